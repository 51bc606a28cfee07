"""One model on one market, as numbers: times of every kernel on every type, groups, and what the solver finds on them.

model ─► candidate kernels ─► times on the market's types ─► Problem over the market's groups ─► units ─► options
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from tvmhet.cluster.market import InstanceOffer, Market
from tvmhet.cluster.nodes import Network, NodeClass
from tvmhet.cluster.spec import ClusterSpec
from tvmhet.cost.measured import MeasuredKernels
from tvmhet.cost.table import TimeTable
from tvmhet.graph.rewrites import Batch, in_words
from tvmhet.ir.prepare import Prepared
from tvmhet.planning import make_plan
from tvmhet.planning_problem import make_problem
from tvmhet.plans import Plan
from tvmhet.proposing import variant_of
from tvmhet.recommending.inferring import with_results
from tvmhet.recommending.measurements import Measured, check_known, measuring_list
from tvmhet.recommending.measuring import Campaign
from tvmhet.recommending.rewrites import best_variant
from tvmhet.recommending.space import Space, make_space, pick_offers, units_of
from tvmhet.recommending.training_fleets import one_of_each
from tvmhet.recommending.uncertainty import KernelBelief, spread
from tvmhet.solve import Objective, Problem, Solution, SolvedStage, Status, Timeline, simulate
from tvmhet.solve.ablate import Solver, together
from tvmhet.solve.evaluate import StageChoice, evaluate
from tvmhet.solve.units import Unit, Units, find_units
from tvmhet.splitting import (
    PricedSplit,
    Wish,
    never_used,
    priced_splits,
    scaled_to_part,
    split_problem,
    splits_of_groups,
)
from tvmhet.times import Candidates, time_table

MOST_OFFERS = 12  # offers that are compared in full
_INPUTS = 120  # of a simulated run: each of up to six replicas gets equally many
_SAME = 1e-9
_JOB_INPUTS = 1200  # at most, of a job that ends


@dataclass(frozen=True)
class Study:
    """A prepared model, its candidate kernels with their times, and a market of few enough offers to compare."""

    prepared: Prepared
    candidates: Candidates
    table: TimeTable
    market: Market
    note: str = ""  # what of the market was left out
    grouped: frozenset[str] | None = None  # the offers that make groups; see `make_space`
    rewrites: tuple[Batch, ...] = ()  # after which the operators are those of `prepared`
    splits: tuple[PricedSplit, ...] = ()  # that pipelines may have teams for
    unused_splits: tuple[str, ...] = ()  # what was asked for and is not among them, in words

    @cached_property
    def space(self) -> Space:
        """The groups of the market's offers."""
        return make_space(self.market, self.grouped, frozenset(s.degree for s in self.splits))

    @cached_property
    def problem(self) -> Problem:
        """The solver's problem over these groups, and teams of their devices after them."""
        return self._problem_and_splits[0]

    @cached_property
    def _problem_and_splits(self) -> tuple[Problem, list[PricedSplit]]:
        problem = problem_of(self.prepared, self.candidates, self.table, self.space)
        return split_problem(problem, self.space.groups, self.splits, self.prepared.operator_graph)

    def units(self, latency_limit_s: float = math.inf) -> Units:
        """Return the units within a latency limit."""
        return self._units if latency_limit_s == math.inf else units_of(self.problem, self.space, latency_limit_s)

    @cached_property
    def _units(self) -> Units:
        return units_of(self.problem, self.space)

    def as_simulated(self, unit: Unit, samples: int | None = None) -> Unit:
        """Return the unit with the period that a run of many inputs shows, where that is longer.

        Of a job of `samples` inputs, n of them end after latency + (n - 1) period + `late_s` at the latest: the run has
        all of them, or so many that a longer job may be run part by part, each to its end, at the pace of the run.
        """
        if len(unit.stages) == 1:
            return unit
        num = _INPUTS if samples is None else min(samples, _JOB_INPUTS)
        solution = Solution(unit.stages, unit.period_s, 0.0, Status.FEASIBLE, 0, "unit")
        line = simulate(self.problem, solution, num)
        whole_s = line.makespan_s / num if samples is not None and samples > num else 0.0
        period_s = max(line.period_s, (line.makespan_s - unit.latency_s) / max(1, num - 1), whole_s)
        period_s = period_s if period_s > unit.period_s * (1 + 1e-6) else unit.period_s
        late_s = 0.0
        if samples is not None:
            ends = np.sort(_ends_s(line, num))
            late_s = max(0.0, float((ends - unit.latency_s - np.arange(num) * period_s).max()))
        if (period_s, late_s) == (unit.period_s, unit.late_s):
            return unit
        return dataclasses.replace(unit, period_s=period_s, late_s=late_s)

    def on(self, market: Market) -> Study:
        """Return the same model and times on another market of the same types."""
        return dataclasses.replace(self, market=market)

    def beliefs(self, units: Sequence[Unit]) -> dict[tuple[int, int], KernelBelief]:
        """Return what is known of the kernels that units use, by (kernel, group)."""
        used = {(k, s.group) for u in units for s in u.stages for k in s.kernels}
        return {(k, g): self._belief(k, g) for k, g in sorted(used)}

    def _belief(self, kernel: int, group: int) -> KernelBelief:
        """A part's error is that of the whole kernel, whose time it follows; one that was given has none."""
        device_type = self.space.groups[self.problem.pool(group)].device.name
        key, known = self.candidates.keys[kernel], self.table.entry(kernel, device_type)
        entry = known
        if (team := group - len(self.space.groups)) >= 0:
            split = self._problem_and_splits[1][team]
            entry = split.entries[kernel]
            if entry.source == "given":
                key, known = f"{key} in {split.degree}", entry
        sigma = spread(known.seconds, known.low, known.high)
        family = self.candidates.descs[kernel].root.family
        return KernelBelief(entry.seconds, sigma, device_type, family, key, known.source)

    def kernel_called(self, key: str) -> tuple[str, ...]:
        """Return the names of the operators of the first candidate with this key."""
        kernel = self.candidates.kernels[self.candidates.keys.index(key)]
        return tuple(self.prepared.operator_graph.operators[i].name for i in kernel.ops)

    def measuring_list(self, campaign: Campaign) -> str:
        """Return what to measure as JSON lines; `seconds` is to be filled in."""
        return measuring_list(campaign, self.kernel_called)

    def plan(self, unit: Unit, *, as_it_is: bool = False) -> tuple[Plan, ClusterSpec]:
        """Return the plan of one unit, and the cluster of its devices; never slower than the unit.

        Of the unit's own stages if `as_it_is`, as a limit on the latency asks for; else of those with most results.
        """
        nodes, index = [NodeClass("gateway", ())], dict[int, int]()
        for g, count in enumerate(unit.devices):
            if count:
                node = next(n for n in self.space.cluster.nodes if n.name == self.space.groups[g].node)
                inside = node.count == 1 and node.num_devices > 1
                devices = ((node.devices[0][0], count if inside else 1),)
                index[g] = len(index)
                nodes.append(dataclasses.replace(node, devices=devices, count=1 if inside else count))
        cluster = ClusterSpec(tuple(nodes), Network(self.market.network))
        teams = [(g, s.degree) for g, s in splits_of_groups(cluster.groups(), self.splits)]

        def group_of(stage: SolvedStage) -> int:
            group = self.problem.groups[stage.group]
            if group.team_of < 0:
                return index[stage.group]
            return len(index) + teams.index((index[group.team_of], int(group.degree)))

        stages = tuple(StageChoice(s.kernels, group_of(s), s.num_replicas) for s in unit.stages)
        plan = make_plan(
            self.prepared,
            self.candidates.kernels,
            self.table,
            cluster,
            Objective.THROUGHPUT,
            {},
            30.0,
            0,
            known=stages,
            search=partial(_only, stages) if as_it_is else together,
            splits=self.splits,
        )
        notes = (*plan.notes, *in_words(self.rewrites))
        return dataclasses.replace(plan, rewrites=self.rewrites, notes=notes), cluster


