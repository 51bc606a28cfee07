"""Training jobs: the fleets that are compared, and the planned iteration of each.

    fleets    each offer alone: 1, 2, 4 or 8 instances; of the best `PAIRED` types, two: 1, 2 or 4 instances of each
              type's cheapest offer
    bound     no plan's iteration on a fleet is shorter than its work bound, so no fleet is faster or cheaper than that
    plans     in order of the bounds, those that may keep the limits first; a fleet is left out if one that is planned
              beats its bound in time and price (a fleet of one type: if one of the same type does)

Single types come first, so that each has its best; at most `MOST_SINGLE` and `MOST_MIXED` are planned.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import tvm

from tvmhet.cluster.market import InstanceOffer, Market
from tvmhet.cluster.nodes import Network, NodeClass
from tvmhet.cluster.spec import ClusterSpec
from tvmhet.cost.measured import MeasuredKernels
from tvmhet.errors import Infeasible
from tvmhet.ir.model import Model
from tvmhet.ir.prepare import Prepared
from tvmhet.ir.training_model import TrainingModel
from tvmhet.pipeline import _training_graph
from tvmhet.planning_training import TrainingGoal, TrainingGraph, dividing, make_training_plan, make_training_problem
from tvmhet.plans import Plan
from tvmhet.recommending.job import Job
from tvmhet.recommending.option import Option, best, make_option, meets, value
from tvmhet.solve.iteration_search import option_bound_s
from tvmhet.solve.pack import StateGraph, state_graph
from tvmhet.training_times import optimizer_name

Fleet = tuple[tuple[InstanceOffer, int], ...]

COUNTS = (1, 2, 4, 8)
PAIR_COUNTS = (1, 2, 4)
PAIRED = 5
MOST_SINGLE = 24
MOST_MIXED = 16
STEPS = 1_000_000  # of the search for one fleet's iteration
_FULL_STATES = 1500  # of the graph that the work bound is computed on


@dataclass(frozen=True)
class Planned:
    """One fleet with its plan of an iteration, and what the job takes and costs on it."""

    option: Option
    plan: Plan
    cluster: ClusterSpec


@dataclass(frozen=True)
class TrainingStudy:
    """A model's iteration as numbers on every type of a market."""

    prepared: Prepared
    graphs: tuple[TrainingGraph, ...]
    goal: TrainingGoal
    market: Market
    states: StateGraph

    def cluster(self, fleet: Fleet) -> ClusterSpec:
        """Return the fleet as a cluster; the first machine is a gateway without devices, which holds the data."""
        return cluster_of(self.market, fleet)

    def bound_s(self, fleet: Fleet) -> float:
        """Return seconds that no iteration on the fleet is shorter than; 0 where the model is too wide to say."""
        fitting = dividing(self.graphs, self.goal.global_batch)
        cluster = self.cluster(fleet)
        problem = make_training_problem(fitting, cluster, cluster.groups(), {}, self.goal)
        states = [self.states] if self.states.num_states else []
        return min(option_bound_s(problem, o, states) for o in range(len(fitting)))

    def plan(self, fleet: Fleet) -> Plan:
        """Return the plan of an iteration on the fleet. Raises Infeasible with the reason."""
        cluster = self.cluster(fleet)
        return make_training_plan(self.prepared, self.graphs, cluster, self.goal, {}, math.inf, max_steps=STEPS)


def make_training_study(
    models: Sequence[Model | TrainingModel | tvm.IRModule],
    market: Market,
    goal: TrainingGoal,
    makers: Sequence[str],
    database: Path | None,
) -> TrainingStudy:
    """Return the study of a model (at one batch size or several) on a market."""
    steps = [m for m in models if isinstance(m, TrainingModel)]
    if steps:
        goal = dataclasses.replace(goal, optimizer=optimizer_name(steps[0].optimizer))
    every = cluster_of(market, tuple((o, 1) for o in market.offers if o.max_instances))
    with closing(MeasuredKernels(database)) as measured:
        ready = [_training_graph(m, measured, every, makers) for m in models]
    graphs = tuple(g for _, g in ready)
    one = dataclasses.replace(goal, global_batch=graphs[0].size)
    forward = make_training_problem(graphs[:1], every, every.groups(), {}, one).options[0].forward
    states = state_graph(forward, range(forward.num_nodes), full=True, max_states=_FULL_STATES)
    return TrainingStudy(ready[0][0], graphs, goal, market, states)


