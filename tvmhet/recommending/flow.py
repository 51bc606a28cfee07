"""The whole flow on one screen: market, times, units, fleets, choice, how sure, plans."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import tvm
from numpy.typing import NDArray

from tvmhet.cluster.market import Market
from tvmhet.cost.measured import MeasuredKernels
from tvmhet.errors import BadInput, Infeasible, NotSupported
from tvmhet.ir.model import Model
from tvmhet.ir.prepare import prepare
from tvmhet.ir.training_model import TrainingModel
from tvmhet.pipeline import MAKERS, _model, candidate_kernels
from tvmhet.planning_training import TrainingGoal
from tvmhet.recommending.feasibility import refusal
from tvmhet.recommending.job import Job, goal_called
from tvmhet.recommending.measurements import Measured
from tvmhet.recommending.measuring import Belief, Campaign, Errors, Prices, choose_measurements
from tvmhet.recommending.option import Option, best, front, meets, value
from tvmhet.recommending.recommendation import Pipeline, Recommendation, TradePoint
from tvmhet.recommending.space import MARGINS, options_of, units_of
from tvmhet.recommending.study import Study, make_study
from tvmhet.recommending.training import TrainingStudy, make_training_study, plan_fleets
from tvmhet.recommending.uncertainty import Draws, Floats, KernelBelief, confidence, draw, unit_periods, values
from tvmhet.recommending.what_if import break_even, changes
from tvmhet.solve import Objective, Status, solve
from tvmhet.solve.units import Units
from tvmhet.times import Candidates

NUM_DRAWS = 1000
_RIVALS = 12  # sets of types that the draws compare, at each margin


def recommend(
    model: Model | TrainingModel | tvm.IRModule | Sequence[Model | TrainingModel],
    *,
    market: Market,
    objective: str = "price",
    samples: int | None = None,
    global_batch: int | None = None,
    iterations: int | None = None,
    optimizer: str = "adamw",
    deadline_h: float | None = None,
    budget_usd: float | None = None,
    throughput_per_s: float | None = None,
    latency_ms: float | None = None,
    spot: bool = False,
    risk: float | None = None,
    what_if: bool = False,
    bind_shapes: Mapping[str, int] | None = None,
    makers: Sequence[str] = MAKERS,
    database: Path | None = None,
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
    mode="training"; see `tvmhet.recommending.training` for the fleets compared, without `risk` and `what_if`.
    Raises Infeasible with the nearest feasible answers, BadInput for limits that make no sense.
    """
    if iterations is not None:
        samples = _samples_of(iterations, samples, global_batch)
    job = Job(goal_called(objective), samples, deadline_h, budget_usd, throughput_per_s, latency_ms, global_batch)
    if global_batch is not None:
        if risk is not None or what_if or measurements:
            raise NotSupported("risk, what_if and measurements are not for training", "leave them out")
        models = list(model) if isinstance(model, Sequence) else [model]
        bound = [m if isinstance(m, TrainingModel) else _model(m, bind_shapes) for m in models]
        goal = TrainingGoal(global_batch, optimizer)
        return train(make_training_study(bound, _offered(market, spot), goal, makers, database), job)
    if isinstance(model, TrainingModel | Sequence):
        raise BadInput("a training step or several models without global_batch", "give global_batch= for training")
    if risk is not None and not 0 < risk < 1:
        raise BadInput(f"risk is {risk}", "give a share of draws between 0 and 1, for example 0.9")
    study = study_of(
        model,
        market=market,
        spot=spot,
        bind_shapes=bind_shapes,
        makers=makers,
        database=database,
        measurements=measurements,
    )
    made = answer(study, job, risk=risk, seed=seed)
    return with_what_if(study, made) if what_if else made


def _offered(market: Market, spot: bool) -> Market:
    return market if spot or all(o.spot for o in market.offers) else market.where(spot=False)


def _samples_of(iterations: int, samples: int | None, global_batch: int | None) -> int:
    if samples is not None or global_batch is None or iterations < 1:
        raise BadInput(
            f"iterations={iterations} with samples={samples} and global_batch={global_batch}",
            "give global_batch= and either samples= or iterations= of 1 or more",
        )
    return iterations * global_batch


