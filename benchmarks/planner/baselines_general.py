"""Other planners on the general problem, with the same kernel times, memory and links.

- one device: the whole model on the best single device, with the cheapest kernels.
- best homogeneous: this planner on the devices of one group.
- equal split: a topological order cut into one piece per device, in proportion to the devices' speeds.
- greedy by memory: the order, one device after the other filled, the fastest first.
- HEFT, ETF, SCT: list schedules (tvmhet/solve/list_schedule.py, favourites.py); each device's nodes are one stage.
- local search: random pieces of the order on random devices, then ends and devices changed while that helps.

All but the homogeneous plan choose a device per node first and the cheapest kernels that stay on one device after. They
know no replicas. Values are the closed forms that plans are checked with; inf where a baseline finds no legal plan.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tvmhet.solve import Objective, Problem, Status, solve
from tvmhet.solve.favourites import sct
from tvmhet.solve.latency import list_slots, list_tasks, plan_of
from tvmhet.solve.list_schedule import Slot, Tasks, etf, heft
from tvmhet.solve.orders import late_order
from tvmhet.solve.pack import allowed_times, predecessors, state_graph
from tvmhet.solve.stage_chain import node_weights_s

Evaluator = Callable[[Sequence[int] | None], float]  # slot of each node -> the objective


def problem_baselines(problem: Problem, objective: Objective) -> dict[str, float]:
    """Return each baseline's objective in seconds."""
    time_s = allowed_times(problem)
    order = late_order(predecessors(problem))
    graph = state_graph(problem, order, full=False, max_states=6000)
    weight_s = np.array([node_weights_s(problem, time_s[:, g]) for g in range(len(problem.groups))])
    if not np.isfinite(weight_s.min(axis=0)).all():
        return {"one device": math.inf}  # some node runs nowhere
    slots = list_slots(problem)
    tasks = list_tasks(problem, weight_s, slots)

    def value(home: Sequence[int] | None) -> float:
        found = plan_of(problem, graph, time_s, home, slots, objective) if home is not None else None
        return found.objective_s if found else math.inf

    fast = sorted(range(len(slots)), key=lambda s: (float(weight_s[slots[s].kind].sum()), s))
    return {
        "one device": min(value([s] * problem.num_nodes) for s in range(len(slots))),
        "best homogeneous": min(_solved(problem, g, objective) for g in range(len(problem.groups))),
        "equal split": value(_shared(order, weight_s, slots, fast)),
        "greedy by memory": value(_filled(order, tasks, slots, fast)),
        "HEFT": value(heft(tasks)),
        "ETF": value(etf(tasks)),
        "SCT": value(sct(tasks)),
        "local search": _local_search(value, order, len(slots)),
    }


def _solved(problem: Problem, group: int, objective: Objective) -> float:
    if problem.groups[group].num_devices <= 0:
        return math.inf
    groups = tuple(d if g == group else replace(d, num_devices=0) for g, d in enumerate(problem.groups))
    solution = solve(replace(problem, groups=groups), objective)
    return math.inf if solution.status is Status.INFEASIBLE else solution.objective


def _shared(
    order: Sequence[int], weight_s: NDArray[np.float64], slots: Sequence[Slot], fast: Sequence[int]
) -> list[int]:
    runs = np.isfinite(weight_s)
    total = np.where(runs, weight_s, 0.0).sum(axis=1) / np.maximum(runs.sum(axis=1), 1)
    speed = [1.0 / max(float(total[slots[s].kind]), 1e-300) for s in fast]
    shares = np.cumsum(speed) / sum(speed)
    work = np.where(np.isfinite(weight_s), weight_s, 0.0).mean(axis=0)
    done = np.cumsum(work[list(order)]) / max(float(work.sum()), 1e-300)
    home = [0] * len(order)
    for v, at in zip(order, done, strict=True):
        home[v] = fast[min(len(fast) - 1, int(np.searchsorted(shares, at)))]
    return home


def _filled(order: Sequence[int], tasks: Tasks, slots: Sequence[Slot], fast: Sequence[int]) -> list[int] | None:
    home, at, used = [0] * len(order), 0, 0.0
    for v in order:
        while at < len(fast) and used + tasks.memory_bytes[v] > slots[fast[at]].memory_bytes:
            at, used = at + 1, 0.0
        if at == len(fast):
            return None
        home[v] = fast[at]
        used += tasks.memory_bytes[v]
    return home


def _local_search(value: Evaluator, order: Sequence[int], devices: int, restarts: int = 4, most: int = 250) -> float:
    """Up to four pieces; a move shifts an end or swaps a piece's device with another's."""
    rng = random.Random(0)
    pieces = min(4, devices)

    def home(ends: Sequence[int], where: Sequence[int]) -> list[int]:
        out = [0] * len(order)
        for p in range(pieces):
            for v in order[ends[p] : ends[p + 1]]:
                out[v] = where[p]
        return out

    best = math.inf
    for _ in range(restarts):
        ends = [0, *sorted(rng.randint(0, len(order)) for _ in range(pieces - 1)), len(order)]
        where = rng.sample(range(devices), pieces)
        now = value(home(ends, where))
        for _ in range(most // restarts):
            tried, there = list(ends), list(where)
            if pieces > 1 and rng.random() < 0.7:
                p = rng.randrange(1, pieces)
                tried[p] = min(tried[p + 1], max(tried[p - 1], tried[p] + rng.choice((-64, -16, -4, -1, 1, 4, 16, 64))))
            else:
                p, d = rng.randrange(pieces), rng.randrange(devices)
                if d in there:
                    there[there.index(d)] = there[p]
                there[p] = d
            if (new := value(home(tried, there))) < now:
                ends, where, now = tried, there, new
        best = min(best, now)
    return best
