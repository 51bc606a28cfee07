"""What is asked for: a job of so many samples, or a service that never ends, its goal and its limits.

                 time                     cost                  energy
    job          hours until the end      USD in all            kWh in all
    service      seconds per input        USD/h (1)             W (1)

(1) per input where no throughput is asked for: the device that costs least per hour may cost most per input.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from tvmhet.errors import BadInput


class Goal(str, enum.Enum):
    """What a recommendation makes least."""

    TIME = "time"
    PRICE = "price"
    ENERGY = "energy"


@dataclass(frozen=True, slots=True)
class Job:
    """A goal and limits; None: no limit. With `samples` it is a job that ends, else a service.

    With `global_batch` it is training: the job takes whole iterations of so many samples.

    `budget_usd` is for the whole job, or for an hour of a service. `deadline_h` counts from the first request for
    machines. Raises BadInput for a limit that makes no sense.
    """

    goal: Goal = Goal.PRICE
    samples: int | None = None
    deadline_h: float | None = None
    budget_usd: float | None = None
    throughput_per_s: float | None = None
    latency_ms: float | None = None
    global_batch: int | None = None

    def __post_init__(self) -> None:
        for name in ("samples", "deadline_h", "budget_usd", "throughput_per_s", "latency_ms", "global_batch"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise BadInput(f"{name} is {value}", f"give a finite {name} of more than 0, or leave it out")
        if self.deadline_h is not None and self.samples is None:
            raise BadInput(
                f"deadline_h is {self.deadline_h:g}, but a service without samples= never ends",
                "give samples=, or ask for throughput_per_s= or latency_ms=",
            )

        if self.global_batch is not None:
            self._check_training()

    def _check_training(self) -> None:
        if self.samples is None:
            raise BadInput(
                f"training with global_batch={self.global_batch} never ends",
                "give samples= or iterations= to train for",
            )
        if self.throughput_per_s is not None or self.latency_ms is not None:
            raise BadInput(
                "throughput_per_s and latency_ms are of services, and global_batch= of training",
                "limit training by deadline_h= or budget_usd=",
            )

    @property
    def is_service(self) -> bool:
        """Whether the work never ends."""
        return self.samples is None

    @property
    def latency_limit_s(self) -> float:
        """The limit on one input's latency in seconds; inf without one."""
        return math.inf if self.latency_ms is None else self.latency_ms / 1e3

    def limits(self) -> dict[str, float]:
        """Return the limits that are set, by the name of the argument."""
        names = ("deadline_h", "budget_usd", "throughput_per_s", "latency_ms")
        return {n: getattr(self, n) for n in names if getattr(self, n) is not None}


def goal_called(name: str) -> Goal:
    """Return the goal of that name. Raises BadInput with the known ones."""
    known = [g.value for g in Goal]
    if name not in known:
        raise BadInput(f"objective {name!r} is unknown", f"use one of {', '.join(known)}")
    return Goal(name)
