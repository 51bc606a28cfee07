"""Memory of a sequence of kernels on one device: parameters once, tensors while they live, workspace while it runs.

    kernel       k0      k1      k2
    input x   ███████████████████████     the caller holds inputs for the whole call
    t0             ██████████             from its kernel to its last reader
    result                     ██████     from its kernel to the end
    workspace       ▌       ▌       ▌

A tensor that only its own kernel reads never leaves the kernel and takes no memory. The peak is what an allocator
without fragmentation needs: a lower bound on what a real one takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvmhet.errors import BadGraph
from tvmhet.graph.opgraph import OpGraph


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes on one device that runs a sequence of kernels.

    `live_bytes[i]` are the tensors and the workspace while kernel i runs, parameters apart.
    """

    param_bytes: int
    live_bytes: tuple[int, ...]

    @property
    def activation_bytes(self) -> int:
        """The largest of `live_bytes`; 0 without kernels."""
        return max(self.live_bytes, default=0)

    @property
    def peak_bytes(self) -> int:
        """Parameters and the largest of `live_bytes`."""
        return self.param_bytes + self.activation_bytes


def memory_use(
    graph: OpGraph, kernels: Sequence[Sequence[int]], workspace_bytes: Sequence[int] | None = None
) -> MemoryUse:
    """Return the memory of running `kernels` (sets of operators) in this order, as one stage of `graph`.

    `workspace_bytes` is one number per kernel, 0 if not given. BadGraph if an operator occurs twice, if a kernel reads
    what a later one makes, or if the numbers of kernels and workspaces differ.
    """
    work = [0] * len(kernels) if workspace_bytes is None else list(workspace_bytes)
    if len(work) != len(kernels):
        raise BadGraph(f"{len(work)} workspaces for {len(kernels)} kernels", "give one number per kernel")
    place = _places(graph, kernels)
    ends = len(kernels) - 1
    live = [0] * (len(kernels) + 1)  # differences: + at the first kernel, - after the last
    params = 0
    for tensor in graph.tensors:
        readers = [place[c] for c in tensor.consumers if c in place]
        made = place.get(tensor.producer)
        if made is None and not readers:
            continue
        if tensor.is_param:
            params += tensor.size_bytes
            continue
        leaves = made is not None and (tensor.is_output or len(readers) < len(tensor.consumers) or not tensor.consumers)
        if made is not None and not leaves and set(readers) == {made}:
            continue
        first = 0 if made is None else made
        last = ends if made is None or leaves else max(readers)
        live[first] += tensor.size_bytes
        live[last + 1] -= tensor.size_bytes
    held, total = [], 0
    for i in range(len(kernels)):
        total += live[i]
        held.append(total + work[i])
    return MemoryUse(params, tuple(held))


def _places(graph: OpGraph, kernels: Sequence[Sequence[int]]) -> dict[int, int]:
    """Return each operator's kernel, having checked the order."""
    place: dict[int, int] = {}
    for i, kernel in enumerate(kernels):
        for op in kernel:
            if op in place:
                raise BadGraph(f"operator {graph.operators[op].name!r} is in two kernels", "run each operator once")
            place[op] = i
    for op, i in place.items():
        for p in graph.predecessors(op):
            if place.get(p, -1) > i:
                raise BadGraph(
                    f"kernel {i} reads {graph.operators[p].name!r}, which the later kernel {place[p]} makes",
                    "list the kernels in an execution order (graph.convex.quotient_order gives one)",
                )
    return place
