"""Data parallel training on many fleets at once, and what no plan on a fleet can beat, without a search for each.

    replicas   every device holds the whole model, the faster ones run more micro-batches: the closed form of
               `evaluate_iteration` for one micro-batch size, the best of the sizes
    work       for any prices v[g] >= 0 the cheapest cover by kernels that cost min over g of v[g] * t[k, g] is no more
               than the priced work of one micro-batch, so

                   iteration >= micro-batches * cover(v) / (sum over devices of v)      v[g] = 1 / seconds alone on g

    fits       every node runs in a kernel that some device of the fleet holds

Copies are on single devices; bounds hold for teams of devices too, whose kernels take their seconds on each of them.

A problem's groups are all devices that could be in a fleet; fleets are rows of device counts, shape (fleets, groups).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tvmhet.solve.bounds import cheapest_cover
from tvmhet.solve.collectives import ring_s
from tvmhet.solve.iteration import IterationProblem, StagePlacing
from tvmhet.solve.iteration_candidate import judge
from tvmhet.solve.iteration_memory import MicroUses, StageNeeds, stage_bytes
from tvmhet.solve.iteration_tables import IterationTables, mode_times, modes_of
from tvmhet.solve.iteration_value import path_s
from tvmhet.solve.pack import StateGraph, allowed_times
from tvmhet.solve.schedules import Schedule

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

_HALVINGS = 60
_SAME = 1e-9


@dataclass(frozen=True)
class WholeModel:
    """The whole model on one device of each group, for one micro-batch size: seconds, inf where it does not fit.

    `path_s` is one micro-batch's way, `load_s` what each further one adds.
    """

    path_s: Floats
    load_s: Floats
    backward_s: Floats
    update_s: Floats
    gradient_bytes: float


def whole_model(problem: IterationProblem, option: int, graph: StateGraph) -> WholeModel:
    """Return the figures of the fastest kernels, recomputed where only that fits. `graph` has the states of a cover."""
    num = len(problem.groups)
    path, load, back, update = (np.full(num, math.inf) for _ in range(4))
    ends = IterationTables(problem, option, graph, np.array([0, graph.num_states - 1], np.int32))
    size = 0.0
    ends.learn([[0, 1, m, 1] for m in np.flatnonzero(np.isfinite(ends.time_s[:, 0, 1])).tolist()])
    needs = StageNeeds(problem, option)
    for m, mode in enumerate(ends.modes):
        if mode.degree > 1 or not math.isfinite(ends.time_s[m, 0, 1]):
            continue
        found = judge(problem, option, (ends.placing(0, 1, m, 1, 0),), Schedule.ONE_F_ONE_B, "whole model", needs)
        if found is None or found.value.stages[0].load_s >= load[mode.group]:
            continue
        (stage,) = found.value.stages
        load[mode.group], path[mode.group] = stage.load_s, path_s(problem.options[option], stage)
        back[mode.group], update[mode.group] = stage.backward_s, stage.update_s
        size = stage.weight_bytes * problem.gradient_ratio
    return WholeModel(path, load, back, update, size)


def replicated_s(problem: IterationProblem, option: int, alone: WholeModel, counts: Counts) -> Floats:
    """Return the seconds of an iteration with the model on every device of each fleet; inf where it does not fit all,
    or where a device would get no micro-batch."""
    used = counts > 0
    fits = (np.isfinite(alone.load_s) | ~used).all(axis=1) & used.any(axis=1)
    out = np.full(len(counts), math.inf)
    if fits.any():
        rows = counts[fits]
        runs, busy = _pipeline_s(problem.num_microbatches(option), alone, rows)
        after = _reduce_s(problem, option, alone, rows)[:, None] - problem.reduce_overlap * np.where(
            np.isfinite(alone.backward_s), alone.backward_s, 0.0
        )
        ends = np.maximum(after, 0.0) + np.where(np.isfinite(alone.update_s), alone.update_s, 0.0)
        out[fits] = np.where(busy, runs + np.where(rows > 0, ends, 0.0).max(axis=1), math.inf)
    return out


def _pipeline_s(count: int, alone: WholeModel, counts: Counts) -> tuple[Floats, NDArray[np.bool_]]:
    """The least seconds in which each fleet's replicas run `count` micro-batches, and whether each of them gets one."""
    used = counts > 0
    path, load = (np.where(used, np.where(np.isfinite(t), t, 1.0), 1.0) for t in (alone.path_s, alone.load_s))
    alone_in_use = used.sum(axis=1) == 1
    load = np.maximum(load, path)  # one micro-batch in flight

    def each(limit_s: Floats) -> Floats:
        """Micro-batches that one replica of each group ends by then."""
        return np.where(used, np.floor((limit_s[:, None] - path) / load * (1 + _SAME) + _SAME) + 1, 0.0).clip(min=0.0)

    low = np.zeros(len(counts))
    high = np.where(used, path + (count - 1) * load, 0.0).max(axis=1)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        enough = (each(middle) * counts).sum(axis=1) >= count
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    runs = each(high)
    busy: NDArray[np.bool_] = (~used | (runs >= 1)).all(axis=1) | alone_in_use  # replicas of one group may go without
    return np.where(used & (runs >= 1), path + (runs - 1) * load, 0.0).max(axis=1), busy


