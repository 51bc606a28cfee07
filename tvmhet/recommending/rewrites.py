"""The operators that a service is priced with: the model's own, or rewritten (`tvmhet.rewriting`) where no type loses.

Each of a few types plans the model on one device of its own, memory aside; what it would rewrite is kept for all types
if the whole model's cheapest kernels then take none of them longer, and together least.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tvmhet.cluster.device import DeviceType
from tvmhet.cluster.market import DEFAULT_NETWORK
from tvmhet.cluster.nodes import Network, NodeClass
from tvmhet.cluster.spec import ClusterSpec
from tvmhet.planning_problem import make_problem
from tvmhet.proposing import Price, Variant
from tvmhet.rewriting import MAX_OPERATORS, Planner, Wanted
from tvmhet.solve import Objective, Problem
from tvmhet.solve.bounds import cheapest_cover
from tvmhet.solve.state_graphs import all_graphs

_MOST_TYPES = 3  # that are asked: the fastest, the slowest, and one between
_ENOUGH_BYTES = 1 << 50
_TIME_LIMIT_S = 10.0  # of CPU, for the rewrites of a type
_SAME = 1e-9


def best_variant(first: Variant, types: Sequence[DeviceType], price: Price, makers: Sequence[str]) -> Variant:
    """Return `first`, or the model after the rewrites that make it fastest and no type slower."""
    if len(first.graph.operators) > MAX_OPERATORS:
        return first
    before = _seconds(first, types)
    order = [int(i) for i in np.argsort(before, kind="stable") if math.isfinite(before[i])]
    best, best_s = first, before
    tried = {first.rewrites}
    for i in dict.fromkeys(order[round(k * (len(order) - 1) / (_MOST_TYPES - 1))] for k in range(_MOST_TYPES) if order):
        wanted = Wanted(Objective.THROUGHPUT, makers, {}, time_limit_s=_TIME_LIMIT_S)
        _, variant = Planner(_alone(types[i]), price, wanted).best(first)
        if variant.rewrites in tried:
            continue
        tried.add(variant.rewrites)
        after = _seconds(variant, types)
        if (after <= before * (1 + _SAME)).all() and _mean(after) < _mean(best_s):
            best, best_s = variant, after
    return best


def _alone(device: DeviceType) -> ClusterSpec:
    """One device that holds any model, behind a gateway."""
    roomy = dataclasses.replace(device, memory_bytes=_ENOUGH_BYTES)
    return ClusterSpec((NodeClass("gateway", ()), NodeClass("alone", ((roomy, 1),))), Network(DEFAULT_NETWORK))


def _seconds(variant: Variant, types: Sequence[DeviceType]) -> NDArray[np.float64]:
    """Seconds of the cheapest kernels of the whole model on each type; inf where there are none."""
    problem = _problem(variant, types[0])
    graph = next(all_graphs(problem), None)
    out = np.full(len(types), math.inf)
    for i, device in enumerate(types if graph is not None else ()):
        assert graph is not None
        seconds = np.ascontiguousarray(variant.table.seconds[:, variant.table.column(device.name)])
        if cover := list(cheapest_cover(graph, seconds)):
            out[i] = float(seconds[cover].sum())
    return out


def _problem(variant: Variant, device: DeviceType) -> Problem:
    cluster = _alone(device)
    seconds = variant.table.seconds[:, [variant.table.column(device.name)]]
    return make_problem(variant.graph, variant.candidates.kernels, seconds, cluster, cluster.groups(), {})


def _mean(seconds: NDArray[np.float64]) -> float:
    """The geometric mean of those that are finite."""
    real = seconds[np.isfinite(seconds) & (seconds > 0)]
    return float(np.exp(np.log(real).mean())) if len(real) else math.inf
