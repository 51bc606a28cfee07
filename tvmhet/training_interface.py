"""What a trainer must know of its model: sizes and names, not the model. A bundle carries it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from tvmhet.dealt import Dealt
from tvmhet.ir.optimizers import Optimizer
from tvmhet.ir.training_model import TrainingModel
from tvmhet.runtime.program import Array


@dataclass(frozen=True)
class TrainingInterface:
    """Names of parameters and buffers as in `TrainingModel`, the optimiser, and the samples of a micro-batch.

    `dealt` are the parameters and buffers that the devices of a team hold in parts.
    """

    name: str
    batch_size: int
    optimizer: Optimizer
    trained: tuple[str, ...]
    torch_names: Mapping[str, str]
    state_dict: Mapping[str, str]
    dealt: Mapping[str, Dealt] = field(default_factory=dict)

    @classmethod
    def of(cls, model: TrainingModel, dealt: Mapping[str, Dealt]) -> TrainingInterface:
        """Return the interface of a model."""
        names = model.torch_names, model.state_dict
        return cls(model.name, model.batch_size, model.optimizer, model.trained, *names, dealt)

    def held(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the names under which devices hold parameters and buffers."""
        return tuple(own for name in names for own in (self.dealt[name].names if name in self.dealt else (name,)))

    def whole(self, state: Mapping[str, Array]) -> dict[str, Array]:
        """Return the state of the model: what devices hold, joined where it is in parts."""
        found = dict(state)
        for name, dealt, suffix in self._in_parts():
            found[name + suffix] = dealt.joined([found.pop(own + suffix) for own in dealt.names])
        return found

    def in_parts(self, state: Mapping[str, Array]) -> dict[str, Array]:
        """Return what devices hold of the state of the model."""
        found = dict(state)
        for name, dealt, suffix in self._in_parts():
            parts = dealt.parts(found.pop(name + suffix))
            found |= {own + suffix: part for own, part in zip(dealt.names, parts, strict=True)}
        return found

    def _in_parts(self) -> Iterator[tuple[str, Dealt, str]]:
        """Each tensor of the state that is in parts: its parameter or buffer, and what follows the name."""
        for name, dealt in self.dealt.items():
            kept = self.optimizer.state if name in self.trained else ()
            yield from ((name, dealt, suffix) for suffix in ("", *(f".{s}" for s in kept)))
