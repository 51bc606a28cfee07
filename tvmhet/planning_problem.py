"""Graph, times and cluster -> the solver's numbers; pins by name -> the groups that nodes may run on."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tvmhet.cluster.groups import Group
from tvmhet.cluster.spec import ClusterSpec
from tvmhet.errors import BadInput
from tvmhet.graph.concurrent import between_kernels
from tvmhet.graph.fusion import LegalKernel
from tvmhet.graph.opgraph import OpGraph
from tvmhet.graph.states import handed_back
from tvmhet.graph.transposed import between_bytes
from tvmhet.solve import DeviceGroup, Edge, Kernel, Link, Problem, Weight
from tvmhet.solve.problem import Wire

#: One call of a compiled stage beyond its kernels and transfers: the VM's entry and the hand-over between workers.
#: llvm: 80 us, rounds from 72 to 90, by `python -m benchmarks.stage_overhead` on two idle x86-64-v4 cores. cuda:
#: assumed, a thread of this process enters the stage.
STAGE_OVERHEAD_S = {"llvm": 80e-6, "cuda": 60e-6}


def make_problem(
    graph: OpGraph,
    kernels: Sequence[LegalKernel],
    seconds: NDArray[np.float64],
    cluster: ClusterSpec,
    groups: Sequence[Group],
    pins: Mapping[int, frozenset[int]],
) -> Problem:
    """Return the planning problem. `seconds[k, g]` is the time of kernel k on group g; inf where it cannot run."""
    kept, returned = {now for now, _ in graph.states}, set(graph.returned)
    edges = tuple(
        Edge(t.producer, t.consumers, t.size_bytes, i in returned)
        for i, t in enumerate(graph.tensors)
        if not t.is_param and i not in kept and (t.consumers or i in returned)
    )
    edges += tuple(Edge(reader, (renewer,), size) for reader, renewer, size in handed_back(graph))
    weights = tuple(Weight(t.consumers, t.size_bytes) for t in graph.tensors if t.is_param and t.consumers)
    weights += _states(graph)
    return Problem(
        num_nodes=len(graph.operators),
        kernels=tuple(
            Kernel(k.ops, tuple(map(float, row)), _workspace_bytes(graph, k))
            for k, row in zip(kernels, seconds, strict=True)
        ),
        edges=edges,
        weights=weights,
        groups=tuple(
            DeviceGroup(g.name, g.num_devices, g.memory_bytes, g.usd_per_h, STAGE_OVERHEAD_S[g.device.kind])
            for g in groups
        ),
        links=tuple(tuple(_link(cluster.link(a, b)) for b in groups) for a in groups),
        host_links=tuple(_link(cluster.host_link(g)) for g in groups),
        pins=pins,
        wires=tuple(Wire(w.name, w.byte_per_s, w.ways) for w in cluster.wires(groups)),
    )


def _states(graph: OpGraph) -> tuple[Weight, ...]:
    """The states as weights of the devices that read or renew them, with what a stage holds of them while it runs."""
    found = []
    for now, after in graph.states:
        renewed = graph.tensors[after]
        nodes = sorted({*graph.tensors[now].consumers, *([renewed.producer] if renewed.producer >= 0 else [])})
        once_more = len(graph.tensors[now].consumers) > 0, renewed.producer >= 0 and not renewed.consumers
        if nodes:
            found.append(Weight(tuple(nodes), renewed.size_bytes * (2 * graph.num_sessions - 2 + sum(once_more))))
    return tuple(found)


def _workspace_bytes(graph: OpGraph, kernel: LegalKernel) -> int:
    if kernel.branches:
        return sum(graph.tensors[t].size_bytes for t in between_kernels(graph, kernel))
    return between_bytes(graph, kernel)


def _link(link: object) -> Link:
    return Link(link.latency_s, link.byte_per_s)  # type: ignore[attr-defined]


def resolve_pins(graph: OpGraph, groups: Sequence[Group], pin: Mapping[str, str]) -> dict[int, frozenset[int]]:
    """Return node -> allowed groups for pins by operator name (or shell pattern) and device type.

    A type goes by its name, an alias, or the family that the cluster's names begin with: "v100" for v100-pcie-16gb.
    Raises BadInput for a pattern that matches no operator, or a device type that the cluster does not have.
    """
    if not isinstance(pin, Mapping):
        raise BadInput(f"the pins are a {type(pin).__name__}", 'give device types by operator: pin={"conv1": "a100"}')
    allowed: dict[int, frozenset[int]] = {}
    for pattern, device in pin.items():
        nodes = [i for i, op in enumerate(graph.operators) if fnmatch.fnmatchcase(op.name, pattern)]
        if not nodes:
            some = ", ".join(op.name for op in graph.operators[:6])
            raise BadInput(
                f"pin {pattern!r} matches none of {len(graph.operators)} operators", f"names look like {some}"
            )
        chosen = _groups_called(device, groups)
        if not chosen:
            known = ", ".join(sorted({g.device.name for g in groups}))
            raise BadInput(f"pin {pattern!r}: the cluster has no device type {device!r}", f"it has {known}")
        for node in nodes:
            allowed[node] = allowed.get(node, chosen) & chosen
            if not allowed[node]:
                raise BadInput(f"pins of operator {graph.operators[node].name!r} contradict each other", "drop one")
    return allowed


def pinned_operators(graph: OpGraph, pin: Mapping[str, str]) -> frozenset[str]:
    """Return the names of the operators that some pin speaks of."""
    return frozenset(op.name for op in graph.operators if any(fnmatch.fnmatchcase(op.name, p) for p in pin))


def _groups_called(device: str, groups: Sequence[Group]) -> frozenset[int]:
    exact = frozenset(
        g for g, group in enumerate(groups) if device in (group.name, group.device.name, *group.device.aliases)
    )
    return exact or frozenset(g for g, group in enumerate(groups) if group.device.name.startswith(f"{device}-"))
