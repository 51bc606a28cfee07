"""tvmhet run: run a bundle and compare its times with the plan's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tvmhet.cli.options import InputsOpt, check_folders
from tvmhet.cli.output import show
from tvmhet.errors import BadInput

if TYPE_CHECKING:
    from tvmhet.module import HetModule

_MAX_LOAD_PER_CORE = 0.5  # load average per core from which a measurement is doubtful


def run(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="A folder that `tvmhet build` wrote.")],
    num_inputs: Annotated[int, typer.Option(min=1, help="Inputs to run alone, and again in a full pipeline.")] = 20,
    inputs: InputsOpt = None,
    seed: Annotated[int, typer.Option(help="Of the random inputs.")] = 0,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the measured run (Chrome trace).")] = None,
) -> None:
    """Run a bundle on random inputs and print predicted against measured times."""
    check_folders(trace)
    from tvmhet.model_source import parse_input_shape, random_inputs
    from tvmhet.module import load
    from tvmhet.report.benchmark import benchmark_view
    from tvmhet.report.text import notes_view
    from tvmhet.report.trace import run_to_trace, save_trace

    shapes = [parse_input_shape(text) for text in inputs or ()]
    busy = busy_note()
    with load(bundle) as module:
        stats = module.benchmark(*random_inputs(shapes or _shapes_of(module), seed), num_inputs=num_inputs)
        if trace:
            save_trace(run_to_trace(stats, module.plan), trace)
        show(benchmark_view(module.plan, stats), *notes_view(busy, "yellow"))


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
