"""How much the plan's objective falls for a second saved in a kernel: finite differences through the planner.

    plan ─► for each stage: the tunable kernels of its device type take 10 % less ─► plan again ─► (fall) / (saved)

Planning again lets boundaries move, so a kernel beside the bottleneck counts as well: work can move to its device. The
same is done at the times that tuning may still reach, whose plan holds kernels that are not worth using yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from tvmhet.cost.table import TimeTable
from tvmhet.graph.opgraph import OpGraph
from tvmhet.plans import Plan, PlannedStage
from tvmhet.times import Candidates
from tvmhet.tuning.allocate import Task

_STEP = 0.1


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """`weights`: seconds of the objective per second of a task. `plan` is the one at today's times."""

    plan: Plan
    weights: Mapping[Task, float]


def analyse(
    make: Callable[[TimeTable], Plan],
    table: TimeTable,
    hopes: Callable[[TimeTable], TimeTable],
    graph: OpGraph,
    candidates: Candidates,
    tunable: frozenset[str],
) -> Sensitivity:
    """Weigh every generated kernel of the best plan, and of the best plan at the times `hopes` gives.

    `make` plans with a table; `tunable` are the device types that can be measured.
    """
    now = make(table)
    hoped = hopes(table)
    then = make(hoped)
    weights = _weights(make, table, now, graph, candidates, tunable)
    for task, weight in _weights(make, hoped, then, graph, candidates, tunable).items():
        weights[task] = max(weights.get(task, 0.0), weight)
    return Sensitivity(now, weights)


def _weights(
    make: Callable[[TimeTable], Plan],
    table: TimeTable,
    plan: Plan,
    graph: OpGraph,
    candidates: Candidates,
    tunable: frozenset[str],
) -> dict[Task, float]:
    place = {(k.ops, k.maker): i for i, k in enumerate(candidates.kernels)}
    number = {op.name: i for i, op in enumerate(graph.operators)}
    weights: dict[Task, float] = {}
    for stage in plan.stages:
        device = stage.placement.device_type
        if device not in tunable:
            continue
        made = [place[tuple(sorted(number[o] for o in k.ops)), k.maker] for k in stage.kernels if k.maker == "tvm"]
        keys = [candidates.keys[i] for i in made]
        saved_s = _STEP * sum(table.entry(i, device).seconds for i in made)
        if saved_s <= 0:
            continue
        fall_s = plan.objective_value - make(_faster(table, device, frozenset(keys), candidates)).objective_value
        rate = max(fall_s / saved_s, _share(plan, stage))
        for key in keys:
            weights[key, device] = weights.get((key, device), 0.0) + rate
    return weights


def _share(plan: Plan, stage: PlannedStage) -> float:
    """What saving in a stage that alone limits the plan is worth, where planning again finds no better plan."""
    if plan.objective == "latency":
        return 1.0
    limits = stage.load_s >= 0.999 * max(s.load_s for s in plan.stages)
    alone = sum(s.load_s >= 0.999 * max(t.load_s for t in plan.stages) for s in plan.stages) == 1
    return 1.0 / len(stage.placement.devices) if limits and alone else 0.0


def _faster(table: TimeTable, device: str, keys: frozenset[str], candidates: Candidates) -> TimeTable:
    return scaled(table, device, {i: 1 - _STEP for i, key in enumerate(candidates.keys) if key in keys})


def scaled(table: TimeTable, device: str, factors: Mapping[int, float]) -> TimeTable:
    """Return the table with the times of these kernels on a device type multiplied; sources stay."""
    d = table.column(device)
    seconds, low, high = table.seconds.copy(), table.low.copy(), table.high.copy()
    for i, factor in factors.items():
        seconds[i, d], low[i, d], high[i, d] = (a[i, d] * factor for a in (seconds, low, high))
    return replace(table, seconds=seconds, low=low, high=high)
