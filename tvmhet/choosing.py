"""The plan that a build takes: of all devices at work, or of one at work alone.

    kernels take ──► what they take while every CPU device works ──► the best plan of the cluster ──┐
                 └─► what they take while one device works ────────► the best plan of each type ────┴─► the better

The second is asked for where the first was measured, for throughput: where devices slow each other down, one alone may
be as fast. A plan of some but not all CPU devices is priced as if all worked.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from tvmhet.campaign import known_times
from tvmhet.candidates import makers_on
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
    best = _plan(prepared, cluster, database, wanted)
    if wanted.objective is not Objective.THROUGHPUT:
        return best
    bound = best.lower_bound
    for name in _slowed_types(prepared, cluster, database):
        alone = cluster.with_counts({other: int(other == name) for other in cluster.counts()})
        try:
            plan = _plan(prepared, alone, database, wanted)
        except (BadInput, Infeasible):  # a pin to another type; too little memory
            continue
        bound = min(bound, plan.lower_bound)
        if plan.objective_value < best.objective_value:
            best = replace(plan, cluster_key=cluster.content_hash())
    stands = bound >= best.lower_bound  # what the plan says of itself holds against the others too
    return best if stands else replace(best, lower_bound=bound, status=Status.FEASIBLE.value)


def _plan(prepared: Prepared, cluster: ClusterSpec, database: MeasuredKernels, wanted: Wanted) -> Plan:
    together = wanted.objective is Objective.THROUGHPUT
    price = partial(known_times, database=database, cluster=cluster, in_context=True, together=together)
    makers = makers_on(wanted.makers, cluster.device_types())
    if CONCURRENT not in wanted.kinds:
        makers = tuple(m for m in makers if m != CONCURRENT)
    planner = Planner(cluster, price, replace(wanted, makers=makers))
    return planner.best(variant_of(prepared, makers, price))[0]


def _slowed_types(prepared: Prepared, cluster: ClusterSpec, database: MeasuredKernels) -> list[str]:
    """The device types of which it is known that others slow them down."""
    part = company(cluster)
    if not part:
        return []
    known = {d.name: (context_factor(database, prepared.key, d, p) for p in (part, "")) for d in cluster.device_types()}
    return [name for name, (together, alone) in known.items() if together not in (1.0, alone)]
