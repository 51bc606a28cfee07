"""tvmhet profile: measure kernels where they will run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tvmhet.cli.options import (
    BindOpt,
    InputsOpt,
    MakersOpt,
    ModelArg,
    ObjectiveOpt,
    SessionsOpt,
    in_sessions,
    parse_makers,
    read_cluster,
)
from tvmhet.cli.output import show
from tvmhet.cli.steps import RATE, LossOpt, ModeOpt, OptimizerOpt, import_step, require_step
from tvmhet.errors import BadInput

if TYPE_CHECKING:
    from tvmhet.cluster import ClusterSpec
    from tvmhet.cost.measure_rpc import Tracker


def profile(
    model: ModelArg,
    cluster: Annotated[
        str | None, typer.Option("--cluster", metavar="FILE", help='A cluster file, or "local" for this machine.')
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="NAME|FILE.yaml", help="One device of this type, instead of a cluster.")
    ] = None,
    budget: Annotated[float, typer.Option(metavar="SECONDS", min=0.0, help="Wall time to spend at most.")] = 60.0,
    objective: ObjectiveOpt = "throughput",
    bind: BindOpt = None,
    inputs: InputsOpt = None,
    makers: MakersOpt = "tvm,library",
    tracker: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="A TVM RPC tracker whose servers have devices that are not here."),
    ] = None,
    key: Annotated[
        str | None, typer.Option(metavar="KEY", help="The servers' key for --device; the type's name by default.")
    ] = None,
    mode: ModeOpt = "inference",
    loss: LossOpt = None,
    optimizer: OptimizerOpt = "adamw",
    sessions: SessionsOpt = None,
    plan: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A plan of this training step, run as it is; later plans know.")
    ] = None,
) -> None:
    """Measure the kernels that decide the plan, here or through a TVM RPC tracker; later plans use the times.

    CPU types and GPUs that this machine has are measured here. Other devices are reached through a
    tracker (--tracker) under the key of their type, with --makers tvm. With
    --mode training all kernels of the step are measured, the whole step, and
    the passes of a plan of it (--plan).
    """
    spec = _spec(cluster, device)
    if key is not None and (device is None or tracker is None):
        raise BadInput(f"--key is {key!r}", "give it with --device and --tracker")
    imported = in_sessions(import_step(mode, model, inputs, bind, loss, optimizer, RATE), sessions)
    if mode == "training":
        require_step(imported, "profile --mode training")
    from tvmhet import profile_tune
    from tvmhet.plans import Plan

    report = profile_tune.profile(
        imported,
        cluster=spec,
        budget_s=budget,
        objective=objective,
        makers=parse_makers(makers),
        tracker=None if tracker is None else _tracker(tracker, spec, key),
        plan=None if plan is None else Plan.load(plan),
        progress=sys.stderr.isatty(),
    )
    show(str(report))


def _spec(cluster: str | None, device: str | None) -> ClusterSpec:
    if (cluster is None) == (device is None):
        raise BadInput("profile has both --cluster and --device" if cluster else "profile has no --cluster", "give one")
    if cluster is not None:
        return read_cluster(cluster)
    from tvmhet.cluster import ClusterSpec
    from tvmhet.cluster.device_file import find_device

    assert device is not None
    return ClusterSpec.of_device(find_device(device))


def _tracker(text: str, spec: ClusterSpec, key: str | None) -> Tracker:
    from tvmhet.cost.measure_rpc import Tracker

    return Tracker.parse(text, [] if key is None else [(d.name, key) for d in spec.device_types()])
