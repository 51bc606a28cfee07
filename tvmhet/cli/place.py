"""tvmhet plan | build: decide where a model runs, and compile it so."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tvmhet.cli.options import (
    BindOpt,
    BudgetOpt,
    ClusterOpt,
    DeadlineOpt,
    FloorOpt,
    InputsOpt,
    JsonOpt,
    MakersOpt,
    ModelArg,
    ObjectiveOpt,
    PinOpt,
    SamplesOpt,
    SessionsOpt,
    SplitsOpt,
    check_folders,
    in_sessions,
    parse_makers,
    parse_pairs,
    parse_splits,
    read_cluster,
)
from tvmhet.cli.output import show
from tvmhet.cli.steps import (
    RATE,
    GlobalBatchOpt,
    LossOpt,
    LrOpt,
    MicrobatchOpt,
    ModeOpt,
    OptimizerOpt,
    import_step,
    parse_microbatch,
    require_step,
)
from tvmhet.errors import BadInput

if TYPE_CHECKING:
    from tvmhet.cluster import ClusterSpec
    from tvmhet.ir.training_model import TrainingModel
    from tvmhet.plans import Plan


def plan(
    model: ModelArg,
    cluster: ClusterOpt,
    objective: ObjectiveOpt = "throughput",
    deadline: DeadlineOpt = None,
    budget: BudgetOpt = None,
    throughput_floor: FloorOpt = None,
    samples: SamplesOpt = None,
    pin: PinOpt = None,
    bind: BindOpt = None,
    inputs: InputsOpt = None,
    makers: MakersOpt = "tvm,library",
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Save the plan, for `tvmhet build --plan`.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the plan as a page.")] = None,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the simulated run (Chrome trace).")] = None,
    dot: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the stages for Graphviz.")] = None,
    ablate: Annotated[
        str,
        typer.Option(
            metavar="fuse-first|place-first|no-fusion|no-library|no-recompute|no-merge|no-concurrent|no-race",
            help="Run a lesser search on the same times.",
        ),
    ] = "",
    virtual_stages: Annotated[
        bool, typer.Option("--virtual-stages", help="A device may run several stages, others' between them.")
    ] = False,
    splits: SplitsOpt = "",
    sessions: SessionsOpt = None,
    mode: ModeOpt = "inference",
    global_batch: GlobalBatchOpt = None,
    loss: LossOpt = None,
    optimizer: OptimizerOpt = "adamw",
    microbatch: MicrobatchOpt = None,
    schedule: Annotated[
        list[str] | None,
        typer.Option(metavar="1f1b|interleaved|gpipe|wavelet", help="Training: allow this one. Repeatable."),
    ] = None,
    recompute: Annotated[bool, typer.Option(help="Training: stages may recompute activations.")] = True,
    unlike_replicas: Annotated[
        bool, typer.Option("--unlike-replicas", help="Training: a stage's replicas on unlike types, in unlike shares.")
    ] = False,
    as_json: JsonOpt = False,
) -> None:
    """Decide kernels, stages, device types and counts; print the plan."""
    pins, spec = parse_pairs("--pin", pin, "conv1=a100"), read_cluster(cluster)
    check_folders(out, html, trace, dot)
    size = parse_microbatch(microbatch)
    imported = in_sessions(import_step(mode, model, inputs, bind, loss, optimizer, RATE), sessions)
    if size is not None:
        require_step(imported, "plan --microbatch")
    from tvmhet import pipeline
    from tvmhet.report.files import write_text
    from tvmhet.report.table import plan_view
    from tvmhet.report.trace import save_trace

    training: dict[str, Any] = {}
    if mode == "training":
        training = {"optimizer": optimizer, "recompute": recompute, "unlike_replicas": unlike_replicas}
        training["microbatch"] = size
        training |= {"schedules": tuple(schedule)} if schedule else {}
    made = pipeline.plan(
        imported,
        cluster=spec,
        objective=objective,
        pin=pins,
        makers=parse_makers(makers),
        ablate=ablate,
        virtual_stages=virtual_stages,
        mode=mode,
        global_batch=global_batch,
        deadline_s=deadline,
        budget_usd=budget,
        throughput_per_s=throughput_floor,
        samples=samples,
        splits=parse_splits(splits),
        **training,
    )
    if out:
        made.save(out)
    if html:
        made.to_html(html)
    if trace:
        save_trace(made.to_trace(), trace)
    if dot:
        write_text(dot, made.to_dot())
    show(made.to_json() if as_json else plan_view(made))


def build(
    model: ModelArg,
    cluster: ClusterOpt,
    out: Annotated[Path, typer.Option(metavar="DIR", help="The bundle: a new folder.")],
    plan_file: Annotated[Path | None, typer.Option("--plan", metavar="FILE", help="A plan that was saved.")] = None,
    profile_s: Annotated[
        float, typer.Option("--profile", metavar="SECONDS", min=0.0, help="First measure kernels, this long at most.")
    ] = 0.0,
    tune_s: Annotated[
        float, typer.Option("--tune", metavar="SECONDS", min=0.0, help="Then tune those that limit the plan.")
    ] = 0.0,
    objective: ObjectiveOpt = "throughput",
    deadline: DeadlineOpt = None,
    budget: BudgetOpt = None,
    throughput_floor: FloorOpt = None,
    samples: SamplesOpt = None,
    pin: PinOpt = None,
    bind: BindOpt = None,
    inputs: InputsOpt = None,
    makers: MakersOpt = "tvm,library",
    splits: SplitsOpt = "",
    sessions: SessionsOpt = None,
    mode: ModeOpt = "inference",
    global_batch: GlobalBatchOpt = None,
    loss: LossOpt = None,
    optimizer: OptimizerOpt = "adamw",
    lr: LrOpt = RATE,
    microbatch: MicrobatchOpt = None,
    max_norm: Annotated[
        float | None, typer.Option(metavar="NORM", help="Training: clip the norm of all gradients together.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Training: fixes what dropout drops.")] = 0,
) -> None:
    """Plan and compile a model, and write it as a bundle that `tvmhet run` and `tvmhet.load` take.

    With --mode training it is a training step, whose bundle `tvmhet.load_trainer`
    reads; --profile then measures the step first.
    """
    pins, spec = parse_pairs("--pin", pin, "conv1=a100"), read_cluster(cluster)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise BadInput(f"the bundle directory {str(out)!r} is not empty", "give a new directory")
    check_folders(out)
    given = _load_plan(plan_file)
    limits: dict[str, Any] = {
        "deadline_s": deadline,
        "budget_usd": budget,
        "throughput_per_s": throughput_floor,
        "samples": samples,
    }
    imported = in_sessions(import_step(mode, model, inputs, bind, loss, optimizer, lr), sessions)
    from tvmhet import pipeline
    from tvmhet.report.table import plan_view

    if mode == "training":
        step = require_step(imported, "build --mode training")
        size = parse_microbatch(microbatch)
        options: dict[str, Any] = {"objective": objective, **limits, "splits": parse_splits(splits)}
        options |= {"pin": pins, "makers": parse_makers(makers), "max_norm": max_norm, "seed": seed, "microbatch": size}
        _build_training(step, spec, given, global_batch, (profile_s, tune_s), options, out)
        return
    made = pipeline.build(
        imported,
        cluster=spec,
        plan=given,
        objective=objective,
        **limits,
        pin=pins,
        makers=parse_makers(makers),
        profile_budget_s=profile_s,
        tune_budget_s=tune_s,
        splits=parse_splits(splits),
        progress=sys.stderr.isatty(),
    )
    with made:
        made.export(out)
    show(plan_view(made.plan))
    show(f"bundle written to {out}")


def _build_training(
    step: TrainingModel,
    cluster: ClusterSpec,
    plan: Plan | None,
    global_batch: int | None,
    budgets_s: tuple[float, float],
    options: dict[str, Any],
    out: Path,
) -> None:
    from tvmhet import pipeline, profile_tune
    from tvmhet.report.table import plan_view

    if global_batch is None:
        raise BadInput("build --mode training has no --global-batch", "give the samples of one iteration")
    if budgets_s[1] > 0 or (plan is not None and budgets_s[0] > 0):
        raise BadInput(
            f"--profile is {budgets_s[0]:g} s, --tune {budgets_s[1]:g} s" + (" and there is a --plan" if plan else ""),
            "kernels of a training step are not tuned; profile before planning",
        )
    progress = sys.stderr.isatty()
    if budgets_s[0] > 0:
        profile_tune.profile(step, cluster=cluster, budget_s=budgets_s[0], makers=options["makers"], progress=progress)
    with pipeline.build(
        step, cluster=cluster, plan=plan, global_batch=global_batch, progress=progress, **options
    ) as trainer:
        trainer.export(out)
    assert trainer.plan is not None
    show(plan_view(trainer.plan))
    show(f"training bundle written to {out}")


def _load_plan(path: Path | None) -> Plan | None:
    if path is None:
        return None
    from tvmhet.plans import Plan

    return Plan.load(path)
