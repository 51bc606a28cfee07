"""An event-driven run of tasks that wait for each other, need devices for themselves, and share wires.

A task starts as soon as what it waits for is done and all its resources are free; among several the first in order goes
first. Tasks that move data over one wire at the same time share it fairly: where they ask for more than it carries, all
of them slow down to an equal part of their own paces; what they leave to others is used (max-min fairness).
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

    `wires`: what its data moves over, and for how many seconds it would take the whole of each. `rank` orders tasks
    that are ready; ties go by index.
    """

    seconds: float
    resources: tuple[Hashable, ...]
    after: tuple[int, ...] = ()
    wires: tuple[tuple[Hashable, float], ...] = ()
    rank: tuple[float, ...] = ()


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
        self.left: dict[int, float] = {}  # task on a wire -> seconds at its own pace still to go
        self.pace: dict[int, float] = {}
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
        if task.seconds > 0 and any(taken > 0 for _, taken in task.wires):
            self.left[i] = task.seconds
            self.pace = {}
        else:
            heapq.heappush(self.timed, (self.now + task.seconds, i))

    def _paces(self) -> dict[int, float]:
        """Return each moving task's pace, 1 at most: equal where tasks contend, and no wire is overbooked."""
        share = {i: {w: s / self.tasks[i].seconds for w, s in self.tasks[i].wires if s > 0} for i in self.left}
        room: dict[Hashable, float] = {w: 1.0 for ways in share.values() for w in ways}
        pace: dict[int, float] = {}
        while len(pace) < len(share):
            asked = dict.fromkeys(room, 0.0)
            for i in share.keys() - pace.keys():
                for w, part in share[i].items():
                    asked[w] += part
            level, tight = min(
                ((room[w] / asked[w], str(w)) for w in room if asked[w] > 0), key=lambda x: x, default=(1.0, "")
            )
            slow = [i for i in share if i not in pace and (level >= 1 or any(str(w) == tight for w in share[i]))]
            for i in slow:
                pace[i] = min(1.0, level)
                for w, part in share[i].items():
                    room[w] = max(0.0, room[w] - part * pace[i])
        return pace

    def _advance(self) -> list[int]:
        """Move on to the next end of any task; return the tasks that end then, none if nothing runs."""
        next_s = self.timed[0][0] if self.timed else math.inf
        if self.left and not self.pace:
            self.pace = self._paces()
        for i, seconds in self.left.items():
            next_s = min(next_s, self.now + seconds / self.pace[i])
        if next_s == math.inf:
            return []
        ended: list[int] = []
        while self.timed and self.timed[0][0] <= next_s:
            ended.append(heapq.heappop(self.timed)[1])
        for i in list(self.left):
            passed = (next_s - self.now) * self.pace[i]
            if self.left[i] <= passed * (1 + 1e-12) + 1e-15:  # what rounding leaves over is not worth an event
                ended.append(i)
                del self.left[i]
            else:
                self.left[i] -= passed
        if any(i in self.pace and i not in self.left for i in ended):
            self.pace = {}
        self.now = next_s
        return sorted(ended)
