"""Cluster files in, the same cluster out; and the links that follow from them."""

import dataclasses
import math
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tvmhet.cluster import ClusterSpec, Link, Network, NodeClass, Offer, device_type, device_types, reader
from tvmhet.errors import BadClusterFile, EmptyCluster, HetError, UnknownDeviceType

EXAMPLES = sorted((Path(__file__).parents[2] / "tutorials" / "clusters").glob("*.yaml"))
NODES = """
nodes:
  - name: big
    count: 2
    devices: {a100: 4}
    link: nvlink
  - name: small
    devices: {t4: 2, cpu-v3: {count: 2, cores: 2, memory: 8 GiB, price: 0.10 USD/h}}
    link: pcie3
network:
  bandwidth: 100 Gbit/s
  latency: 5 us
  pairs:
    - {nodes: [small, big], bandwidth: 10 Gbit/s, latency: 30 us}
"""
NET = Link(5e-6, 12.5e9, "network")
SLOW = Link(30e-6, 1.25e9, "network")


def test_a_path_is_a_file(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text(NODES)
    assert ClusterSpec.from_yaml(path) == ClusterSpec.from_file(str(path)) == ClusterSpec.from_yaml(NODES)


def test_a_file_reads_as_written():
    spec = ClusterSpec.from_yaml(NODES)
    assert spec.counts() == {"a100-sxm-80gb": 8, "t4": 2, "cpu-x86-64-v3-2core": 2}
    cpu = spec.nodes[1].devices[1][0]
    assert (cpu.num_sms, cpu.memory_bytes, cpu.usd_per_h) == (2, 8 * 2**30, 0.10)
    assert spec.network.between("big", "small") == SLOW
    assert spec.network.between("big", "big") == NET


def test_groups_name_their_devices():
    a100, t4, cpu = ClusterSpec.from_yaml(NODES).groups()
    assert (a100.name, a100.num_devices, a100.machines) == ("a100-sxm-80gb", 8, ("big-0", "big-1"))
    assert a100.device_ids[0] == "big-0/a100-sxm-80gb:0"
    assert a100.device_ids[4] == "big-1/a100-sxm-80gb:0"
    assert t4.device_ids == ("small/t4:0", "small/t4:1")
    assert (cpu.usd_per_h, t4.usd_per_h) == (0.10, 0.0)


def test_links_inside_a_machine():
    _, t4, cpu = ClusterSpec.from_yaml(NODES).groups()
    spec = ClusterSpec.from_yaml(NODES)
    assert spec.link(t4, t4) == Link(10e-6, 15.75e9, "pcie3")
    assert spec.link(t4, cpu) == Link(10e-6, 15.75e9, "pcie3"), "a class that the file names holds for every pair"


def test_a_group_over_several_machines_has_the_slower_link():
    spec = ClusterSpec.from_yaml(NODES)
    a100 = spec.groups()[0]
    assert a100.link == Link(5e-6, 300e9, "nvlink")
    assert spec.link(a100, a100) == Link(10e-6 + 5e-6 + 10e-6, 12.5e9, "network+pcie4")


def test_per_node_groups_have_exact_links():
    spec = ClusterSpec.from_yaml(NODES)
    first, second, *_ = spec.groups(per_node=True)
    assert (first.name, second.name) == ("a100-sxm-80gb@big-0", "a100-sxm-80gb@big-1")
    assert spec.link(first, first) == Link(5e-6, 300e9, "nvlink")
    assert spec.link(first, second).byte_per_s == 12.5e9
    assert sum(g.num_devices for g in spec.groups(per_node=True)) == 12


def test_links_between_machines_take_the_pair_and_both_host_links():
    spec = ClusterSpec.from_yaml(NODES)
    a100, t4, cpu = spec.groups()
    assert spec.link(a100, t4) == spec.link(t4, a100)
    assert spec.link(a100, t4).byte_per_s == 1.25e9
    assert spec.link(a100, t4).latency_s == pytest.approx(30e-6 + 10e-6 + 10e-6)
    assert spec.link(a100, cpu).latency_s == pytest.approx(30e-6 + 10e-6), "CPU memory is on the network without a hop"


def test_host_links_start_at_the_first_machine():
    spec = ClusterSpec.of({"t4": 1, "cpu-v3": 1})
    t4, cpu = spec.groups()
    assert spec.host_link(t4) == Link(10e-6, 15.75e9, "pcie3")
    assert spec.host_link(cpu) == Link(20e-6, 8e9, "shm")
    far = ClusterSpec.from_yaml(NODES)
    assert far.host_link(far.groups()[1]).byte_per_s == 1.25e9
    assert far.host_link(far.groups(per_node=True)[0]).byte_per_s == 31.5e9, "the first machine holds the inputs"
    assert far.host_link(far.groups()[0]).byte_per_s == 12.5e9, "some members sit in another machine"


@pytest.mark.parametrize(
    ("a", "b", "link"),
    [
        ("a100", "a100", Link(5e-6, 300e9, "nvlink")),
        ("a100-pcie-40gb", "a100-pcie-40gb", Link(10e-6, 31.5e9, "pcie4")),  # a bridge must be asked for
        ("a100", "v100", Link(10e-6, 15.75e9, "pcie3")),
        ("t4", "cpu-v3", Link(10e-6, 15.75e9, "pcie3")),
        ("cpu-v2", "cpu-v4", Link(20e-6, 8e9, "shm")),
        ("gh200", "cpu-v3", Link(2e-6, 450e9, "")),
    ],
)
def test_automatic_links(a, b, link):
    spec = ClusterSpec.of({a: 2} if a == b else {a: 1, b: 1})
    groups = spec.groups()
    assert spec.link(groups[0], groups[-1]) == link


def test_nvlink_class_takes_bridges_and_leaves_others_on_pcie():
    spec = ClusterSpec.from_yaml("nodes: [{devices: {a100-pcie-40gb: 2, t4: 2}, link: nvlink}]")
    a100, t4 = spec.groups()
    assert spec.link(a100, a100).byte_per_s == 300e9
    assert spec.link(t4, t4) == Link(10e-6, 15.75e9, "pcie3")


def test_the_topology_is_what_a_planner_needs():
    spec = ClusterSpec.from_yaml(NODES)
    top = spec.topology()
    assert top.groups == spec.groups()
    assert [[link.byte_per_s for link in row] for row in top.links] == [
        [spec.link(a, b).byte_per_s for b in top.groups] for a in top.groups
    ]
    assert top.host_links == tuple(spec.host_link(a) for a in top.groups)


def test_of_takes_links_and_nodes():
    spec = ClusterSpec.of({"v100": 2, "t4": 4}, link="pcie3", network=NET, one_node=False)
    v100, t4 = spec.groups()
    assert (v100.node, t4.node) == ("node0", "node1")
    assert spec.link(v100, v100).name == "pcie3"
    assert spec.link(v100, t4).byte_per_s == 12.5e9
    with pytest.raises(UnknownDeviceType):
        ClusterSpec.of({"v10": 1})
    with pytest.raises(BadClusterFile, match="count of 'v100' is -1"):
        ClusterSpec.of({"v100": -1})
    with pytest.raises(BadClusterFile, match="node 'node0' lists 't4' twice"):
        ClusterSpec.of({"t4": 1, "T4": 2})
    with pytest.raises(BadClusterFile, match="unknown link class 'nvlnk'"):
        ClusterSpec.of({"v100": 1}, link="nvlnk")


def test_a_count_of_zero_keeps_a_type_out():
    spec = ClusterSpec.of({"v100": 0, "t4": 1})
    assert [g.name for g in spec.groups()] == ["t4"]
    assert spec.counts() == {"v100-sxm2-16gb": 0, "t4": 1}
    with pytest.raises(EmptyCluster):
        ClusterSpec.of({"v100": 0})
    with pytest.raises(EmptyCluster):
        ClusterSpec.of({})


def test_a_market_alone_is_a_cluster_without_groups():
    spec = ClusterSpec.from_yaml("market: [{type: V100, price: 2.49 USD/h, max_count: 8, region: west}]")
    assert spec.groups() == ()
    assert spec.market == (Offer(device_type("v100"), 2.49, 8, "", "west"),)


def test_own_types_inherit_and_override():
    spec = ClusterSpec.from_yaml(
        "device_types:\n  half: {like: a100, memory: 20 GiB, rates: {float16: 100 TFLOP/s}}\n"
        "  quarter: {like: half, memory: 10 GiB}\n  a100: {like: a100, price: 2 USD/h}\n"
        "nodes: [{devices: {half: 1, quarter: 1, a100: 1}}]"
    )
    half, quarter, a100 = spec.device_types()
    assert half.memory_bytes == half.nominal_memory_bytes == 20 * 2**30, "what a file says, whole"
    assert a100.memory_bytes == device_type("a100").memory_bytes < a100.nominal_memory_bytes == 80 * 2**30
    assert quarter.peak_flop_per_s == {**device_type("a100").peak_flop_per_s, "float16": 100e12}
    assert half.sources["memory"] == "the cluster file"
    assert half.sources["bandwidth"] == device_type("a100").sources["bandwidth"]
    assert (a100.name, a100.usd_per_h) == ("a100", 2.0)


def test_an_own_type_from_scratch_marks_what_was_not_given():
    spec = ClusterSpec.from_yaml(
        "device_types:\n  x: {target: {kind: cuda, arch: sm_80}, memory: 1 GiB, bandwidth: 9 GB/s, "
        "rates: {float32: 1 TFLOP/s}}\n"
        "nodes: [{devices: {x: 1}}]"
    )
    (x,) = spec.device_types()
    assert "default" in x.sources["sms"]
    assert x.sources["memory"] == "the cluster file"
    assert x.peer_byte_per_s == x.host_byte_per_s == 31.5e9


@pytest.mark.parametrize("path", EXAMPLES, ids=[p.name for p in EXAMPLES])
def test_example_files_read_and_round_trip(path):
    spec = ClusterSpec.from_file(path)
    assert ClusterSpec.from_yaml(spec.to_yaml()) == spec
    assert spec.groups() or spec.market


def test_the_example_in_the_reader_s_docstring_reads():
    _, example = reader.__doc__.split("names the place.\n\n")
    spec = ClusterSpec.from_yaml(textwrap.dedent(example))
    assert spec.counts()["a100-sxm-80gb"] == 8
    assert (spec.market[0].device.name, spec.custom_types[0].usd_per_h) == ("h100-sxm-80gb", 1.10)


def test_from_dict_is_from_yaml():
    assert ClusterSpec.from_dict(yaml.safe_load(NODES)) == ClusterSpec.from_yaml(NODES)


def test_unreadable_files(tmp_path):
    with pytest.raises(BadClusterFile, match="cannot be read: No such file"):
        ClusterSpec.from_file(tmp_path / "none.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"nodes: \xff\xfe")
    with pytest.raises(BadClusterFile, match="not UTF-8 text"):
        ClusterSpec.from_file(tmp_path / "latin.yaml")


def test_the_hash_is_of_meaning_and_the_same_everywhere():
    spec = ClusterSpec.from_yaml(NODES)
    same = ClusterSpec.from_yaml(NODES.replace("100 Gbit/s", "12.5 GB/s").replace("a100", "A100"))
    assert same.content_hash() == spec.content_hash()
    assert dataclasses.replace(spec, notes=("seen",)).content_hash() == spec.content_hash()
    for old, new in [
        ("count: 2\n", "count: 3\n"),
        ("8 GiB", "9 GiB"),
        ("5 us", "6 us"),
        ("t4: 2", "l4: 2"),
        ("0.10", "0.20"),
    ]:
        assert ClusterSpec.from_yaml(NODES.replace(old, new)).content_hash() != spec.content_hash()
    code = f"from tvmhet.cluster import ClusterSpec; print(ClusterSpec.from_yaml({NODES!r}).content_hash())"
    root = str(Path(__file__).parents[2])
    out = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == spec.content_hash()


links = st.builds(Link, st.floats(0, 1), st.floats(1, 1e15))
counts = st.integers(0, 6)
picked = st.sampled_from([d for d in device_types()])
node_lists = st.lists(
    st.tuples(
        st.integers(1, 3),
        st.lists(st.tuples(picked, counts), min_size=1, max_size=3, unique_by=lambda p: p[0].name),
        st.one_of(st.sampled_from(["auto", "pcie3", "pcie5", "shm"]), links),
        st.one_of(st.none(), links),
    ),
    min_size=1,
    max_size=3,
).filter(lambda nodes: any(c for _, devices, _, _ in nodes for _, c in devices))


@st.composite
def clusters(draw):
    nodes = tuple(
        NodeClass(f"n{i}", tuple(devices), count, link, host)
        for i, (count, devices, link, host) in enumerate(draw(node_lists))
    )
    network = Network(draw(links), tuple((n.name, nodes[0].name, draw(links)) for n in nodes[1:2]))
    return ClusterSpec(nodes, network)


@pytest.mark.parametrize("device", device_types(), ids=[d.name for d in device_types()])
def test_every_type_can_be_written_out_in_full(device):
    sources = {**device.sources, "price": "the cluster file"}
    own = dataclasses.replace(device, name="own", usd_per_h=1.25, time_table="own.csv", sources=sources)
    spec = ClusterSpec((NodeClass("n", ((own, 1),)),))
    again = ClusterSpec.from_yaml(spec.to_yaml())
    assert again.nodes == spec.nodes, "a plan made on this cluster must mean the same after a round trip"


def test_names_are_no_numbers():
    spec = ClusterSpec.from_yaml("nodes: [{name: '200', devices: {t4: 1}}]")
    assert ClusterSpec.from_yaml(spec.to_yaml()) == spec


words = st.sampled_from(
    [
        "nodes",
        "devices",
        "count",
        "network",
        "pairs",
        "t4",
        "v100",
        "link",
        "bandwidth",
        "5 us",
        "1 GB/s",
        "market",
        "like",
    ]
)
yaml_values = st.recursive(
    st.one_of(words, st.integers(-3, 3), st.floats(), st.booleans(), st.none(), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(words, inner, max_size=4)),
    max_leaves=12,
)


@given(st.one_of(yaml_values, st.fixed_dictionaries({"nodes": st.lists(yaml_values, max_size=2)})))
@settings(max_examples=300, deadline=None)
def test_any_values_are_a_cluster_or_one_of_our_errors(values):
    for read in (lambda: ClusterSpec.from_dict(values), lambda: ClusterSpec.from_yaml(yaml.safe_dump(values))):
        try:
            read()
        except HetError as e:
            assert e.remedy


@given(st.text(alphabet="nodes:devict4 \n\t-[]{}&*!|>'\"#%@`,?0123456789.", max_size=60))
@settings(max_examples=300, deadline=None)
def test_any_text_is_a_cluster_or_one_of_our_errors(text):
    try:
        ClusterSpec.from_yaml(text)
    except HetError as e:
        assert e.remedy


@given(clusters())
@settings(max_examples=60, deadline=None)
def test_every_cluster_round_trips(spec):
    again = ClusterSpec.from_yaml(spec.to_yaml())
    assert again.content_hash() == spec.content_hash()  # not ==: hypothesis' links have no class to be named after
    assert again.to_yaml() == spec.to_yaml()


@given(clusters())
@settings(max_examples=60, deadline=None)
def test_laws_of_links(spec):
    groups, exact = spec.groups(), spec.groups(per_node=True)
    assert sum(g.num_devices for g in groups) == sum(g.num_devices for g in exact) == sum(spec.counts().values())
    ids = [i for g in groups for i in g.device_ids]
    assert sorted(ids) == sorted(i for g in exact for i in g.device_ids)
    assert len(set(ids)) == len(ids)
    for a in groups:
        assert math.isfinite(spec.host_link(a).byte_per_s)
        for b in groups:
            assert spec.link(a, b) == spec.link(b, a)
    # a merged group's link is never faster than the exact one between any two of its members
    for a in exact:
        whole = next(g for g in groups if set(a.device_ids) <= set(g.device_ids))
        for b in exact:
            other = next(g for g in groups if set(b.device_ids) <= set(g.device_ids))
            if a is not b or a.num_devices > 1:
                assert spec.link(whole, other).transfer_s(1e6) >= spec.link(a, b).transfer_s(1e6)


@given(clusters(), st.data())
@settings(max_examples=60, deadline=None)
def test_taking_devices_away(spec, data):
    name = data.draw(st.sampled_from(sorted(n for n, c in spec.counts().items() if c)))
    number = data.draw(st.integers(1, spec.counts()[name]))
    if sum(spec.counts().values()) == number:
        with pytest.raises(EmptyCluster):
            spec.without({name: number})
        return
    less = spec.without({name: number})
    assert less.counts() == {**spec.counts(), name: spec.counts()[name] - number}
    before, after = ({i for g in s.groups() for i in g.device_ids} for s in (spec, less))
    assert after < before, "the devices that stay keep their ids"
    machines = {g.device_ids[0].split("/")[0]: g.node for g in less.groups(per_node=True)}
    old = {g.device_ids[0].split("/")[0]: g.node for g in spec.groups(per_node=True)}
    for a in machines:
        for b in machines:
            if a != b:
                assert less.network.between(machines[a], machines[b]) == spec.network.between(old[a], old[b])


REGIONS = """
nodes:
  - {name: near, devices: {a100: 4}, link: nvlink, region: east}
  - {name: old, devices: {v100: 4}, region: east}
  - {name: far, count: 2, devices: {t4: 4}, link: pcie3, region: west}
network:
  bandwidth: 100 Gbit/s
  latency: 5 us
  pairs: [{nodes: [old, far], bandwidth: 1 Gbit/s, latency: 30 ms}]
  regions: [{between: [east, west], bandwidth: 8 Gbit/s, latency: 40 ms}]
"""


def test_transfers_between_regions_share_one_line_in_each_direction():
    spec = ClusterSpec.from_yaml(REGIONS)
    near, old, far = spec.groups()
    assert spec.link(near, old).byte_per_s == 12.5e9
    assert (spec.link(near, far).byte_per_s, spec.link(near, far).latency_s) == (1e9, pytest.approx(40e-3, rel=1e-3))
    there, back = spec.topology().wires
    assert (there.name, back.name) == ("east -> west", "west -> east")
    # The driver is `near`; `old` has a line of its own to `far`.
    assert there.ways == {(-1, 2), (0, 2)}
    assert back.ways == {(2, -1), (2, 0)}
    assert there.byte_per_s == 1e9
    assert spec.link(old, far).byte_per_s == 0.125e9
    assert ClusterSpec.of({"v100": 2, "t4": 4}).topology().wires == ()


def test_regions_read_back_and_change_the_hash():
    spec = ClusterSpec.from_yaml(REGIONS)
    assert ClusterSpec.from_yaml(spec.to_yaml()) == spec
    wider = REGIONS.replace("8 Gbit/s", "9 Gbit/s")
    assert ClusterSpec.from_yaml(wider).content_hash() != spec.content_hash()
    fewer = spec.without({"t4": 5})
    assert {n.region for n in fewer.nodes} == {"east", "west"}, "machines stay where they stand"
    assert fewer.topology().wires[0].byte_per_s == 1e9


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("link: pcie3, region: west", "link: pcie3", "'far' has no region"),
        ("between: [east, west]", "between: [east, wets]", "'wets', where no node stands"),
        ("between: [east, west]", "between: [east, east]", "joins 'east' to itself"),
        ("  regions: [{between: [east, west], bandwidth: 8 Gbit/s, latency: 40 ms}]\n", "", "no line between"),
        ("bandwidth: 8 Gbit/s", "bandwidth: 0 Gbit/s", "line 10|:10: network.regions"),
        ("bandwidth: 8 Gbit/s", "bandwidth: -8 Gbit/s", "network.regions"),
        ("latency: 40 ms}]", "latency: 40 ms}, {between: [west, east], bandwidth: 1 GB/s, latency: 1 ms}]", "twice"),
    ],
)
def test_bad_regions_are_refused(old, new, match):
    with pytest.raises(HetError, match=match):
        ClusterSpec.from_yaml(REGIONS.replace(old, new, 1))
