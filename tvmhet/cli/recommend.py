"""tvmhet recommend: what to rent for a model, from a market."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tvmhet.cli.options import (
    BindOpt,
    InputsOpt,
    JsonOpt,
    MakersOpt,
    ModelArg,
    check_folders,
    import_model,
    parse_makers,
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
    samples: Annotated[int | None, typer.Option(help="A job of so many inputs; without it, a service.")] = None,
    global_batch: GlobalBatchOpt = None,
    iterations: Annotated[int | None, typer.Option(help="Training: so many, in place of --samples.")] = None,
    optimizer: OptimizerOpt = "adamw",
    loss: LossOpt = None,
    microbatch: MicrobatchOpt = None,
    deadline_h: Annotated[float | None, typer.Option(help="Hours until the job must be done.")] = None,
    budget_usd: Annotated[float | None, typer.Option(help="USD for the job, or for an hour of a service.")] = None,
    throughput: Annotated[float | None, typer.Option(help="Inputs per second at least.")] = None,
    latency_ms: Annotated[float | None, typer.Option(help="Milliseconds for one input at most.")] = None,
    types: Annotated[str, typer.Option(metavar="t4,l4", help="Only these device types.")] = "",
    limit: Annotated[int, typer.Option(min=1, help="Instances of each kind, where the list gives no limit.")] = 8,
    spot: Annotated[bool, typer.Option("--spot", help="Also rent spot instances.")] = False,
    risk: Annotated[float | None, typer.Option(help="Choose by this quantile of the errors: 0.9.")] = None,
    what_if: Annotated[bool, typer.Option("--what-if", help="Also say what would change the answer.")] = False,
    bind: BindOpt = None,
    inputs: InputsOpt = None,
    makers: MakersOpt = "tvm,library",
    profile_budget_usd: Annotated[
        float | None, typer.Option(help="With --dry-run: list what to measure for so much.")
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
    from tvmhet.recommending import flow, service, training_choice
    from tvmhet.recommending.job import Job, goal_called
    from tvmhet.recommending.measurements import read_measurements, write_list
    from tvmhet.recommending.text import measuring_view, recommendation_view

    known = read_measurements(measurements) if measurements else ()
    if iterations is not None:
        samples = flow.samples_of(iterations, samples, global_batch)
    job = Job(goal_called(objective), samples, deadline_h, budget_usd, throughput, latency_ms, global_batch)
    size = parse_microbatch(microbatch)
    if global_batch is None and (loss or size):
        given = f"--loss {loss}" if loss else f"--microbatch {size}"
        raise BadInput(f"{given} without --global-batch", "give --global-batch N for training")
    imported: Model | TrainingModel
    if global_batch is None or (bind and not loss):
        imported = import_model(model, inputs, bind)
    else:
        imported = import_step("training", model, inputs, bind, loss, optimizer, RATE)
    if size is not None:
        require_step(imported, "recommend --microbatch")
    if profile_budget_usd is not None:
        of = parse_makers(makers)
        if global_batch is None:
            study = flow.study_of(imported, market=offered, spot=spot, makers=of, measurements=known)
            campaign = service.what_to_measure(study, job, profile_budget_usd)
            listed, called = study.measuring_list(campaign), study.kernel_called
        else:
            training = flow.training_study_of(
                imported,
                market=offered,
                global_batch=global_batch,
                optimizer=optimizer,
                microbatch=size,
                spot=spot,
                makers=of,
                measurements=known,
            )
            campaign = training_choice.what_to_measure(training, job, profile_budget_usd)
            listed, called = training.measuring_list(campaign), training.kernel_called
        if out:
            write_list(out, listed)
        show(listed if as_json else measuring_view(campaign, called))
        return
    made = flow.recommend(
        imported,
        market=offered,
        objective=objective,
        samples=samples,
        global_batch=global_batch,
        optimizer=optimizer,
        microbatch=size,
        deadline_h=deadline_h,
        budget_usd=budget_usd,
        throughput_per_s=throughput,
        latency_ms=latency_ms,
        spot=spot,
        risk=risk,
        what_if=what_if,
        makers=parse_makers(makers),
        measurements=known,
    )
    if out:
        made.save(out)
    show(made.to_json() if as_json else recommendation_view(made))


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
