"""tvmhet profile: measure kernels where they will run."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from tvmhet.cli.options import (
    BindOpt,
    ClusterOpt,
    InputsOpt,
    MakersOpt,
    ModelArg,
    ObjectiveOpt,
    import_model,
    parse_makers,
    read_cluster,
)
from tvmhet.cli.output import show


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
    spec = read_cluster(cluster)
    imported = import_model(model, inputs, bind)
    from tvmhet import pipeline

    report = pipeline.profile(
        imported,
        cluster=spec,
        budget_s=budget,
        objective=objective,
        makers=parse_makers(makers),
        progress=sys.stderr.isatty(),
    )
    show(str(report))
