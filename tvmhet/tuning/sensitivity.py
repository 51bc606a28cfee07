"""How much the plan's objective falls for a second saved in a kernel: finite differences through the planner.

    plan ─► for each stage: its generated kernels take 10 % less ─► plan again ─► (fall) / (saved)
         ─► for each device type: its kernels at the times that tuning may still reach ─► plan again ─► (fall) / (saved)

Planning again lets boundaries move, so a kernel beside the bottleneck counts as well: work can move to its device. The
second line finds kernels that no plan uses yet, because they are not worth it before they are tuned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from tvmhet.cost.table import TimeTable
from tvmhet.plans import Plan, PlannedStage
from tvmhet.times import Candidates
from tvmhet.tuning.allocate import Task

_STEP = 0.1  # of a kernel's time: the finite difference


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """`weights`: seconds of the objective per second of a task. `plan` is the one at today's times."""

    plan: Plan
    weights: Mapping[Task, float]


def analyse(
    make: Callable[[TimeTable], Plan],
    table: TimeTable,
    hopes: Callable[[TimeTable, str], TimeTable],
    candidates: Candidates,
    tunable: frozenset[str],
) -> Sensitivity:
    """Weigh every generated kernel of the best plan, and of the best plan at the times hoped for on each device type.

    `make` plans with a table; `hopes` lowers the times of one of `tunable`, the device types that can be measured.
    """
    now = make(table)
    weights = _weights(make, table, now, candidates, tunable)
    for device in sorted(tunable):
        hoped = hopes(table, device)
        then = make(hoped)
        used = [i for s in then.stages if s.placement.device_type == device for i in _generated(candidates, s)]
        saved_s = sum(table.entry(i, device).seconds - hoped.entry(i, device).seconds for i in used)
        rate = max(0.0, now.objective_value - then.objective_value) / saved_s if saved_s > 0 else 0.0
        for task, count in Counter((candidates.keys[i], device) for i in used).items():
            weights[task] = max(weights.get(task, 0.0), rate * count)
    return Sensitivity(now, weights)


def _generated(candidates: Candidates, stage: PlannedStage) -> list[int]:
    """The candidates of a stage that TVM makes."""
    return candidates.indices([k for k in stage.kernels if k.maker == "tvm"])


def _weights(
    make: Callable[[TimeTable], Plan], table: TimeTable, plan: Plan, candidates: Candidates, tunable: frozenset[str]
) -> dict[Task, float]:
    weights: dict[Task, float] = {}
    for stage in plan.stages:
        device = stage.placement.device_type
        made = _generated(candidates, stage) if device in tunable else []
        saved_s = _STEP * sum(table.entry(i, device).seconds for i in made)
        if saved_s <= 0:
            continue
        keys = [candidates.keys[i] for i in made]
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
