"""Tables of devices and clusters, and the same as JSON."""

import json

import pytest

from tvmhet.cluster import ClusterSpec, device_type, device_types
from tvmhet.report.devices import cluster_table, device_head, device_sheet, devices_json, devices_table
from tvmhet.report.text import to_text


def text(table):
    return to_text(table, 100)


def test_the_table_of_all_types(golden):
    golden("devices_table.txt", text(devices_table(device_types())))


def test_one_type_with_its_sources(golden):
    golden("device_sheet.txt", device_head(device_type("l4")) + "\n" + text(device_sheet(device_type("l4"))))


def test_a_cluster(golden):
    spec = ClusterSpec.from_yaml(
        "nodes: [{name: a, count: 3, devices: {a100: {count: 4, price: 2.5 USD/h}}}, {name: c, devices: {cpu-v3: 1}}]\n"
        "network: {bandwidth: 100 Gbit/s, latency: 5 us}"
    )
    golden("cluster_table.txt", text(cluster_table(spec)))


def test_json_has_every_type_and_reads_back():
    values = json.loads(json.dumps(devices_json(device_types()), allow_nan=False))
    assert [v["name"] for v in values] == [d.name for d in device_types()]
    a100 = next(v for v in values if v["name"] == "a100-sxm-80gb")
    assert a100["peak_flop_per_s"]["float16"] == pytest.approx(312e12)
    assert a100["target"]["arch"] == "sm_80"


def test_no_name_of_the_catalogue_is_cut():
    words = text(devices_table(device_types())).split()
    assert {d.name for d in device_types()} <= set(words)
