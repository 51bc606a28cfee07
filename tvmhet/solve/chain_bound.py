"""The largest T that no chain of stages keeps: a lower bound on the largest load, from a table of least loads.

The bound by fractional load (bounds.py) lets work flow freely between groups. A chain does not: each of its stages pays
an overhead and transfers, runs on whole devices of one group, and starts where the one before ended. This is the
bottleneck with communication (Archer et al., "Practical performance guarantees for pipelined DNN inference", ICML
2024), for unlike devices and replicas; each transfer is charged at the best link that its group has.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from tvmhet._passes import passes_func
from tvmhet.solve.pack import as_tensor, link_arrays
from tvmhet.solve.problem import Problem

_LABELS = 2000
_STEPS = 2_000_000  # per bound
_TOLERANCE = 5e-7  # relative distance at which bisection stops


def chain_bound_s(
    problem: Problem, time_s: NDArray[np.float64], moves: NDArray[np.float64], lower_s: float, upper_s: float
) -> float:
    """Return a lower bound, given one already known and the load of a known plan.

    `time_s` [cuts, cuts, groups] and `moves` [cuts, cuts, 8], as in passes/segment_table.cc, must bound every stage of
    every plan from below.
    """
    if not math.isfinite(upper_s):
        return lower_s
    bound, _ = passes_func("tvmhet.StageBound")(
        [as_tensor(a) for a in (time_s, moves, *link_arrays(problem))],
        problem.overlap_transfers,
        lower_s,
        upper_s,
        _TOLERANCE,
        _LABELS,
        _STEPS,
    )
    return max(lower_s, float(bound) * (1 - 1e-9))
