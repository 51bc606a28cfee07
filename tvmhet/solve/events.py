"""An event-driven run of tasks that wait for each other, need devices for themselves, and share wires.

A task starts as soon as what it waits for is done and all its resources are free; among several the first in order goes
first. Tasks that move data over one wire at the same time share it fairly: while n are on it, each proceeds at 1 / n of
its own pace.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from tvmhet.errors import BadInput


@dataclass(frozen=True, slots=True)
class Task:
    """`seconds` it takes alone, what it needs for itself meanwhile, and the tasks (by index) that end before it.

    `wire`: what its data moves over, None for none. `rank` orders tasks that are ready; ties go by index.
    """

    seconds: float
    resources: tuple[Hashable, ...]
    after: tuple[int, ...] = ()
    wire: Hashable | None = None
    rank: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """Bytes on one device during a run: `bytes[i]` from `times_s[i]` on. `replica` counts within its place."""

    place: int
    replica: int
    times_s: tuple[float, ...]
    bytes: tuple[float, ...]

    @property
    def peak_bytes(self) -> float:
        """The most at any time."""
        return max(self.bytes)


def run(tasks: Sequence[Task]) -> tuple[list[float], list[float]]:
    """Return (start, finish) seconds of every task. Raises BadInput if tasks wait for each other in a circle."""
    return _Run(tasks).go()


class _Run:
    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = tasks
        self.followers: list[list[int]] = [[] for _ in tasks]
        self.missing = [len(t.after) for t in tasks]
        for i, t in enumerate(tasks):
            for before in t.after:
                self.followers[before].append(i)
        self.order = {i: n for n, i in enumerate(sorted(range(len(tasks)), key=lambda i: (tasks[i].rank, i)))}
        self.by_order = sorted(self.order, key=lambda i: self.order[i])
        self.waiting: dict[Hashable, list[int]] = {}  # resource -> heap of the order of ready tasks
        self.busy: set[Hashable] = set()
        self.start, self.finish = [math.inf] * len(tasks), [math.inf] * len(tasks)
        self.timed: list[tuple[float, int]] = []
        self.left: dict[Hashable, dict[int, float]] = {}  # wire -> task -> seconds of its own pace still to go
        self.now = 0.0

    def go(self) -> tuple[list[float], list[float]]:
        free = [i for i, m in enumerate(self.missing) if m == 0]
        self._offer(free)
        self._begin({r for i in free for r in self.tasks[i].resources})
        done = 0
        while ended := self._advance():
            done += len(ended)
            freed: set[Hashable] = set()
            ready: list[int] = []
            for i in ended:
                self.finish[i] = self.now
                self.busy.difference_update(self.tasks[i].resources)
                freed.update(self.tasks[i].resources)
                for f in self.followers[i]:
                    self.missing[f] -= 1
                    if self.missing[f] == 0:
                        ready.append(f)
                        freed.update(self.tasks[f].resources)
            self._offer(ready)
            self._begin(freed)
        if done < len(self.tasks):
            stuck = next(i for i, f in enumerate(self.finish) if f == math.inf)
            raise BadInput(f"task {stuck} of {len(self.tasks)} never starts", "tasks wait for each other in a circle")
        return self.start, self.finish

    def _offer(self, ready: Sequence[int]) -> None:
        for i in ready:
            for r in self.tasks[i].resources:
                heapq.heappush(self.waiting.setdefault(r, []), self.order[i])
            if not self.tasks[i].resources:
                self._start(i)

    def _begin(self, resources: set[Hashable]) -> None:
        """Start, in order, every ready task that needs one of `resources` and finds all of its own free."""
        for n in sorted({n for r in resources if r not in self.busy for n in self.waiting.get(r, ())}):
            i = self.by_order[n]
            if any(r in self.busy for r in self.tasks[i].resources):
                continue
            for r in self.tasks[i].resources:
                self.busy.add(r)
                self.waiting[r].remove(n)
                heapq.heapify(self.waiting[r])
            self._start(i)

    def _start(self, i: int) -> None:
        task = self.tasks[i]
        self.start[i] = self.now
        if task.wire is None:
            heapq.heappush(self.timed, (self.now + task.seconds, i))
        else:
            self.left.setdefault(task.wire, {})[i] = task.seconds

    def _advance(self) -> list[int]:
        """Move on to the next end of any task; return the tasks that end then, none if nothing runs."""
        next_s = self.timed[0][0] if self.timed else math.inf
        for moving in self.left.values():
            if moving:
                next_s = min(next_s, self.now + min(moving.values()) * len(moving))
        if next_s == math.inf:
            return []
        ended: list[int] = []
        while self.timed and self.timed[0][0] <= next_s:
            ended.append(heapq.heappop(self.timed)[1])
        for moving in self.left.values():
            passed = (next_s - self.now) / max(1, len(moving))
            near = passed * (1 + 1e-12) + 1e-15  # what rounding leaves over is not worth an event
            ended += [i for i, seconds in moving.items() if seconds <= near]
            for i in list(moving):
                moving[i] -= passed
                if moving[i] <= near - passed:
                    del moving[i]
        self.now = next_s
        return sorted(ended)
