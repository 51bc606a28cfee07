"""Machines that were described one by one as one cluster."""

import dataclasses

import pytest

from tvmhet.cluster import ClusterSpec, device_type
from tvmhet.cluster.link import Link
from tvmhet.cluster.nodes import NodeClass
from tvmhet.cluster.ray_cluster import check_names, link_of, merged
from tvmhet.errors import NotSupported

CPU = device_type("cpu-x86-64-v3")


def machine(*devices, notes=()):
    return ClusterSpec((NodeClass("local", tuple((d, 1) for d in devices)),), custom_types=devices, notes=notes)


def with_figures(device, **scales):
    figures = {name: getattr(device, name) for name in scales}
    return dataclasses.replace(device, **{name: type(v)(v * scales[name]) for name, v in figures.items()})


def test_alike_machines_have_one_type_and_the_slowest_network():
    other = with_figures(CPU, clock_hz=0.95, memory_bytes=1.05)
    found = {"b": machine(CPU, device_type("t4"), notes=("no driver",)), "a": machine(other), "c": machine(CPU)}
    spec = merged(found, [Link(1e-3, 2e9), Link(2e-3, 3e9)])
    assert spec.counts() == {CPU.name: 3, "t4": 1} and spec.device_types() == (CPU, device_type("t4"))
    smaller = with_figures(CPU, memory_bytes=0.95)
    for machines in ((CPU, smaller), (smaller, CPU)):
        spec_of_two = merged(dict(zip("ab", map(machine, machines), strict=True)), [Link(0, 1e9)])
        assert [d.memory_bytes for n in spec_of_two.nodes for d, _ in n.devices] == [smaller.memory_bytes] * 2
    assert [n.name for n in spec.nodes] == ["b", "a", "c"]
    assert spec.network.link == Link(2e-3, 2e9)
    assert spec.notes[0] == "b: no driver" and "the slowest" in spec.notes[-1]
    assert ClusterSpec.from_yaml(spec.to_yaml()).content_hash() == spec.content_hash()


def test_two_nodes_of_one_name_are_refused():
    check_names(["a", "b"])
    with pytest.raises(NotSupported, match="two nodes of the Ray cluster are named 'a'"):
        check_names(["a", "b", "a"])


@pytest.mark.parametrize("figure", ["clock_hz", "memory_bytes", "dram_byte_per_s", "num_sms"])
def test_unlike_types_of_one_name_are_each_machines_own(figure):
    other = with_figures(CPU, **{figure: 2})
    spec = merged({"a": machine(CPU), "b": machine(other), "c": machine(CPU)}, [Link(0, 1e9)] * 2)
    assert spec.counts() == {CPU.name: 2, f"{CPU.name}-b": 1}
    assert getattr(spec.device_types()[1], figure) == getattr(other, figure)


def test_one_machine_needs_no_network():
    assert merged({"a": machine(CPU)}, []).network is None


@pytest.mark.parametrize(
    ("few_s", "many_s", "link"),
    [(0.003, 0.018, Link(0.002, 1e9)), (0.0005, 0.0155, Link(0.0, 1e9)), (0.004, 0.002, Link(0.004, 16e6 / 0.002))],
)
def test_two_sizes_give_a_latency_and_a_rate(few_s, many_s, link):
    found = link_of((1_000_000, few_s), (16_000_000, many_s))
    assert (found.latency_s, found.byte_per_s) == pytest.approx((link.latency_s, link.byte_per_s), rel=1e-9, abs=1e-12)
