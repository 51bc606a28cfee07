"""Groups of interchangeable devices, and the links between them.

    node "big" x 2:  4 x a100 ═nvlink═            groups:  a100 (8 devices)   link a100 - a100:  network
    node "t4" x 1:   2 x t4 ─pcie3─                        t4   (2 devices)   link t4 - t4:      pcie3

One group holds all devices of one type in all `count` copies of a kind of node. Two members may then sit in the same
node or in different ones; the group's link is the slower of the two, so a predicted transfer is never too short.
`per_node=True` gives each machine its own groups and exact links, for more groups to search. A transfer between nodes
crosses the sender's host link, the network and the receiver's host link in a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvmhet.cluster.catalog import catalog
from tvmhet.cluster.device import DeviceType
from tvmhet.cluster.link import Link
from tvmhet.cluster.nodes import Network, NodeClass


@dataclass(frozen=True, slots=True)
class Group:
    """Interchangeable devices: one type in the copies of one kind of node.

    `link` joins two members inside one machine; `device_ids` are "<machine>/<type>:<i>" in order.
    """

    name: str
    device: DeviceType
    num_devices: int
    node: str  # the name of the node class
    machines: tuple[str, ...]  # the copies of it that these devices sit in
    device_ids: tuple[str, ...]
    link: Link
    host: Link

    @property
    def usd_per_h(self) -> float:
        """Price of one device; 0.0 where none is given."""
        return self.device.usd_per_h or 0.0

    @property
    def memory_bytes(self) -> int:
        """Memory of one device."""
        return self.device.memory_bytes


@dataclass(frozen=True, slots=True)
class Topology:
    """A cluster as a planner wants it: `links[a][b]` joins a device of group a to another of group b (a == b: a peer).

    `host_links[a]` joins a device of group a to the driver's memory, where a model's inputs and outputs lie.
    `wires` are the lines between regions.
    """

    groups: tuple[Group, ...]
    links: tuple[tuple[Link, ...], ...]
    host_links: tuple[Link, ...]
    wires: tuple[SharedWire, ...] = ()


@dataclass(frozen=True, slots=True)
class SharedWire:
    """One direction of the line between two regions: all transfers over any of `ways` share its capacity.

    A way is (group of the sender, group of the receiver), indices into the groups; -1 is the driver's memory.
    """

    name: str
    byte_per_s: float
    ways: frozenset[tuple[int, int]]


def inside(node: NodeClass, a: DeviceType, b: DeviceType) -> Link:
    """Return the link between a device of type `a` and another of type `b` in one machine of `node`.

    "auto" takes built-in NVLink between devices of one type, shared memory between CPU devices, else the host links;
    "nvlink" also takes bridges. Any other class, or a link spelt out, holds for every pair.
    """
    if isinstance(node.link, Link):
        return node.link
    classes = catalog().links
    if node.link not in ("auto", "nvlink"):
        return classes[node.link]
    if a.name == b.name and a.nvlink_byte_per_s and (node.link == "nvlink" or not a.nvlink_is_bridge):
        return Link(classes["nvlink"].latency_s, a.nvlink_byte_per_s, "nvlink")
    if a.is_cpu and b.is_cpu:
        return classes["shm"]
    hosts = [host_of(node, d) for d in (a, b) if not d.is_cpu]
    slow = min(hosts, key=lambda link: link.byte_per_s)  # one copy that crosses both links at once
    return Link(max(h.latency_s for h in hosts), slow.byte_per_s, slow.name)


def host_of(node: NodeClass, device: DeviceType) -> Link:
    """Return the link between a device and the memory of its own machine."""
    return node.host_link or Link(device.host_latency_s, device.host_byte_per_s, device.host_link)


def across(node_a: NodeClass, a: DeviceType, node_b: NodeClass, b: DeviceType, network: Network) -> Link:
    """Return the link between devices of two machines. CPU devices are on the network without a hop."""
    link = network.join(node_a, node_b)
    hosts = [host_of(node, device) for node, device in ((node_a, a), (node_b, b)) if not device.is_cpu]
    for host in sorted(hosts, key=lambda h: (h.latency_s, h.byte_per_s, h.name)):  # the same sum in both directions
        link = link.then(host)
    return link


def shared_wires(
    nodes: Sequence[NodeClass], groups: Sequence[Group], network: Network | None
) -> tuple[SharedWire, ...]:
    """Return the lines between regions that some transfer between two groups, or a group and the driver, may cross."""
    if network is None:
        return ()
    by_name = {n.name: n for n in nodes}
    places = {-1: nodes[0], **{g: by_name[group.node] for g, group in enumerate(groups)}}
    ways: dict[tuple[str, str], set[tuple[int, int]]] = {}
    rate: dict[tuple[str, str], float] = {}
    for a, here in places.items():
        for b, there in places.items():
            if (line := network.shared(here, there)) is not None:
                key = (here.region, there.region)
                ways.setdefault(key, set()).add((a, b))
                rate[key] = line.byte_per_s
    return tuple(SharedWire(f"{x} -> {y}", rate[x, y], frozenset(ways[x, y])) for x, y in sorted(ways))


def slower(a: Link, b: Link) -> Link:
    """Return a link that is never faster than `a` or `b`."""
    slow = a if a.byte_per_s <= b.byte_per_s else b
    return Link(max(a.latency_s, b.latency_s), slow.byte_per_s, slow.name)


def make_groups(nodes: Sequence[NodeClass], per_node: bool) -> tuple[Group, ...]:
    """Return the groups of `nodes` in the file's order; types with a count of 0 have none."""
    parts = [
        (node, machines, device, count)
        for node in nodes
        for machines in ([(m,) for m in node.machines] if per_node else [node.machines])
        for device, count in node.devices
        if count > 0
    ]
    names = [device.name for _, _, device, _ in parts]
    groups = []
    for node, machines, device, count in parts:
        place = machines[0] if per_node else node.name
        groups.append(
            Group(
                name=device.name if names.count(device.name) == 1 else f"{device.name}@{place}",
                device=device,
                num_devices=count * len(machines),
                node=node.name,
                machines=machines,
                device_ids=tuple(f"{m}/{device.name}:{i}" for m in machines for i in range(count)),
                link=inside(node, device, device),
                host=host_of(node, device),
            )
        )
    return tuple(groups)
