"""A built training step: run it batch by batch, save where it stands, go on from there.

trainer = tvmhet.build(model, cluster=spec, mode="training", global_batch=64)
for batch in loader:
    loss = trainer.train_step(batch)
trainer.save("run.safetensors")
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import length_hint
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from tvmhet.errors import BadBatch, BadInput, NotSupported, PlanMismatch
from tvmhet.ir.optimizers import Optimizer, ParameterGroups, Rates, Rule, scalars_of
from tvmhet.ir.training_model import TrainingModel
from tvmhet.nested import call_arguments, one_call
from tvmhet.plans import Plan
from tvmhet.progress import progress_bar
from tvmhet.runtime.fleet import check_gpus
from tvmhet.runtime.program import Array, ValueSpec
from tvmhet.runtime.stalls import check_stall_limit
from tvmhet.runtime.tensors import check_inputs, to_numpy
from tvmhet.runtime.training_engine import PassTime, TrainingEngine
from tvmhet.runtime.training_program import TrainingProgram
from tvmhet.training_bundle import export_training, read_training
from tvmhet.training_checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from tvmhet.training_interface import TrainingInterface
from tvmhet.training_rates import RateOf, rates_from


@dataclass(frozen=True, slots=True)
class RunState:
    """Where a run stands: steps done, and the seed that fixes its noise."""

    step: int
    seed: int


def load_trainer(directory: str | Path) -> HetTrainer:
    """Return the trainer that `HetTrainer.export` wrote, bound to this machine's devices; `restore` goes on with a run.

    Raises BadBundle for a file that is missing, changed or of another kind, PlanMismatch for another TVM.
    """
    return HetTrainer(*read_training(directory))


class HetTrainer:
    """A training step on its placed devices. Workers start at the first step; `close` (or `with`) stops them.

    The loss of a step is the mean over its micro-batches, and so are its gradients. Dropout's masks come from
    (`seed`, step, micro-batch): a run is repeated exactly by its seed, on any placement with the same micro-batches.
    A step that fails raises, and leaves parameters, buffers and the optimiser as they were.

    Where this machine lacks a GPU of the plan, steps raise NotSupported: the trainer is to be exported, and run there.
    """

    def __init__(
        self, model: TrainingInterface, program: TrainingProgram, plan: Plan | None = None, seed: int = 0
    ) -> None:
        self.plan, self.program, self.seed = plan, program, seed
        self.lr: Rates = model.optimizer.lr
        self.steps_done = 0
        self._model = model
        self._optimizer: Optimizer = model.optimizer
        self._specs = [program.values[name] for name in program.batch]
        self._here = _engine_of(program)

    @property
    def _engine(self) -> TrainingEngine:
        if isinstance(self._here, NotSupported):
            raise self._here
        return self._here

    @property
    def stall_limit_s(self) -> float | None:
        """Seconds for which no pass of a step may end, 600 unless set; None is no limit.

        After them the step is given up, and WorkerFailed says what each worker was doing; the next step starts anew.
        """
        return self._engine.stall_limit_s

    @stall_limit_s.setter
    def stall_limit_s(self, seconds: float | None) -> None:
        self._engine.stall_limit_s = check_stall_limit(seconds)

    @property
    def _state(self) -> Mapping[str, Array]:
        """The state of the model."""
        return self._model.whole(self.program.state if isinstance(self._here, NotSupported) else self._here.state)

    @property
    def name(self) -> str:
        """The model's name."""
        return self._model.name

    @property
    def global_batch(self) -> int:
        """Samples of one step."""
        return self._model.batch_size * self.program.num_microbatches

    @property
    def batch_specs(self) -> list[ValueSpec]:
        """The tensors of one global batch: inputs, then targets."""
        count = self.program.num_microbatches
        return [ValueSpec.of(s.name, (count * s.shape[0], *s.shape[1:]), s.dtype) for s in self._specs]

    def train_step(self, *batch: Any, **named: Any) -> float:
        """Run one step on a global batch, inputs then targets (or one sequence of them); return its loss.

        They may also be given by name, or as one mapping, where the step was imported with names. Tensors of any kind,
        whose first dim is the global batch. Raises BadBatch, BadInput (also for an `lr` that is none), NotFinite,
        WorkerFailed, OutOfMemory.
        """
        inputs = batch[0] if len(batch) == 1 and isinstance(batch[0], tuple | list) else batch
        given = call_arguments(one_call(tuple(inputs), named), self.program.batch)
        microbatches = self._split(given)
        number = self.steps_done + 1
        scale = 1.0 / self.program.num_microbatches
        numbers = (scale, *scalars_of(self._optimizer, number, self.lr))
        scalars = dict(zip(self.program.scalars, numbers, strict=True))
        losses = self._engine.step(number, self.seed, microbatches, scalars)
        self.steps_done = number
        return float(np.mean(losses))

    def fit(
        self, loader: Iterable[Any], *, steps: int | None = None, lr: RateOf | None = None, progress: bool = False
    ) -> list[float]:
        """Train on the batches of `loader`, all or the first `steps`; return the loss of each step.

        `lr` is a function of the step (the first is 1) or a scheduler of torch, which is stepped after each step;
        either sets `self.lr`. Raises BadInput for no loader, `steps` that are no number and an `lr` that is neither,
        and what `train_step` raises.
        """
        if not isinstance(loader, Iterable):
            raise BadInput(f"the loader is a {type(loader).__name__}", "give an iterable of batches")
        if steps is not None and (type(steps) is not int or steps < 0):
            raise BadInput(f"steps is {steps!r}", "give a number of steps, or None to take every batch")
        rates = None if lr is None else rates_from(lr)
        losses: list[float] = []
        total = steps if steps is not None else length_hint(loader)
        with progress_bar("train", progress) as report:
            for batch in loader:
                if steps is not None and len(losses) >= steps:
                    break
                if rates is not None:
                    self.lr = rates.at(self.steps_done + 1)
                losses.append(self.train_step(batch))
                if rates is not None:
                    rates.step()
                report(len(losses), total, f"loss {losses[-1]:.4f}")
        return losses

    def state_dict(self) -> dict[str, Array]:
        """Return copies of parameters and buffers by torch's names, tied ones under each of their names."""
        state = self._state
        return {name: np.array(state[relax]) for name, relax in self._model.state_dict.items()}

    def optimizer_state(self) -> dict[tuple[str, str], Array]:
        """Return copies of the optimiser's tensors by (torch's name of the parameter, name of the tensor)."""
        names, state = self._model.torch_names, self._state
        return {(names[p], s): np.array(state[f"{p}.{s}"]) for p in self._model.trained for s in self._optimizer.state}

    def save(self, path: str | Path) -> Path:
        """Write a checkpoint: whole or not at all, even if this process is killed meanwhile.

        Raises BadInput where the file cannot be written; one that was there stays.
        """
        names, state = self._model.torch_names, self._state
        checkpoint = Checkpoint(
            tensors={name: np.array(state[relax]) for relax, name in names.items()},
            optimizer_tensors=self.optimizer_state(),
            tied={key: names[relax] for key, relax in self._model.state_dict.items()},
            step=self.steps_done,
            seed=self.seed,
            optimizer=describe(self._optimizer),
        )
        return write_checkpoint(Path(path), checkpoint)

    def restore(self, path: str | Path) -> RunState:
        """Go on from a checkpoint: the steps that follow are bit-equal to those of a run that was never stopped.

        Raises BadBundle for a broken file, PlanMismatch for one of another model or optimiser; nothing changes then.
        """
        checkpoint = read_checkpoint(path)
        if checkpoint.optimizer != describe(self._optimizer):
            raise PlanMismatch(
                f"checkpoint {str(path)!r} was made with {checkpoint.optimizer}, "
                f"this run has {describe(self._optimizer)}",
                "build with the same optimiser",
            )
        names = self._model.torch_names
        values = {relax: checkpoint.tensors.get(name) for relax, name in names.items()}
        for p in self._model.trained:
            values |= {f"{p}.{s}": checkpoint.optimizer_tensors.get((names[p], s)) for s in self._optimizer.state}
        self._engine.restore(self._model.in_parts(_checked(values, self._state, str(path))))
        self.steps_done, self.seed = checkpoint.step, checkpoint.seed
        return RunState(checkpoint.step, checkpoint.seed)

    def times(self) -> list[PassTime]:
        """Return when each pass of the last step ran on which device.

        A split stage of the plan is several of the program's: `program.stages[i].planned` is the one of the plan.
        """
        return self._engine.times()

    def update_times(self, device: str) -> list[float]:
        """Return what each of `program.updates_of(device)` took in the last step, in seconds."""
        return self._engine.update_times(device)

    def stash_bytes(self) -> dict[str, int]:
        """Return, by device, the most bytes of activations kept at once in the last step."""
        return self._engine.stash_bytes()

    def memory_bytes(self) -> dict[str, int]:
        """Return, by device, the memory that its worker took for the steps so far, beyond what it has when idle."""
        return self._engine.memory_bytes()

    def export(self, directory: str | Path) -> Path:
        """Write the trainer as it was built, which `tvmhet.load_trainer` reads. The directory appears whole or not."""
        return export_training(self._model, self.program, self.plan, self.seed, Path(directory))

    def close(self) -> None:
        """Stop the workers and free their memory. May be repeated."""
        if not isinstance(self._here, NotSupported):
            self._here.close()

    def __enter__(self) -> HetTrainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _split(self, batch: Sequence[Any]) -> list[list[Array]]:
        """Check a global batch and cut it into micro-batches."""
        for spec in self._specs:
            if not spec.shape or spec.shape[0] != self._model.batch_size:
                raise BadBatch(
                    f"{spec.name!r} of shape {spec.shape} has no batch dim of {self._model.batch_size} to be cut",
                    "give every input and target the samples as its first dim",
                )
        whole = self.batch_specs
        _check_samples(batch, whole, self.global_batch)
        arrays = check_inputs(batch, whole)
        size = self._model.batch_size
        return [[a[m * size : (m + 1) * size] for a in arrays] for m in range(self.program.num_microbatches)]


