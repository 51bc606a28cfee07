"""Every pipeline of a problem that has few: stages between all downsets, on all groups. One replica each.

For the pipelines of one chain, price and rate follow from adding replicas to the busiest stage, one after another.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
from numpy.typing import NDArray

from tvmhet.solve.evaluate import StageChoice
from tvmhet.solve.objective import Objective
from tvmhet.solve.pack import allowed_times
from tvmhet.solve.pipeline import StageSearch
from tvmhet.solve.problem import Problem
from tvmhet.solve.state_graphs import all_graphs

_Rows = tuple[tuple[int, int, int, int], ...]  # of each stage: from state, to state, group, replicas


def every_chain(problem: Problem, limit: int) -> list[tuple[StageChoice, ...]] | None:
    """Return every chain of stages that its devices can hold, each stage with the fastest kernels that fit.

    None where there are more than about `limit`, or where not all of them are known: too many downsets or kernels.
    """
    graph = next(all_graphs(problem), None)
    if graph is None or not graph.full:
        return None
    search = StageSearch(problem, graph, allowed_times(problem), Objective.THROUGHPUT)
    cuts = np.arange(graph.num_states, dtype=np.int32)
    if len(cuts) > limit or not search.knows_all(cuts):
        return None
    possible = search.possible(cuts)
    if _number(possible) > limit:
        return None
    chains = [np.array(rows, np.int64) for rows in _chains(problem, possible)]
    search.learn(chains, cuts)
    return [search.choices(rows, cuts) for rows in chains]


def _number(possible: NDArray[np.bool_]) -> float:
    """How many chains there are if devices never run out; [states, states, groups]: is a stage possible."""
    ways = possible.sum(axis=2)
    number = np.zeros(len(ways))
    number[-1] = 1.0
    for b in range(len(ways) - 2, -1, -1):
        number[b] = float(ways[b, b + 1 :] @ number[b + 1 :])
    return float(number[0])


def _chains(problem: Problem, possible: NDArray[np.bool_]) -> Iterator[_Rows]:
    last = len(possible) - 1
    degree = [g.degree for g in problem.groups]
    pool = [problem.pool(g) for g in range(len(degree))]

    @cache
    def stages(b: int) -> tuple[tuple[int, int], ...]:
        return tuple((int(c), int(g)) for c, g in np.argwhere(possible[b]))

    def go_on(b: int, rows: _Rows, free: tuple[int, ...]) -> Iterator[_Rows]:
        if b == last:
            yield rows
            return
        for c, g in stages(b):
            left = list(free)
            left[pool[g]] -= degree[g]
            if left[pool[g]] >= 0:
                yield from go_on(c, (*rows, (b, c, g, 1)), tuple(left))

    yield from go_on(0, (), tuple(max(0, g.num_devices) for g in problem.groups))
