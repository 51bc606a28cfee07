"""Run plans one against the other as the pipelines they are, and keep what each took: what no kernel's time has in it.

    the plan that is predicted best, those that would be if a device type were slower than thought,
    the lesser searches' plans, the fastest of the last race
        ─► run in turn, round by round ─► those near the fastest, more rounds ─► the median of each

The rest of the machine counts in a pipeline: the process that feeds the workers takes its time from their cores, and
they slow each other down by what they do just then. A stage that is a little less full than predicted best leaves room.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

from tvmhet.choosing import predicted_best, prices_on, usable_makers
from tvmhet.cluster.local import cuda_ordinals
from tvmhet.cluster.spec import ClusterSpec
from tvmhet.cost.measure_worker import argument_values
from tvmhet.cost.measured import MeasuredKernels
from tvmhet.deploy import bind_devices, compile_plans, deploy
from tvmhet.emit.cache import StageCache, default_cache_dir
from tvmhet.errors import HetError, Infeasible
from tvmhet.ir.prepare import Prepared
from tvmhet.plans import Plan
from tvmhet.profiling import ProfileReport, int_high
from tvmhet.progress import progress_bar
from tvmhet.proposing import Price, Variant, variant_of
from tvmhet.raced import Placed, Raced, keep_race, last_race, made_again
from tvmhet.rewriting import Planner, Wanted
from tvmhet.runtime.local import HetRuntime
from tvmhet.runtime.program import Array, PipelineProgram
from tvmhet.solve import Objective
from tvmhet.solve.ablate import fuse_first, place_first

_MOST, _BATCH = 8, 4  # plans of one race, and of those that are compiled at once
_SLOWER = (1.07, 1.2)  # by which a device type may be slower than thought
_NEAR = 1.3  # of the plan that is predicted best: what is predicted slower does not run
_ROUNDS = 8
_TURN_S, _LEAST_INPUTS = 0.4, 6  # of one plan in one round
_STAYS = (math.inf, 1.12, 1.1, 1.06)  # after each round: of the fastest so far; later rounds as the last
_TELLING = 5  # rounds: in fewer, chance may put one plan before another each time (`Raced.is_surely_faster`)
_PREPARING = 0.4  # of the time left: compiles no further plans after it, as rounds enough to tell take longer


@dataclass(frozen=True, slots=True)
class Racer:
    """A plan in the race, compiled. Every round starts workers of its own, so that no plan is judged by one start."""

    plan: Plan
    program: PipelineProgram
    took_s: list[float]  # seconds of an input by round

    @property
    def seconds(self) -> float:
        """The median of its rounds; infinite where none succeeded."""
        return statistics.median(self.took_s) if self.took_s else math.inf


@dataclass(frozen=True)
class Race:
    """Plans of one model on a cluster whose devices are all on this machine."""

    prepared: Prepared
    cluster: ClusterSpec
    database: MeasuredKernels
    wanted: Wanted
    progress: bool = False

    def run(self, deadline_s: float, report: ProfileReport) -> None:
        """Run plans until the fastest is known or `deadline_s` (monotonic clock) has passed, and keep what they took.

        What fails is said in `report`, and does not win.
        """
        racers = self._compiled(deadline_s, report)
        if len(racers) > 1:
            self._rounds(racers, deadline_s, report)
        raced = [Raced(Placed.of(r.plan), r.plan.objective_value, tuple(r.took_s)) for r in racers if r.took_s]
        if len(raced) > 1:
            keep_race(self.database, self.prepared, self.cluster, self.wanted, raced)
            report.raced_s = tuple(r.ran_s for r in sorted(raced, key=lambda r: r.planned_s))

    def _rounds(self, racers: Sequence[Racer], deadline_s: float, report: ProfileReport) -> None:
        """Let plans run in turn, in another order each round, as a machine may be slower for seconds.

        The one that is predicted best stays: the others are compared with it, round by round. Where time is short, as
        few others stay as can be run in rounds enough to tell.
        """
        inputs, racing, started_s, runs = self._inputs(), list(racers), time.monotonic(), 0
        best = min(racers, key=lambda racer: racer.plan.objective_value)
        with progress_bar("race plans", self.progress) as tell:
            for turn in range(_ROUNDS):
                random.Random(turn).shuffle(racing)
                for racer in racing:
                    runs += 1
                    try:
                        racer.took_s.append(self._time(racer, inputs))
                    except HetError as error:
                        report.failed.append(f"a plan that was run: {error.problem}")
                        racer.took_s.clear()
                stays = _STAYS[min(turn, len(_STAYS) - 1)] * min(racer.seconds for racer in racing)
                racing = [r for r in racing if r.took_s and (r is best or r.seconds <= stays)]
                now_s = time.monotonic()
                racing = _affordable(racing, best, deadline_s - now_s, (now_s - started_s) / runs, turn + 1)
                tell(turn + 1, _ROUNDS, f"{len(racing)} left")
                if len(racing) < 2 or time.monotonic() > deadline_s:
                    return

    def _compiled(self, deadline_s: float, report: ProfileReport) -> list[Racer]:
        """Compile plans, as many as there is time for; the predicted best comes first."""
        last_s = time.monotonic() + _PREPARING * (deadline_s - time.monotonic())
        racers: list[Racer] = []
        cache, plans, took_s = StageCache(default_cache_dir()), self._plans(), 0.0
        while len(racers) < _MOST and time.monotonic() + took_s < last_s:
            started_s = time.monotonic()
            batch = list(islice(plans, _BATCH))
            if not batch or not all(self._fits(plan) for plan in batch):
                break
            with suppress(HetError):  # which plan it is of, `deploy` says
                compile_plans(self.prepared, batch, self.cluster, cache)
            for plan in batch:
                try:
                    program = deploy(self.prepared, plan, self.cluster, cache)
                except HetError as error:
                    report.failed.append(f"a plan that was to run: {error.problem}")
                    continue
                assert isinstance(program, PipelineProgram)
                racers.append(Racer(plan, program, []))
            took_s = time.monotonic() - started_s
        return racers

    def _fits(self, plan: Plan) -> bool:
        """Whether this machine has a core or a GPU for each device of the plan: else it would not run as planned."""
        bindings = bind_devices(plan, self.cluster).values()
        gpus = [binding.ordinal for binding in bindings if binding.kind == "cuda"]
        return not any(binding.shared_cores for binding in bindings) and max(gpus, default=-1) < len(cuda_ordinals())

    def _plans(self) -> Iterator[Plan]:
        """Different plans that may be the fastest, the one that is predicted best first."""
        best = predicted_best(self.prepared, self.cluster, self.database, self._usable)
        seen: set[Placed] = set()
        for placed in self._placements(best):
            if placed in seen:
                continue
            seen.add(placed)
            plan = made_again(placed, self.prepared, self.cluster, self._usable, self._price_on)
            if plan is not None and plan.objective_value <= _NEAR * best.objective_value:
                yield plan

    def _placements(self, best: Plan) -> Iterator[Placed]:
        yield Placed.of(best)
        before = last_race(self.database, self.prepared, self.cluster, self.wanted)
        yield from (raced.placed for raced in sorted(before, key=lambda raced: raced.ran_s)[:2])
        price = self._price_on(self.cluster)
        variant = variant_of(self.prepared, self._usable.makers, price, best.rewrites)
        planner = Planner(self.cluster, price, self._usable)
        for factor in _SLOWER:
            for name in variant.table.device_types:
                yield from self._planned(planner, _slower(variant, name, factor))
        plain = variant_of(self.prepared, self._usable.makers, price) if best.rewrites else variant
        for search in (fuse_first, place_first):
            yield from self._planned(replace(planner, wanted=replace(self._usable, search=search)), plain)

    def _planned(self, planner: Planner, variant: Variant) -> Iterator[Placed]:
        with suppress(Infeasible):
            yield Placed.of(planner.plan(variant))

    @cached_property
    def _usable(self) -> Wanted:
        return replace(self.wanted, makers=usable_makers(self.wanted, self.cluster))

    def _price_on(self, cluster: ClusterSpec) -> Price:
        return prices_on(cluster, self.database, together=self.wanted.objective is Objective.THROUGHPUT)

    def _inputs(self) -> list[Array]:
        """One input of the model, its indices within what they index."""
        graph = self.prepared.operator_graph
        every = range(len(graph.operators))
        tensors = [(graph.tensors[t], int_high(graph, every, t)) for t in graph.given]
        return [argument_values(t.shape, t.dtype, high, seed) for seed, (t, high) in enumerate(tensors)]

    def _time(self, racer: Racer, inputs: Sequence[Array]) -> float:
        """Seconds of one input in a full pipeline, or alone where latency is the goal."""
        count = max(_LEAST_INPUTS, int(_TURN_S / max(racer.plan.objective_value, 1e-6)))
        with HetRuntime(racer.program) as runtime:
            pipelined = self.wanted.objective is Objective.THROUGHPUT
            return runtime.period_s(inputs, count) if pipelined else runtime.latency_s(inputs, count)


def _affordable(racing: Sequence[Racer], best: Racer, left_s: float, run_s: float, rounds: int) -> list[Racer]:
    """Return the plans that can be run up to `_TELLING` rounds in `left_s`, after `rounds`: the fastest, and `best`.

    A run takes `run_s`. One other stays at least.
    """
    others = sorted((r for r in racing if r is not best), key=lambda racer: racer.seconds)
    each_s = (_TELLING - rounds) * run_s
    while len(others) > 1 and (len(others) + 1) * each_s > max(left_s, 0.0):
        others.pop()
    kept = {id(r) for r in others}
    return [r for r in racing if r is best or id(r) in kept]


def _slower(variant: Variant, device_type: str, factor: float) -> Variant:
    """The variant where kernels on a device type take longer by a factor."""
    table = variant.table
    column = [name == device_type for name in table.device_types]
    scale = [factor if own else 1.0 for own in column]
    return replace(
        variant,
        table=replace(table, seconds=table.seconds * scale, low=table.low * scale, high=table.high * scale),
    )
