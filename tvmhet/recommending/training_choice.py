"""Training jobs: the choice among planned fleets, how sure it is, and what would change it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from tvmhet.cluster.market import Market
from tvmhet.plans import Plan
from tvmhet.recommending.compare import binding, only, pool_of, trades
from tvmhet.recommending.feasibility import refusal
from tvmhet.recommending.job import Job
from tvmhet.recommending.measuring import Belief, Campaign, Errors, Prices, check_budget, choose_measurements
from tvmhet.recommending.option import Option, best, meets, value
from tvmhet.recommending.recommendation import Pipeline, Recommendation
from tvmhet.recommending.training import FleetSearch, Planned, TrainingStudy, refused
from tvmhet.recommending.training_sure import iteration_draws, stage_beliefs
from tvmhet.recommending.uncertainty import NUM_DRAWS, Draws, Floats, KernelBelief, confidence, draw, values
from tvmhet.recommending.what_if import Case, break_even, changes

_ROOM = (1.15, 1.35)  # how much tighter limits are sought too: what to rent if predictions prove too short
_SEARCHED = (3, 4)  # fleets of one type, of any, planned for each change of a what-if


def train(study: TrainingStudy, job: Job, *, risk: float | None = None, seed: int = 0) -> Recommendation:
    """Return the recommendation for one training job on a study. Raises Infeasible with the nearest answers."""
    search, options, chosen, pool = _searched(study, job)
    known = _known(search, pool)
    drawn, kept = _draw_values(search, pool, known, draw(_beliefs(known), NUM_DRAWS, seed))
    index = pool.index(chosen)
    if risk is not None:
        allowed = [i for i, o in enumerate(pool) if meets(o, job.limits())]
        index = min(allowed, key=lambda i: (float(np.quantile(drawn[i], risk)), i))
        chosen = pool[index]
    made = _plan_of(search, chosen)
    assert made is not None, "the best option is planned"
    bound = min(search.bound(), value(job, chosen))
    return Recommendation(
        study.prepared.model.name,
        job,
        study.market,
        chosen,
        best(job, [o for o in options if o.is_homogeneous]),
        tuple((d.name, best(job, only(options, d.name))) for d in study.market.device_types()),
        tuple(trades(job, options)),
        tuple(binding(job, options, chosen)),
        (Pipeline(1, made.plan, made.cluster),),
        confidence(pool, index, drawn, kept),
        study.fleets.complete and value(job, chosen) <= bound * (1 + 1e-6),
        (),
        tuple(options),
        (*study.market.notes, *made.plan.notes, *_notes(search)),
        bound=bound,
    )


def _searched(study: TrainingStudy, job: Job) -> tuple[FleetSearch, list[Option], Option, list[Option]]:
    """The search, its options, the best of them, and the planned ones that could win if predictions are wrong.

    Raises Infeasible with the nearest answers.
    """
    FleetSearch(study, job).run()
    for room in _ROOM if job.limits() else ():
        hours, usd = (None if v is None else v / room for v in (job.deadline_h, job.budget_usd))
        tight = dataclasses.replace(job, deadline_h=hours, budget_usd=usd)
        FleetSearch(study, tight).run(1, 1)
    search = FleetSearch(study, job).run(0, 0)  # with all that is planned by now
    options = search.options()
    chosen = best(job, options)
    if not options:
        raise refused(search)
    if chosen is None:
        raise refusal(job, options)
    pool = pool_of(job, [o for o in options if _plan_of(search, o)], chosen)
    return search, options, chosen, pool


def what_to_measure(study: TrainingStudy, job: Job, budget_usd: float, *, seed: int = 0) -> Campaign:
    """Return the measurements of forward kernels that would improve the recommendation most for up to `budget_usd`.

    The fleets that are planned are compared, each with the plan that it has. Results are taken to be as believed.
    Raises what `train` would.
    """
    check_budget(budget_usd)
    search, _, _, pool = _searched(study, job)
    known = _known(search, pool)

    def cost(errors: Errors) -> Floats:
        return _draw_values(search, pool, known, Draws(errors, len(next(iter(errors.values())))))[0]

    return choose_measurements(Belief.of(_beliefs(known)), Prices.of(study.market), budget_usd, cost, seed=seed)


def _plan_of(search: FleetSearch, option: Option) -> Planned | None:
    ((row, _),) = option.pipelines
    found = search.planned.get(row)
    return found if isinstance(found, Planned) else None


#: Rows of planned fleets -> their plans, and what is known of the kernels of each stage.
_Known = Mapping[int, tuple[Plan, list[list[KernelBelief]]]]


def _known(search: FleetSearch, pool: list[Option]) -> _Known:
    study, graph = search.study, search.study.prepared.graph
    assert graph is not None, "a model in training has a graph"
    plans = {o.pipelines[0][0]: p.plan for o in pool if (p := _plan_of(search, o)) is not None}
    return {row: (p, [stage_beliefs(p, s, graph, study.keys) for s in p.stages]) for row, p in plans.items()}


def _beliefs(known: _Known) -> list[KernelBelief]:
    return [b for _, stages in known.values() for stage in stages for b in stage]


def _draw_values(
    search: FleetSearch, pool: list[Option], known: _Known, draws: Draws
) -> tuple[Floats, NDArray[np.bool_]]:
    seconds = {row: iteration_draws(plan, stages, draws) for row, (plan, stages) in known.items()}
    batch = search.study.goal.global_batch
    periods: Mapping[int, Floats] = {row: s / batch for row, s in seconds.items()}
    return values(search.job, search.study.market.running, pool, periods, seconds)


def _notes(search: FleetSearch) -> list[str]:
    fleets, offers = search.study.fleets, search.study.market.offers
    planned = sum(isinstance(p, Planned) for p in search.planned.values())
    notes = [
        f"{len(fleets.counts):,} fleets compared as whole copies of the model on every device, "
        f"{planned} of them with a plan of their own"
    ]
    if not fleets.complete:
        most = int((fleets.counts > 0).sum(axis=1).max())
        notes.append(f"not compared: most fleets of {most} of the {len(offers)} offers, and all of more")
    return notes


def with_what_if(study: TrainingStudy, made: Recommendation) -> Recommendation:
    """Return the recommendation with what would change it."""

    def again(changed: TrainingStudy, job: Job) -> Option:
        search = FleetSearch(changed, job).run(*_SEARCHED)
        options = search.options()
        if (found := best(job, options)) is None:
            raise refusal(job, options) if options else refused(search)
        return found

    batch = 2 * study.goal.global_batch
    larger = dataclasses.replace(study, goal=dataclasses.replace(study.goal, global_batch=batch), plans={})
    more = Case(f"batches of {batch:,}", lambda: again(larger, dataclasses.replace(made.job, global_batch=batch)))
    names = [d.name for d in study.market.device_types()]
    even = tuple(break_even(made.job, study.market.running, made.options, made.best, n) for n in names)

    def on_market(market: Market) -> Option:
        return again(study.on(market), made.job)

    found = changes(made.job, study.market, made.best, on_market, (more,))
    return dataclasses.replace(made, break_evens=even, changes=found)
