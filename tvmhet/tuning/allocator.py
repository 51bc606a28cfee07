"""Keeps the curve of every kernel and the weight that the plan gives it; says which kernel gets the next batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from tvmhet.cluster.device import DeviceType
from tvmhet.cost.model import KernelDesc
from tvmhet.cost.roofline import SPEC_SHEET, Roofline, supports
from tvmhet.cost.table import MEASURED, TimeTable
from tvmhet.plans import Plan
from tvmhet.times import Candidates
from tvmhet.tuning.allocate import Curve, Task, choose
from tvmhet.tuning.sensitivity import Sensitivity, analyse, scaled

_REPLAN_BATCHES = 8  # after which all is planned again, whatever they gained
_BEST = 0.1  # of the measured time of a device type: its best kernels
_REPLAN_GAIN = 0.05  # a change of one kernel's time that makes the weights out of date


class Allocator:
    """Chooses among the generated kernels of a graph on the device types that can be measured.

    `table` gives today's times, `make` plans with a table. Kernels that nobody began have their time in the table.
    """

    def __init__(
        self,
        candidates: Candidates,
        types: Mapping[str, DeviceType],
        table: Callable[[], TimeTable],
        make: Callable[[TimeTable], Plan],
    ) -> None:
        self._candidates, self._types = candidates, types
        self._read, self._make = table, make
        self._index = {key: i for i, key in reversed(list(enumerate(candidates.keys)))}
        self._rooflines = {name: _roofline_s(d, candidates.descs) for name, d in types.items()}
        self._reached = dict.fromkeys(types, 1.0)  # what the best kernels of a type reach of its rates
        self._curves: dict[Task, Curve] = {}
        self._done: set[Task] = set()
        self._found: Sensitivity | None = None  # None: out of date
        self._batches = 0
        self._table: TimeTable | None = None

    def next(self) -> Task | None:
        """Return the kernel to give a batch to; None if none is expected to lower the objective noticeably."""
        if self._found is None:
            self._table = self._read()
            self._reached = {name: self._best_share(self._table, name) for name in self._types}
            self._found = analyse(self._make, self._table, self._hoped, self._candidates, frozenset(self._types))
            self._batches = 0
        assert self._table is not None
        curves = {t: self._curve(t, self._table) for t in self._found.weights if t not in self._done}
        return choose(curves, self._found.weights, self._found.plan.objective_value)

    def plan(self) -> Plan:
        """Return the plan that the last choice rests on, or make one."""
        return self._found.plan if self._found is not None else self._make(self._read())

    def index(self, task: Task) -> int:
        """Return the first candidate of a kernel."""
        return self._index[task[0]]

    def begin(self, task: Task, seconds: Sequence[float]) -> None:
        """Give a kernel the curve that earlier runs have drawn: by the rules, then after each batch."""
        self._curves[task] = Curve(tuple(seconds))

    def observe(self, task: Task, seconds: float) -> None:
        """Tell the best known time of a kernel after a batch."""
        before = self._curves[task]
        self._curves[task] = before.after([seconds])
        self._batches += 1
        if self._batches >= _REPLAN_BATCHES or self._curves[task].now_s < (1 - _REPLAN_GAIN) * before.now_s:
            self._found = None

    def drop(self, task: Task) -> None:
        """Leave a kernel out from now on: it cannot be tuned, or everything was tried."""
        self._done.add(task)

    def _hoped(self, table: TimeTable, device_type: str) -> TimeTable:
        """The table with every generated kernel of a device type at the time that tuning may still reach."""
        factors = {}
        for i, (kernel, key) in enumerate(zip(self._candidates.kernels, self._candidates.keys, strict=True)):
            task = key, device_type
            if kernel.maker == "tvm" and task not in self._done and np.isfinite(table.entry(i, device_type).seconds):
                curve = self._curve(task, table)
                factors[i] = curve.eventual_s() / curve.now_s
        return scaled(table, device_type, factors)

    def _curve(self, task: Task, table: TimeTable) -> Curve:
        """The curve of a kernel above its floor: the roofline at the rates that the best kernels reach."""
        index = self.index(task)
        known = self._curves.get(task) or Curve((table.entry(index, task[1]).seconds,))
        return replace(known, floor_s=self._rooflines[task[1]][index] / self._reached[task[1]])

    def _best_share(self, table: TimeTable, device_type: str) -> float:
        """Roofline over time, reached or passed in a tenth of all measured time; at least 1.

        The rates of CPU types are nominal: good kernels pass them, and then they bound nothing.
        """
        rooflines = self._rooflines[device_type]
        entries = ((rooflines[i], table.entry(i, device_type)) for i in self._index.values())
        known = sorted((s / e.seconds, e.seconds) for s, e in entries if e.source in MEASURED and e.seconds < np.inf)
        left_s = _BEST * sum(seconds for _, seconds in known)
        for share, seconds in reversed(known):
            left_s -= seconds
            if left_s <= 0:
                return max(1.0, share)
        return 1.0


def _roofline_s(device: DeviceType, descs: Sequence[KernelDesc]) -> tuple[float, ...]:
    """By candidate, the roofline at the rates of the device's description in seconds; 0 where it has no rate."""
    known = [i for i, desc in enumerate(descs) if supports(device, desc)]
    seconds = Roofline(device, SPEC_SHEET).predict([descs[i] for i in known]).seconds
    found = dict(zip(known, map(float, seconds), strict=True))
    return tuple(found.get(i, 0.0) for i in range(len(descs)))
