"""The parts of a cluster: kinds of machine, the network between them, and what can be rented."""

from __future__ import annotations

from dataclasses import dataclass

from tvmhet.cluster.device import DeviceType
from tvmhet.cluster.link import Link
from tvmhet.errors import BadClusterFile

#: More devices than this in machines of one kind are taken for a slip of the pen.
MAX_DEVICES = 100_000


@dataclass(frozen=True, slots=True)
class NodeClass:
    """`count` machines that are alike. `devices` gives the number of each type in one machine; 0 keeps a type out.

    `link` is "auto", a link class, or a link spelt out; it joins the devices of one machine. `host_link` replaces
    the devices' own. `region` names where the machines stand, "" where the cluster has no regions.
    """

    name: str
    devices: tuple[tuple[DeviceType, int], ...]
    count: int = 1
    link: str | Link = "auto"
    host_link: Link | None = None
    region: str = ""

    def __post_init__(self) -> None:
        names = [device.name for device, _ in self.devices]
        if twice := sorted({n for n in names if names.count(n) > 1}):
            raise BadClusterFile(f"node {self.name!r} lists {twice[0]!r} twice", "add the two counts up")
        if max(self.count, self.num_devices) > MAX_DEVICES:
            raise BadClusterFile(
                f"node {self.name!r} has {self.count} machines and {self.num_devices} devices; "
                f"the limit is {MAX_DEVICES} of each",
                "give the counts that there are",
            )

    @property
    def machines(self) -> tuple[str, ...]:
        """Names of the copies: the class's own name when there is one, else with an index."""
        return (self.name,) if self.count == 1 else tuple(f"{self.name}-{i}" for i in range(self.count))

    @property
    def num_devices(self) -> int:
        """Devices of all types in all copies."""
        return self.count * sum(n for _, n in self.devices)


@dataclass(frozen=True, slots=True)
class Network:
    """The network between machines, one direction; `pairs` are node classes between which it differs.

    `regions` gives the line between two regions: all transfers from one to the other share it, each direction has its
    own. A pair of node classes under `pairs` has a line of its own and shares none.
    """

    link: Link
    pairs: tuple[tuple[str, str, Link], ...] = ()
    regions: tuple[tuple[str, str, Link], ...] = ()

    def between(self, a: str, b: str) -> Link:
        """Return the link between a machine of the class named `a` and another of `b` in one region."""
        return next((link for x, y, link in self.pairs if {x, y} == {a, b}), self.link)

    def join(self, a: NodeClass, b: NodeClass) -> Link:
        """Return the link between a machine of class `a` and another of class `b`, wherever they stand."""
        return self.shared(a, b) or self.between(a.name, b.name)

    def shared(self, a: NodeClass, b: NodeClass) -> Link | None:
        """Return the line between regions that a transfer from `a` to `b` crosses, or None."""
        if a.region == b.region or any({x, y} == {a.name, b.name} for x, y, _ in self.pairs):
            return None
        return next((link for x, y, link in self.regions if {x, y} == {a.region, b.region}), None)


@dataclass(frozen=True, slots=True)
class Offer:
    """A device type that can be rented, its price, and how many there are."""

    device: DeviceType
    usd_per_h: float
    max_count: int
    provider: str = ""
    region: str = ""
