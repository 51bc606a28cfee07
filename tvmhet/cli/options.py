"""Options that several commands share, and their texts read into values."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tvmhet.errors import BadInput, EmptyCluster

if TYPE_CHECKING:
    from tvmhet.cluster import ClusterSpec
    from tvmhet.ir.model import Model
    from tvmhet.ir.training_model import TrainingModel

ModelArg = Annotated[
    str, typer.Argument(metavar="MODEL", help="A .onnx file, a .pt2 file, or package.module:function.")
]
ClusterOpt = Annotated[
    str,
    typer.Option(
        "--cluster", metavar="FILE", help='A cluster file, "local" for this machine, or "ray" for the Ray cluster here.'
    ),
]
ObjectiveOpt = Annotated[str, typer.Option(metavar="throughput|latency|cost", help="What the plan is best at.")]
DeadlineOpt = Annotated[
    float | None,
    typer.Option("--deadline", metavar="SECONDS", help="Cost: for one input or iteration; with --samples, for all."),
]
BudgetOpt = Annotated[
    float | None,
    typer.Option("--budget", metavar="USD", help="Cost: for an hour or iteration; with --samples, for all."),
]
FloorOpt = Annotated[
    float | None, typer.Option("--throughput-floor", metavar="PER_S", help="Cost: samples per second at least.")
]
SamplesOpt = Annotated[int | None, typer.Option("--samples", metavar="N", help="Cost: a job of so many samples.")]
PinOpt = Annotated[
    list[str] | None,
    typer.Option("--pin", metavar="OP=TYPE", help="Run operators (a name or a pattern) on a device type."),
]
BindOpt = Annotated[list[str] | None, typer.Option("--bind", metavar="DIM=N", help="Give a symbolic dim its value.")]
InputsOpt = Annotated[
    list[str] | None,
    typer.Option("--inputs", metavar="SHAPE:DTYPE", help="Shape of each input, in order: 1x3x224x224:float32."),
]
MakersOpt = Annotated[str, typer.Option(metavar="tvm,library", help="Who may make kernels.")]
SplitsOpt = Annotated[
    str,
    typer.Option(
        "--splits", metavar="2,4|FILE", help="Stages may be split over so many devices of a machine (tensor split)."
    ),
]
JsonOpt = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def parse_pairs(option: str, texts: list[str] | None, example: str) -> dict[str, str]:
    """Read "key=value" texts. Raises BadInput naming the option, for a text without "=" or a key given twice."""
    pairs: dict[str, str] = {}
    for text in texts or ():
        key, equals, value = text.rpartition("=")
        if not equals or not key.strip() or not value.strip():
            raise BadInput(f"{option} is {text!r}", f"write it as {option} {example}")
        if key.strip() in pairs:
            raise BadInput(f"{option} names {key.strip()!r} twice", "give each name once")
        pairs[key.strip()] = value.strip()
    return pairs


def parse_dims(texts: list[str] | None) -> dict[str, int]:
    """Read "n=128" texts. Raises BadInput for a value that is not a positive whole number."""
    dims = parse_pairs("--bind", texts, "n=128")
    for key, value in dims.items():
        if not value.isdecimal() or int(value) == 0:
            raise BadInput(f"--bind gives {key!r} the value {value!r}", "give a whole number of at least 1")
    return {key: int(value) for key, value in dims.items()}


SessionsOpt = Annotated[
    int | None,
    typer.Option("--sessions", metavar="N", help="Of a model with states: how many have states of their own."),
]


def in_sessions(imported: Model | TrainingModel, sessions: int | None) -> Any:
    """Return the model for so many sessions. Raises BadInput for one without states."""
    if sessions is None:
        return imported
    from tvmhet.ir.model import Model
    from tvmhet.ir.state import with_sessions

    if not isinstance(imported, Model):
        raise BadInput(f"--sessions is {sessions} and the model is a training step", "leave it out")
    return with_sessions(imported, sessions)


def import_model(model: str, inputs: list[str] | None, bind: list[str] | None) -> Model:
    """Import the model that a user names, bound to the shapes given."""
    from tvmhet.model_source import load_model, parse_input_shape

    imported = load_model(model, [parse_input_shape(text) for text in inputs or ()], parse_dims(bind))
    return dataclasses.replace(imported, name=model)  # plans and reports say what the user typed


def read_cluster(name: str) -> ClusterSpec:
    """Read a cluster file, this machine, or a Ray cluster. Raises EmptyCluster if it has no device."""
    from tvmhet.cluster import ClusterSpec

    found = {"local": ClusterSpec.from_local, "ray": ClusterSpec.from_ray}
    spec = found[name]() if name in found else ClusterSpec.from_file(name)
    if not any(group.num_devices for group in spec.groups()):
        offers = "; what its market offers is not rented yet" if spec.market else ""
        raise EmptyCluster(f"cluster {name!r} has no device{offers}", "add nodes: with at least one device")
    return spec


def parse_makers(text: str) -> tuple[str, ...]:
    """Read "tvm,library"."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def parse_splits(text: str) -> list[int] | str:
    """Return the degrees of "2,4", or the name of a file; no degrees for ""."""
    parts = [part.strip() for part in text.split(",")] if text else []
    return [int(part) for part in parts] if all(part.isdecimal() for part in parts) else text


def check_folders(*paths: Path | None) -> None:
    """Refuse, before any work is done, a file in a folder that does not exist."""
    for path in paths:
        if path is not None and not path.absolute().parent.is_dir():
            raise BadInput(f"the folder of {str(path)!r} does not exist", "make it first, or give another path")
