"""The plan that a build takes: of all devices at work, or of one at work alone.

    kernels take ──► what they take while every CPU device works ──► the best plan of the cluster ──┐
                 └─► what they take while one device works ────────► the best plan of each type ────┴─► the better

The second is asked for where the first was measured, for throughput and in training: where devices slow each other
down, one alone may be as fast. A plan of several but not all CPU devices is priced as if all worked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from tvmhet.campaign import known_times
from tvmhet.candidates import makers_on
from tvmhet.cluster.device import DeviceType
from tvmhet.cluster.spec import ClusterSpec
from tvmhet.context import company, context_factor
from tvmhet.cost.measured import MeasuredKernels
from tvmhet.errors import BadInput, Infeasible
from tvmhet.graph.concurrent import CONCURRENT
from tvmhet.ir.prepare import Prepared
from tvmhet.plans import Plan
from tvmhet.proposing import variant_of
from tvmhet.rewriting import Planner, Wanted
from tvmhet.solve import Objective, Status


def best_plan(prepared: Prepared, cluster: ClusterSpec, database: MeasuredKernels, wanted: Wanted) -> Plan:
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
    together = wanted.objective is Objective.THROUGHPUT
    price = partial(known_times, database=database, cluster=cluster, in_context=True, together=together)
    makers = makers_on(wanted.makers, cluster.device_types())
    if CONCURRENT not in wanted.kinds:
        makers = tuple(m for m in makers if m != CONCURRENT)
    planner = Planner(cluster, price, replace(wanted, makers=makers))
    return planner.best(variant_of(prepared, makers, price))[0]
