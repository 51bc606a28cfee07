"""What a trainer must know of its model: sizes and names, not the model. A bundle carries it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tvmhet.ir.optimizers import Optimizer
from tvmhet.ir.training_model import TrainingModel


@dataclass(frozen=True)
class TrainingInterface:
    """Names of parameters and buffers as in `TrainingModel`, the optimiser, and the samples of a micro-batch."""

    name: str
    batch_size: int
    optimizer: Optimizer
    trained: tuple[str, ...]
    torch_names: Mapping[str, str]
    state_dict: Mapping[str, str]

    @classmethod
    def of(cls, model: TrainingModel) -> TrainingInterface:
        """Return the interface of a model."""
        return cls(model.name, model.batch_size, model.optimizer, model.trained, model.torch_names, model.state_dict)
