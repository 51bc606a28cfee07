"""tvmhet tune: search better schedules for the kernels that limit the plan."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tvmhet.cli.options import (
    BindOpt,
    ClusterOpt,
    InputsOpt,
    MakersOpt,
    ModelArg,
    ObjectiveOpt,
    PinOpt,
    import_model,
    parse_makers,
    parse_pairs,
    read_cluster,
)
from tvmhet.cli.output import show

if TYPE_CHECKING:
    from tvmhet.cost.measure_rpc import Tracker


def tune(
    model: ModelArg,
    cluster: ClusterOpt,
    budget_s: Annotated[
        float, typer.Option("--budget-s", metavar="SECONDS", min=0.0, help="Wall time to spend at most.")
    ] = 300.0,
    trials: Annotated[int | None, typer.Option(metavar="N", min=0, help="Schedules to try at most.")] = None,
    db: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The database of measured kernels; trials are kept beside it."),
    ] = None,
    objective: ObjectiveOpt = "throughput",
    pin: PinOpt = None,
    bind: BindOpt = None,
    inputs: InputsOpt = None,
    makers: MakersOpt = "tvm,library",
    tracker: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="A TVM RPC tracker: servers register under their device type's name."),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Of the search.")] = 0,
) -> None:
    """Tune the generated kernels that limit the plan; later plans and builds use what was found.

    Trials go to the kernel and device type whose expected gain makes the plan's
    objective fall most. The next run goes on where this one ends.
    """
    pins, spec = parse_pairs("--pin", pin, "conv1=a100"), read_cluster(cluster)
    imported = import_model(model, inputs, bind)
    from tvmhet import profile_tune

    report = profile_tune.tune(
        imported,
        cluster=spec,
        budget_s=budget_s,
        trials=trials,
        objective=objective,
        pin=pins,
        makers=parse_makers(makers),
        database=db,
        tracker=None if tracker is None else _tracker(tracker),
        seed=seed,
        progress=sys.stderr.isatty(),
    )
    show(str(report))


def _tracker(text: str) -> Tracker:
    from tvmhet.cost.measure_rpc import Tracker

    return Tracker.parse(text)