def _check_samples(batch: Sequence[Any], specs: Sequence[ValueSpec], samples: int) -> None:
    for value, spec in zip(batch, specs, strict=False):
        array = to_numpy(value)
        if array is not None and array.shape[1:] == spec.shape[1:] and array.shape[:1] != (samples,):
            raise BadBatch(
                f"{spec.name!r} holds {array.shape[0]} samples, the global batch is {samples}",
                "give one global batch, or build with another global_batch",
            )


def _engine_of(program: TrainingProgram) -> TrainingEngine | NotSupported:
    """Return what runs the program, or why this machine does not: it lacks a GPU."""
    try:
        check_gpus(program.bindings.values())
    except NotSupported as error:
        return error
    return TrainingEngine(program)


def microbatches_of(model: TrainingModel, global_batch: int) -> int:
    """Return how many micro-batches make the global batch. Raises BadBatch unless they divide it."""
    if global_batch < 1 or global_batch % model.batch_size:
        raise BadBatch(
            f"micro-batches of {model.batch_size} samples do not divide the global batch of {global_batch}",
            f"give a multiple of {model.batch_size}, or import the model with other example inputs",
        )
    return global_batch // model.batch_size


def describe(optimizer: Optimizer) -> str:
    """Return the optimiser without its learning rate, which may change during a run."""
    if not isinstance(optimizer, ParameterGroups):
        return _describe_rule(optimizer)
    groups = zip(optimizer.rules, optimizer.names, strict=True)
    return "; ".join(f"{_describe_rule(rule)} of {', '.join(names)}" for rule, names in groups)


def _describe_rule(rule: Rule) -> str:
    options = {k: v for k, v in dataclasses.asdict(rule).items() if k != "lr"}
    return f"{type(rule).__name__}({', '.join(f'{k}={v}' for k, v in sorted(options.items()))})"


def _checked(values: Mapping[str, Array | None], state: Mapping[str, Array], path: str) -> dict[str, Array]:
    """Return the values, all there and of the state's shapes and dtypes."""
    found: dict[str, Array] = {}
    for name, want in state.items():
        value = values.get(name)
        if value is None or value.shape != want.shape or value.dtype != want.dtype:
            what = "is not there" if value is None else f"is {value.shape} {value.dtype.name}"
            raise PlanMismatch(
                f"checkpoint {path!r}: {name!r} {what}; the model's is {want.shape} {want.dtype.name}",
                "give a checkpoint of this model",
            )
        found[name] = value
    return found