def _only(known: Sequence[StageChoice], problem: Problem, objective: Objective, solver: Solver) -> Solution:
    """These stages, with the bound of all others."""
    stages, value = evaluate(problem, known, objective)
    found = solver(problem, objective)
    status = Status.OPTIMAL if value <= found.lower_bound * (1 + _SAME) else Status.FEASIBLE
    return dataclasses.replace(found, stages=stages, objective=value, status=status, solver="stages known before")


def _ends_s(line: Timeline, num_inputs: int) -> NDArray[np.float64]:
    """The end of each input of a run."""
    ends = np.zeros(num_inputs)
    for event in line.events:
        ends[event.input_index] = max(ends[event.input_index], event.finish_s)
    return ends


def make_study(
    prepared: Prepared,
    makers: Sequence[str],
    market: Market,
    database: MeasuredKernels | None,
    measurements: Sequence[Measured] = (),
    splits: Sequence[Wish] = (),
) -> Study:
    """Return the study of a model on a market; of large markets only the offers that cost least for what they do.

    `splits`: pipelines may have teams of devices, whose times follow those of whole kernels.
    """
    seen: set[str] = set()

    def price(_: Prepared, candidates: Candidates) -> TimeTable:
        seen.update(candidates.keys)
        mine = [m for m in measurements if m.key in candidates.keys]
        devices = market.device_types()
        return with_results(time_table(candidates, devices, database), candidates, devices, mine)

    variant = best_variant(variant_of(prepared, makers, price), market.device_types(), price, makers)
    check_known(measurements, seen)
    study = study_with(variant.prepared, variant.candidates, variant.table, market)
    return with_teams(dataclasses.replace(study, rewrites=variant.rewrites), splits)


