"""Services and jobs of many inputs: units, fleets of them, the choice, how sure it is, what to measure first."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from tvmhet.cluster.market import Market
from tvmhet.cluster.units import gib
from tvmhet.errors import Infeasible
from tvmhet.planning import with_names
from tvmhet.recommending.belief import Belief, generations
from tvmhet.recommending.compare import binding, only, pool_of, trades
from tvmhet.recommending.feasibility import nearest, proof_by_bounds, refusal
from tvmhet.recommending.job import Job
from tvmhet.recommending.measuring import Campaign, Errors, Prices, check_budget, choose_measurements
from tvmhet.recommending.option import Option, best
from tvmhet.recommending.recommendation import Pipeline, Recommendation
from tvmhet.recommending.service_bounds import reach_of
from tvmhet.recommending.space import options_of
from tvmhet.recommending.study import Study
from tvmhet.recommending.uncertainty import (
    NUM_DRAWS,
    Draws,
    Floats,
    KernelBelief,
    Robust,
    confidence,
    draw,
    unit_periods,
    values,
)
from tvmhet.recommending.what_if import break_evens, changes
from tvmhet.solve import Objective, Status, solve
from tvmhet.solve.units import Units

_Found = tuple[Units, tuple[Option, ...], bool]  # units, options of them, whether these are all


def _search(study: Study, job: Job) -> _Found:
    """The units and options of a job; raises Infeasible where no unit exists."""
    units = study.units(job.latency_limit_s)
    if not units.units:
        raise _nothing_fits(study, job, units)

    def chosen(options: Sequence[Option]) -> list[Option]:
        return [] if (found := best(job, options)) is None else [found]

    return _as_run(study, job, units, chosen)


def _as_run(study: Study, job: Job, units: Units, named: Callable[[Sequence[Option]], list[Option]]) -> _Found:
    """The units and options of a job, with those that are `named` as they run.

    Stages may wait for each other longer than a unit's period says. What would be named is simulated and counts as it
    runs, until it is named all the same.
    """
    ran: set[int] = set()
    while True:
        options, complete = options_of(study.space, job, units.units)
        new = {u for o in named(options) for u, _ in o.pipelines} - ran
        timed = {u: study.as_simulated(units.units[u], job.samples) for u in sorted(new)}
        ran |= new
        if all(timed[u] is units.units[u] for u in new):
            return units, options, complete
        units = dataclasses.replace(units, units=tuple(timed.get(i, u) for i, u in enumerate(units.units)))


_Timed = tuple[dict[int, Floats], dict[int, Floats]]  # seconds between results and of one input, by unit


def _timed(
    study: Study,
    units: Units,
    pool: Sequence[Option],
    beliefs: Mapping[tuple[int, int], KernelBelief],
    draws: Draws,
) -> _Timed:
    overhead = [g.stage_overhead_s for g in study.problem.groups]
    used = sorted({u for o in pool for u, _ in o.pipelines})
    timed = {u: unit_periods(units.units[u], beliefs, draws, overhead) for u in used}
    return {u: t[0] for u, t in timed.items()}, {u: t[1] for u, t in timed.items()}


def answer(study: Study, job: Job, *, risk: float | None = None, seed: int = 0, plans: bool = True) -> Recommendation:
    """Return the recommendation for one job on a study; without `plans` only the figures."""
    units, options, complete = _search(study, job)
    chosen = best(job, options)
    if chosen is None:
        raise _refusal(study, job, units, complete)
    pool = pool_of(job, options, chosen)
    beliefs = study.beliefs([units.units[u] for u in sorted({u for o in pool for u, _ in o.pipelines})])
    timed = _timed(study, units, pool, beliefs, draw(list(beliefs.values()), NUM_DRAWS, seed))
    drawn, kept = values(job, study.market.running, pool, *timed)
    robust = None if risk is None else Robust(job, study.market.running, tuple(pool), *timed, risk)
    chosen = (robust.best() if robust else None) or chosen
    by_type = tuple((d.name, best(job, only(options, d.name))) for d in study.market.device_types())
    single = best(job, [o for o in options if o.is_homogeneous])
    limited = job.latency_ms is not None
    made = [Pipeline(n, *study.plan(units.units[u], as_it_is=limited)) for u, n in chosen.pipelines] if plans else []
    return Recommendation(
        study.prepared.model.name,
        job,
        study.market,
        chosen,
        single,
        by_type,
        tuple(trades(job, options)),
        tuple(binding(job, options, chosen)),
        tuple(made),
        confidence(pool, pool.index(chosen), drawn, kept),
        complete and units.complete and not study.note,
        units.units,
        options,
        (*_notes(study, complete, units), _compared(options, pool, risk)),
        robust=robust,
    )


def with_what_if(study: Study, made: Recommendation, seed: int = 0) -> Recommendation:
    """Return the recommendation with what would change it, chosen by risk where it was."""
    risk = made.robust.risk if made.robust else None

    def again(market: Market) -> Option:
        return answer(study.on(market), made.job, risk=risk, seed=seed, plans=False).best

    even = break_evens(made.job, study.market, made.best, made.options, made.winner if made.robust else None)
    return dataclasses.replace(made, break_evens=even, changes=changes(made.job, study.market, made.best, again))


def what_to_measure(study: Study, job: Job, budget_usd: float, *, seed: int = 0) -> Campaign:
    """Return the measurements that would improve the recommendation most for up to `budget_usd`, in order.

    Results are taken to be as believed: it is the list for a dry run. Raises what `answer` would.
    """
    check_budget(budget_usd)
    units, options, complete = _search(study, job)
    chosen = best(job, options)
    if chosen is None:
        raise _refusal(study, job, units, complete)
    pool = pool_of(job, options, chosen)
    used = {u for o in pool for u, _ in o.pipelines}
    beliefs = study.beliefs([units.units[u] for u in sorted(used)])

    def cost(errors: Errors) -> Floats:
        draws = Draws(errors, len(next(iter(errors.values()))))
        return values(job, study.market.running, pool, *_timed(study, units, pool, beliefs, draws))[0]

    known = Belief.of(list(beliefs.values()), generations(o.device for o in study.market.offers))
    return choose_measurements(known, Prices.of(study.market), budget_usd, cost, seed=seed)


def _notes(study: Study, complete: bool, units: Units) -> list[str]:
    notes = [*study.market.notes, *study.unused_splits]
    if study.note:
        notes.append(study.note)
    graph = study.prepared.operator_graph
    if graph.num_states:
        counted = "one session" if graph.num_sessions == 1 else f"{graph.num_sessions} sessions"
        notes.append(
            f"rates are of full pipelines, which take a session a stage or more: memory is counted for {counted} "
            "on every device (num_sessions)"
        )
    if not complete:
        notes.append("too many fleets to try each: the cheapest was sought for each of a grid of rates")
    if not units.complete:
        notes.append("pipelines were sought over a selection of cuts and devices: a better split may exist")
    return notes


def _compared(options: Sequence[Option], pool: Sequence[Option], risk: float | None) -> str:
    """What the draws compare."""
    which = "the best of each set of types, also with room to spare"
    chosen = f"; the choice by risk={risk:g} is among them" if risk is not None else ""
    return f"how sure it is: {len(pool)} of {len(options):,} fleets timed again in each draw: {which}{chosen}"


def _room(study: Study) -> str:
    """What the weights take, and what the market has."""
    weights = sum(w.size_bytes for w in study.problem.weights if w.nodes)
    each = ", ".join(f"{d.name} with {gib(d.memory_bytes)}" for d in study.market.device_types())
    total = sum(o.max_instances * o.num_devices * o.device.memory_bytes for o in study.market.offers)
    return f"its weights take {gib(weights)}; the market has {each}, in all {gib(total)}"


def _compared_fleets(study: Study) -> str:
    num = sum(o.max_instances > 0 for o in study.market.offers)
    return f"the {num} offers compared" if study.note else "this market"


def _refusal(study: Study, job: Job, units: Units, complete: bool) -> Infeasible:
    """Why no option keeps the limits; the nearest answers may also take longer for an input."""
    every = complete and units.complete and not study.note and units is study.units(job.latency_limit_s)
    named = partial(nearest, job)
    options = _as_run(study, job, units, named)[1]
    if job.latency_ms is not None:
        free = dataclasses.replace(job, latency_ms=None)
        options = (*options, *_as_run(study, free, study.units(), named)[1])
    if every:
        return refusal(job, options, "proved: every fleet of this market was tried, with every pipeline")
    reach = reach_of(study.problem, study.space, job)
    return refusal(job, options, proof_by_bounds(job.limits(), reach, _compared_fleets(study), hourly=job.is_service))


def _nothing_fits(study: Study, job: Job, units: Units) -> Infeasible:
    if job.latency_ms is None:
        why = with_names(units.reason, study.prepared.operator_graph)
        machines = any(o.max_instances and o.num_devices > 1 and not o.device.is_cpu for o in study.market.offers)
        share = ", or let GPUs of a machine share stages: splits=[2, 4]" if machines and not study.splits else ""
        return Infeasible(f"{why} ({_room(study)})", f"add a type with more memory, or a higher limit{share}")
    fastest = solve(study.problem, Objective.LATENCY, time_limit_s=10.0)
    if fastest.status is Status.INFEASIBLE:
        return _nothing_fits(study, dataclasses.replace(job, latency_ms=None), units)
    names = [study.problem.groups[s.group].name for s in fastest.stages]
    least = {"latency_ms": fastest.lower_bound * 1e3}
    proof = proof_by_bounds({"latency_ms": job.latency_ms}, least, _compared_fleets(study))
    return Infeasible(
        f"no pipeline of this market answers within latency_ms={job.latency_ms:g} ({proof})",
        f"nearest: latency_ms={fastest.objective * 1e3 * 1.005:.3g} ms on {' -> '.join(names)}",
    )
