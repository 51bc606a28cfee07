"""Plan a model as it is and as it may be rewritten, and keep the best plan.

    plan ──► proposed rewrites ──► rewrite, plan again ──► better? propose once more
                                                      └──► no: the plan before

Done with each kind of rewrite alone and with both together. So no plan is worse than one without rewrites, or without
one kind of them, by construction; and every plan is one of ordinary operators: the checker, the passes and the emitter
need not know how the operators came about.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from tvmhet.cluster.spec import ClusterSpec
from tvmhet.errors import Infeasible
from tvmhet.graph.rewrites import Batch, in_words
from tvmhet.planning import make_plan
from tvmhet.plans import Plan
from tvmhet.proposing import CHOICES, Price, Proposer, Variant, offered, variant_of
from tvmhet.solve import Objective
from tvmhet.solve.ablate import Search, is_sequential, jointly, together
from tvmhet.solve.price_limits import PriceLimits
from tvmhet.splitting import PricedSplit, Wish, never_used, priced_splits, scaled_where_measured

_ROUNDS = 2
_INTERRUPTED = ", interrupted"  # how the solver names an answer that Ctrl-C ended
_MIN_GAIN = 1e-3  # a plan that is better by less is not worth other operators than the user's
MAX_OPERATORS = 2000  # larger models are planned as they are: a second and third search would take too long


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a plan is made for, apart from its devices and their times.

    `makers` of kernels, device types by operator in `pin`, and `kinds` of choices beyond kernels and stages (`CHOICES`)
    that it may take.
    """

    objective: Objective
    makers: Sequence[str]
    pin: Mapping[str, str]
    kinds: frozenset[str] = CHOICES
    time_limit_s: float = 30.0
    seed: int = 0
    search: Search = jointly
    limits: PriceLimits | None = None
    splits: Sequence[Wish] = ()


@dataclass(frozen=True, slots=True)
class Planner:
    """Makes plans on `cluster` by the times that `price` gives kernels."""

    cluster: ClusterSpec
    price: Price
    wanted: Wanted

    def plan(self, variant: Variant, search: Search | None = None) -> Plan:
        """Return the plan of a variant, by another search if one is given. Raises Infeasible."""
        wanted, splits = self.wanted, self._priced(variant)
        found = make_plan(
            variant.prepared,
            variant.candidates.kernels,
            variant.table,
            self.cluster,
            wanted.objective,
            wanted.pin,
            wanted.time_limit_s,
            wanted.seed,
            search=search or wanted.search,
            limits=wanted.limits,
            splits=splits,
        )
        return replace(
            found,
            rewrites=variant.rewrites,
            notes=(*found.notes, *in_words(variant.rewrites), *never_used(wanted.splits, splits)),
        )

    def _priced(self, variant: Variant) -> tuple[PricedSplit, ...]:
        if not self.wanted.splits:
            return ()
        devices, known = self.cluster.device_types(), (variant.table, variant.candidates)
        price = scaled_where_measured(partial(self.price, variant.prepared), *known, devices)
        return priced_splits(self.wanted.splits, variant.graph, variant.candidates, self.cluster, price)

    def best(self, first: Variant) -> tuple[Plan, Variant]:
        """Return the best plan of `first` and of what it may be rewritten to, with the variant that it is a plan of.

        After `time_limit_s` of CPU time, and on Ctrl-C, no further rewrites are tried.
        """
        plan = self.plan(first)
        # what the lesser searches find on the operators as they are, they are not asked for after each rewrite
        search = self.wanted.search if is_sequential(plan.solver) else together
        tried = _Tried(self, search, {(): (plan, first)})
        stop_s = time.process_time() + self.wanted.time_limit_s  # so that a busy machine makes no other plan
        try:
            for kinds in self._subsets(first):
                tried.climb(kinds, stop_s)
        except KeyboardInterrupt:
            pass  # the plans made until then stand
        best = min(tried.plans.values(), key=lambda pair: pair[0].objective_value)  # the first of equals
        return best if _is_better(best[0], plan) else (plan, first)

    def _subsets(self, first: Variant) -> list[frozenset[str]]:
        """Each kind of rewrite that the model offers, and all of them."""
        if len(first.graph.operators) > MAX_OPERATORS:
            return []
        kinds = sorted(self.wanted.kinds & offered(first.graph, self.wanted.pin))
        return [frozenset({k}) for k in kinds] + ([frozenset(kinds)] if len(kinds) > 1 else [])


class _Tried:
    """The plans made so far by their rewrites, and what the next ones are made of."""

    def __init__(self, planner: Planner, search: Search, plans: dict[tuple[Batch, ...], tuple[Plan, Variant]]) -> None:
        self.plans = plans
        self._planner, self._search = planner, search
        self._proposers: dict[tuple[Batch, ...], Proposer] = {}

    def climb(self, kinds: frozenset[str], stop_s: float) -> None:
        """Rewrite by proposals of some kinds as long as that makes the plan better, until `stop_s` of CPU time."""
        plan, variant = self.plans[()]
        for _ in range(_ROUNDS):
            if time.process_time() > stop_s or _INTERRUPTED in plan.solver:
                return
            found = self._propose(variant, kinds)
            if found is None or not _is_better(found[0], plan):
                return
            plan, variant = found

    def _propose(self, variant: Variant, kinds: frozenset[str]) -> tuple[Plan, Variant] | None:
        """Return the plan of what is proposed for a variant; None if there is none."""
        p, wanted = self._planner, self._planner.wanted
        if variant.rewrites not in self._proposers:
            self._proposers[variant.rewrites] = Proposer(variant, p.cluster, wanted.pin, wanted.makers, p.price)
        proposed = self._proposers[variant.rewrites].propose(wanted.objective, kinds, wanted.time_limit_s)
        rewrites = (*variant.rewrites, *proposed)
        if rewrites not in self.plans:
            other = variant_of(self.plans[()][1].prepared, wanted.makers, p.price, rewrites)
            try:
                self.plans[rewrites] = p.plan(other, self._search), other
            except Infeasible:
                return None
        return self.plans[rewrites]


def _is_better(one: Plan, other: Plan) -> bool:
    return one.objective_value < other.objective_value * (1 - _MIN_GAIN)
