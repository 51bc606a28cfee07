"""The searches that `solve` runs on a problem, phase after phase; each improves one record of plan and bound.

    one device group ──► stages over states ──► lower bounds ──► refinement ──► branch and bound (small problems),
                                                                            └──► kernels of each stage again (others)

A phase yields where the search may stop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tvmhet.solve.bounds import cheapest_cover, latency_bound_s, tails_s, throughput_bound_s
from tvmhet.solve.evaluate import StageChoice, Uses, evaluate
from tvmhet.solve.exact_cover import covered_again, exact_cover
from tvmhet.solve.floor import floor_bound_s
from tvmhet.solve.latency import latency_start
from tvmhet.solve.objective import Objective
from tvmhet.solve.orders import first_order
from tvmhet.solve.pack import StateGraph, allowed_times, predecessors
from tvmhet.solve.pipeline import Found, StageSearch, crossing_bytes, near_cuts, pick_cuts, progress_s
from tvmhet.solve.problem import Problem
from tvmhet.solve.state_graphs import FULL_STATES, all_graphs
from tvmhet.solve.virtual import virtual_bound_s

_BOUND_STATES = 800  # up to here the bound knows every downset
_EXACT_STATES = 300  # up to here branch and bound is tried
_EXACT_STEPS = 150_000  # of it
_FEW_LABELS = 16  # of the first search over a graph
_FEWEST_LABELS = 8  # of another where its plan is far from the bound
_MAX_LABELS = {Objective.THROUGHPUT: 64, Objective.LATENCY: 48}
_REFINEMENTS = 5  # searches among cuts near those of the best answer so far
_KEPT = 8  # plans that are simulated at most
PROVED = 1e-6  # a gap up to this is called optimal
_FAR = 0.05  # gap from which another search, and the linear programs of assign_bound.py, are worth their time


@dataclass
class Record:
    """The best plan and bound so far. Only `offer` changes the plan, in one assignment: Ctrl-C finds it whole."""

    best: tuple[Found, str] | None = None  # with the name of the search
    kept: tuple[tuple[Found, str], ...] = ()  # the few best, each other stages
    lower_s: float = 0.0
    steps: int = 0

    @property
    def value_s(self) -> float:
        """The objective of the best plan; inf without one."""
        return self.best[0].objective_s if self.best else math.inf

    @property
    def proved(self) -> bool:
        """Is the best plan known to be optimal?"""
        return self.best is not None and self.value_s - self.lower_s <= PROVED * self.value_s

    def offer(self, found: Found | None, name: str) -> None:
        """Keep `found` if it is the best so far."""
        if found is not None:
            self.steps += found.steps
            self.best = (found, name) if found.objective_s < self.value_s else self.best
            if all(found.stages != other.stages for other, _ in self.kept):
                self.kept = tuple(sorted((*self.kept, (found, name)), key=lambda p: p[0].objective_s)[:_KEPT])


def is_far(record: Record) -> bool:
    """Is there a plan, far from the bound?"""
    return record.best is not None and record.value_s - record.lower_s > _FAR * record.value_s


def phases(problem: Problem, objective: Objective, record: Record, max_steps: int) -> Iterator[None]:
    """Improve `record` phase by phase; each `yield` is a place to stop."""
    time_s = allowed_times(problem)
    if problem.num_nodes >= FULL_STATES:  # states of so many nodes take a tenth of a second
        alone = _each_by_itself(problem)
        record.offer(_whole(problem, objective, time_s, lambda _: alone), "whole model on one group, nothing fused")
        yield
    graphs: list[StateGraph] = []
    for graph in all_graphs(problem):
        if not graphs:
            covers = partial(_cheapest_on, graph, time_s)
            record.offer(_whole(problem, objective, time_s, covers), "whole model on one group")
            yield
            if not graph.full and sum(g.num_devices for g in problem.groups) == 1:
                _alone(problem, objective, time_s, record)
                yield
        graphs.append(graph)
    if not graphs:
        return
    complete = next((g for g in graphs if not g.truncated), None)
    bound = throughput_bound_s if objective is Objective.THROUGHPUT else latency_bound_s
    record.lower_s = bound(problem, complete, time_s) if complete else 0.0
    if problem.wires and objective is Objective.THROUGHPUT:
        yield
        record.lower_s = max(record.lower_s, virtual_bound_s(problem, time_s))
    if objective is Objective.LATENCY:
        yield
        quicker, label, proved_s = latency_start(problem, graphs[0], time_s, record.best[0] if record.best else None)
        record.offer(quicker, label)
        record.lower_s = max(record.lower_s, proved_s)
    for i, graph in enumerate(graphs):
        yield
        search = StageSearch(problem, graph, time_s, objective)
        name = "stages over all downsets" if graph.full else "stages over linear orders"
        yield from _stages(search, record, name, max_steps // len(graphs), time_s, is_first=i == 0)
    yield
    if graphs[0].full:
        _branch(problem, graphs[0], time_s, objective, record, max_steps)
    elif record.best:
        found, name = record.best
        again = covered_again(problem, time_s, found.stages, objective)
        record.offer(Found(*again, -math.inf, 0), f"{name}, kernels chosen again")


def _raise_bound(search: StageSearch, record: Record, time_s: NDArray[np.float64]) -> None:
    """Raise the lower bound by what stages take at least: over all downsets while they are few, else over an order."""
    if search.graph.full and search.graph.num_states <= _BOUND_STATES:
        record.lower_s = search.bound_s(record.lower_s, record.value_s)
    else:
        record.lower_s = floor_bound_s(search.problem, time_s, record.lower_s, record.value_s)


def _branch(
    problem: Problem,
    full: StateGraph,
    time_s: NDArray[np.float64],
    objective: Objective,
    record: Record,
    max_steps: int,
) -> None:
    """Branch and bound over all downsets, where they are few."""
    search = StageSearch(problem, full, time_s, objective)
    budget = min(max_steps, _EXACT_STEPS) if full.num_states <= _EXACT_STATES else 0
    tails = tails_s(problem, time_s.min(axis=1))
    found, exhaustive, _ = search.exact(record.value_s, tails, budget)
    record.offer(found, "branch and bound")
    if exhaustive and record.best:
        record.lower_s = record.value_s


def _whole(
    problem: Problem, objective: Objective, time_s: NDArray[np.float64], cover_on: Callable[[int], Sequence[int]]
) -> Found | None:
    """Return the best plan with a single stage on one group, replicated where that helps: a first incumbent.

    `cover_on` gives the kernels for a group, none where it has none.
    """
    tried = []
    for g, group in enumerate(problem.groups):
        if group.num_devices > 0 and (cover := tuple(cover_on(g))):
            replicas = group.num_devices if objective is Objective.THROUGHPUT else 1
            tried.append((float(time_s[list(cover), g].sum()) / replicas, g, cover, replicas))
    best: Found | None = None
    uses = Uses.of(problem)
    for least_s, g, cover, replicas in sorted(tried):
        if not least_s < (best.objective_s if best else math.inf):
            break
        stages, value = evaluate(problem, (StageChoice(cover, g, replicas),), objective, uses)
        fits = stages[0].memory_bytes <= problem.groups[g].memory_bytes
        if fits and math.isfinite(value) and (best is None or value < best.objective_s):
            best = Found(stages, value, -math.inf, 0)
    return best


def _alone(problem: Problem, objective: Objective, time_s: NDArray[np.float64], record: Record) -> None:
    """Offer the plan of a problem with one device, which its cheapest kernels make, if they fit; raise the bound."""
    group = next(g for g, x in enumerate(problem.groups) if x.num_devices > 0)
    cover = exact_cover(problem, time_s[:, group])
    if not cover.kernels:
        return
    record.offer(_whole(problem, objective, time_s, lambda _: cover.kernels), "the cheapest kernels of one device")
    stages, value_s = evaluate(problem, (StageChoice(cover.kernels, group),), objective)
    record.lower_s = max(record.lower_s, value_s - max(0.0, stages[0].compute_s - cover.least_s))


def _cheapest_on(graph: StateGraph, time_s: NDArray[np.float64], group: int) -> Sequence[int]:
    return cheapest_cover(graph, np.ascontiguousarray(time_s[:, group]))


def _each_by_itself(problem: Problem) -> tuple[int, ...]:
    """Return a kernel for every node alone, in an order that runs; () where a node has none."""
    own = {k.nodes[0]: i for i, k in enumerate(problem.kernels) if len(k.nodes) == 1}
    order = first_order(predecessors(problem))
    return tuple(own[v] for v in order) if len(own) == problem.num_nodes == len(order) else ()


def _stages(
    search: StageSearch, record: Record, name: str, max_steps: int, time_s: NDArray[np.float64], is_first: bool
) -> Iterator[None]:
    """Search one state graph for something better: few labels, then more, then among cuts near the best ones."""
    problem, graph = search.problem, search.graph
    crossing = crossing_bytes(problem, graph)
    progress = progress_s(graph, time_s.min(axis=1))
    cuts = pick_cuts(crossing, progress, _num_cuts(problem, search.objective, max_steps))
    most = _MAX_LABELS[search.objective]
    best: Found | None = None
    if search.objective is Objective.THROUGHPUT:
        best = search.over(cuts, record.lower_s, _below(record.value_s), _FEW_LABELS, max_steps // 8)
        record.offer(best, name)
        yield
        if is_first:
            _raise_bound(search, record, time_s)
            yield
    found = search.over(cuts, record.lower_s, _below(record.value_s), most, max_steps // 2)
    record.offer(found, name)
    if len(cuts) == graph.num_states:
        if found and search.knows_all(cuts) and _dp_is_exact(problem, search.objective):
            record.lower_s = max(record.lower_s, found.proved_s)
        return
    best = found or best
    limits = [most]
    if search.objective is Objective.THROUGHPUT and is_far(record):
        yield
        limits = [_FEWEST_LABELS, most]  # the fewer, the more limits on the load are tried in the same steps
        found = search.over(cuts, record.lower_s, _below(record.value_s), _FEWEST_LABELS, max_steps // 8)
        record.offer(found, name)
        best = found or best
    for g, group in enumerate(problem.groups):  # with many groups the label limit may hide even these
        if 0 < group.num_devices < sum(d.num_devices for d in problem.groups):
            alone = search.over(cuts, record.lower_s, _below(record.value_s), most, max_steps // 8, only=g)
            record.offer(alone, name)
            best = alone or best
    for limit in limits:
        for _ in range(_REFINEMENTS):
            yield
            if best is None or len(best.stages) == 1:
                break
            near = near_cuts(search.cuts_of(best), crossing, progress, len(cuts))
            finer = search.over(near, record.lower_s, _below(record.value_s), limit, max_steps // 8, start=best)
            record.offer(finer, name)
            if finer is None:
                break
            best = finer


def _below(value_s: float) -> float:
    return value_s * (1 - 1e-9)


def _num_cuts(problem: Problem, objective: Objective, max_steps: int) -> int:
    """How many cuts the step budget pays for: a few searches of cuts^2 / 2 * groups * labels each."""
    groups = sum(g.num_devices > 0 for g in problem.groups)
    combinations = math.prod(1 + max(0, g.num_devices) for g in problem.groups)
    labels = min(_MAX_LABELS[objective], max(1, combinations // 4))
    runs = 8 if objective is Objective.THROUGHPUT else 25
    return max(32, min(400, math.isqrt(max_steps * 2 // (runs * groups * labels))))


def _dp_is_exact(problem: Problem, objective: Objective) -> bool:
    """Does the stage search's own bound hold for every plan? With unlike links it does not."""
    if objective is Objective.LATENCY or problem.wires:
        return False
    return len({(x.latency_s, x.byte_per_s) for row in problem.links for x in row}) == 1
