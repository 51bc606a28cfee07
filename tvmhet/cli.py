"""The command line: tvmhet plan | build | run | profile | devices.

Every error that a user can mend is one message on standard error, with its code, and exit status 2. Anything else is
a defect and shows its traceback. Heavy imports happen inside the commands, so that help comes at once.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tvmhet.errors import BadInput, EmptyCluster, HetError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tvmhet.cluster import ClusterSpec
    from tvmhet.ir.model import Model
    from tvmhet.module import HetModule
    from tvmhet.plans import Plan

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Place a model over unlike devices: fusion, device types and counts, decided together.",
)

ModelArg = Annotated[
    str, typer.Argument(metavar="MODEL", help="A .onnx file, a .pt2 file, or package.module:function.")
]
ClusterOpt = Annotated[
    str, typer.Option("--cluster", metavar="FILE", help='A cluster file, or "local" for this machine.')
]
ObjectiveOpt = Annotated[str, typer.Option(metavar="throughput|latency", help="What the plan is best at.")]
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
JsonOpt = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
OutFile = Annotated[Path | None, typer.Option(metavar="FILE")]
_MAX_COLUMNS, _FILE_COLUMNS = 120, 100
_MAX_LOAD_PER_CORE = 0.5  # load average per core from which a measurement is doubtful


@app.command()
def plan(
    model: ModelArg,
    cluster: ClusterOpt,
    objective: ObjectiveOpt = "throughput",
    pin: PinOpt = None,
    bind: BindOpt = None,
    inputs: InputsOpt = None,
    makers: MakersOpt = "tvm,library",
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Save the plan, for `tvmhet build --plan`.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the plan as a page.")] = None,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the simulated run (Chrome trace).")] = None,
    dot: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the stages for Graphviz.")] = None,
    as_json: JsonOpt = False,
) -> None:
    """Decide kernels, stages, device types and counts; print the plan."""
    pins, spec = parse_pairs("--pin", pin, "conv1=a100"), _cluster(cluster)
    _check_folders(out, html, trace, dot)
    imported = _import(model, inputs, bind)
    from tvmhet import pipeline
    from tvmhet.report.files import write_text
    from tvmhet.report.table import plan_view
    from tvmhet.report.trace import save_trace

    made = pipeline.plan(imported, cluster=spec, objective=objective, pin=pins, makers=_makers(makers))
    if out:
        made.save(out)
    if html:
        made.to_html(html)
    if trace:
        save_trace(made.to_trace(), trace)
    if dot:
        write_text(dot, made.to_dot())
    _print(made.to_json() if as_json else plan_view(made))


@app.command()
def build(
    model: ModelArg,
    cluster: ClusterOpt,
    out: Annotated[Path, typer.Option(metavar="DIR", help="The bundle: a new folder.")],
    plan_file: Annotated[Path | None, typer.Option("--plan", metavar="FILE", help="A plan that was saved.")] = None,
    profile_s: Annotated[
        float, typer.Option("--profile", metavar="SECONDS", min=0.0, help="First measure kernels, this long at most.")
    ] = 0.0,
    objective: ObjectiveOpt = "throughput",
    pin: PinOpt = None,
    bind: BindOpt = None,
    inputs: InputsOpt = None,
    makers: MakersOpt = "tvm,library",
) -> None:
    """Plan and compile a model, and write it as a bundle that `tvmhet run` and `tvmhet.load` take."""
    pins, spec = parse_pairs("--pin", pin, "conv1=a100"), _cluster(cluster)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise BadInput(f"the bundle directory {str(out)!r} is not empty", "give a new directory")
    _check_folders(out)
    given = _load_plan(plan_file)
    imported = _import(model, inputs, bind)
    from tvmhet import pipeline
    from tvmhet.report.table import plan_view

    made = pipeline.build(
        imported,
        cluster=spec,
        plan=given,
        objective=objective,
        pin=pins,
        makers=_makers(makers),
        profile_budget_s=profile_s,
        progress=sys.stderr.isatty(),
    )
    with made:
        made.export(out)
    _print(plan_view(made.plan))
    _print(f"bundle written to {out}")


@app.command()
def run(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="A folder that `tvmhet build` wrote.")],
    num_inputs: Annotated[int, typer.Option(min=1, help="Inputs to run alone, and again in a full pipeline.")] = 20,
    inputs: InputsOpt = None,
    seed: Annotated[int, typer.Option(help="Of the random inputs.")] = 0,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the measured run (Chrome trace).")] = None,
) -> None:
    """Run a bundle on random inputs and print predicted against measured times."""
    _check_folders(trace)
    from tvmhet.model_source import parse_input_shape, random_inputs
    from tvmhet.module import load
    from tvmhet.report.benchmark import benchmark_view
    from tvmhet.report.text import notes_view
    from tvmhet.report.trace import run_to_trace, save_trace

    shapes = [parse_input_shape(text) for text in inputs or ()]
    busy = _busy_note()
    with load(bundle) as module:
        stats = module.benchmark(*random_inputs(shapes or _shapes_of(module), seed), num_inputs=num_inputs)
        if trace:
            save_trace(run_to_trace(stats, module.plan), trace)
        _print(benchmark_view(module.plan, stats), *notes_view(busy, "yellow"))


@app.command()
def profile(
    model: ModelArg,
    cluster: ClusterOpt,
    budget: Annotated[float, typer.Option(metavar="SECONDS", min=0.0, help="Wall time to spend at most.")] = 60.0,
    objective: ObjectiveOpt = "throughput",
    bind: BindOpt = None,
    inputs: InputsOpt = None,
    makers: MakersOpt = "tvm,library",
) -> None:
    """Measure on this machine the kernels that decide the plan; later plans use the times."""
    spec = _cluster(cluster)
    imported = _import(model, inputs, bind)
    from tvmhet import pipeline

    report = pipeline.profile(
        imported,
        cluster=spec,
        budget_s=budget,
        objective=objective,
        makers=_makers(makers),
        progress=sys.stderr.isatty(),
    )
    _print(str(report))


@app.command()
def devices(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="One device type, with its sources.")] = None,
    as_json: JsonOpt = False,
) -> None:
    """List the device types that clusters may name, and what this machine has."""
    from tvmhet.cluster import device_type, device_types
    from tvmhet.report.devices import device_head, device_sheet, devices_json, devices_table

    types = device_types() if name is None else (device_type(name),)
    if as_json:
        _print(json.dumps(devices_json(types), indent=1, sort_keys=True))
    elif name is not None:
        _print(device_head(types[0]), device_sheet(types[0]))
    else:
        _print("device types: dense peaks, links in one direction, * with a bridge", devices_table(types))
        _print_this_machine()


def _print_this_machine() -> None:
    from tvmhet.cluster import ClusterSpec
    from tvmhet.report.devices import cluster_table
    from tvmhet.report.text import notes_view

    try:
        here = ClusterSpec.from_local()
    except HetError as error:
        _print(f"this machine: {error.problem}")
    else:
        _print("\nthis machine (--cluster local)", cluster_table(here), *notes_view(here.notes))


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from tvmhet import __version__

        _print(f"tvmhet {__version__}")
        raise typer.Exit


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


def _import(model: str, inputs: list[str] | None, bind: list[str] | None) -> Model:
    from tvmhet.model_source import load_model, parse_input_shape

    imported = load_model(model, [parse_input_shape(text) for text in inputs or ()], parse_dims(bind))
    return dataclasses.replace(imported, name=model)  # plans and reports say what the user typed


def _cluster(name: str) -> ClusterSpec:
    from tvmhet.cluster import ClusterSpec

    spec = ClusterSpec.from_local() if name == "local" else ClusterSpec.from_file(name)
    if not any(group.num_devices for group in spec.groups()):
        offers = "; what its market offers is not rented yet" if spec.market else ""
        raise EmptyCluster(f"cluster {name!r} has no device{offers}", "add nodes: with at least one device")
    return spec


def _load_plan(path: Path | None) -> Plan | None:
    if path is None:
        return None
    from tvmhet.plans import Plan

    return Plan.load(path)


def _makers(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _shapes_of(module: HetModule) -> list[Any]:
    """Shapes of the bundle's inputs. Raises BadInput for a model that was placed whole: it takes any."""
    from tvmhet.model_source import InputShape
    from tvmhet.runtime.program import PipelineProgram

    program = module.program
    if not isinstance(program, PipelineProgram):
        raise BadInput(
            f"the model was placed whole ({module.plan.whole_reason}), so its bundle fixes no shapes",
            "give one --inputs SHAPE:DTYPE per input",
        )
    values = [program.values[name] for name in program.inputs]
    return [InputShape(v.shape, v.dtype) for v in values]