def train(study: TrainingStudy, job: Job) -> Recommendation:
    """Return the recommendation for one training job on a study. Raises Infeasible with the nearest answers."""
    planned, notes = plan_fleets(study, job)
    options = [p.option for p in planned]
    chosen = best(job, options)
    if chosen is None:
        raise refusal(job, options)
    made = planned[options.index(chosen)]
    return Recommendation(
        study.prepared.model.name,
        job,
        study.market,
        chosen,
        best(job, [o for o in options if o.is_homogeneous]),
        tuple((d.name, best(job, _only(options, d.name))) for d in study.market.device_types()),
        tuple(_trades(job, options)),
        tuple(_binding(job, options, chosen)),
        (Pipeline(1, made.plan, made.cluster),),
        None,
        False,
        (),
        tuple(options),
        (*study.market.notes, *made.plan.notes, *notes),
    )


def study_of(
    model: Model | tvm.IRModule,
    *,
    market: Market,
    spot: bool = False,
    bind_shapes: Mapping[str, int] | None = None,
    makers: Sequence[str] = MAKERS,
    database: Path | None = None,
    measurements: Sequence[Measured] = (),
) -> Study:
    """Return the numbers of a model on a market; `recommend` says what the arguments mean."""
    offered = _offered(market, spot)
    prepared = prepare(_model(model, bind_shapes))
    if prepared.graph is None:
        raise NotSupported(
            f"the model cannot be timed: it is placed whole ({prepared.whole_reason})", "bind its shapes: bind_shapes="
        )
    with closing(MeasuredKernels(database)) as known:
        candidates = Candidates.of(prepared.graph, candidate_kernels(prepared.graph, makers))
        return make_study(prepared, candidates, offered, known, measurements)


def what_to_measure(study: Study, job: Job, budget_usd: float, *, seed: int = 0) -> Campaign:
    """Return the measurements that would improve the recommendation most for up to `budget_usd`, in order.

    Results are taken to be as believed: it is the list for a dry run. Raises what `answer` would.
    """
    if not budget_usd > 0:
        raise BadInput(f"the profiling budget is {budget_usd} USD", "give more than 0")
    units, options, _ = _search(study, job)
    chosen = best(job, options)
    if chosen is None:
        raise refusal(job, options)
    pool = _pool(job, options, chosen)
    used = {u for o in pool for u, _ in o.pipelines}
    beliefs = study.beliefs([units.units[u] for u in sorted(used)])

    def cost(errors: Errors) -> Floats:
        draws = Draws(errors, len(next(iter(errors.values()))))
        return _draw_values(study, job, units, pool, beliefs, draws)[0]

    return choose_measurements(Belief.of(list(beliefs.values())), _measuring_prices(study), budget_usd, cost, seed=seed)


def _measuring_prices(study: Study) -> Prices:
    """The smallest machine of each type is rented, whole, from its start-up on."""
    smallest: dict[str, float] = {}
    for offer in sorted(study.market.offers, key=lambda o: (o.num_devices, o.usd_per_h)):
        smallest.setdefault(offer.device.name, offer.usd_per_h / 3600)
    startup_s = study.market.running.startup_s
    return Prices({n: p * startup_s for n, p in smallest.items()}, smallest)


def _search(study: Study, job: Job) -> tuple[Units, tuple[Option, ...], bool]:
    """The units and options of a job; raises Infeasible where no unit exists."""
    units = units_of(study.problem, study.space, job.latency_limit_s)
    if not units.units:
        raise _nothing_fits(study, job, units)
    options, complete = options_of(study.space, job, units.units)
    return units, options, complete


def _draw_values(
    study: Study,
    job: Job,
    units: Units,
    pool: Sequence[Option],
    beliefs: Mapping[tuple[int, int], KernelBelief],
    draws: Draws,
) -> tuple[Floats, NDArray[np.bool_]]:
    overhead = [g.stage_overhead_s for g in study.problem.groups]
    used = sorted({u for o in pool for u, _ in o.pipelines})
    timed = {u: unit_periods(units.units[u], beliefs, draws, overhead) for u in used}
    periods, latencies = ({u: t[i] for u, t in timed.items()} for i in (0, 1))
    return values(job, study.market.running, pool, periods, latencies)


