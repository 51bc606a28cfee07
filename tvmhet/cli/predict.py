"""tvmhet predict: the time of operators, or of a whole model, on a device that need not be here."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from tvmhet.cli.options import (
    BindOpt,
    InputsOpt,
    JsonOpt,
    MakersOpt,
    check_folders,
    import_model,
    parse_makers,
)
from tvmhet.cli.output import show
from tvmhet.errors import BadInput

if TYPE_CHECKING:
    from tvmhet.cluster.device import DeviceType
    from tvmhet.cost.model import CostModel
    from tvmhet.ir.model import Model

_STREAM = "-"
DeviceOpt = Annotated[
    str | None,
    typer.Option(
        "--device", metavar="NAME|FILE.yaml", help="A device type (`tvmhet devices`), or a file with an entry for one."
    ),
]


def predict(
    device: DeviceOpt = None,
    ops: Annotated[
        str | None, typer.Option(metavar="FILE|-", help="Operators, one JSON object a line; - is standard input.")
    ] = None,
    out: Annotated[
        str, typer.Option(metavar="FILE|-", help="Answers, one a line in the same order; - is standard output.")
    ] = _STREAM,
    dispatch: Annotated[
        str,
        typer.Option(
            metavar="published|queued",
            help="Fixed cost of a kernel: as published measurements have it, or kernels queued back to back.",
        ),
    ] = "published",
    calibration: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Times from `tvmhet calibrate --out`; the user's stored ones by default."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="A whole model instead: .onnx, .pt2, package.module:function."),
    ] = None,
    inputs: InputsOpt = None,
    bind: BindOpt = None,
    makers: MakersOpt = "tvm,library",
    as_json: JsonOpt = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print every operator, its fields and an example.")] = False,
) -> None:
    """Predict the seconds of operators on any device type, also on one that is not here.

    Each line of --ops is an operator:

      {"op": "linear", "m": 512, "n": 3072, "k": 768, "dtype": "bfloat16"}

    --schema lists them all. Each answer holds seconds, low and high (the
    80 % interval), source and in_range (false: unlike what was measured).

    A device that `tvmhet devices` does not list is a file with one entry:

      my-gpu:
        architecture: Ada
        target: {kind: cuda, arch: sm_89}
        sms: 46
        lanes_per_sm: 128
        boost_clock: 2475 MHz
        memory: 12 GiB
        bandwidth: 504 GB/s
        l2: 36 MiB
        rates: {float32: 29.1 TFLOP/s, bfloat16: 58.3 TFLOP/s}
        power: 200 W

    Rates are dense peaks; `like: l4` takes what is left out from an L4.

    A CPU type's operators are predicted from the kernels that `tvmhet
    profile` measured on this machine once a hundred are there, before that
    from those that come with tvmhet if they are of a processor of the same
    vendor (source "learned"; with --dispatch queued as they run inside a
    model larger than caches), else from its data sheet ("roofline").

    --model prices every kernel of a whole model as planned for the device,
    queued back to back.
    """
    if schema:
        from tvmhet.cost.schema import schema_text

        show(schema_text())
        return
    if device is None or (ops is None) == (model is None):
        raise BadInput(
            f"predict has {'--ops and --model' if ops and model else 'no --ops' if device else 'no --device'}",
            "give --device and either --ops or --model; --schema shows what operators may be",
        )
    if model is not None and (out != _STREAM or dispatch != "published" or calibration is not None):
        raise BadInput(
            "predict has --model and one of --out, --dispatch, --calibration",
            "these go with --ops; a whole model is queued and uses the times that `tvmhet calibrate` stored",
        )
    if ops is not None and (inputs or bind or as_json):
        raise BadInput("predict has --ops and one of --inputs, --bind, --json", "these go with --model")
    from tvmhet.cluster.device_file import find_device

    kind = find_device(device)
    if model is not None:
        _predict_model(kind, import_model(model, inputs, bind), parse_makers(makers), as_json)
        return
    assert ops is not None
    check_folders(*([] if out == _STREAM else [Path(out)]))
    if dispatch not in ("published", "queued"):
        raise BadInput(f"--dispatch is {dispatch!r}", "give published or queued")
    _predict_ops(kind, ops, out, dispatch, calibration)


def _predict_model(device: DeviceType, model: Model, makers: tuple[str, ...], as_json: bool) -> None:
    from tvmhet import pipeline
    from tvmhet.cluster import ClusterSpec
    from tvmhet.report.prediction import prediction_json, prediction_view

    plan = pipeline.plan(model, cluster=ClusterSpec.of_device(device), objective="latency", makers=makers)
    show(json.dumps(prediction_json(plan), indent=1) if as_json else prediction_view(plan))


def _predict_ops(device: DeviceType, ops: str, out: str, dispatch: str, calibration: Path | None) -> None:
    from tvmhet.cost.calibration import model_for, network_for
    from tvmhet.cost.learned_cpu import A_MODEL_BYTES
    from tvmhet.cost.predict import Assumed, predict_lines

    queued = dispatch == "queued"
    model: CostModel = Assumed(device, model_for(device, "queued" if queued else "published", calibration), queued)
    if device.is_cpu and calibration is None:
        model = _learned(device, model, A_MODEL_BYTES if queued else 0.0)
    network = network_for(device, calibration)
    with _reading(ops) as lines, _writing(out) as answers:
        predict_lines(lines, answers, device, model, network)


def _learned(device: DeviceType, model: CostModel, inside_bytes: float) -> CostModel:
    """Return `model` after what kernels measured on this machine teach of a CPU type, and those of one like it."""
    from tvmhet.cost.learned_cpu import LearnedFirst
    from tvmhet.cost.measured import MeasuredKernels, default_path
    from tvmhet.cost.shipped_cpu import shipped_cpu
    from tvmhet.cpu_times import learned_cpu

    if (elsewhere := shipped_cpu(device)) is not None:
        model = LearnedFirst(elsewhere, model, inside_bytes)
    if default_path().is_file():
        with MeasuredKernels() as database:
            here = learned_cpu(device, database)
        if here is not None:
            model = LearnedFirst(here, model, inside_bytes)
    return model


@contextmanager
def _reading(source: str) -> Iterator[TextIO]:
    from tvmhet.cost.predict import reading

    with nullcontext(sys.stdin) if source == _STREAM else reading(Path(source)) as lines:
        yield lines


@contextmanager
def _writing(out: str) -> Iterator[TextIO]:
    """Give a file that reaches `out` when the block ends well, and nothing otherwise."""
    from tvmhet.cost.predict import written_whole

    if out != _STREAM:
        with written_whole(Path(out)) as answers:
            yield answers
        return
    with tempfile.TemporaryFile("w+", encoding="utf-8") as held:
        yield held
        held.seek(0)
        shutil.copyfileobj(held, sys.stdout)
