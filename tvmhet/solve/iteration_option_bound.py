"""A lower bound on an iteration with one micro-batch size, by covers: work spread over all devices, or one way through.

max( M x fractional load,  one micro-batch over the fastest devices,  pipeline filled, then busy )  + update
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tvmhet.solve.bounds import cheapest_cover, filling_bound_s, throughput_bound_s
from tvmhet.solve.iteration import IterationProblem
from tvmhet.solve.iteration_tables import mode_times, modes_of
from tvmhet.solve.pack import StateGraph
from tvmhet.solve.schedules import Schedule


def option_bound_s(problem: IterationProblem, option: int, graphs: list[StateGraph]) -> float:
    """Return a lower bound on the iteration with that micro-batch size, for every plan; 0 if `graphs` miss covers.

    All devices always busy with the work they do best (M times the fractional load), or one micro-batch's way over the
    fastest devices, or the pipeline filled and then kept busy; and the update of all weights, spread over all devices.
    """
    graph = next((g for g in graphs if not g.truncated), None)
    if graph is None:
        return 0.0
    micro = problem.options[option]
    modes = modes_of(problem, option)
    both, _ = mode_times(micro, modes)
    work = least_work_s(problem, option)
    load = throughput_bound_s(micro.forward, graph, work)
    cover = list(cheapest_cover(graph, np.ascontiguousarray(both.min(axis=1))))
    way = float(both.min(axis=1)[cover].sum())
    weights = sum(w.size_bytes for w in micro.forward.weights if w.nodes)
    used = [g for g, group in enumerate(problem.groups) if group.num_devices > 0]
    devices = sum(problem.groups[g].num_devices for g in used)
    update = min(problem.update_s_per_byte[g] for g in used) * weights / max(1, devices)
    filled = _filled_bound_s(problem, option, graph, work)
    return max(problem.num_microbatches(option) * load, way, filled) * (1 - 1e-9) + update


def least_work_s(problem: IterationProblem, option: int) -> NDArray[np.float64]:
    """Return the least device seconds of both passes, shape (kernels, groups), split or not; inf: cannot run."""
    micro, modes = problem.options[option], modes_of(problem, option)
    both, _ = mode_times(micro, modes)
    work = np.full((len(both), len(problem.groups)), np.inf)
    for m, mode in enumerate(modes):
        work[:, mode.group] = np.minimum(work[:, mode.group], mode.degree * both[:, m])
    return work


def _filled_bound_s(problem: IterationProblem, option: int, graph: StateGraph, work: NDArray[np.float64]) -> float:
    """Return a lower bound on filling a pipeline and keeping it busy; 0 where tensors are split or replicas unlike.

    With X the seconds of one micro-batch over all stages, an iteration takes X + (M / r - 1) w for every stage of w
    seconds on r replicas; so its n[g] devices of group g run at most W = n[g] / (M - n[g]) D of it, D = iteration - X
    (r is concave in w: several stages need no fewer devices than one). Interleaved with up to v chunks a device: X / v
    instead of X, and n[g] / (M - n[g] / v).
    """
    if problem.may_mix or problem.options[option].splits:
        return 0.0
    count = problem.num_microbatches(option)
    devices = np.array([max(0, g.num_devices) for g in problem.groups], np.float64)
    chunks = {problem.most_chunks if s is Schedule.INTERLEAVED else 1 for s in problem.schedules}
    bounds = []
    for v in chunks:
        left = count - devices / v
        most = np.where(left > 0, devices / np.where(left > 0, left, 1.0), np.inf)
        bounds.append(filling_bound_s(graph, work, most, 1.0 / v))
    return min(bounds)
