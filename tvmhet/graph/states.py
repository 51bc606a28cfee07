"""What calls hand on to each other, as a planner sees it: memory of the devices that read or renew it, and no transfer.

    reader ──► ... ──► renewer          next call: what the renewer made is what the reader reads
       ╰───────────────────╯            apart, both devices would exchange the whole state in every call

A device holds a state twice for each session, as it is and as it becomes: a call that fails leaves it as it was.
"""

from __future__ import annotations

from collections.abc import Collection

from tvmhet.graph.opgraph import OpGraph


def kept_bytes(graph: OpGraph, ops: Collection[int]) -> int:
    """Return what a device that runs `ops` holds of the states of other sessions than the one whose call it runs.

    Of that one they are an argument and a result.
    """
    inside = set(ops)
    return sum(
        2 * (graph.num_sessions - 1) * graph.tensors[now].size_bytes
        for now, after in graph.states
        if inside & {*graph.tensors[now].consumers, graph.tensors[after].producer}
    )


def copied_bytes(graph: OpGraph, ops: Collection[int]) -> int:
    """Return what a GPU copies in each call of the states that `ops` renew: where sessions alternate, away and back."""
    inside, times = set(ops), 1 if graph.num_sessions == 1 else 2
    return times * sum(
        graph.tensors[now].size_bytes for now, after in graph.states if graph.tensors[after].producer in inside
    )


def handed_back(graph: OpGraph) -> list[tuple[int, int, int]]:
    """Return (reader, renewer, bytes) of the states whose first reader leads to the operator that renews them.

    On two devices, the state would go from one to the other between calls. Readers that do not lead there are left out:
    an edge from them would order what is in no order.
    """
    found = []
    for now, after in graph.states:
        readers, renewer = graph.tensors[now].consumers, graph.tensors[after].producer
        if renewer >= 0 and readers and readers[0] < renewer and _leads_to(graph, readers[0], renewer):
            found.append((readers[0], renewer, graph.tensors[now].size_bytes))
    return found


def _leads_to(graph: OpGraph, first: int, last: int) -> bool:
    reached = {first}
    for op in range(first + 1, last + 1):
        if reached.intersection(graph.predecessors(op)):
            reached.add(op)
    return last in reached
