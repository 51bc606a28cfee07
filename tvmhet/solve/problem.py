"""The planning problem as numbers: no IR, no cost model, no device name that means anything to the solver.

Nodes are operators 0..n-1 in a topological order. A *kernel* is a convex set of nodes with a time on each device
group. A *stage* is a set of kernels on one group; stages form an acyclic quotient of the graph.

    load of a stage on one of its r replicas =
        (sum of kernel times + stage_overhead_s[group]) / r  +  receives / r  +  sends / r
    a tensor crosses a link once per (producer stage, consuming stage); tensors from or to the host use `host_links`.
    load of a wire = the bytes of one input that cross it / its rate

A *team* is `degree` devices of one group that run the kernels of a stage together (tensor split, see splits.py): a
group of its own, whose devices are those of another.

A device may hold several stages in a row with others between them (virtual stages): then their loads and their memory
add up, and what passes between them stays where it is.

Transfers are not overlapped with compute unless `overlap_transfers` is set, in which case the load is the larger of
compute, receive and send. Throughput minimises the largest load of a device or wire; latency the makespan of one input.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from tvmhet.errors import BadGraph, BadTime, EmptyCluster


@dataclass(frozen=True, slots=True)
class Kernel:
    """A candidate kernel: a convex set of nodes and its seconds on each group (`math.inf`: cannot run there)."""

    nodes: tuple[int, ...]
    time_s: tuple[float, ...]
    workspace_bytes: int = 0

    def __post_init__(self) -> None:
        if not self.nodes or list(self.nodes) != sorted(set(self.nodes)):
            raise BadGraph(f"kernel nodes {self.nodes} are not ascending and distinct", "sort them")
        for t in self.time_s:
            if math.isnan(t) or t < 0:
                raise BadTime(f"kernel {self.nodes} has time {t} s", "times are >= 0 s, or inf where it cannot run")


@dataclass(frozen=True, slots=True)
class Edge:
    """One tensor: made by node `src` (-1: a model input), read by nodes `dsts`; `is_output` if the model returns it."""

    src: int
    dsts: tuple[int, ...]
    size_bytes: int
    is_output: bool = False


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter, read by `nodes`; stored once per device that runs any of them.

    The devices of a team hold their shares of it, or, where it `is_whole`, each all of it; in training with its
    gradient and the optimiser's state, and each updates what it holds. The update takes as long as that of
    `update_bytes` more in a longer tensor, which is what it takes to call a kernel for it.
    """

    nodes: tuple[int, ...]
    size_bytes: int
    is_whole: bool = False
    update_bytes: int = 0

    @property
    def updated_bytes(self) -> int:
        """What its update is priced by."""
        return self.size_bytes + self.update_bytes

    def share(self, degree: int) -> float:
        """Return which part of it each device of a team of `degree` holds."""
        return 1.0 if self.is_whole else 1.0 / degree


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """Interchangeable devices: one type behind one link class. `usd_per_h` is per device.

    Or teams of `degree` devices of the group `team_of`: their number and price are of teams, `memory_bytes` is of one
    device, which holds 1 / degree of every weight that is not whole, and all else whole.
    """

    name: str
    num_devices: int
    memory_bytes: float
    usd_per_h: float = 0.0
    stage_overhead_s: float = 0.0
    team_of: int = -1
    degree: int = 1


@dataclass(frozen=True, slots=True)
class Link:
    """Seconds to move n bytes: latency_s + n / byte_per_s. A rate of 0 means that there is no link."""

    latency_s: float = 0.0
    byte_per_s: float = math.inf

    def __post_init__(self) -> None:
        if not (0 <= self.latency_s < math.inf and self.byte_per_s >= 0):
            raise BadTime(
                f"a link has {self.latency_s} s latency and {self.byte_per_s} byte/s",
                "latency is finite and >= 0, the rate >= 0 (0: no link)",
            )

    def transfer_s(self, size_bytes: float) -> float:
        """Return seconds for one transfer of `size_bytes`; inf where there is no link."""
        return self.latency_s + size_bytes / self.byte_per_s if self.byte_per_s > 0 else math.inf


@dataclass(frozen=True, slots=True)
class Wire:
    """A line that several pairs of devices share: what crosses any of `ways` has `byte_per_s` together.

    A way is (group of the sender, group of the receiver); -1 is the host. Each direction is a wire of its own. A link
    over a wire is to be no faster than it: `Link` says what a transfer takes alone.
    """

    name: str
    byte_per_s: float
    ways: frozenset[tuple[int, int]]

    def __post_init__(self) -> None:
        if not self.byte_per_s > 0:
            raise BadTime(f"wire {self.name!r} carries {self.byte_per_s} byte/s", "give a rate above 0")


