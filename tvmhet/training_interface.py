"""What a trainer must know of its model: sizes and names, not the model. A bundle carries it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from tvmhet.dealt import Dealt, WholeState
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

    def whole(self, state: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return the state of the model: of what devices hold, joined, tensor by tensor, where it is in parts."""
        return WholeState(state, self._state_in_parts())

    def in_parts(self, state: Mapping[str, Array]) -> dict[str, Array]:
        """Return what devices hold of the state of the model."""
        found = dict(state)
        for name, dealt in self._state_in_parts().items():
            found |= zip(dealt.names, dealt.parts(found.pop(name)), strict=True)
        return found

    def _state_in_parts(self) -> dict[str, Dealt]:
        """The parameters and buffers that are in parts, and the optimiser's tensors of those parameters."""
        found = dict(self.dealt)
        for name in self.dealt.keys() & set(self.trained):
            for kept in self.optimizer.state:
                own = tuple(f"{part}.{kept}" for part in self.dealt[name].names)
                found[f"{name}.{kept}"] = replace(self.dealt[name], names=own)
        return found