def cluster_of(market: Market, fleet: Fleet) -> ClusterSpec:
    """Return whole instances of a market as a cluster behind a gateway without devices."""
    nodes = [NodeClass("gateway", ())]
    for offer, count in fleet:
        device = dataclasses.replace(offer.device, usd_per_h=offer.usd_per_h / offer.num_devices)
        nodes.append(NodeClass(offer.key, ((device, offer.num_devices),), count, offer.link))
    return ClusterSpec(tuple(nodes), Network(market.network))


def single_fleets(market: Market) -> list[Fleet]:
    """Return every offer alone, 1, 2, 4 or 8 instances within its limit."""
    return [((o, n),) for o in market.offers for n in COUNTS if n <= o.max_instances]


def mixed_fleets(market: Market, types: Sequence[str]) -> list[Fleet]:
    """Return two of these types: 1, 2 or 4 instances of the offer with each type's cheapest device."""
    offers = [o for o in market.offers if o.max_instances]
    cheapest = [
        min(
            (o for o in offers if o.device.name == t), key=lambda o: (o.usd_per_h / o.num_devices, o.num_devices, o.key)
        )
        for t in types
    ]
    return [
        ((a, n), (b, m))
        for a, b in itertools.combinations(cheapest, 2)
        for n, m in itertools.product(PAIR_COUNTS, PAIR_COUNTS)
        if n <= a.max_instances and m <= b.max_instances
    ]


def plan_fleets(study: TrainingStudy, job: Job) -> tuple[list[Planned], list[str]]:
    """Return the planned fleets and what was left out. Raises Infeasible if the model can be trained on none."""
    singles, refused, left = _planned(study, job, single_fleets(study.market), [], MOST_SINGLE)
    order = _types_in_order(study.market, job, [p.option for p in singles])
    mixed, refused_mixed, left_mixed = _planned(study, job, mixed_fleets(study.market, order), singles, MOST_MIXED)
    made = singles + mixed
    if not made:
        raise (refused_mixed + refused)[-1]
    notes = ["fleets compared: 1, 2, 4 or 8 instances of one offer, and 1, 2 or 4 of each of two types"]
    if left + left_mixed:
        notes.append(f"{left + left_mixed} more fleets were not planned: those with the least promising bounds")
    return made, notes


def _types_in_order(market: Market, job: Job, singles: Sequence[Option]) -> list[str]:
    """The types to mix: those that do best alone, then those that hold the model only with others."""

    def rank(name: str) -> tuple[float, str]:
        alone = [o for o in singles if set(o.devices) == {name}]
        found = best(job, alone, {})
        return (math.inf if found is None else value(job, found), name)

    names = sorted({o.device.name for o in market.offers if o.max_instances}, key=rank)
    return names[:PAIRED]


def _planned(
    study: TrainingStudy, job: Job, fleets: Sequence[Fleet], known: Sequence[Planned], most: int
) -> tuple[list[Planned], list[Infeasible], int]:
    """Plans of fleets in order of the job's goal at their bounds; refusals; how many were not looked at."""
    ideal = [_option(study, job, fleet, study.bound_s(fleet)) for fleet in fleets]

    def rank(i: int) -> tuple[bool, float, float, str]:
        return not meets(ideal[i], job.limits()), value(job, ideal[i]), ideal[i].cost(), ideal[i].fleet

    order = sorted(range(len(fleets)), key=rank)
    made: list[Planned] = []
    refused: list[Infeasible] = []
    left = 0
    for i in order:
        if _beaten(ideal[i], [p.option for p in (*known, *made)]):
            continue
        if len(made) + len(refused) >= most:
            left += 1
            continue
        try:
            plan = study.plan(fleets[i])
        except Infeasible as e:
            refused.append(e)
        else:
            made.append(Planned(_option(study, job, fleets[i], plan.latency_s), plan, study.cluster(fleets[i])))
    return made, refused, left


def _beaten(ideal: Option, planned: Sequence[Option]) -> bool:
    """Does a planned fleet (of the same type, for a single type) do as well as the best that this one could?"""
    rivals = [o for o in planned if o.devices.keys() == ideal.devices.keys()] if ideal.is_homogeneous else planned
    return any(o.time() <= ideal.time() and o.cost() <= ideal.cost() for o in rivals)


def _option(study: TrainingStudy, job: Job, fleet: Fleet, iteration_s: float) -> Option:
    rate = study.goal.global_batch / max(iteration_s, 1e-12)
    return make_option(job, study.market.running, fleet, (), rate, iteration_s)
