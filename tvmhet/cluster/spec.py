"""A cluster: which devices there are, how they are joined, and what they cost.

spec = ClusterSpec.from_file("cluster.yaml")
spec = ClusterSpec.of({"v100": 2, "t4": 4})
for group in spec.groups(): ...         # interchangeable devices: what the planner sees
spec.link(a, b), spec.host_link(a)      # seconds to move n bytes
spec.without({"v100": 1})               # what if one V100 fails?
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from tvmhet.cluster import groups as g
from tvmhet.cluster.catalog import Catalog, catalog, device_type
from tvmhet.cluster.device import DeviceType
from tvmhet.cluster.groups import Group, SharedWire, Topology
from tvmhet.cluster.link import Link
from tvmhet.cluster.nodes import Network, NodeClass, Offer
from tvmhet.errors import BadClusterFile, EmptyCluster


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """Nodes, the network between them, and a market. `custom_types` are those that are not the catalogue's.

    The first machine is the *driver*: it holds a model's inputs and receives its outputs. Construction raises
    EmptyCluster when there is nothing to place on and nothing to rent, and BadClusterFile for a contradiction.
    """

    nodes: tuple[NodeClass, ...]
    network: Network | None = None
    market: tuple[Offer, ...] = ()
    custom_types: tuple[DeviceType, ...] = ()
    notes: tuple[str, ...] = ()  # what detection could not know; not part of the file or the hash

    def __post_init__(self) -> None:
        if not any(n.num_devices for n in self.nodes) and not any(o.max_count for o in self.market):
            raise EmptyCluster(
                "the cluster has no device", "give a node at least one device, or a market at least one offer"
            )
        machines = [m for n in self.nodes for m in n.machines]
        if twice := sorted(m for m, times in Counter(machines).items() if times > 1):
            raise BadClusterFile(f"two nodes are named {twice[0]!r}", "give every node its own name")
        if len(machines) > 1 and self.network is None:
            raise BadClusterFile(
                f"there are {len(machines)} nodes but no network",
                "add network: {bandwidth: 100 Gbit/s, latency: 5 us} with your figures",
            )
        self._check_regions()

    def _check_regions(self) -> None:
        regions = list(dict.fromkeys(n.region for n in self.nodes))
        lines = self.network.regions if self.network else ()
        if without := [n.name for n in self.nodes if not n.region and any(regions)]:
            raise BadClusterFile(f"node {without[0]!r} has no region, others have one", "give every node its region")
        for x, y, _ in lines:
            if unknown := [r for r in (x, y) if r not in regions]:
                raise BadClusterFile(
                    f"network.regions names {unknown[0]!r}, where no node stands", f"the regions are {regions}"
                )
            if x == y:
                raise BadClusterFile(f"network.regions joins {x!r} to itself", "name two regions")
        known = [frozenset((x, y)) for x, y, _ in lines]
        if twice := sorted(tuple(sorted(p)) for p in known if known.count(p) > 1):
            raise BadClusterFile(f"network.regions joins {twice[0][0]!r} and {twice[0][1]!r} twice", "keep one")
        for i, x in enumerate(regions):
            for y in regions[i + 1 :]:
                if frozenset((x, y)) not in known:
                    raise BadClusterFile(
                        f"there is no line between the regions {x!r} and {y!r}",
                        f"add to network.regions: {{between: [{x}, {y}], bandwidth: 5 Gbit/s, latency: 40 ms}}",
                    )

    @staticmethod
    def from_file(path: str | PathLike[str]) -> ClusterSpec:
        """Read a cluster file. Raises BadClusterFile, BadQuantity or UnknownDeviceType, naming the line."""
        from tvmhet.cluster.reader import read_cluster

        file = Path(path)
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            reason = e.strerror if isinstance(e, OSError) else "not UTF-8 text"
            raise BadClusterFile(f"{file}: cannot be read: {reason}", "give the path of a cluster file in YAML") from e
        return read_cluster(text, file.name)

    @staticmethod
    def from_yaml(text: str | PathLike[str]) -> ClusterSpec:
        """Read a cluster from YAML text, or from the file of a path object; errors name the line of it."""
        from tvmhet.cluster.reader import read_cluster

        if isinstance(text, PathLike):
            return ClusterSpec.from_file(text)
        return read_cluster(text, "<text>")

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> ClusterSpec:
        """Read a cluster from the values of a cluster file; errors name the key."""
        from tvmhet.cluster.reader import cluster_from

        return cluster_from(values)

    @staticmethod
    def of_device(device: DeviceType) -> ClusterSpec:
        """Return a cluster of one device, whether the catalogue has its type or not."""
        known = catalog().types.get(device.name) == device
        return ClusterSpec((NodeClass("node0", ((device, 1),)),), custom_types=() if known else (device,))

    @staticmethod
    def of(
        devices: Mapping[str, int], link: str | Link = "auto", network: Link | None = None, one_node: bool = True
    ) -> ClusterSpec:
        """Return a cluster of `devices` (type name to count) in one node, or one node per type joined by `network`.

        `link` joins the devices of a node: a class such as "pcie4", or "auto" for what the types have. Raises
        UnknownDeviceType, BadClusterFile for a count or a link that is none, EmptyCluster without a device.

        >>> [(g.name, g.num_devices) for g in ClusterSpec.of({"v100": 2, "t4": 4}).groups()]
        [('v100-sxm2-16gb', 2), ('t4', 4)]
        """
        if not isinstance(devices, Mapping):
            raise BadClusterFile(f"the devices are {devices!r}", 'give counts by type: ClusterSpec.of({"v100": 2})')
        for name, count in devices.items():
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise BadClusterFile(f"the count of {name!r} is {count!r}", "give a whole number, 0 or more")
        if isinstance(link, str) and link != "auto":
            catalog().link_class(link)
        found = tuple((device_type(n), c) for n, c in devices.items())
        if one_node:
            nodes: tuple[NodeClass, ...] = (NodeClass("node0", found, link=link),)
        else:
            nodes = tuple(NodeClass(f"node{i}", (pair,), link=link) for i, pair in enumerate(found))
        return ClusterSpec(nodes, None if network is None else Network(network))

    @staticmethod
    def from_local() -> ClusterSpec:
        """Return this machine: its NVIDIA GPUs (through NVML) and its CPU. `notes` say what is not certain."""
        from tvmhet.cluster.local import detect

        return detect()

    @staticmethod
    def from_ray(address: str | None = None) -> ClusterSpec:
        """Return the nodes of a Ray cluster, as `from_local` finds each, and what a hand-over between them takes.

        `address` is the cluster's ("HOST:PORT"; by default the one that runs here). The node of this process comes
        first. `notes` say what is not certain. Raises MissingPackage or NotSupported.
        """
        from tvmhet.cluster.ray_cluster import detect_ray

        return detect_ray(address)

    def groups(self, per_node: bool = False) -> tuple[Group, ...]:
        """Return the groups of interchangeable devices; see `tvmhet.cluster.groups` for what `per_node` changes."""
        return g.make_groups(self.nodes, per_node)

    def topology(self) -> Topology:
        """Return the groups with all links between them and to the driver."""
        groups = self.groups()
        links = tuple(tuple(self.link(a, b) for b in groups) for a in groups)
        return Topology(groups, links, tuple(self.host_link(a) for a in groups), self.wires(groups))

    def wires(self, groups: Sequence[Group]) -> tuple[SharedWire, ...]:
        """Return the lines between regions, one for each direction that some of `groups` can use."""
        return g.shared_wires(self.nodes, groups, self.network)

    def link(self, a: Group, b: Group) -> Link:
        """Return the link between a device of `a` and another device of `b` (the slowest where members differ)."""
        node_a, node_b = self._node(a), self._node(b)
        same, apart = set(a.machines) & set(b.machines), len(set(a.machines) | set(b.machines)) > 1
        within = g.inside(node_a, a.device, b.device) if same else None
        between = self._across(node_a, a.device, node_b, b.device) if apart else None
        if within is not None and between is not None:
            return g.slower(within, between)
        found = within or between
        assert found is not None, "two groups sit in one machine or in several"
        return found

    def host_link(self, group: Group) -> Link:
        """Return the link between a device of `group` and the driver's memory, where inputs and outputs lie."""
        driver = self.nodes[0]
        host = g.host_of(self._node(group), group.device)
        if group.machines == (driver.machines[0],):
            return host
        assert self.network is not None, "several machines have a network"
        over = self.network.join(driver, self._node(group))
        return over if group.device.is_cpu else over.then(host)

    def _node(self, group: Group) -> NodeClass:
        return next(n for n in self.nodes if n.name == group.node)

    def _across(self, node_a: NodeClass, a: DeviceType, node_b: NodeClass, b: DeviceType) -> Link:
        assert self.network is not None, "several machines have a network"
        return g.across(node_a, a, node_b, b, self.network)

    def device_types(self) -> tuple[DeviceType, ...]:
        """Return the types of all groups, each name once, in order."""
        return tuple({group.device.name: group.device for group in self.groups()}.values())

    def counts(self) -> dict[str, int]:
        """Return how many devices of each type there are, by its catalogue name; types held at 0 are listed."""
        result: dict[str, int] = {}
        for node in self.nodes:
            for device, count in node.devices:
                result[device.name] = result.get(device.name, 0) + count * node.count
        return result

    def catalog(self) -> Catalog:
        """Return the catalogue as this cluster sees it: its own types first."""
        return catalog().with_types({t.name: t for t in self.custom_types})

    def without(self, devices: Mapping[str, int]) -> ClusterSpec:
        """Return the cluster less `devices` (type name to how many), taken from the last machines first.

        Raises BadInput for a type or a number that the cluster does not have.
        """
        from tvmhet.cluster.what_if import remove

        return remove(self, devices)

    def with_counts(self, counts: Mapping[str, int]) -> ClusterSpec:
        """Return the cluster with these totals per type; types not named keep theirs."""
        from tvmhet.cluster.what_if import set_counts

        return set_counts(self, counts)

    def with_prices(self, usd_per_h: Mapping[str, float]) -> ClusterSpec:
        """Return the cluster with these prices of one device per hour, by device type. Raises BadInput."""
        from tvmhet.cluster.what_if import set_prices

        return set_prices(self, usd_per_h)

    def to_yaml(self) -> str:
        """Return a cluster file that reads back as this cluster."""
        from tvmhet.cluster.writer import cluster_to_yaml

        return cluster_to_yaml(self)

    def content_hash(self) -> str:
        """Return a sha256 over everything a plan depends on, device figures included; the same in every process."""
        from tvmhet.cluster.writer import canonical

        return hashlib.sha256(canonical(self).encode()).hexdigest()
