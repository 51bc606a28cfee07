"""A training step as every later layer takes it: forward and backward in one Relax function, and who is who in it.

    main(batch, noise, | parameters, buffers, constants) -> (loss, gradients of `trained`, new values of `updated`)

The update is not in it: gradients of several micro-batches are added first (`training_update` makes it).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import tvm

from tvmhet.errors import BadBatch
from tvmhet.ir.model import Model
from tvmhet.ir.optimizers import Optimizer


@dataclass(frozen=True)
class TrainingModel:
    """One micro-batch of a training step, in normal form, with the values that training starts from.

    `step.mod["main"]` takes the batch (inputs, then targets), one tensor of noise per entry of `noise`, then what
    `step.params` holds: parameters, buffers, constants, by their Relax names. `torch_names` gives torch's names of
    parameters and buffers, `state_dict` the Relax name of every entry of the module's state dict: two entries share one
    where weights are tied. The batch's first dim counts its samples. `again` traces the step at another batch size.
    """

    step: Model
    num_batch: int
    noise: tuple[str, ...]  # distribution of each noise input: "uniform" on [0, 1) or "normal"
    trained: tuple[str, ...]  # Relax names of parameters with a gradient, in the order of the gradients
    updated: tuple[str, ...]  # Relax names of buffers with a new value, in the order of those values
    torch_names: Mapping[str, str]
    state_dict: Mapping[str, str]
    optimizer: Optimizer
    again: Callable[[int], TrainingModel] | None = field(default=None, repr=False, compare=False)

    @property
    def name(self) -> str:
        """What reports call the model."""
        return self.step.name

    @property
    def mod(self) -> tvm.IRModule:
        """The module of the step."""
        return self.step.mod

    @property
    def params(self) -> Mapping[str, Any]:
        """Initial values of parameters and buffers, and constants, by Relax name."""
        return self.step.params

    @property
    def batch_size(self) -> int:
        """Samples in one micro-batch."""
        return int(self.step.inputs[0].ty.shape.values[0])

    def at_batch(self, size: int) -> TrainingModel:
        """Return the step with micro-batches of `size` samples: the same module, loss and optimiser, traced again.

        Raises BadBatch for a size below 1, and where the module is not known or an input does not hold the samples.
        """
        if size == self.batch_size:
            return self
        if self.again is None or size < 1:
            raise BadBatch(
                f"the step of {self.name} has micro-batches of {self.batch_size} samples, not {size}",
                "import it with from_torch, with example inputs of that many samples",
            )
        return self.again(size)
