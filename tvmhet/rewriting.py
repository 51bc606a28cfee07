"""Plan a model as it is and as it may be rewritten, and keep the best plan.

    plan ──► proposed rewrites ──► rewrite, plan again ──► better? propose once more
                                                      └──► no: the plan before

Done with each kind of rewrite alone and with both together. So no plan is worse than one without rewrites, or without
one kind of them, by construction; and every plan is one of ordinary operators: the checker, the passes and the emitter
need not know how the operators came about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tvmhet.cluster.spec import ClusterSpec
from tvmhet.errors import Infeasible
from tvmhet.graph.rewrites import Batch, in_words
from tvmhet.planning import make_plan
from tvmhet.plans import Plan
from tvmhet.proposing import KINDS, Price, Variant, offered, propose, variant_of
from tvmhet.solve import Objective
from tvmhet.solve.ablate import Search, jointly

_ROUNDS = 2
_MIN_GAIN = 1e-3  # a plan that is better by less is not worth other operators than the user's
_MAX_OPERATORS = 2000  # larger models are planned as they are: a second and third search would take too long


@dataclass(frozen=True, slots=True)
class Planner:
    """What a plan is made for, and the rewrites that it may use."""

    cluster: ClusterSpec
    objective: Objective
    price: Price
    makers: Sequence[str]
    pin: Mapping[str, str]
    kinds: frozenset[str] = KINDS
    time_limit_s: float = 30.0
    seed: int = 0
    search: Search = jointly

    def plan(self, variant: Variant) -> Plan:
        """Return the plan of a variant. Raises Infeasible."""
        found = make_plan(
            variant.prepared,
            variant.candidates.kernels,
            variant.table,
            self.cluster,
            self.objective,
            self.pin,
            self.time_limit_s,
            self.seed,
            search=self.search,
        )
        return replace(found, rewrites=variant.rewrites, notes=(*found.notes, *in_words(variant.rewrites)))

    def best(self, first: Variant) -> tuple[Plan, Variant]:
        """Return the best plan of `first` and of what it may be rewritten to, with the variant that it is a plan of."""
        known: dict[tuple[Batch, ...], tuple[Plan, Variant]] = {(): (self.plan(first), first)}
        if len(first.graph.operators) > _MAX_OPERATORS:
            return known[()]
        kinds = sorted(self.kinds & offered(first.graph, self.pin))
        found = [known[()]]
        for subset in [frozenset({k}) for k in kinds] + ([frozenset(kinds)] if len(kinds) > 1 else []):
            found.append(self._climb(first, subset, known))
        return min(found, key=lambda pair: pair[0].objective_value)  # the first of equals

    def _climb(
        self, first: Variant, kinds: frozenset[str], known: dict[tuple[Batch, ...], tuple[Plan, Variant]]
    ) -> tuple[Plan, Variant]:
        """Rewrite by proposals of some kinds as long as that makes the plan better. `known` holds all plans made."""
        plan, variant = known[()]
        for _ in range(_ROUNDS):
            proposed = propose(
                variant, self.cluster, self.objective, self.pin, self.makers, self.price, kinds, self.time_limit_s
            )
            rewrites = (*variant.rewrites, *proposed)
            if rewrites not in known:
                other = variant_of(first.prepared, self.makers, self.price, rewrites)
                try:
                    known[rewrites] = self.plan(other), other
                except Infeasible:
                    break
            if known[rewrites][0].objective_value >= plan.objective_value * (1 - _MIN_GAIN):
                break
            plan, variant = known[rewrites]
        return plan, variant
