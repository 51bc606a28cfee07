"""`solve`: the entry point that chooses the searches for a problem, keeps the best answer and states its bound.

    one device group ──► stages over states ──► lower bounds ──► refinement ──► branch and bound (small problems)

Each phase leaves the best plan and the best bound so far in one record, so a limit or Ctrl-C between two of them, or
inside one, costs nothing that was found.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tvmhet.errors import BadInput
from tvmhet.solve.apart_bound import apart_bound_s
from tvmhet.solve.assign_bound import assign_bound_s
from tvmhet.solve.bounds import cheapest_cover, latency_bound_s, tails_s, throughput_bound_s
from tvmhet.solve.evaluate import StageChoice, Uses, evaluate
from tvmhet.solve.floor import floor_bound_s, node_floors
from tvmhet.solve.infeasible import memory_reason, no_kernel_reason, smallest_mend
from tvmhet.solve.latency import latency_start
from tvmhet.solve.objective import Objective
from tvmhet.solve.orders import linear_orders
from tvmhet.solve.pack import StateGraph, allowed_times, predecessors, state_graph
from tvmhet.solve.pipeline import Found, StageSearch, crossing_bytes, near_cuts, pick_cuts, progress_s
from tvmhet.solve.problem import Link, Problem
from tvmhet.solve.simulated import best_simulated, simulated_s
from tvmhet.solve.solution import Solution, Status
from tvmhet.solve.virtual import virtual_bound_s, virtual_plans

_FULL_STATES = 1500  # every downset is a state up to here
_LINEAR_STATES = 6000  # and beyond it, states of one linear order
_BOUND_STATES = 800  # up to here the bound knows every downset
_EXACT_STATES = 300  # up to here branch and bound is tried
_EXACT_STEPS = 150_000
_FEW_LABELS = 16  # of the first search over a graph
_FEWEST_LABELS = 8  # of another where its plan is far from the bound
_MAX_LABELS = {Objective.THROUGHPUT: 64, Objective.LATENCY: 48}
_REFINEMENTS = 5  # searches among cuts near those of the best answer so far
_KEPT = 8  # plans that are simulated at most
_PROVED = 1e-6  # a gap up to this is called optimal
_FAR = 0.05  # gap from which another search, and the linear programs of assign_bound.py, are worth their time


def solve(
    problem: Problem,
    objective: Objective = Objective.THROUGHPUT,
    *,
    max_steps: int = 24_000_000,
    time_limit_s: float = 60.0,
    seed: int = 0,
    virtual_stages: bool = False,
    simulated: bool = False,
) -> Solution:
    """Return the best plan found, its lower bound and its status.

    Work is counted in steps (label extensions of the stage search): the same `max_steps` gives the same answer on any
    machine; `time_limit_s` is the second limit, checked between searches. Where that limit or KeyboardInterrupt
    (Ctrl-C) ends the search, the best plan so far comes back and `solver` says so; without any plan yet,
    KeyboardInterrupt is raised. `seed` is reserved for random restarts.
    With `virtual_stages` a device may run several stages with others between them (throughput only), where such a plan
    is better and does not lose it again by waiting (`simulate`); the bound is then one over such plans too, which knows
    less. With `simulated` the answer is the best in the simulator of the few best plans found (see simulated.py); its
    objective stays the closed form. Infeasible problems come back with status INFEASIBLE, the binding constraint and
    the smallest mend as `reason`.
    """
    if objective is Objective.COST:
        raise BadInput("solve minimises seconds, not cost", "use tvmhet.solve.cheapest.cheapest")
    if reason := no_kernel_reason(problem):
        return _infeasible(reason)
    virtual = virtual_stages and objective is Objective.THROUGHPUT
    solution = _search(problem, objective, max_steps, time_limit_s, virtual, simulated)
    if solution.status is not Status.INFEASIBLE:
        return solution
    if reason := memory_reason(problem) or _link_reason(problem, max_steps):
        return _infeasible(reason, solution.steps)

    def feasible(changed: Problem) -> bool:
        return _search(changed, Objective.LATENCY, max_steps // 8, 1.0).status is not Status.INFEASIBLE

    return _infeasible(smallest_mend(problem, feasible), solution.steps)


def _link_reason(problem: Problem, max_steps: int) -> str:
    """Return that missing links are what stops every plan, or an empty text if they are not."""
    missing = [
        f"{a.name!r} -> {b.name!r}"
        for a, row in zip(problem.groups, problem.links, strict=True)
        for b, link in zip(problem.groups, row, strict=True)
        if link.byte_per_s == 0
    ]
    missing += [
        f"host <-> {g.name!r}" for g, x in zip(problem.groups, problem.host_links, strict=True) if not x.byte_per_s
    ]
    if not missing:
        return ""
    joined = replace(
        problem,
        links=tuple(tuple(x if x.byte_per_s else Link() for x in row) for row in problem.links),
        host_links=tuple(x if x.byte_per_s else Link() for x in problem.host_links),
    )
    if _search(joined, Objective.LATENCY, max_steps // 8, 1.0).status is Status.INFEASIBLE:
        return ""
    return f"links: every plan needs a transfer where there is no link ({', '.join(missing[:4])}); give one a rate > 0"


def _infeasible(reason: str, steps: int = 0) -> Solution:
    return Solution((), math.inf, math.inf, Status.INFEASIBLE, steps, "none", reason)


@dataclass
class _Record:
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
        return self.best is not None and self.value_s - self.lower_s <= _PROVED * self.value_s

    def offer(self, found: Found | None, name: str) -> None:
        """Keep `found` if it is the best so far."""
        if found is not None:
            self.steps += found.steps
            self.best = (found, name) if found.objective_s < self.value_s else self.best
            if all(found.stages != other.stages for other, _ in self.kept):
                self.kept = tuple(sorted((*self.kept, (found, name)), key=lambda p: p[0].objective_s)[:_KEPT])


def _search(
    problem: Problem,
    objective: Objective,
    max_steps: int,
    time_limit_s: float,
    virtual: bool = False,
    simulated: bool = False,
    bounded: bool = True,
) -> Solution:
    deadline = time.monotonic() + time_limit_s
    if problem.num_nodes == 0:
        return Solution((), 0.0, 0.0, Status.OPTIMAL, 0, "empty")
    record, stopped, shared_s = _Record(), "", 0.0
    parts = [_phases(problem, objective, record, max_steps), *([_virtual(problem, record)] if virtual else [])]
    try:
        for part in parts:
            for _ in part:
                if record.proved or record.steps >= max_steps:
                    break
                if time.monotonic() > deadline:
                    stopped = f", stopped by the time limit of {time_limit_s:g} s"
                    break
            if stopped:
                break
        if objective is Objective.THROUGHPUT and bounded and not stopped and _is_far(record):
            record.lower_s = apart_bound_s(problem, record.lower_s, record.value_s, _side_bound_s)
            shared_s = _assigned_s(problem, record)
    except KeyboardInterrupt:
        if record.best is None:
            raise
        stopped = ", interrupted"
    if record.best is None or math.isinf(record.value_s):
        return _infeasible("", record.steps)
    best, name = record.best
    if simulated and not stopped:
        best, name = best_simulated(problem, objective, record.kept, _again(problem, objective, max_steps, deadline))
    if virtual:  # the bounds so far are of plans with devices of its own for each stage
        record.lower_s = virtual_bound_s(problem, allowed_times(problem))
    lower_s = min(max(record.lower_s, shared_s), best.objective_s)
    status = Status.OPTIMAL if best.objective_s - lower_s <= _PROVED * best.objective_s else Status.FEASIBLE
    return Solution(best.stages, best.objective_s, lower_s, status, record.steps, name + stopped)


def _again(
    problem: Problem, objective: Objective, max_steps: int, deadline: float
) -> Callable[[Problem], Found | None]:
    def plan(changed: Problem) -> Found | None:
        found = _search(changed, objective, max_steps // 4, max(0.0, deadline - time.monotonic()), bounded=False)
        if found.status is Status.INFEASIBLE:
            return None
        choices = [StageChoice(s.kernels, s.group, s.num_replicas, s.shares) for s in found.stages]
        return Found(*evaluate(problem, choices, objective), -math.inf, found.steps)

    return plan


def _phases(problem: Problem, objective: Objective, record: _Record, max_steps: int) -> Iterator[None]:
    """Improve `record` phase by phase; each `yield` is a place to stop."""
    time_s = allowed_times(problem)
    graphs: list[StateGraph] = []
    for graph in _graphs(problem):
        if not graphs:
            record.offer(_whole(problem, objective, graph, time_s), "whole model on one group")
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
    if graphs[0].full:
        yield
        _branch(problem, graphs[0], time_s, objective, record, max_steps)


def _virtual(problem: Problem, record: _Record) -> Iterator[None]:
    """Improve `record` by plans in which devices run several stages; each `yield` is a place to stop."""
    record.lower_s = 0.0
    best = record.best[0] if record.best else None
    for found in virtual_plans(problem, list(_graphs(problem)), allowed_times(problem), best):
        if found and found.objective_s < record.value_s and _keeps_up(problem, found, record):
            record.offer(found, "virtual stages")
        yield


def _keeps_up(problem: Problem, found: Found, record: _Record) -> bool:
    """Is `found` not slower than the best plan so far in the simulator, where devices wait for each other?"""
    if record.best is None:
        return True

    mine, other = (simulated_s(problem, Objective.THROUGHPUT, plan) for plan in (found, record.best[0]))
    return mine <= other


def _raise_bound(search: StageSearch, record: _Record, time_s: NDArray[np.float64]) -> None:
    """Raise the lower bound by what stages take at least: over all downsets while they are few, else over an order."""
    if search.graph.full and search.graph.num_states <= _BOUND_STATES:
        record.lower_s = search.bound_s(record.lower_s, record.value_s)
    else:
        record.lower_s = floor_bound_s(search.problem, time_s, record.lower_s, record.value_s)


def _is_far(record: _Record) -> bool:
    """Is there a plan, far from the bound?"""
    return record.best is not None and record.value_s - record.lower_s > _FAR * record.value_s


def _side_bound_s(problem: Problem, lower_s: float, upper_s: float) -> float:
    return floor_bound_s(problem, allowed_times(problem), lower_s, upper_s)


def _assigned_s(problem: Problem, record: _Record) -> float:
    """Return a bound by what passes between groups, where the plan is still far from the bound so far; else 0.

    It holds where stages share devices, too.
    """
    if not _is_far(record):
        return 0.0
    return assign_bound_s(problem, node_floors(problem, allowed_times(problem), alike=True), 0.0, record.value_s)


def _branch(
    problem: Problem,
    full: StateGraph,
    time_s: NDArray[np.float64],
    objective: Objective,
    record: _Record,
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


def _graphs(problem: Problem) -> Iterator[StateGraph]:
    """Make the graph of all downsets, or else (there is at least one per node) those of several linear orders."""
    if problem.num_nodes < _FULL_STATES:
        full = state_graph(problem, range(problem.num_nodes), full=True, max_states=_FULL_STATES)
        if full.num_states:
            yield full
            return
    for order in linear_orders(predecessors(problem)):
        graph = state_graph(problem, order, full=False, max_states=_LINEAR_STATES)
        if graph.num_states:
            yield graph


def _whole(problem: Problem, objective: Objective, graph: StateGraph, time_s: NDArray[np.float64]) -> Found | None:
    """Return the best plan with a single stage on one group, replicated where that helps: a first incumbent."""
    best: Found | None = None
    uses = Uses.of(problem)
    for g, group in enumerate(problem.groups):
        if group.num_devices <= 0 or not (cover := cheapest_cover(graph, np.ascontiguousarray(time_s[:, g]))):
            continue
        replicas = group.num_devices if objective is Objective.THROUGHPUT else 1
        least_s = float(time_s[list(cover), g].sum()) / replicas
        if not least_s < (best.objective_s if best else math.inf):
            continue
        stages, value = evaluate(problem, (StageChoice(cover, g, replicas),), objective, uses)
        if (
            stages[0].memory_bytes <= group.memory_bytes
            and math.isfinite(value)
            and (best is None or value < best.objective_s)
        ):
            best = Found(stages, value, -math.inf, 0)
    return best


def _stages(
    search: StageSearch, record: _Record, name: str, max_steps: int, time_s: NDArray[np.float64], is_first: bool
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
    if search.objective is Objective.THROUGHPUT and _is_far(record):
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
