"""Options of commands that take a training step: --mode, --loss, --optimizer, --lr, --microbatch."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from tvmhet.cli.options import import_model
from tvmhet.errors import BadInput

if TYPE_CHECKING:
    from tvmhet.ir.model import Model
    from tvmhet.ir.training_model import TrainingModel

RATE = 1e-3  # torch's default of AdamW

ModeOpt = Annotated[str, typer.Option(metavar="inference|training", help="What the model is for.")]
GlobalBatchOpt = Annotated[int | None, typer.Option(metavar="N", help="Training: samples of one iteration.")]
LossOpt = Annotated[
    str | None,
    typer.Option(
        metavar="cross_entropy|mse|output", help="Training: the loss; without it, backward times are assumed."
    ),
]
OptimizerOpt = Annotated[
    str,
    typer.Option(
        metavar="sgd|momentum|adamw|rmsprop|adagrad|lion|*-bf16",
        help="Training: decides what is kept and updated per weight.",
    ),
]
LrOpt = Annotated[float, typer.Option(metavar="RATE", help="Training: the optimizer's rate.")]
MicrobatchOpt = Annotated[
    str | None,
    typer.Option(metavar="auto|N", help="Training: samples of a micro-batch; those of the model's example by default."),
]


def import_step(
    mode: str, model: str, inputs: list[str] | None, bind: list[str] | None, loss: str | None, optimizer: str, lr: float
) -> Model | TrainingModel:
    """Import a model for inference, or for training: its step where its loss is known, else its forward pass."""
    if mode not in ("inference", "training"):
        raise BadInput(f"--mode is {mode!r}", "use inference or training")
    if mode == "inference":
        if loss is not None:
            raise BadInput(f"--loss is {loss!r} and --mode is inference", "add --mode training, or leave the loss out")
        return import_model(model, inputs, bind)
    from tvmhet.ir.training_model import TrainingModel
    from tvmhet.model_source import StepOptions, load_step, parse_input_shape

    if loss is None and ":" not in model:
        return import_model(model, inputs, bind)
    if bind:
        raise BadInput(f"--bind is {bind} and the model is a training step", "give --inputs of fixed shapes")
    shapes = [parse_input_shape(text) for text in inputs or ()]
    imported = load_step(model, shapes, StepOptions(loss, optimizer, lr))
    if isinstance(imported, TrainingModel):  # plans and reports say what the user typed
        return dataclasses.replace(imported, step=dataclasses.replace(imported.step, name=model))
    return dataclasses.replace(imported, name=model)


def require_step(imported: Model | TrainingModel, command: str) -> TrainingModel:
    """Return the training step. Raises BadInput for a forward pass alone."""
    from tvmhet.ir.training_model import TrainingModel

    if isinstance(imported, TrainingModel):
        return imported
    raise BadInput(
        f"{command} needs a training step, and the model is a forward pass alone",
        "give --loss cross_entropy (or mse, or output where the module returns its loss)",
    )


def parse_microbatch(text: str | None) -> int | str | None:
    """Read "auto" or a number of samples."""
    if text is None or text == "auto":
        return text
    if not text.isdecimal() or int(text) == 0:
        raise BadInput(f"--microbatch is {text!r}", "give auto, or a whole number of at least 1")
    return int(text)
