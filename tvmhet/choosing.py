"""The plan that a build takes: of all devices at work, or of one at work alone.

    kernels take ──► what they take while every CPU device works ──► the best plan of the cluster ──┐
                 └─► what they take while one device works ────────► the best plan of each type ────┴─► the better
                                                                     plans that ran one against the other, as they did

The second is asked for where the first was measured, for throughput and in training: where devices slow each other
down, one alone may be as fast. A plan of several but not all CPU devices is priced as if all worked. Plans that ran one
against the other (`tvmhet.racing`) are chosen by what they took where they were surely faster than the one predicted
best: plans near each other differ by less than one's rounds do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from tvmhet.candidates import makers_on
from tvmhet.cluster.device import DeviceType
from tvmhet.cluster.spec import ClusterSpec
from tvmhet.cluster.units import duration
from tvmhet.context import company, context_factor
from tvmhet.cost.measured import MeasuredKernels
from tvmhet.errors import BadInput, Infeasible
from tvmhet.graph.concurrent import CONCURRENT
from tvmhet.ir.prepare import Prepared
from tvmhet.known_times import known_times
from tvmhet.plans import Plan
from tvmhet.proposing import CHOICES, Price, variant_of
from tvmhet.raced import Placed, Raced, expected_s, last_race, made_again
from tvmhet.rewriting import Planner, Wanted
from tvmhet.solve import Objective, Status
from tvmhet.solve.ablate import jointly

_MADE_AGAIN = 2  # of the plans that ran: what is known of their kernels since may put the second first


def best_plan(prepared: Prepared, cluster: ClusterSpec, database: MeasuredKernels, wanted: Wanted) -> Plan:
    """Return the best plan by the best known times, and of those that ran by what they took.

    Of a model with states, the one that gives its sessions results most often: calls of a session follow one another,
    so that too few sessions do not fill a pipeline. Raises Infeasible, or BadInput for a pin.
    """
    best = _best_plan(prepared, cluster, database, wanted)
    graph = prepared.operator_graph
    if not graph.num_states:
        return best
    if wanted.objective is Objective.THROUGHPUT and wanted.search is jointly and not wanted.limits:
        quick = _best_plan(prepared, cluster, database, replace(wanted, objective=Objective.LATENCY))
        best = min(best, quick, key=lambda plan: apart_s(plan, graph.num_sessions))
    every = duration(apart_s(best, graph.num_sessions))
    note = f"calls of a session follow one another: results of {_sessions(graph.num_sessions)} come every {every}"
    if best.objective == Objective.LATENCY.value != wanted.objective.value:
        note += "; more would fill a pipeline, for fewer this plan, of least latency, is the better one"
    return replace(best, notes=(*best.notes, note))


def apart_s(plan: Plan, num_sessions: int) -> float:
    """Return the time between two results of a model with states, with so many sessions."""
    return max(plan.period_s, plan.latency_s / num_sessions)


def _sessions(num: int) -> str:
    return "one session" if num == 1 else f"{num} sessions"


def _best_plan(prepared: Prepared, cluster: ClusterSpec, database: MeasuredKernels, wanted: Wanted) -> Plan:
    best = predicted_best(prepared, cluster, database, wanted)
    race = last_race(database, prepared, cluster, wanted) if takes_races(wanted) else ()
    return _best_of_race(best, race, prepared, cluster, database, wanted) if race else best


def takes_races(wanted: Wanted) -> bool:
    """Whether plans that ran are among those that are wanted: nothing is pinned, limited, split or left out."""
    free = not (wanted.pin or wanted.limits or wanted.splits) and wanted.search is jointly
    return free and wanted.kinds >= CHOICES and wanted.objective in (Objective.THROUGHPUT, Objective.LATENCY)


def _best_of_race(
    best: Plan,
    race: Sequence[Raced],
    prepared: Prepared,
    cluster: ClusterSpec,
    database: MeasuredKernels,
    wanted: Wanted,
) -> Plan:
    """The plan that is predicted best, or one that ran and was surely faster than the one predicted best then."""
    wanted = replace(wanted, makers=usable_makers(wanted, cluster))
    price_on = partial(prices_on, database=database, together=wanted.objective is Objective.THROUGHPUT)
    before = min(race, key=lambda raced: raced.planned_s)
    faster = sorted((r for r in race if r.is_surely_faster(before)), key=lambda raced: raced.ran_s)
    again = [made_again(raced.placed, prepared, cluster, wanted, price_on) for raced in faster[:_MADE_AGAIN]]
    found = min([best, *(plan for plan in again if plan is not None)], key=lambda plan: expected_s(plan, race))
    ran_s = next((raced.ran_s for raced in race if raced.placed == Placed.of(found)), None)
    if found is not best:  # its bound is of plans with the same operators
        bound = min(best.lower_bound, found.objective_value) if found.rewrites == best.rewrites else 0.0
        found = replace(found, lower_bound=bound, steps=best.steps)
    if ran_s is None:
        return found
    others = "one other plan" if len(race) == 2 else f"{len(race) - 1} other plans"
    took = f"it took {duration(ran_s)} an input when profile ran it against {others}"
    return replace(found, notes=(*found.notes, took), ran_s=expected_s(found, race))


def predicted_best(prepared: Prepared, cluster: ClusterSpec, database: MeasuredKernels, wanted: Wanted) -> Plan:
    """Return the best plan by the best known times. Raises Infeasible, or BadInput for a pin."""
    slowed = slowed_types(prepared.key, cluster, database) if wanted.objective is Objective.THROUGHPUT else []
    return best_or_alone(cluster, slowed, lambda some: _plan(prepared, some, database, wanted))


def best_or_alone(cluster: ClusterSpec, slowed: Sequence[str], plan: Callable[[ClusterSpec], Plan]) -> Plan:
    """Return the best `plan` of the cluster and of one device of each type in `slowed`, which others slow down.

    What it says of itself holds against the others too. Raises what planning on the whole cluster raises, Infeasible
    only where no device alone has a plan.
    """
    whole, refused = list[Plan](), None
    try:
        whole.append(plan(cluster))
    except Infeasible as error:
        refused = error
    ones = _ones(cluster, slowed, plan)
    if refused is not None and not ones:
        raise refused
    plans = [*whole, *ones]
    best = min(ones if ones and any(_is_alone(p, slowed) for p in whole) else plans, key=lambda p: p.objective_value)
    bound = min(p.lower_bound for p in plans)
    stands = bound >= best.lower_bound
    return best if stands else replace(best, lower_bound=bound, status=Status.FEASIBLE.value)


def _ones(cluster: ClusterSpec, types: Sequence[str], plan: Callable[[ClusterSpec], Plan]) -> list[Plan]:
    """The plans of one device of each type, as plans for the cluster."""
    found = []
    for name in types:
        try:
            one = plan(cluster.with_counts({other: int(other == name) for other in cluster.counts()}))
        except (BadInput, Infeasible):  # a pin to another type; too little memory
            continue
        found.append(replace(one, cluster_key=cluster.content_hash()))
    return found


def _is_alone(plan: Plan, types: Sequence[str]) -> bool:
    """Whether the plan is of one device of these types, and so priced as if others slowed it down."""
    used = {(s.placement.device_type, d) for s in plan.stages for d in s.placement.devices}
    return len(used) == 1 and min(used)[0] in types


def slowed_types(
    model_key: str, cluster: ClusterSpec, database: MeasuredKernels, halves: Sequence[str] = ("",)
) -> list[str]:
    """Return the device types of which it is known that others slow them down, in one of `halves` of a step."""
    part = company(cluster)
    if not part:
        return []

    def is_slowed(device: DeviceType, half: str) -> bool:
        together, alone = (context_factor(database, model_key, device, p + half) for p in (part, ""))
        return together not in (1.0, alone)

    return [d.name for d in cluster.device_types() if any(is_slowed(d, half) for half in halves)]


def _plan(prepared: Prepared, cluster: ClusterSpec, database: MeasuredKernels, wanted: Wanted) -> Plan:
    price = prices_on(cluster, database, together=wanted.objective is Objective.THROUGHPUT)
    makers = usable_makers(wanted, cluster)
    planner = Planner(cluster, price, replace(wanted, makers=makers))
    return planner.best(variant_of(prepared, makers, price))[0]


def usable_makers(wanted: Wanted, cluster: ClusterSpec) -> tuple[str, ...]:
    """Return the makers that are wanted and that some device has a use for. Raises BadInput."""
    makers = makers_on(wanted.makers, cluster.device_types())
    return makers if CONCURRENT in wanted.kinds else tuple(m for m in makers if m != CONCURRENT)


def prices_on(cluster: ClusterSpec, database: MeasuredKernels, together: bool) -> Price:
    """Return what gives the best known times of kernels on a cluster: while all its devices work if `together`."""
    return partial(known_times, database=database, cluster=cluster, in_context=True, together=together)