def _reduce_s(problem: IterationProblem, option: int, alone: WholeModel, counts: Counts) -> Floats:
    """One group by its own network; several in one ring at the pace of the slowest link among them."""
    links, devices = problem.options[option].forward.links, counts.sum(axis=1)
    most = int(devices.max(initial=0))
    out = np.zeros(len(counts))
    for kind, mine in _kinds(counts):
        if len(kind) == 1:
            own = problem.all_reduce[kind[0]]
            table = [own.seconds(alone.gradient_bytes, n) for n in range(most + 1)]
        else:
            ways = {links[g][h] for g in kind for h in kind}
            ways |= {x for g in kind for x in (problem.all_reduce[g].inner, problem.all_reduce[g].outer)}
            table = [max(ring_s(x, alone.gradient_bytes, n) for x in ways) for n in range(most + 1)]
        out[mine] = np.array(table)[devices[mine]]
    return out


def _kinds(counts: Counts) -> Iterator[tuple[list[int], NDArray[np.bool_]]]:
    """Yield each set of groups that fleets use, with the fleets that use it."""
    kinds, kind_of = np.unique(counts > 0, axis=0, return_inverse=True)
    for i, kind in enumerate(kinds):
        yield np.flatnonzero(kind).tolist(), kind_of.reshape(-1) == i


def work_bounds_s(problem: IterationProblem, option: int, graph: StateGraph, counts: Counts) -> Floats:
    """Return seconds that no iteration with this micro-batch size is shorter than on each fleet, whatever the plan.

    Zeros where `graph` does not hold every cover; inf where the fleet has too little memory for weights and their state
    altogether.
    """
    both, soonest = _device_seconds(problem, option)
    micro = problem.num_microbatches(option)
    size = sum(w.size_bytes for w in problem.options[option].forward.weights if w.nodes)
    memory = counts @ np.array([g.memory_bytes for g in problem.groups], np.float64)
    out = np.where(memory < size * (1 + problem.gradient_ratio + problem.state_ratio), math.inf, 0.0)
    if graph.truncated or not graph.num_states:
        return out
    alone = np.array([_cover_s(graph, both[:, [g]]) for g in range(both.shape[1])])
    runs = (alone > 0) & np.isfinite(alone)
    speed = np.where(runs, 1.0 / np.where(runs, alone, 1.0), 0.0)
    update = np.array(problem.update_s_per_byte)
    for kind, mine in _kinds(counts):
        cover, way = _cover_s(graph, _priced(both[:, kind], speed[kind])), _cover_s(graph, soonest[:, kind])
        devices = counts[mine][:, kind]
        work = micro * cover / np.maximum(devices @ speed[kind], 1e-300)
        least = np.maximum(work, way) * (1 - _SAME) + update[kind].min() * size / devices.sum(axis=1)
        out[mine] = np.maximum(out[mine], least)
    return out


def _device_seconds(problem: IterationProblem, option: int) -> tuple[Floats, Floats]:
    """Return the least seconds of devices, and the least until the end, of each kernel's both passes on each group."""
    modes = modes_of(replace(problem, may_recompute=False), option)
    both, _ = mode_times(problem.options[option], modes)
    num = len(problem.groups)
    assert [m.group for m in modes if m.degree == 1] == list(range(num)), "every group of the market has devices"
    mine = [[i for i, m in enumerate(modes) if m.group == g] for g in range(num)]
    work = both * np.array([m.degree for m in modes])
    least, soonest = (np.stack([t[:, i].min(axis=1) for i in mine], axis=1) for t in (work, both))
    return least, soonest


def node_fits(problem: IterationProblem, option: int) -> NDArray[np.bool_]:
    """Return whether a device of each group holds some kernel of each node; shape (nodes, groups).

    A kernel holds its weights with their state, what one micro-batch keeps, and its working memory, which any stage
    with it does; where the model may be split, a part of them.
    """
    forward, uses = problem.options[option].forward, MicroUses.of(problem.options[option])
    runs = np.isfinite(allowed_times(forward))
    degree = [max([s.degree for s in problem.options[option].splits if s.group == g], default=1)
              for g in range(len(problem.groups))]  # fmt: skip
    room = np.array([g.memory_bytes for g in problem.groups], np.float64)
    fits = np.zeros((forward.num_nodes, len(problem.groups)), np.bool_)
    for k, kernel in enumerate(forward.kernels):
        needs = {d: stage_bytes(problem, option, StagePlacing((k,), 0, 1, 0, degree=d), uses) for d in set(degree)}
        need = np.array([needs[d].state + needs[d].working + needs[d].stash for d in degree])
        fits[list(kernel.nodes)] |= runs[k] & (need <= room)
    return fits


@dataclass(frozen=True)
class CheapestKernels:
    """The kernels that take one group the least seconds, forward and backward, of one micro-batch; inf: none do."""

    kernels: tuple[int, ...]
    seconds: float


def cheapest_kernels(problem: IterationProblem, option: int, graph: StateGraph) -> list[CheapestKernels]:
    """Return those of each group, memory aside. `graph` has the states of a cover."""
    both, _ = mode_times(problem.options[option], modes_of(replace(problem, may_recompute=False), option))
    found = []
    for group in range(len(problem.groups)):
        cover = cheapest_cover(graph, np.ascontiguousarray(both[:, group])) if graph.num_states else ()
        found.append(CheapestKernels(cover, float(both[list(cover), group].sum()) if cover else math.inf))
    return found


def _priced(times: Floats, price: Floats) -> Floats:
    return np.where(np.isfinite(times), times, 1.0) * price + np.where(np.isfinite(times), 0.0, math.inf)


def _cover_s(graph: StateGraph, times: Floats) -> float:
    least = np.ascontiguousarray(times.min(axis=1))
    cover = list(cheapest_cover(graph, least))
    return float(least[cover].sum()) if cover else math.inf
