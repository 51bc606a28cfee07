"""A training job on a market as numbers: every fleet in closed form, and the plan of each that is asked for.

whole copies   an iteration with the model on every device of a fleet, in closed form (solve/iteration_replicas.py)
bound          what no plan's iteration on the fleet is shorter than
plans          stages, replicas, recomputation, unlike shares of one fleet
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tvmhet.cluster.market import Market
from tvmhet.cluster.spec import ClusterSpec
from tvmhet.errors import Infeasible
from tvmhet.ir.prepare import Prepared
from tvmhet.planning_training import TrainingGoal, TrainingGraph, dividing, make_training_problem
from tvmhet.plans import Plan
from tvmhet.recommending.measurements import measuring_list
from tvmhet.recommending.measuring import Campaign
from tvmhet.recommending.training_fleets import Fleet, cluster_of, fleet_of, instance_counts, prices_apart
from tvmhet.recommending.training_sure import KernelKeys, kernel_keys
from tvmhet.solve.iteration import IterationProblem
from tvmhet.solve.iteration_replicas import (
    CheapestKernels,
    cheapest_kernels,
    node_fits,
    replicated_s,
    whole_model,
    work_bounds_s,
)
from tvmhet.solve.orders import first_order
from tvmhet.solve.pack import StateGraph, predecessors, state_graph
from tvmhet.training_solve import make_training_plan

Floats = NDArray[np.float64]

#: Of the search for one fleet's iteration. With 300,000 an iteration on eight A100 short of memory took 52 % longer.
STEPS = 2_000_000
_FULL_STATES = 1500  # of the graph that bounds are computed on
_LINEAR_STATES = 6000


@dataclass(frozen=True)
class Planned:
    """One fleet's plan of an iteration, and its cluster."""

    plan: Plan
    cluster: ClusterSpec

    @property
    def iteration_s(self) -> float:
        """Seconds of an iteration: the closed form, or the simulated run where that waits longer."""
        assert self.plan.training is not None, "a plan of an iteration"
        return max(self.plan.training.iteration_s, self.plan.training.simulated_s)


@dataclass(frozen=True)
class Fleets:
    """Rows of instance counts; seconds of an iteration as whole copies (inf: they do not fit), and at least."""

    counts: NDArray[np.int64]
    copies_s: Floats
    bound_s: Floats
    complete: bool  # every fleet of the market is there


@dataclass(frozen=True)
class TrainingStudy:
    """A model's iteration as numbers on every type of a market. `plans` grows with every fleet that is planned."""

    prepared: Prepared
    graphs: tuple[TrainingGraph, ...]
    goal: TrainingGoal
    market: Market
    plans: dict[tuple[tuple[str, int], ...], Planned | Infeasible] = field(default_factory=dict)
    unused_splits: tuple[str, ...] = ()  # splits that were asked for and no plan can use, in words

    @cached_property
    def keys(self) -> KernelKeys:
        """The keys of the candidate kernels."""
        return kernel_keys(self.graphs)

    def kernel_called(self, key: str) -> tuple[str, ...]:
        """Return the names of the operators of the first candidate with this key."""
        return next(ops for (_, _, ops), known in self.keys.items() if known == key)

    def measuring_list(self, campaign: Campaign) -> str:
        """Return what to measure as JSON lines; `seconds` is to be filled in."""
        return measuring_list(campaign, self.kernel_called)

    def on(self, market: Market) -> TrainingStudy:
        """Return the same model and times on another market of the same types."""
        kept = self.plans if market.network == self.market.network else {}
        return dataclasses.replace(self, market=market, plans=kept)

    @cached_property
    def problem(self) -> IterationProblem:
        """The iteration on all machines of the market together, a group for each offer."""
        full = fleet_of(self.market, [o.max_instances for o in self.market.offers])
        cluster = cluster_of(self.market, full)
        graphs = dividing(self.graphs, self.goal.global_batch)
        return make_training_problem(graphs, cluster, cluster.groups(), {}, self.goal)

    @cached_property
    def sold(self) -> list[int]:
        """The offers that can be rented: the groups of `problem`, in order."""
        return [o for o, offer in enumerate(self.market.offers) if offer.max_instances]

    @cached_property
    def _states(self) -> list[StateGraph]:
        return [_states(self.problem, o) for o in range(len(self.problem.options))]

    @cached_property
    def alone(self) -> list[list[CheapestKernels]]:
        """The model on each group's type alone, memory aside, for each micro-batch size."""
        return [cheapest_kernels(self.problem, o, g) for o, g in enumerate(self._states)]

    @cached_property
    def fleets(self) -> Fleets:
        """Every fleet that is compared."""
        sold = self.sold
        sizes = np.array([self.market.offers[o].num_devices for o in sold])
        problem, graphs = self.problem, self._states
        options = range(len(problem.options))
        whole = [whole_model(problem, o, g) for o, g in zip(options, graphs, strict=True)]

        weights = sum(w.size_bytes for w in problem.options[0].forward.weights if w.nodes)
        state = weights * (1 + problem.gradient_ratio + problem.state_ratio)
        memory = np.array([g.memory_bytes for g in problem.groups])
        fits = [np.unique(node_fits(problem, o), axis=0) for o in options]

        def bounds(instances: NDArray[np.int64]) -> Floats:
            held = [((instances @ fit.T) > 0).all(axis=1) for fit in fits]
            each = [work_bounds_s(problem, o, graphs[o], instances * sizes) for o in options]
            least = np.min(np.where(held, each, math.inf), axis=0)
            return np.where((instances * sizes) @ memory >= state, least, math.inf)

        price = np.array([self.market.offers[o].usd_per_h for o in sold]) * bounds(np.eye(len(sold), dtype=np.int64))
        price = np.where(np.isfinite(price), price, price[np.isfinite(price)].max(initial=0.0))
        order = [int(i) for i in np.argsort(price, kind="stable")]
        limits = [self.market.offers[o].max_instances for o in sold]
        mine, complete = instance_counts(limits, order)
        copies = np.min([replicated_s(problem, o, whole[o], mine * sizes) for o in options], axis=0)
        counts = np.zeros((len(mine), len(self.market.offers)), np.int64)
        counts[:, sold] = mine
        return Fleets(counts, copies, bounds(mine), complete)

    def planned(self, fleet: Fleet) -> Planned | Infeasible:
        """Return the fleet's plan of an iteration, or that there is none."""
        key = tuple((o.key, n) for o, n in fleet)
        if key not in self.plans:
            try:
                self.plans[key] = self.plan(fleet, explain=False)
            except Infeasible as e:
                self.plans[key] = e
        return self.plans[key]

    def plan(self, fleet: Fleet, *, explain: bool = True) -> Planned:
        """Plan an iteration on a fleet. Raises Infeasible; `explain` what would mend it takes long."""
        cluster = cluster_of(self.market, prices_apart(fleet))
        made = make_training_plan(
            self.prepared, self.graphs, cluster, self.goal, {}, math.inf, max_steps=STEPS, explain=explain
        )
        return Planned(made, cluster)


def _states(problem: IterationProblem, option: int) -> StateGraph:
    """The downsets of the forward pass, where they are too many those of one order."""
    forward = problem.options[option].forward
    full = state_graph(forward, range(forward.num_nodes), full=True, max_states=_FULL_STATES)
    if full.num_states:
        return full
    order = first_order(predecessors(forward))
    return state_graph(forward, order, full=False, max_states=_LINEAR_STATES)
