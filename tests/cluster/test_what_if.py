"""The same cluster with other counts."""

import pytest

from tvmhet.cluster import ClusterSpec, Link
from tvmhet.errors import BadInput, EmptyCluster, UnknownDeviceType

BOX = ClusterSpec.of({"v100": 2, "t4": 4})
FLEET = ClusterSpec.from_yaml(
    "nodes: [{name: t, count: 4, devices: {t4: 4}}, {name: a, devices: {a100: 2}}]\n"
    "network: {bandwidth: 1 GB/s, latency: 5 us}"
)


def test_remove_by_alias():
    assert BOX.without({"V100": 1}).counts() == {"v100-sxm2-16gb": 1, "t4": 4}
    assert BOX.without({"v100": 2}).groups()[0].name == "t4"
    assert BOX.without({}) == BOX


def test_the_last_machines_lose_theirs_first():
    less = FLEET.without({"t4": 5})
    assert [(n.name, n.count, n.devices[0][1]) for n in less.nodes] == [
        ("t", 2, 4),
        ("t-2", 1, 3),
        ("t-3", 1, 0),
        ("a", 1, 2),
    ]


def test_with_counts_takes_and_adds():
    assert BOX.with_counts({"v100": 0, "t4": 6}).counts() == {"v100-sxm2-16gb": 0, "t4": 6}
    assert BOX.with_counts({"l4": 2}).counts() == {"v100-sxm2-16gb": 2, "t4": 4, "l4": 2}
    assert FLEET.with_counts({"a100": 3, "t4": 16}).counts() == {"t4": 16, "a100-sxm-80gb": 3}


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (lambda: BOX.without({"v100": 3}), BadInput, "3 x 'v100' cannot be taken away: the cluster has 2"),
        (lambda: BOX.without({"l4": 1}), BadInput, "the cluster has 0"),
        (lambda: BOX.without({"v10": 1}), UnknownDeviceType, "unknown device type 'v10'"),
        (lambda: BOX.without({"v100": -1}), BadInput, "count of 'v100' is -1"),
        (lambda: BOX.without({"v100": 2, "t4": 4}), EmptyCluster, "no device"),
        (lambda: FLEET.with_counts({"t4": 17}), BadInput, "not clear which node"),
        (lambda: FLEET.with_counts({"t4": 1.5}), BadInput, "count of 't4' is 1.5"),
    ],
)
def test_errors(change, error, says):
    with pytest.raises(error, match=says):
        change()


def test_links_in_a_row():
    assert Link(1e-6, 2e9, "a").then(Link(2e-6, 1e9, "b")) == Link(3e-6, 1e9, "a+b")
    assert Link(1e-6, 2e9).transfer_s(2e9) == 1.000001
