"""How many micro-batches each of a stage's unlike replicas runs: each next one goes where it would end first."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

from tvmhet.solve.iteration import IterationProblem, StagePlacing
from tvmhet.solve.iteration_value import pass_s, paths_and_loads_s

Stages = Sequence[Sequence[StagePlacing]]


def with_shares(problem: IterationProblem, option: int, stages: Stages) -> tuple[StagePlacing, ...]:
    """Return the placings of all stages, with shares where a stage is on several groups.

    What crosses stages depends on the shares, and they on it: they are dealt once without it, then with it. Replicas
    that would run nothing are left out.
    """
    micro, count = problem.options[option], problem.num_microbatches(option)
    if all(len(parts) == 1 for parts in stages):
        return tuple(p for parts in stages for p in parts)
    dealt = [_dealt(parts, [(s, s) for s in (sum(pass_s(micro, p)) for p in parts)], count) for parts in stages]
    placed = tuple(p for parts in dealt for p in parts)
    times = iter(paths_and_loads_s(micro, placed, count))
    again = [_dealt(parts, [next(times) for _ in parts], count) for parts in dealt]
    return tuple(p for parts in again for p in parts)


def _dealt(parts: Sequence[StagePlacing], times: Sequence[tuple[float, float]], count: int) -> tuple[StagePlacing, ...]:
    """Deal `count` micro-batches to `parts`; `times`: seconds of a replica's first one, and of each further one."""
    if len(parts) == 1:
        return (replace(parts[0], share=0),)
    shares = [0] * len(parts)
    ends = [(first, i) for i, (first, _) in enumerate(times)]
    heapq.heapify(ends)
    for _ in range(count):
        best = ends[0][1]
        shares[best] += 1
        first, each = times[best]
        later = first + shares[best] // parts[best].num_replicas * max(first, each)
        heapq.heapreplace(ends, (later, best))
    used = [replace(p, share=n, num_replicas=min(p.num_replicas, n)) for p, n in zip(parts, shares, strict=True) if n]
    return tuple(used) if len(used) > 1 else (replace(used[0], share=0),)