def _busy_note() -> list[str]:
    """Say so if other processes keep this machine's cores at work: measured times will be too long."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load <= _MAX_LOAD_PER_CORE * cores:
        return []
    return [
        f"this machine was busy before the run (load average {load:.1f}, {cores} cores): measured times are too long"
    ]


def _check_folders(*paths: Path | None) -> None:
    """Refuse, before any work is done, a file in a folder that does not exist."""
    for path in paths:
        if path is not None and not path.absolute().parent.is_dir():
            raise BadInput(f"the folder of {str(path)!r} does not exist", "make it first, or give another path")


def _print(*views: RenderableType) -> None:
    """Print text as it is; views in the terminal's width and colours, or 100 plain columns where it is no terminal."""
    from rich.console import Console

    from tvmhet.report.text import to_text

    terminal = sys.stdout.isatty()
    width = min(Console().width, _MAX_COLUMNS) if terminal else _FILE_COLUMNS
    for view in views:
        text = view.rstrip("\n") if isinstance(view, str) else to_text(view, width, colour=terminal)
        sys.stdout.write(text + "\n")


def main() -> None:
    """Run the command line. Errors that a user can mend end it with status 2 and one message."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore", FutureWarning)  # torch's words to its own developers
    try:
        app()
    except HetError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
