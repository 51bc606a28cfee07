"""Learning rates of the steps to come: by a function of the step, or by a scheduler of torch."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from tvmhet.errors import BadInput
from tvmhet.ir.optimizers import Rates


class Scheduler(Protocol):
    """What torch.optim.lr_scheduler's schedulers have."""

    def get_last_lr(self) -> list[float]:
        """Return the rate of each group of parameters."""

    def step(self) -> Any:
        """Go on to the next step."""


RateOf = Callable[[int], Rates] | Scheduler


@dataclass(frozen=True, slots=True)
class ByFunction:
    """Rates by a function of the step's number, from 1."""

    function: Callable[[int], Rates]

    def at(self, step: int) -> Rates:
        """Return the rates of a step."""
        return self.function(step)

    def step(self) -> None:
        """Nothing: the function is asked for each step."""


@dataclass(frozen=True, slots=True)
class ByScheduler:
    """Rates as a scheduler has them, whose optimiser takes no steps itself."""

    scheduler: Scheduler

    def at(self, step: int) -> Rates:
        """Return the rates of the step that comes."""
        del step
        return [float(rate) for rate in self.scheduler.get_last_lr()]  # torch may hold them as tensors

    def step(self) -> None:
        """Go on, without torch's warning that its optimiser was not stepped."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            self.scheduler.step()


def rates_from(lr: RateOf) -> ByFunction | ByScheduler:
    """Return the rates of a function or a scheduler. Raises BadInput for what is neither, or needs more than steps."""
    if hasattr(lr, "get_last_lr") and hasattr(lr, "step"):
        if "metrics" in inspect.signature(lr.step).parameters:
            raise BadInput(
                f"{type(lr).__name__} is stepped with a metric",
                "step it in a loop of your own, and set trainer.lr there",
            )
        if getattr(lr, "cycle_momentum", False):
            raise BadInput(f"{type(lr).__name__} changes momentum, too", "make it with cycle_momentum=False")
        return ByScheduler(lr)
    if not callable(lr):
        raise BadInput(
            f"lr is {lr!r}", "give a function of the step or a scheduler of torch; trainer.lr = ... for one rate"
        )
    return ByFunction(lr)
