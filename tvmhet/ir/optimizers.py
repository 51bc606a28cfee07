"""The optimisers, as torch defines them: what they keep per parameter, and the numbers that a step needs.

p' = p - lr * (momentum of (g + weight_decay * p))                          Sgd
p' = p * (1 - lr * weight_decay) - lr * m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)      AdamW
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tvmhet.errors import BadInput


@dataclass(frozen=True, slots=True)
class Sgd:
    """torch.optim.SGD: momentum starts from the first gradient."""

    lr: float = 1e-3
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        _check_range("lr", self.lr, 0.0)
        _check_range("momentum", self.momentum, 0.0)
        _check_range("weight_decay", self.weight_decay, 0.0)
        if self.nesterov and self.momentum == 0.0:
            raise BadInput("nesterov is set and momentum is 0", "give a momentum above 0, or nesterov=False")

    @property
    def state(self) -> tuple[str, ...]:
        """Names of the tensors kept per parameter, as torch calls them."""
        return ("momentum_buffer",) if self.momentum else ()

    def scalars(self, step: int, lr: float) -> tuple[float, ...]:
        """Return the numbers that change with the step: the rate alone."""
        del step
        return (lr,)


@dataclass(frozen=True, slots=True)
class AdamW:
    """torch.optim.AdamW, with decoupled weight decay."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2

    def __post_init__(self) -> None:
        _check_range("lr", self.lr, 0.0)
        _check_range("weight_decay", self.weight_decay, 0.0)
        _check_range("eps", self.eps, 0.0)
        for beta in self.betas:
            _check_range("beta", beta, 0.0, 1.0)

    @property
    def state(self) -> tuple[str, ...]:
        """Names of the tensors kept per parameter, as torch calls them."""
        return ("exp_avg", "exp_avg_sq")

    def scalars(self, step: int, lr: float) -> tuple[float, ...]:
        """Return the numbers of step `step` (from 1) at rate `lr`: 1 - lr * decay, lr / (1 - b1^t), sqrt(1 - b2^t)."""
        first, second = self.betas
        return (1.0 - lr * self.weight_decay, lr / (1.0 - first**step), (1.0 - second**step) ** 0.5)


Optimizer = Sgd | AdamW

_BY_NAME: Mapping[str, type[Sgd] | type[AdamW]] = {"sgd": Sgd, "adamw": AdamW}


def optimizer_of(chosen: str | Optimizer, options: Mapping[str, float]) -> Optimizer:
    """Return the optimiser called `chosen` with these options, or the one that was given."""
    if isinstance(chosen, Sgd | AdamW):
        if options:
            raise BadInput(f"options {sorted(options)} were given beside {chosen}", "give them to the optimiser itself")
        return chosen
    if chosen not in _BY_NAME:
        raise BadInput(f"optimizer {chosen!r} is unknown", f"use one of {', '.join(_BY_NAME)}")
    try:
        return _BY_NAME[chosen](**options)  # type: ignore[arg-type]
    except TypeError as error:
        raise BadInput(f"optimizer {chosen!r} does not take {sorted(options)}: {error}", "see Sgd and AdamW") from error


def _check_range(name: str, value: float, low: float, high: float = float("inf")) -> None:
    if not low <= value < high:
        raise BadInput(f"{name} is {value}", f"give a number in [{low:g}, {high:g})")
