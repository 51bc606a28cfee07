"""tvmhet run: run a bundle and compare its times with the plan's."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tvmhet.cli.options import InputsOpt, check_folders
from tvmhet.cli.output import show
from tvmhet.errors import BadInput

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tvmhet.module import HetModule

_DEFAULT_COUNT = 20
_MAX_LOAD_PER_CORE = 0.5  # load average per core from which a measurement is doubtful


def run(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="A folder that `tvmhet build` wrote.")],
    num_inputs: Annotated[
        int | None, typer.Option(min=1, help="Inputs to run alone, and again in a full pipeline; 20 by default.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Of a training bundle: steps to take; 20 by default.")
    ] = None,
    inputs: InputsOpt = None,
    seed: Annotated[int, typer.Option(help="Of the random inputs.")] = 0,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the measured run (Chrome trace).")] = None,
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Run on the machines of this Ray cluster: HOST:PORT, or auto."),
    ] = None,
    machines: Annotated[
        list[str] | None,
        typer.Option(
            "--machine", metavar="NAME=NODE", help="With --ray: which node a machine of the plan is, if not by name."
        ),
    ] = None,
) -> None:
    """Run a bundle on random inputs, or train it some steps on them; print predicted against measured times."""
    check_folders(trace)
    from tvmhet.bundle import kind_of

    if kind_of(bundle) == "training":
        given = {"--num-inputs": num_inputs, "--inputs": inputs, "--trace": trace, "--ray": ray, "--machine": machines}
        _refuse(given, "one for training")
        show(*_train(bundle, steps or _DEFAULT_COUNT, seed))
        return
    _refuse({"--steps": steps}, "one for inference")
    from tvmhet.model_source import parse_input_shape, random_inputs
    from tvmhet.module import load
    from tvmhet.report.benchmark import benchmark_view
    from tvmhet.report.text import notes_view
    from tvmhet.report.trace import run_to_trace, save_trace

    shapes = [parse_input_shape(text) for text in inputs or ()]
    busy = busy_note()
    nodes = _nodes(machines, ray)
    with load(bundle) if ray is None else load(bundle).on_ray(ray, machines=nodes) as module:
        stats = module.benchmark(
            *random_inputs(shapes or _shapes_of(module), seed), num_inputs=num_inputs or _DEFAULT_COUNT
        )
        if trace:
            save_trace(run_to_trace(stats, module.plan), trace)
        show(benchmark_view(module.plan, stats), *notes_view(busy, "yellow"))


def _nodes(machines: Sequence[str] | None, ray: str | None) -> dict[str, str]:
    """Return the node given for each machine."""
    if machines and ray is None:
        raise BadInput("--machine is given without --ray", "add --ray ADDRESS, or leave --machine out")
    pairs = [text.partition("=") for text in machines or ()]
    if wrong := [name for name, _, node in pairs if not (name and node)]:
        raise BadInput(f"--machine {wrong[0]!r} names no node", "write --machine NAME=NODE")
    return {name: node for name, _, node in pairs}


def _refuse(options: Mapping[str, object], kind: str) -> None:
    if given := [name for name, value in options.items() if value]:
        raise BadInput(f"{given[0]} is given and the bundle is {kind}", f"leave {given[0]} out")


def _train(bundle: Path, steps: int, seed: int) -> Sequence[RenderableType]:
    """Train on a made-up batch; return what to print."""
    from tvmhet.model_source import InputShape, random_inputs
    from tvmhet.report.steps import steps_view
    from tvmhet.report.text import notes_view
    from tvmhet.training import load_trainer

    busy = busy_note()
    losses, seconds = [], []
    with load_trainer(bundle) as trainer:
        batch = random_inputs([InputShape(s.shape, s.dtype) for s in trainer.batch_specs], seed)
        for _ in range(steps):
            began = time.perf_counter()
            losses.append(trainer.train_step(batch))
            seconds.append(time.perf_counter() - began)
        return steps_view(trainer.name, trainer.plan, losses, seconds), *notes_view(busy, "yellow")


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


def busy_note() -> list[str]:
    """Say so if other processes keep this machine's cores at work: measured times will be too long."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load <= _MAX_LOAD_PER_CORE * cores:
        return []
    return [
        f"this machine was busy before the run (load average {load:.1f}, {cores} cores): measured times are too long"
    ]
