"""Branches that a CPU device may run at the same time, each on one of its cores: a kernel by the maker "concurrent".

           ┌─ conv ────────────┐           share 0 (core 0)   conv ─ conv
    fork ──┼─ conv ─ conv ─────┼─ concat   share 1 (core 1)   conv, pool ─ conv
           └─ pool ─ conv ─────┘           the concat is a kernel of its own, before and after

Small kernels gain little from a second core: the fork and join of every kernel's loops take longer than half of its
work. Run at the same time, branches pay for that once. Between a join and its immediate dominator, the branches are the
connected parts of what lies between; no operator of one reads another. The parts are convex together, as every path
between two of them stays between the dominator and the join. Each branch is a sequence of generated kernels.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from tvmhet.graph.fusion import Branch, LegalKernel
from tvmhet.graph.opgraph import Operator, OpGraph, PatternKind

#: Maker of kernels that hold branches.
CONCURRENT = "concurrent"

_MAX_OPS = 64  # of all branches together
_FLOP_PER_BYTE = 4.0  # what moving a byte counts for, where shares are balanced
_MIN_WORK = 2e5  # FLOP: some microseconds of one core. A second branch below it cannot pay for the start of a core


def concurrent_kernels(graph: OpGraph, generated: Sequence[LegalKernel]) -> tuple[LegalKernel, ...]:
    """Return a kernel for each set of branches between a join and its dominator; `generated` are the kernels to use.

    Branches hold operators with one result that make a loop nest (no OPAQUE or TUPLE pattern), at most 64 in all, and
    at least two of them more than a few microseconds of work. Deterministic, in the order of the joins.
    """
    before = _dominators(graph)
    ends_in: dict[int, list[tuple[int, ...]]] = {}
    for kernel in generated:
        ends_in.setdefault(kernel.sink, []).append(kernel.ops)
    found: dict[tuple[int, ...], LegalKernel] = {}
    for join in range(len(graph.operators)):
        if len(graph.predecessors(join)) < 2:
            continue
        region = _between(graph, before[join], join)
        if region is None or tuple(region) in found or not all(_is_loop_nest(graph.operators[i]) for i in region):
            continue
        parts = _parts(graph, region)
        if sum(work(graph, part) >= _MIN_WORK for part in parts) >= 2:
            branches = tuple(Branch(_cover(part, ends_in), work(graph, part)) for part in parts)
            found[tuple(region)] = LegalKernel(tuple(region), CONCURRENT, branches)
    return tuple(found.values())


def work(graph: OpGraph, ops: Sequence[int]) -> float:
    """FLOP of operators, with what they move counted as FLOP: what shares are balanced by."""
    chosen = [graph.operators[i] for i in ops]
    return sum(op.flop + _FLOP_PER_BYTE * (op.read_bytes + op.write_bytes) for op in chosen)


def shares(works: Sequence[float], num_cores: int) -> tuple[tuple[int, ...], ...]:
    """Return which branches each core runs: the longest first, each on the core that has least to do. No core is idle.

    >>> shares([5.0, 1.0, 3.0, 2.0], 2)
    ((0,), (1, 2, 3))
    """
    loads = [0.0] * min(num_cores, len(works))
    chosen: list[list[int]] = [[] for _ in loads]
    for branch in sorted(range(len(works)), key=lambda b: (-works[b], b)):
        core = loads.index(min(loads))
        loads[core] += works[branch]
        chosen[core].append(branch)
    return tuple(tuple(sorted(c)) for c in chosen)


def concurrent_spec(graph: OpGraph, kernel: LegalKernel) -> str:
    """Return the JSON text that a plan carries: per branch its work and its kernels, as names of operators."""
    branches = [
        {"work": branch.work, "kernels": [[graph.operators[i].name for i in ops] for ops in branch.kernels]}
        for branch in kernel.branches
    ]
    return json.dumps(branches)


def between_kernels(graph: OpGraph, kernel: LegalKernel) -> frozenset[int]:
    """Return the tensors that only this kernel reads and that lie in memory meanwhile, between kernels of a branch."""
    inner = {i: ops for branch in kernel.branches for ops in branch.kernels for i in ops}
    made = {t for i in inner for t in graph.operators[i].outputs}
    return frozenset(
        t
        for t in made
        if not graph.tensors[t].is_output
        and all(c in inner for c in graph.tensors[t].consumers)
        and any(inner[c] != inner[graph.tensors[t].producer] for c in graph.tensors[t].consumers)
    )


def _is_loop_nest(op: Operator) -> bool:
    return op.pattern <= PatternKind.OUT_EWISE_FUSABLE and len(op.outputs) == 1


def _dominators(graph: OpGraph) -> list[int]:
    """The immediate dominator of each operator, -1 where that is the model's inputs (Cooper, Harvey, Kennedy 2001)."""
    found: list[int] = []
    depth: list[int] = []
    for i in range(len(graph.operators)):
        above = graph.predecessors(i)
        common = above[0] if above else -1
        for other in above[1:]:
            while common != other:
                if other == -1 or (common != -1 and depth[common] >= depth[other]):
                    common = found[common]
                else:
                    other = found[other]
        found.append(common)
        depth.append(0 if common == -1 else depth[common] + 1)
    return found


def _between(graph: OpGraph, fork: int, join: int) -> list[int] | None:
    """The operators between a dominator and its join, ascending; None if they are too many."""
    seen: set[int] = set()
    ahead = [p for p in graph.predecessors(join) if p != fork]
    while ahead:
        i = ahead.pop()
        if i in seen:
            continue
        seen.add(i)
        if len(seen) > _MAX_OPS:
            return None
        ahead += [p for p in graph.predecessors(i) if p != fork]
    return sorted(seen)


def _parts(graph: OpGraph, region: Sequence[int]) -> list[list[int]]:
    """The connected parts of a region, each ascending, in the order of their first operators."""
    part = {i: i for i in region}

    def root(i: int) -> int:
        while part[i] != i:
            i = part[i]
        return i

    for i in region:
        for p in graph.predecessors(i):
            if p in part:
                one, other = sorted((root(i), root(p)))
                part[other] = one
    out: dict[int, list[int]] = {}
    for i in region:
        out.setdefault(root(i), []).append(i)
    return list(out.values())


def _cover(part: Sequence[int], ends_in: dict[int, list[tuple[int, ...]]]) -> tuple[tuple[int, ...], ...]:
    """Kernels that make a branch, in execution order: from the end, the one with most operators that is left."""
    left, chosen = set(part), []
    for i in reversed(part):
        if i in left:
            ops = max((k for k in ends_in[i] if left.issuperset(k)), key=lambda k: (len(k), k))
            left -= set(ops)
            chosen.append(ops)
    return tuple(reversed(chosen))
