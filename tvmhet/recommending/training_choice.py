"""Training jobs: the choice among planned fleets, how sure it is, and what would change it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tvmhet.cluster.market import Market
from tvmhet.errors import Infeasible
from tvmhet.plans import Plan
from tvmhet.recommending.belief import Belief, generations
from tvmhet.recommending.compare import binding, only, pool_of, trades
from tvmhet.recommending.feasibility import nearest, proof_by_bounds, refusal
from tvmhet.recommending.job import Job
from tvmhet.recommending.measuring import Campaign, Errors, Prices, check_budget, choose_measurements
from tvmhet.recommending.option import Option, best, value
from tvmhet.recommending.recommendation import Pipeline, Recommendation
from tvmhet.recommending.training import Planned, TrainingStudy
from tvmhet.recommending.training_rivals import Rival, rivals_of
from tvmhet.recommending.training_search import FleetSearch, refused
from tvmhet.recommending.training_sure import iteration_draws, stage_beliefs
from tvmhet.recommending.uncertainty import (
    NUM_DRAWS,
    Draws,
    Floats,
    KernelBelief,
    Robust,
    confidence,
    draw,
    values,
)
from tvmhet.recommending.what_if import Case, break_evens, changes

_ROOM = (1.15, 1.35)  # how much tighter limits are sought too: what to rent if predictions prove too short
_SEARCHED = (3, 4)  # fleets of one type, of any, planned for each change of a what-if


def train(study: TrainingStudy, job: Job, *, risk: float | None = None, seed: int = 0) -> Recommendation:
    """Return the recommendation for one training job on a study. Raises Infeasible with the nearest answers."""
    search, options, chosen = _searched(study, job)
    pool = _pool(search, options, chosen)
    timed = _timed(search, pool)
    seconds = _drawn_s(timed, seed)
    drawn, kept = _values(search, pool, seconds)
    robust = None if risk is None else _robust(search, pool, seconds, risk)
    chosen = (robust.best() if robust else None) or chosen
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
        confidence(pool, pool.index(chosen), drawn, kept),
        study.fleets.complete and value(job, chosen) <= bound * (1 + 1e-6),
        (),
        tuple(options),
        (*study.market.notes, *study.unused_splits, *made.plan.notes, *_notes(search, pool, risk)),
        bound=bound,
        robust=robust,
    )


def _searched(study: TrainingStudy, job: Job) -> tuple[FleetSearch, list[Option], Option]:
    """The search, its options and the best of them. Raises Infeasible with the nearest answers."""
    FleetSearch(study, job).run()
    for room in _ROOM if job.limits() else ():
        hours, usd = (None if v is None else v / room for v in (job.deadline_h, job.budget_usd))
        tight = dataclasses.replace(job, deadline_h=hours, budget_usd=usd)
        FleetSearch(study, tight).run(1, 1)
    search = FleetSearch(study, job).run(0, 0)  # with all that is planned by now
    options = search.options()
    chosen = best(job, options)
    if chosen is None:
        raise _refusal(search, options)
    return search, options, chosen


def _refusal(search: FleetSearch, options: list[Option]) -> Infeasible:
    if not options:
        return refused(search)
    while new := {o.pipelines[0][0] for o in nearest(search.job, options)} - search.planned.keys():
        for row in sorted(new):
            search.know(row)  # what is named has a plan
        options = search.options()
    num, every = len(search.seconds), "all" if search.study.fleets.complete else "the"
    return refusal(search.job, options, proof_by_bounds(search.job.limits(), search.reach(), f"{every} {num:,} fleets"))


def _pool(search: FleetSearch, options: list[Option], chosen: Option) -> list[Option]:
    """What could win if predictions are wrong: all that is planned, and the best of each set of types that is not."""
    planned = [o for o in options if _plan_of(search, o)]
    rivals = pool_of(search.job, search.options(search.expected_s()), chosen)
    return list(dict.fromkeys([chosen, *planned, *rivals]))


def what_to_measure(study: TrainingStudy, job: Job, budget_usd: float, *, seed: int = 0) -> Campaign:
    """Return the measurements of forward kernels that would improve the recommendation most for up to `budget_usd`.

    Fleets are compared with the plan that they have, else half-way between whole copies and the plan that is expected.
    Results are taken to be as believed.
    Raises what `train` would.
    """
    check_budget(budget_usd)
    search, options, chosen = _searched(study, job)
    pool = _pool(search, options, chosen)
    timed = _timed(search, pool)

    def cost(errors: Errors) -> Floats:
        draws = Draws(errors, len(next(iter(errors.values()))))
        return _values(search, pool, {row: t.draws(draws, 0.5) for row, t in timed.items()})[0]

    every = [b for t in timed.values() for b in t.beliefs]
    known = Belief.of(every, generations(o.device for o in study.market.offers))
    return choose_measurements(known, Prices.of(study.market), budget_usd, cost, seed=seed)


def _plan_of(search: FleetSearch, option: Option) -> Planned | None:
    ((row, _),) = option.pipelines
    found = search.planned.get(row)
    return found if isinstance(found, Planned) else None


@dataclass(frozen=True, slots=True)
class _ByPlan:
    """A planned fleet, and what is known of the kernels of each stage."""

    plan: Plan
    stages: list[list[KernelBelief]]

    @property
    def beliefs(self) -> list[KernelBelief]:
        return [b for stage in self.stages for b in stage]

    def draws(self, draws: Draws, _: Floats | float) -> Floats:
        return iteration_draws(self.plan, self.stages, draws)


_Timed = Mapping[int, _ByPlan | Rival]  # by row


def _timed(search: FleetSearch, pool: list[Option]) -> _Timed:
    """How the fleets of `pool` are timed in each draw; those without an estimate are taken out of it."""
    study, graph = search.study, search.study.prepared.operator_graph
    plans = {o.pipelines[0][0]: p.plan for o in pool if (p := _plan_of(search, o)) is not None}
    rivals = rivals_of(search, [o.pipelines[0][0] for o in pool if o.pipelines[0][0] not in plans])
    pool[:] = [o for o in pool if o.pipelines[0][0] in plans or o.pipelines[0][0] in rivals]
    planned = {r: _ByPlan(p, [stage_beliefs(p, s, graph, study.keys) for s in p.stages]) for r, p in plans.items()}
    return {**planned, **rivals}


def _drawn_s(timed: _Timed, seed: int) -> dict[int, Floats]:
    """Seconds of an iteration in each draw."""
    draws = draw([b for t in timed.values() for b in t.beliefs], NUM_DRAWS, seed)
    gains = np.random.default_rng([seed, 1]).random(NUM_DRAWS)  # of planning what is not planned
    return {row: t.draws(draws, gains) for row, t in timed.items()}


def _periods(search: FleetSearch, seconds: Mapping[int, Floats]) -> Mapping[int, Floats]:
    return {row: s / search.study.goal.global_batch for row, s in seconds.items()}


def _values(search: FleetSearch, pool: list[Option], seconds: Mapping[int, Floats]) -> tuple[Floats, NDArray[np.bool_]]:
    return values(search.job, search.study.market.running, pool, _periods(search, seconds), seconds)


def _robust(search: FleetSearch, pool: list[Option], seconds: Mapping[int, Floats], risk: float) -> Robust:
    """The choice by risk, among fleets with a plan."""
    planned = tuple(o for o in pool if _plan_of(search, o))
    return Robust(search.job, search.study.market.running, planned, _periods(search, seconds), seconds, risk)


def _notes(search: FleetSearch, pool: list[Option], risk: float | None) -> list[str]:
    fleets, offers = search.study.fleets, search.study.market.offers
    planned = sum(isinstance(p, Planned) for p in search.planned.values())
    drawn = sum(_plan_of(search, o) is not None for o in pool)
    notes = [
        f"{len(fleets.counts):,} fleets compared as whole copies of the model on every device, "
        f"{planned} of them with a plan of their own",
        f"how sure it is: {len(pool)} fleets timed again in each draw, {drawn} "
        "by their plans, the others between whole copies and what planning gained on their like",
    ]
    if risk is not None:
        notes.append(f"the choice by risk={risk:g} is among the {drawn} with a plan; the probability counts all")
    if not fleets.complete:
        most = int((fleets.counts > 0).sum(axis=1).max())
        notes.append(f"not compared: most fleets of {most} of the {len(offers)} offers, and all of more")
    return notes


def with_what_if(study: TrainingStudy, made: Recommendation, seed: int = 0) -> Recommendation:
    """Return the recommendation with what would change it, chosen by risk where it was."""
    risk = made.robust.risk if made.robust else None

    def again(changed: TrainingStudy, job: Job) -> Option:
        search = FleetSearch(changed, job).run(*_SEARCHED)
        options = search.options()
        if (found := best(job, options)) is None:
            raise _refusal(search, options)
        if risk is None:
            return found
        pool = [o for o in _pool(search, options, found) if _plan_of(search, o)]
        return _robust(search, pool, _drawn_s(_timed(search, pool), seed), risk).best() or found

    batch = 2 * study.goal.global_batch
    larger = dataclasses.replace(study, goal=dataclasses.replace(study.goal, global_batch=batch), plans={})
    more = Case(f"batches of {batch:,}", lambda: again(larger, dataclasses.replace(made.job, global_batch=batch)))
    even = break_evens(made.job, study.market, made.best, made.options, made.winner if made.robust else None)

    def on_market(market: Market) -> Option:
        return again(study.on(market), made.job)

    found = changes(made.job, study.market, made.best, on_market, (more,))
    return dataclasses.replace(made, break_evens=even, changes=found)
