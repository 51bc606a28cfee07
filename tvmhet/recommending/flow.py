"""The whole flow on one screen: market, times, units, fleets, choice, how sure, plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import tvm

from tvmhet.candidates import MAKERS, candidate_kernels
from tvmhet.cluster.market import Market
from tvmhet.cost.measured import MeasuredKernels
from tvmhet.errors import BadInput
from tvmhet.ir.importers import as_model
from tvmhet.ir.model import Model
from tvmhet.ir.prepare import Prepared, prepare
from tvmhet.ir.training_model import TrainingModel
from tvmhet.planning_training import TrainingGoal
from tvmhet.recommending import service, training_choice
from tvmhet.recommending.job import Job, goal_called
from tvmhet.recommending.measurements import Measured
from tvmhet.recommending.recommendation import Recommendation
from tvmhet.recommending.study import Study, make_study
from tvmhet.recommending.training import TrainingStudy
from tvmhet.recommending.training_study import make_training_study
from tvmhet.splitting import wishes_of
from tvmhet.times import Candidates


def recommend(
    model: Model | TrainingModel | tvm.IRModule | Sequence[Model | TrainingModel],
    *,
    market: Market,
    objective: str = "price",
    samples: int | None = None,
    global_batch: int | None = None,
    iterations: int | None = None,
    optimizer: str = "adamw",
    microbatch: int | str | None = None,
    deadline_h: float | None = None,
    budget_usd: float | None = None,
    throughput_per_s: float | None = None,
    latency_ms: float | None = None,
    spot: bool = False,
    risk: float | None = None,
    what_if: bool = False,
    bind_shapes: Mapping[str, int] | None = None,
    makers: Sequence[str] = MAKERS,
    splits: Sequence[Any] | str | Path = (),
    database: str | Path | None = None,
    measurements: Sequence[Measured] = (),
    seed: int = 0,
) -> Recommendation:
    """Recommend what to rent from `market` to run `model`: device types, counts, instances, and what runs where.

    `objective` is "price", "time" or "energy". With `samples` it is a job that ends (deadline and budget are of all of
    it), else a service (the budget is per hour). One input is one call of the model, at the batch it was imported with.
    Spot offers are used with `spot=True` only. `risk=0.9` takes the option whose value is least in nine of ten draws of
    the predictions' errors instead of the option that is best as predicted. `what_if` also says at which prices, with
    which type sold out and with how fast a network the answer changes.
    With `global_batch` it is a training job of `samples` or `iterations`, for a model as `tvmhet.plan` takes it in
    mode="training" (`optimizer`, `microbatch` as there); see `tvmhet.recommending.training` for the fleets compared.
    With `splits` stages may run on teams of GPUs of one machine (tensor split): degrees such as `[2, 4]`, or measured
    times, as `tvmhet.plan` takes them; such plans are not built.
    `makers`, `bind_shapes` and `database` are those of `tvmhet.plan`; `measurements` are kernels measured elsewhere
    (`read_measurements`); `seed` is of the draws.
    Raises Infeasible with the nearest feasible answers, BadInput for limits that make no sense, NotSupported for a
    model that cannot be cut.
    """
    if not isinstance(market, Market):
        raise BadInput(
            f"the market is a {type(market).__name__}", 'make it with Market.from_file(path) or Market.shipped("aws")'
        )
    if iterations is not None:
        samples = samples_of(iterations, samples, global_batch)
    job = Job(goal_called(objective), samples, deadline_h, budget_usd, throughput_per_s, latency_ms, global_batch)
    if risk is not None and not 0 < risk < 1:
        raise BadInput(f"risk is {risk}", "give a share of draws between 0 and 1, for example 0.9")
    if global_batch is not None:
        training = training_study_of(
            model,
            market=market,
            global_batch=global_batch,
            optimizer=optimizer,
            microbatch=microbatch,
            spot=spot,
            bind_shapes=bind_shapes,
            makers=makers,
            splits=splits,
            database=database,
            measurements=measurements,
        )
        trained = training_choice.train(training, job, risk=risk, seed=seed)
        return training_choice.with_what_if(training, trained, seed) if what_if else trained
    if microbatch is not None:
        raise BadInput(f"microbatch is {microbatch!r} without global_batch", "give global_batch= for training")
    if isinstance(model, TrainingModel | Sequence):
        raise BadInput("a training step or several models without global_batch", "give global_batch= for training")
    study = study_of(
        model,
        market=market,
        spot=spot,
        bind_shapes=bind_shapes,
        makers=makers,
        splits=splits,
        database=database,
        measurements=measurements,
    )
    made = service.answer(study, job, risk=risk, seed=seed)
    return service.with_what_if(study, made, seed) if what_if else made


def _offered(market: Market, spot: bool) -> Market:
    return market if spot or all(o.spot for o in market.offers) else market.where(spot=False)


def samples_of(iterations: int, samples: int | None, global_batch: int | None) -> int:
    """Return the samples of a training job. Raises BadInput where `samples` is given too, or no global batch."""
    if samples is not None or global_batch is None or iterations < 1:
        raise BadInput(
            f"iterations={iterations} with samples={samples} and global_batch={global_batch}",
            "give global_batch= and either samples= or iterations= of 1 or more",
        )
    return iterations * global_batch


def training_study_of(
    model: Model | TrainingModel | tvm.IRModule | Sequence[Model | TrainingModel],
    *,
    market: Market,
    global_batch: int,
    optimizer: str = "adamw",
    microbatch: int | str | None = None,
    spot: bool = False,
    bind_shapes: Mapping[str, int] | None = None,
    makers: Sequence[str] = MAKERS,
    splits: Sequence[Any] | str | Path = (),
    database: str | Path | None = None,
    measurements: Sequence[Measured] = (),
) -> TrainingStudy:
    """Return the numbers of a model's iteration on a market; `recommend` says what the arguments mean."""
    models = list(model) if isinstance(model, Sequence) else [model]
    bound = [m if isinstance(m, TrainingModel) else as_model(m, bind_shapes) for m in models]
    goal = TrainingGoal(global_batch, optimizer, unlike_replicas=True, microbatch=microbatch)
    return make_training_study(bound, _offered(market, spot), goal, makers, database, measurements, wishes_of(splits))


def study_of(
    model: Model | tvm.IRModule,
    *,
    market: Market,
    spot: bool = False,
    bind_shapes: Mapping[str, int] | None = None,
    makers: Sequence[str] = MAKERS,
    splits: Sequence[Any] | str | Path = (),
    database: str | Path | None = None,
    measurements: Sequence[Measured] = (),
) -> Study:
    """Return the numbers of a model on a market; `recommend` says what the arguments mean."""
    ready, offered, wishes = prepare(as_model(model, bind_shapes)), _offered(market, spot), wishes_of(splits)
    with closing(MeasuredKernels(database)) as known:
        return make_study(ready, makers, offered, known, measurements, wishes)


def candidates_of(model: Model | tvm.IRModule) -> tuple[Prepared, Candidates]:
    """Return the model's own operators and kernels. Raises NotSupported for a model without graph."""
    prepared = prepare(as_model(model, None))
    return prepared, Candidates.of(prepared.operator_graph, candidate_kernels(prepared.operator_graph, MAKERS))
