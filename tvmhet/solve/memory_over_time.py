"""Memory of each device over a simulated run: what the planner's peaks look like in time.

bytes |      ____                inference: weights always; an input's live-ins from the start of its arrival, its
      | ____|    |____           results until the last of them is sent, working memory while it is computed
      |____________________ s    training: state always, a stash from forward to backward, working memory in a pass
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tvmhet.solve.iteration import IterationProblem, IterationSolution, teams
from tvmhet.solve.iteration_memory import StageNeeds, held_weights
from tvmhet.solve.problem import Problem
from tvmhet.solve.simulate import Event, Timeline
from tvmhet.solve.simulate_training import TrainingEvent, TrainingTimeline
from tvmhet.solve.solution import Solution


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """Bytes on one device during a run: `bytes[i]` from `times_s[i]` on. `replica` counts within its place."""

    place: int
    replica: int
    times_s: tuple[float, ...]
    bytes: tuple[float, ...]

    @property
    def peak_bytes(self) -> float:
        """The most at any time."""
        return max(self.bytes)


def of_inference(problem: Problem, solution: Solution, timeline: Timeline) -> tuple[MemoryCurve, ...]:
    """Return one curve per device that `timeline` (of `simulate`) uses; a curve's place is its stage.

    A device that holds one input at a time peaks at the stage's `memory_bytes`. With transfers beside computation,
    where one sender's tensor of the next input comes before another's of this one, or where inputs arrive from the host
    while it waits for the reader of a result, it holds parts of several, which the planner does not count.
    """
    by_device: dict[tuple[int, int], list[Event]] = {}
    for e in timeline.events:
        by_device.setdefault((e.stage, e.replica), []).append(e)
    return tuple(_of_stage(problem, solution, *device, events) for device, events in sorted(by_device.items()))


def of_training(
    problem: IterationProblem, solution: IterationSolution, timeline: TrainingTimeline
) -> tuple[MemoryCurve, ...]:
    """Return one curve per device that `timeline` (of `simulate_training`) uses."""
    placings = [s.placing for s in solution.stages]
    known = StageNeeds(problem, solution.option)
    needs = [known.of(p) for p in placings]
    ratio = 1 + problem.gradient_ratio + problem.state_ratio
    weights = held_weights(problem.options[solution.option], placings, teams(placings, solution.num_microbatches))
    passes: dict[tuple[int, int], list[TrainingEvent]] = {}
    for e in timeline.events:
        if e.kind in ("forward", "backward"):
            passes.setdefault((e.place, e.replica), []).append(e)
    curves = []
    for (place, replica), mine in sorted(passes.items()):
        state = sum(weights[i] * ratio for i, p in enumerate(placings) if p.place == place)
        changes: list[tuple[float, int, float]] = []
        for e in mine:
            need = needs[e.stage]
            changes += [(e.start_s, 1, need.working), (e.finish_s, 0, -need.working)]
            changes.append((e.start_s, 1, need.stash) if e.kind == "forward" else (e.finish_s, 0, -need.stash))
        curves.append(_curve(place, replica, state, changes))
    return tuple(curves)


def _of_stage(problem: Problem, solution: Solution, stage: int, replica: int, events: list[Event]) -> MemoryCurve:
    solved = solution.stages[stage]
    nodes = {v for k in solved.kernels for v in problem.kernels[k].nodes}
    weights = float(sum(w.size_bytes for w in problem.weights if not nodes.isdisjoint(w.nodes)))
    live_in = sum(e.size_bytes for e in problem.edges if e.src not in nodes and not nodes.isdisjoint(e.dsts))
    results = sum(
        e.size_bytes for e in problem.edges if e.src in nodes and (e.is_output or not nodes.issuperset(e.dsts))
    )
    working = solved.memory_bytes - weights - live_in - results  # beyond what outlives the computation
    changes: list[tuple[float, int, float]] = []
    for n in sorted({e.input_index for e in events}):
        mine = [e for e in events if e.input_index == n]
        compute = next((e for e in mine if e.kind == "compute"), None)
        if compute is None:
            continue
        changes += [(min(e.start_s for e in mine), 1, live_in), (compute.finish_s, 0, -live_in)]
        changes += [(compute.start_s, 1, results), (max(e.finish_s for e in mine), 0, -results)]
        changes += [(compute.start_s, 1, working), (compute.finish_s, 0, -working)]
    return _curve(stage, replica, weights, changes)


def _curve(place: int, replica: int, held: float, changes: Iterable[tuple[float, int, float]]) -> MemoryCurve:
    """Add up changes of (time, 0 for what ends and 1 for what begins, bytes): what ends is freed first."""
    times, amounts = [0.0], [held]
    for at, _, change in sorted(changes):
        held += change
        if at > times[-1]:
            times.append(at)
            amounts.append(held)
        else:
            amounts[-1] = max(held, amounts[-1]) if change > 0 else held
    return MemoryCurve(place, replica, tuple(times), tuple(amounts))
