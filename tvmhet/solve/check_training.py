"""The independent checker of training plans: recomputes all that a solution claims, and names every broken rule.

It shares no code with the search or with the closed forms, and is written for plainness, not for speed.
"""

from __future__ import annotations

import math
from collections import Counter

from tvmhet.errors import BrokenSolution
from tvmhet.solve.check_exchanges import Exchanges
from tvmhet.solve.check_facts import TOLERANCE, PlanFacts
from tvmhet.solve.check_memory import Memory
from tvmhet.solve.check_pipeline import Pipeline
from tvmhet.solve.iteration import IterationProblem, IterationSolution
from tvmhet.solve.schedules import Schedule
from tvmhet.solve.solution import Status


def check_training(problem: IterationProblem, solution: IterationSolution) -> None:
    """Return quietly if `solution` is legal and its figures are right; else raise BrokenSolution with all that is not.

    Checked: each node in one stage (and in all its unlike replicas), order, finite times, pins, counts, shares, what
    the schedule demands of places and micro-batches, memory, the iteration's time and the side of the bound.
    """
    if broken := _broken(problem, solution):
        raise BrokenSolution("the training plan is not legal: " + "; ".join(broken), "this is a defect of the solver")


def _broken(problem: IterationProblem, solution: IterationSolution) -> list[str]:
    """One sentence per broken rule; empty if the solution is legal."""
    if solution.status is Status.INFEASIBLE:
        found = ["infeasible, yet it has stages"] if solution.stages else []
        return found if solution.reason else [*found, "infeasible without a reason"]
    if not 0 <= solution.option < len(problem.options):
        return [f"there is no micro-batch option {solution.option}"]
    found = _Rules(problem, solution).broken()
    return found or [*Memory(problem, solution).broken(), *_Times(problem, solution).broken()]


class _Rules(PlanFacts):
    """Cover, devices, schedule; the later ones make sense only where the earlier ones are kept."""

    def broken(self) -> list[str]:
        return self._cover() or self._devices() or self._schedule()

    def _cover(self) -> list[str]:
        """Every way through the model, by one part of each stage, runs each node once and in order."""
        found: list[str] = []
        for way in range(max(map(len, self.parts), default=0)):
            through = [parts[min(way, len(parts) - 1)] for parts in self.parts]
            run = [(v, i, k) for i in through for k in self.placed[i].kernels for v in self.forward.kernels[k].nodes]
            times = Counter(v for v, _, _ in run)
            found += [f"node {v} is run {times[v]} times" for v in range(self.forward.num_nodes) if times[v] != 1]
            at = {v: n for n, (v, _, _) in enumerate(run)}
            kernel = {v: (i, k) for v, i, k in run}
            found += [
                f"node {d} reads node {e.src}, which runs later"
                for e in self.forward.edges
                for d in e.dsts
                if not found and e.src >= 0 and at[d] < at[e.src] and kernel[d] != kernel[e.src]
            ]
        return found

    def _devices(self) -> list[str]:
        found: list[str] = []
        used: dict[int, dict[int, int]] = {}
        for i, p in enumerate(self.placed):
            if not 0 <= p.group < len(self.problem.groups) or min(p.num_replicas, p.degree) < 1 or not p.kernels:
                return [f"stage {i} has no group, no replica or no kernel"]
            used.setdefault(p.group, {})[p.place] = p.num_replicas * p.degree
            if p.recompute and not self.problem.may_recompute:
                found.append(f"stage {i} recomputes, which was not allowed")
            for k in p.kernels:
                if not math.isfinite(self.kernel_s(i, k)[0] + self.kernel_s(i, k)[1]):
                    found.append(f"stage {i}: kernel {k} cannot run on {self.problem.groups[p.group].name!r}")
            for v in self.nodes(i):
                if p.group not in self.forward.pins.get(v, {p.group}):
                    found.append(f"node {v} is pinned elsewhere than {self.problem.groups[p.group].name!r}")
        for g, places in used.items():
            if sum(places.values()) > self.problem.groups[g].num_devices:
                found.append(f"{sum(places.values())} devices of {self.problem.groups[g].name!r} are used")
        return found

    def _schedule(self) -> list[str]:
        found: list[str] = []
        places = [p.place for p in self.placed]
        if self.solution.schedule not in self.problem.schedules:
            found.append(f"the schedule {self.solution.schedule.value} was not allowed")
        if self.solution.num_microbatches != self.count:
            found.append(f"{self.solution.num_microbatches} micro-batches are claimed, there are {self.count}")
        if self.solution.schedule is Schedule.INTERLEAVED:
            ring = len(set(places))
            if places != [i % ring for i in range(len(places))] or ring < 2 or len(places) % ring:
                found.append(f"interleaved places {places} do not go round")
            if len({(p.num_replicas) for p in self.placed}) > 1 or self.count % (ring * self.placed[0].num_replicas):
                found.append(f"{self.count} micro-batches do not go round {ring} interleaved devices")
        elif len(set(places)) != len(places):
            found.append(f"stages share places {places} without interleaving")
        for parts in self.parts:
            shares = [self.placed[i].share or self.count for i in parts]
            if len(parts) > 1 and not self.problem.may_mix:
                found.append(f"stages {parts} are unlike replicas, which were not allowed")
            if sum(shares) != self.count or any(self.placed[i].num_replicas > self.share(i) for i in parts):
                found.append(f"stages {parts} share {shares} of {self.count} micro-batches")
        return found


class _Times(PlanFacts):
    """The pipeline's and the iteration's seconds, and the bound."""

    def broken(self) -> list[str]:
        pipeline = Pipeline(self.problem, self.solution).seconds()
        exchanges = Exchanges(self.problem, self.solution)
        after: dict[int, float] = {}
        for i, (p, reduce) in enumerate(zip(self.placed, exchanges.reduce_s(), strict=True)):
            shown = max(0.0, reduce - self.problem.reduce_overlap * self.passes(i)[1])
            shown += self.problem.update_s_per_byte[p.group] * exchanges.updated_bytes(i)
            after[p.place] = after.get(p.place, 0.0) + shown
        value = pipeline + max(after.values())
        found = []
        for name, real, claimed in (
            ("pipeline", pipeline, self.solution.pipeline_s),
            ("iteration", value, self.solution.iteration_s),
        ):
            if abs(real - claimed) > TOLERANCE * max(abs(real), abs(claimed)):
                found.append(f"the {name} takes {real} s, not {claimed} s")
        bound = self.solution.lower_bound_s
        if bound > value * (1 + 1e-6):
            found.append(f"the lower bound {bound} s exceeds the iteration's {value} s")
        if self.solution.status is Status.OPTIMAL and value - bound > 1e-5 * value:
            found.append(f"called optimal with bound {bound} s under {value} s")
        return found
