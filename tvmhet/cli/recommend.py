"""tvmhet recommend: what to rent for a model, from a market."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tvmhet.cli.options import (
    BindOpt,
    InputsOpt,
    JsonOpt,
    MakersOpt,
    ModelArg,
    SessionsOpt,
    SplitsOpt,
    check_folders,
    import_model,
    in_sessions,
    parse_makers,
    parse_splits,
)
from tvmhet.cli.output import show
from tvmhet.cli.steps import (
    RATE,
    GlobalBatchOpt,
    LossOpt,
    MicrobatchOpt,
    OptimizerOpt,
    import_step,
    parse_microbatch,
    require_step,
)
from tvmhet.errors import BadInput

if TYPE_CHECKING:
    from tvmhet.cluster import Market
    from tvmhet.ir.model import Model
    from tvmhet.ir.training_model import TrainingModel
    from tvmhet.recommending.job import Job

MarketOpt = Annotated[
    str,
    typer.Option(
        "--market",
        metavar="FILE|PROVIDER",
        help="A price list (YAML, CSV, SkyPilot catalogue, nvidia-smi output), or a provider of the shipped one: aws.",
    ),
]


def recommend(
    model: ModelArg,
    market: MarketOpt,
    objective: Annotated[str, typer.Option(metavar="price|time|energy", help="What to make least.")] = "price",
    samples: Annotated[
        int | None, typer.Option(metavar="N", help="A job of so many inputs; without it, a service.")
    ] = None,
    global_batch: GlobalBatchOpt = None,
    iterations: Annotated[
        int | None, typer.Option(metavar="N", help="Training: so many, in place of --samples.")
    ] = None,
    optimizer: OptimizerOpt = "adamw",
    loss: LossOpt = None,
    microbatch: MicrobatchOpt = None,
    deadline_h: Annotated[float | None, typer.Option(metavar="HOURS", help="Until the job must be done.")] = None,
    budget_usd: Annotated[
        float | None, typer.Option(metavar="USD", help="For the job, or for an hour of a service.")
    ] = None,
    throughput: Annotated[float | None, typer.Option(metavar="PER_S", help="Inputs per second at least.")] = None,
    latency_ms: Annotated[float | None, typer.Option(metavar="MS", help="For one input at most.")] = None,
    types: Annotated[str, typer.Option(metavar="t4,l4", help="Only these device types.")] = "",
    limit: Annotated[
        int, typer.Option(metavar="N", min=1, help="Instances of each kind at most, where the list gives no limit.")
    ] = 8,
    spot: Annotated[bool, typer.Option("--spot", help="Also rent spot instances.")] = False,
    risk: Annotated[
        float | None, typer.Option(metavar="SHARE", help="Choose what is best in this share of cases, such as 0.9.")
    ] = None,
    what_if: Annotated[bool, typer.Option("--what-if", help="Also say what would change the answer.")] = False,
    bind: BindOpt = None,
    inputs: InputsOpt = None,
    makers: MakersOpt = "tvm,library",
    splits: SplitsOpt = "",
    sessions: SessionsOpt = None,
    profile_budget_usd: Annotated[
        float | None, typer.Option(metavar="USD", help="With --dry-run: what measuring may cost.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the kernels worth measuring, with costs.")] = False,
    measurements: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Measured kernels: the list with seconds filled in (JSON lines or .parquet)."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Folder for the plans; with --dry-run, file for the list.")
    ] = None,
    as_json: JsonOpt = False,
) -> None:
    """Recommend device types, counts and instances, with the price, and what runs where."""
    offered = read_market(market, types, limit)
    check_folders(out)
    if dry_run != (profile_budget_usd is not None):
        raise BadInput(
            "--profile-budget-usd and --dry-run come together",
            "measure what the list says, with `tvmhet profile` or elsewhere, and give --measurements FILE",
        )
    from tvmhet.recommending import flow
    from tvmhet.recommending.job import Job, goal_called
    from tvmhet.recommending.measurements import read_measurements
    from tvmhet.recommending.text import recommendation_view

    if iterations is not None:
        samples = flow.samples_of(iterations, samples, global_batch)
    job = Job(goal_called(objective), samples, deadline_h, budget_usd, throughput, latency_ms, global_batch)
    size = parse_microbatch(microbatch)
    if global_batch is None and (loss or size):
        option = f"--loss {loss}" if loss else f"--microbatch {size}"
        raise BadInput(f"{option} without --global-batch", "give --global-batch N for training")
    imported: Model | TrainingModel
    if global_batch is None or (bind and not loss):
        imported = import_model(model, inputs, bind)
    else:
        imported = import_step("training", model, inputs, bind, loss, optimizer, RATE)
    imported = in_sessions(imported, sessions)
    if size is not None:
        require_step(imported, "recommend --microbatch")
    given: dict[str, Any] = {
        "market": offered,
        "spot": spot,
        "makers": parse_makers(makers),
        "splits": parse_splits(splits),
        "measurements": read_measurements(measurements) if measurements else (),
    }
    if profile_budget_usd is not None:
        training = (
            None if global_batch is None else {"global_batch": global_batch, "optimizer": optimizer, "microbatch": size}
        )
        _list_measurements(imported, job, profile_budget_usd, given, training, out, as_json)
        return
    made = flow.recommend(
        imported,
        **given,
        objective=objective,
        samples=samples,
        global_batch=global_batch,
        optimizer=optimizer,
        microbatch=size,
        deadline_h=deadline_h,
        budget_usd=budget_usd,
        throughput_per_s=throughput,
        latency_ms=latency_ms,
        risk=risk,
        what_if=what_if,
    )
    if out:
        made.save(out)
    show(made.to_json() if as_json else recommendation_view(made))


def _list_measurements(
    model: Model | TrainingModel,
    job: Job,
    budget_usd: float,
    given: Mapping[str, Any],
    training: Mapping[str, Any] | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Print what is worth measuring, and write it to `out`; with options of `training` for a training job."""
    from tvmhet.recommending import flow, service, training_choice
    from tvmhet.recommending.measurements import write_list
    from tvmhet.recommending.text import measuring_view

    if training is None:
        study = flow.study_of(model, **given)
        campaign = service.what_to_measure(study, job, budget_usd)
        listed, called = study.measuring_list(campaign), study.kernel_called
    else:
        trained = flow.training_study_of(model, **training, **given)
        campaign = training_choice.what_to_measure(trained, job, budget_usd)
        listed, called = trained.measuring_list(campaign), trained.kernel_called
    if out:
        write_list(out, listed)
    show(listed if as_json else measuring_view(campaign, called))


def read_market(name: str, types: str = "", limit: int = 8) -> Market:
    """Return the market of a file, or of a provider in the shipped price list."""
    from tvmhet.cluster import Market

    if Path(name).exists() or "." in name or "/" in name:
        market = Market.from_file(name, max_instances=limit)
    elif name.strip():
        market = Market.shipped(None if name == "all" else name)
    else:
        raise BadInput("--market is empty", "give a price list, or a provider such as aws")
    wanted = [t.strip() for t in types.split(",") if t.strip()]
    return market.where(types=wanted) if wanted else market