def answer(study: Study, job: Job, *, risk: float | None = None, seed: int = 0, plans: bool = True) -> Recommendation:
    """Return the recommendation for one job on a study; without `plans` only the figures."""
    units, options, complete = _search(study, job)
    chosen = best(job, options)
    if chosen is None:
        raise refusal(job, options)
    pool = _pool(job, options, chosen)
    beliefs = study.beliefs([units.units[u] for u in sorted({u for o in pool for u, _ in o.pipelines})])
    drawn, kept = _draw_values(study, job, units, pool, beliefs, draw(list(beliefs.values()), NUM_DRAWS, seed))
    index = pool.index(chosen)
    if risk is not None:
        allowed = [i for i, o in enumerate(pool) if meets(o, job.limits())]
        index = min(allowed, key=lambda i: (float(np.quantile(drawn[i], risk)), i))
        chosen = pool[index]
    by_type = tuple((d.name, best(job, _only(options, d.name))) for d in study.market.device_types())
    single = best(job, [o for o in options if o.is_homogeneous])
    made = [Pipeline(n, *study.plan(units.units[u])) for u, n in chosen.pipelines] if plans else []
    return Recommendation(
        study.prepared.model.name,
        job,
        study.market,
        chosen,
        single,
        by_type,
        tuple(_trades(job, options)),
        tuple(_binding(job, options, chosen)),
        tuple(made),
        confidence(pool, index, drawn, kept),
        complete and units.complete and not study.note,
        units.units,
        options,
        tuple(_notes(study, complete, units)),
    )


def with_what_if(study: Study, made: Recommendation) -> Recommendation:
    """Return the recommendation with what would change it."""

    def again(market: Market) -> Option:
        return answer(study.on(market), made.job, plans=False).best

    names = [d.name for d in study.market.device_types()]
    even = tuple(break_even(made.job, study.market.running, made.options, made.best, n) for n in names)
    return dataclasses.replace(made, break_evens=even, changes=changes(made.job, study.market, made.best, again))


def _only(options: Sequence[Option], device_type: str) -> list[Option]:
    return [o for o in options if set(o.devices) == {device_type}]


def _trades(job: Job, options: Sequence[Option]) -> list[TradePoint]:
    """The front within the limits, each point beside the cheapest single-type option that is as fast."""
    kept = [o for o in options if meets(o, job.limits())]
    alone = [o for o in kept if o.is_homogeneous]
    points = []
    for option in front(kept):
        as_fast = [o for o in alone if o.time() <= option.time() * (1 + 1e-9)]
        points.append(TradePoint(option, min(as_fast, key=lambda o: (o.cost(), o.time(), o.fleet), default=None)))
    return points


def _binding(job: Job, options: Sequence[Option], chosen: Option) -> list[tuple[str, Option]]:
    """Limits without which something better would be taken. A service's throughput is no limit but its purpose."""
    out = []
    for name in job.limits():
        if name == "throughput_per_s" and job.is_service:
            continue
        free = best(job, options, {n: v for n, v in job.limits().items() if n != name})
        if free is not None and free != chosen and not meets(free, {name: job.limits()[name]}):
            out.append((name, free))
    return out


def _pool(job: Job, options: Sequence[Option], chosen: Option) -> list[Option]:
    """The options that could win if predictions are wrong: of each set of types the best, also with room to spare."""
    by_kind: dict[frozenset[str], list[Option]] = {}
    for option in options:
        by_kind.setdefault(frozenset(option.devices), []).append(option)
    found: dict[Option, None] = {chosen: None}
    for margin in (*MARGINS, 0.9, 0.75):
        asked = {n: v * margin if n == "throughput_per_s" else v / margin for n, v in job.limits().items()}
        winners = [o for group in by_kind.values() if (o := best(job, group, asked)) is not None]
        found |= dict.fromkeys(sorted(winners, key=lambda o: (value(job, o), o.fleet))[:_RIVALS])
        if not job.limits():
            break
    return list(found)


def _notes(study: Study, complete: bool, units: Units) -> list[str]:
    notes = list(study.market.notes)
    if study.note:
        notes.append(study.note)
    if not complete:
        notes.append("too many fleets to try each: the cheapest was sought for each of a grid of rates")
    if not units.complete:
        notes.append("pipelines were sought over a selection of cuts: a better split of the model may exist")
    return notes


def _nothing_fits(study: Study, job: Job, units: Units) -> Infeasible:
    if job.latency_ms is None:
        have = ", ".join(f"{d.name}" for d in study.market.device_types())
        return Infeasible(f"{units.reason} (the market has {have})", "add a type with more memory, or a higher limit")
    fastest = solve(study.problem, Objective.LATENCY, time_limit_s=10.0)
    if fastest.status is Status.INFEASIBLE:
        return _nothing_fits(study, dataclasses.replace(job, latency_ms=None), units)
    names = [study.problem.groups[s.group].name for s in fastest.stages]
    return Infeasible(
        f"no pipeline of this market answers within latency_ms={job.latency_ms:g}",
        f"nearest: latency_ms={fastest.objective * 1e3 * 1.005:.3g} on {' -> '.join(names)}",
    )
