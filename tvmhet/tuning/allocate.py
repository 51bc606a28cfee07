"""Which kernel gets the next trials: the one whose expected gain makes the plan's objective fall most.

    value of a batch = seconds of the objective per second of the kernel  x  seconds that the batch may save

The first factor comes from the plan (`tvmhet.tuning.sensitivity`), the second from the kernel's own curve: what its
last batches saved, or, while it had few, a hope that halves with every batch (the idea of Ansor's gradient, Zheng et
al., OSDI 2020, whose sum over all kernels is replaced by the objective of the plan). Numbers only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: A kernel to tune: its key and a device type.
Task = tuple[str, str]

#: What the first batch is hoped to save, as a share of the time; each further one half of that.
FIRST_HOPE = 0.3
_LEAST_HOPE = 0.25  # the share of it that is left for a kernel at its floor, which is an estimate
_WINDOW = 2  # batches whose savings are expected to go on
#: A batch that may lower the objective by less than this share is not worth its trials.
WORTHWHILE = 0.001


@dataclass(frozen=True, slots=True)
class Curve:
    """Best seconds of one kernel on one device type: by the rules, then after each batch; never above the first.

    `floor_s` is what the device type's best kernels would take: the nearer, the less is hoped for.
    """

    best_s: tuple[float, ...]
    floor_s: float = 0.0

    @property
    def now_s(self) -> float:
        """The best time so far."""
        return self.best_s[-1]

    def after(self, seconds: Sequence[float]) -> Curve:
        """Return the curve after a batch with these times (of the sound trials)."""
        return Curve((*self.best_s, min(self.now_s, *seconds) if seconds else self.now_s), self.floor_s)

    def next_s(self) -> float:
        """The time that one more batch may reach."""
        return self.now_s * (1 - self._gain())

    def eventual_s(self) -> float:
        """The time that batches without end may reach, each saving half of what the one before saved."""
        return self.now_s * (1 - min(0.9, 2 * self._gain()))

    def _gain(self) -> float:
        batches = len(self.best_s) - 1
        hope = FIRST_HOPE * 0.5**batches * max(_LEAST_HOPE, 1 - self.floor_s / self.now_s)
        window = min(_WINDOW, batches)
        recent = (1 - self.now_s / self.best_s[-1 - window]) / window if window else 0.0
        return max(hope, recent / 2)


def choose(curves: Mapping[Task, Curve], weights: Mapping[Task, float], objective_s: float) -> Task | None:
    """Return the kernel to give the next batch to, None if none is worth one; ties go to the first by name.

    `weights` are seconds of the objective per second of the kernel.
    """
    values = {task: weights.get(task, 0.0) * (c.now_s - c.next_s()) for task, c in curves.items()}
    best = max(sorted(values), key=lambda task: values[task], default=None)
    return best if best is not None and values[best] > WORTHWHILE * objective_s else None
