"""Training jobs: every fleet of a market in closed form, and the planned iteration of those that matter.

    whole copies   an iteration with the model on every device of a fleet, in closed form (solve/iteration_replicas.py)
    bound          what no plan's iteration on the fleet is shorter than
    plans          stages, replicas, recomputation, unlike shares: one after the other for the fleet that would be best
                   if planning gained there what it gained on its like, until that fleet is planned already; on markets
                   of few fleets each whose bound leaves it a chance

The best fleet of one type is sought in the same way first, so that it is not compared by halves. The answer is always a
planned fleet. A fleet that is not planned counts as whole copies; where those do not fit, it is no option.
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
from tvmhet.recommending.job import Goal, Job
from tvmhet.recommending.measurements import measuring_list
from tvmhet.recommending.measuring import Campaign
from tvmhet.recommending.option import Option, make_option
from tvmhet.recommending.training_fleets import Fleet, cluster_of, fleet_of, instance_counts
from tvmhet.recommending.training_sure import KernelKeys, kernel_keys
from tvmhet.solve.iteration import IterationProblem
from tvmhet.solve.iteration_replicas import CheapestKernels, cheapest_kernels, replicated_s, whole_model, work_bounds_s
from tvmhet.solve.orders import linear_orders
from tvmhet.solve.pack import StateGraph, predecessors, state_graph
from tvmhet.training_solve import make_training_plan

Floats = NDArray[np.float64]

MOST_SINGLE = 8  # fleets of one type that are planned for a job
MOST_PLANS = 12  # and fleets of any types
MOST_FAILURES = 8  # fleets that turn out too small, in each of both searches
FEW_FLEETS = 40  # of a market: each whose bound is below the best is planned
STEPS = 1_000_000  # of the search for one fleet's iteration
_FULL_STATES = 1500  # of the graph that bounds are computed on
_LINEAR_STATES = 6000
_SAME = 1e-9
_HOPED = 0.85  # of whole copies' seconds, where no fleet of the kind is planned yet


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

        def bounds(instances: NDArray[np.int64]) -> Floats:
            each = [work_bounds_s(problem, o, graphs[o], instances * sizes) for o in options]
            return np.where((instances * sizes) @ memory >= state, np.min(each, axis=0), math.inf)

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
        cluster = cluster_of(self.market, fleet)
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
    order = linear_orders(predecessors(forward))[0]
    return state_graph(forward, order, full=False, max_states=_LINEAR_STATES)


@dataclass
class FleetSearch:
    """One job on a study: which fleets to plan next, and what is known of each."""

    study: TrainingStudy
    job: Job

    def __post_init__(self) -> None:
        fleets = self.study.fleets
        offers = self.study.market.offers
        self.seconds = fleets.copies_s.copy()  # of an iteration, as known
        self.least_s = fleets.bound_s.copy()
        names = sorted({o.device.name for o in offers})
        has = np.array([[o.device.name == n for n in names] for o in offers])
        kinds, kind_of = np.unique(fleets.counts @ has > 0, axis=0, return_inverse=True)
        self.kinds = [frozenset(n for n, h in zip(names, row, strict=True) if h) for row in kinds]
        self.kind_of = kind_of.reshape(-1)
        devices = fleets.counts @ np.array([o.num_devices for o in offers])
        like = np.stack([self.kind_of, np.log2(devices).astype(np.int64)], axis=1)
        self.like_of = np.unique(like, axis=0, return_inverse=True)[1].reshape(-1)  # types, and devices within twice
        self.single = np.array([len(k) == 1 for k in self.kinds])[self.kind_of]
        self.usd_per_h = fleets.counts @ np.array([o.usd_per_h for o in offers])
        self.power_w = fleets.counts @ np.array([o.power_w for o in offers])
        self.spot = fleets.counts @ np.array([int(o.spot) for o in offers])
        self.planned: dict[int, Planned | Infeasible] = {}
        keys = [o.key for o in offers]
        for known in list(self.study.plans):
            if {k for k, _ in known} <= set(keys):
                counts = [dict(known).get(k, 0) for k in keys]
                for row in np.flatnonzero((fleets.counts == counts).all(axis=1)):
                    self._know(int(row))

    def run(self, most_single: int = MOST_SINGLE, most: int = MOST_PLANS) -> FleetSearch:
        """Plan fleets of one type, then of any."""
        self._seek(self.single, most_single)
        self._seek(np.ones_like(self.single), most)
        for kind, name in enumerate(self.kinds):  # a type that holds the model in stages only is shown too
            if len(name) == 1 and not np.isfinite(self.seconds[self.kind_of == kind]).any():
                self._seek(self.kind_of == kind, 1)
        if not np.isfinite(self.seconds).any():
            self._know(self.largest())
        return self

    def largest(self) -> int:
        """The fleet with the most memory."""
        offers = self.study.market.offers
        return int((self.study.fleets.counts @ [o.num_devices * o.device.memory_bytes for o in offers]).argmax())

    def _seek(self, allowed: NDArray[np.bool_], most: int) -> None:
        few = len(self.seconds) <= FEW_FLEETS
        left, failures = (len(self.seconds), len(self.seconds)) if few else (most, MOST_FAILURES)
        while left > 0 and failures > 0:
            row = self._best(self.expected_s(unknown=1.0), allowed)
            if few and (row is None or row in self.planned):
                row = self._open(allowed)
            if row is None or row in self.planned:
                break
            self._know(row)
            found = isinstance(self.planned[row], Planned)
            left, failures = left - found, failures - (not found)
        while (row := self._best(self.seconds, allowed)) is not None and row not in self.planned:
            self._know(row)  # the answer has a plan, whatever was expected of others

    def _know(self, row: int) -> None:
        found = self.study.planned(self.fleet(row))
        self.planned[row] = found
        if isinstance(found, Infeasible):
            fleets = self.study.fleets
            less = (fleets.counts <= fleets.counts[row]).all(axis=1) & np.isinf(fleets.copies_s)
            less[row] = True
            self.seconds[less] = self.least_s[less] = math.inf
        else:
            self.seconds[row] = found.iteration_s
            self.least_s[row] = max(self.least_s[row], found.plan.lower_bound)

    def expected_s(self, unknown: float = math.inf) -> Floats:
        """Seconds of an iteration, where there is no plan if planning gained what it gained on a fleet's like.

        Where copies do not fit and no like is planned, they are the bound times `unknown`.
        """
        fleets = self.study.fleets
        made = [r for r, p in self.planned.items() if isinstance(p, Planned)]
        gain = np.full(self.like_of.max() + 1, np.nan)  # planned over whole copies, of fleets of a kind
        slack = gain.copy()  # planned over bound
        for r in made:
            k = self.like_of[r]
            if math.isfinite(fleets.copies_s[r]):
                gain[k] = np.fmin(gain[k], self.seconds[r] / fleets.copies_s[r])
            slack[k] = np.fmin(slack[k], self.seconds[r] / self.least_s[r] if self.least_s[r] > 0 else 1.0)
        gain, slack = np.where(np.isnan(gain), _HOPED, gain), np.where(np.isnan(slack), unknown, slack)
        staged = np.maximum(self.least_s, 1e-300) * slack[self.like_of]
        guess = np.where(np.isfinite(fleets.copies_s), fleets.copies_s * gain[self.like_of], staged)
        guess = np.maximum(guess, self.least_s)
        rows = list(self.planned)
        guess[rows] = self.seconds[rows]
        return guess

    def _open(self, allowed: NDArray[np.bool_]) -> int | None:
        """A fleet without a plan whose bound is below the best so far, the lowest first; None if there is none."""
        bound = self.least_s.copy()
        bound[list(self.planned)] = math.inf
        row, best = self._best(bound, allowed), self._best(self.seconds, allowed)
        if row is None or best is None:
            return row
        (least_miss, least), (miss, goal) = self._rank(bound, row), self._rank(self.seconds, best)
        return row if (least_miss, least) < (miss, goal * (1 - _SAME)) else None

    def _rank(self, seconds: Floats, row: int) -> tuple[float, float]:
        """By how much a row misses the limits, then its goal: the lesser is better."""
        figures = self._figures(seconds)
        return float(self._misses(figures)[row]), float(self._goal(figures)[row])

    def _best(self, seconds: Floats, allowed: NDArray[np.bool_]) -> int | None:
        """The best row for the job at these seconds; where none keeps the limits, the one that misses them least."""
        figures = self._figures(seconds)
        goal, hours = self._goal(figures), figures[0]
        miss = self._misses(figures)
        rows = np.flatnonzero(allowed & np.isfinite(goal) & np.isfinite(miss))
        if not len(rows):
            return None
        keys = (self.usd_per_h[rows], hours[rows], np.round(goal[rows], 12), miss[rows])
        return int(rows[np.lexsort(keys)[0]])

    def _misses(self, figures: tuple[Floats, Floats, Floats]) -> Floats:
        """By how much each row misses the limits, as a factor; 1 where it keeps them."""
        miss = np.ones(len(figures[0]))
        for name, figure in zip(("deadline_h", "budget_usd"), figures, strict=False):
            if (limit := self.job.limits().get(name)) is not None:
                miss = np.maximum(miss, figure / limit)
        return np.where(miss <= 1 + _SAME, 1.0, miss)

    def _figures(self, seconds: Floats) -> tuple[Floats, Floats, Floats]:
        assert self.job.samples is not None and self.job.global_batch is not None, "checked by Job"
        work_s = math.ceil(self.job.samples / self.job.global_batch) * seconds
        hours = np.full(len(seconds), math.inf)
        real = np.isfinite(work_s)
        running = self.study.market.running
        hours[real] = [running.hours(float(w), int(n)) for w, n in zip(work_s[real], self.spot[real], strict=True)]
        usd, kwh = np.full_like(hours, math.inf), np.full_like(hours, math.inf)
        usd[real], kwh[real] = self.usd_per_h[real] * hours[real], self.power_w[real] * hours[real] / 1e3
        return hours, usd, kwh

    def fleet(self, row: int) -> Fleet:
        """Return the fleet of a row."""
        return fleet_of(self.study.market, self.study.fleets.counts[row])

    def option(self, row: int, seconds: Floats | None = None) -> Option:
        """Return what a row takes and costs, at its seconds as known by default; its one pipeline is the row."""
        iteration_s = float((self.seconds if seconds is None else seconds)[row])
        rate = self.study.goal.global_batch / max(iteration_s, 1e-12)
        return make_option(self.job, self.study.market.running, self.fleet(row), ((row, 1),), rate, iteration_s)

    def options(self, seconds: Floats | None = None) -> list[Option]:
        """Return the options that are worth a look: of each set of types those that no other of it beats in time and
        rent, and all that are planned. `seconds` of each row are as known by default."""
        seconds = self.seconds if seconds is None else seconds
        kept: list[int] = []
        order = np.lexsort((seconds, self.usd_per_h))
        least = np.full(len(self.kinds), math.inf)
        for row in order[np.isfinite(seconds[order])]:
            kind = self.kind_of[row]
            if seconds[row] < least[kind] * (1 - _SAME) or row in self.planned:
                kept.append(int(row))
                least[kind] = min(least[kind], seconds[row])
        return [self.option(r, seconds) for r in sorted(kept)]

    def bound(self) -> float:
        """Return a value of the goal that no fleet compared goes below within the limits, whatever its plan."""
        figures = self._figures(self.least_s)
        keeps = np.isfinite(self.least_s)
        for name, figure in zip(("deadline_h", "budget_usd"), figures, strict=False):
            if (limit := self.job.limits().get(name)) is not None:
                keeps &= figure <= limit * (1 + _SAME)
        return float(self._goal(figures)[keeps].min(initial=math.inf))

    def _goal(self, figures: tuple[Floats, Floats, Floats]) -> Floats:
        return figures[(Goal.TIME, Goal.PRICE, Goal.ENERGY).index(self.job.goal)]


def refused(search: FleetSearch) -> Infeasible:
    """Return why no fleet was found to train the model on: the reason of the fleet with most memory."""
    try:
        search.study.plan(search.fleet(search.largest()))
    except Infeasible as error:
        return error
    raise AssertionError("else it would be an option")