@dataclass(frozen=True, slots=True)
class Problem:
    """Everything a solver may know. `links[a][b]` joins a device of group a to another of group b (a == b: a peer).

    `pins` limits a node to some groups. Memory of a stage on one device, bounded by `memory_bytes`: its weights and
    live-ins, both kept throughout, + the largest over its kernels, in execution order, of: results made so far and
    still needed (live-outs to the end), the kernel's own results, its workspace.

    Latency of one input: a stage starts when the last of its tensors has arrived; transfers between two stages follow
    each other, those between different pairs do not contend.

    A wire takes the bytes of one input that cross it over its rate; no objective is less than what any wire takes. A
    device that waits for a crowded wire may lose more: `simulate` says how much.
    """

    num_nodes: int
    kernels: tuple[Kernel, ...]
    edges: tuple[Edge, ...]
    weights: tuple[Weight, ...]
    groups: tuple[DeviceGroup, ...]
    links: tuple[tuple[Link, ...], ...]
    host_links: tuple[Link, ...]  # host <-> a device of group g, for model inputs and outputs
    pins: Mapping[int, frozenset[int]] = field(default_factory=dict)
    overlap_transfers: bool = False
    wires: tuple[Wire, ...] = ()

    def __post_init__(self) -> None:
        if not self.groups or all(g.num_devices == 0 for g in self.groups):
            raise EmptyCluster("the cluster has no device", "add a device type with a count of at least 1")
        for e in self.edges:
            if not 0 <= e.size_bytes < math.inf:
                raise BadGraph(f"edge from node {e.src} has {e.size_bytes} bytes", "sizes are finite and >= 0")
            if e.src < -1 or any(not e.src < d < self.num_nodes for d in e.dsts) or e.src >= self.num_nodes:
                raise BadGraph(f"edge {e.src} -> {e.dsts} is not in topological order", "renumber the nodes")
        for w in self.weights:
            if not 0 <= w.size_bytes < math.inf or any(not 0 <= v < self.num_nodes for v in w.nodes):
                raise BadGraph(
                    f"a weight of {w.size_bytes} bytes is read by nodes {w.nodes}",
                    f"sizes are finite and >= 0, nodes 0..{self.num_nodes - 1}",
                )
        for g in self.groups:
            if g.num_devices < 0 or not g.memory_bytes >= 0 or not g.stage_overhead_s >= 0:
                raise BadGraph(
                    f"group {g.name!r}: {g.num_devices} devices, {g.memory_bytes} bytes, {g.stage_overhead_s} s idle",
                    "all are >= 0",
                )
            if g.num_devices != int(g.num_devices) or not 0 <= g.usd_per_h < math.inf:
                raise BadGraph(
                    f"group {g.name!r}: {g.num_devices} devices at {g.usd_per_h} USD/h",
                    "counts are whole numbers, prices finite and >= 0",
                )
        self._check_teams()
        if [len(row) for row in self.links] != [len(self.groups)] * len(self.groups):
            raise BadGraph(f"links do not match {len(self.groups)} groups", "give one link per pair of groups")
        for v, allowed in self.pins.items():
            if not 0 <= v < self.num_nodes:
                raise BadGraph(f"a pin names node {v} among {self.num_nodes}", "pin a node that exists")
            if unknown := sorted(g for g in allowed if not 0 <= g < len(self.groups)):
                raise BadGraph(
                    f"node {v} is pinned to group {unknown[0]} among {len(self.groups)}",
                    "pin it to a group that exists",
                )
        for wire in self.wires:
            if any(not -1 <= g < len(self.groups) for way in wire.ways for g in way):
                raise BadGraph(f"wire {wire.name!r} names a group that is not there", f"-1..{len(self.groups) - 1}")
        if len(self.host_links) != len(self.groups):
            raise BadGraph(f"{len(self.host_links)} host links for {len(self.groups)} groups", "give one per group")
        for k in self.kernels:
            if k.nodes[0] < 0 or k.nodes[-1] >= self.num_nodes or not 0 <= k.workspace_bytes < math.inf:
                raise BadGraph(
                    f"kernel {k.nodes} with {k.workspace_bytes} bytes of workspace among {self.num_nodes} nodes",
                    "nodes are 0..num_nodes - 1, bytes >= 0",
                )
            if len(k.time_s) != len(self.groups):
                raise BadTime(
                    f"kernel {k.nodes} has {len(k.time_s)} times for {len(self.groups)} groups", "give one per group"
                )

    def _check_teams(self) -> None:
        for i, g in enumerate(self.groups):
            if g.team_of < 0 and g.degree == 1:
                continue
            base = self.groups[g.team_of] if 0 <= g.team_of < i else None
            if base is None or base.team_of >= 0 or g.degree < 2 or g.degree != int(g.degree):
                raise BadGraph(
                    f"group {g.name!r}: teams of {g.degree} devices of group {g.team_of}",
                    "a team has 2 devices or more of a group before it that is no team",
                )
            if g.num_devices != max(0, base.num_devices) // g.degree or not math.isclose(
                g.usd_per_h, base.usd_per_h * g.degree, rel_tol=1e-9
            ):
                raise BadGraph(
                    f"group {g.name!r}: {g.num_devices} teams at {g.usd_per_h} USD/h, of {base.num_devices} devices",
                    "make teams with tvmhet.solve.with_splits, change counts with with_devices",
                )

    def pool(self, group: int) -> int:
        """Return the group whose devices `group` takes: itself, or that of its teams."""
        return group if self.groups[group].team_of < 0 else self.groups[group].team_of