def with_teams(study: Study, splits: Sequence[Wish]) -> Study:
    """Return the study with splits that pipelines may have teams for. Raises BadInput."""
    if not splits:
        return study
    part = scaled_to_part(study.table, study.candidates, study.market.device_types())
    graph, cluster = study.prepared.operator_graph, one_of_each(study.market)
    priced = priced_splits(splits, graph, study.candidates, cluster, part)
    return dataclasses.replace(study, splits=priced, unused_splits=never_used(splits, priced))


def study_with(prepared: Prepared, candidates: Candidates, table: TimeTable, market: Market) -> Study:
    """Return the study with the times of a table, which has all types of the market."""
    whole = Study(prepared, candidates, table, market)
    if len(market.offers) <= MOST_OFFERS:
        return whole
    rates = _rates_alone(whole)
    chosen, grouped, note = pick_offers(market, MOST_OFFERS, lambda name: rates.get(name, 0.0))
    return Study(prepared, candidates, table, chosen, note, grouped)


def _rates_alone(study: Study) -> dict[str, float]:
    """Results per second of one device of each type that holds the model."""
    offers = tuple(InstanceOffer(d.name, d, 1, 0.0, 1) for d in study.market.device_types())
    space = make_space(dataclasses.replace(study.market, offers=offers))
    units = find_units(problem_of(study.prepared, study.candidates, study.table, space), max_devices=1)
    return {space.groups[u.devices.index(1)].device.name: u.rate_per_s for u in units.units}


def problem_of(prepared: Prepared, candidates: Candidates, table: TimeTable, space: Space) -> Problem:
    """Return the problem of a model on the groups of a market."""
    columns = [table.seconds[:, table.column(g.device.name)] for g in space.groups]
    seconds = np.stack(columns, axis=1)
    return make_problem(prepared.operator_graph, candidates.kernels, seconds, space.cluster, space.groups, {})
