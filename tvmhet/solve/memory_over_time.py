"""Memory of each device over a simulated run of inference: what the planner's peak per stage looks like in time.

bytes |      ____                weights always; an input's live-ins from the start of its arrival, its results until
      | ____|    |____           the last of them is sent, working memory while it is computed
      |____________________ s
"""

from __future__ import annotations

from tvmhet.solve.events import MemoryCurve
from tvmhet.solve.problem import Problem
from tvmhet.solve.simulate import Event, Timeline
from tvmhet.solve.solution import Solution


def memory_over_time(problem: Problem, solution: Solution, timeline: Timeline) -> tuple[MemoryCurve, ...]:
    """Return one curve per device that `timeline` (of `simulate`) uses; a curve's place is its stage.

    A device that holds one input at a time peaks at the stage's `memory_bytes`. With transfers beside computation, or
    where one sender's tensor of the next input comes before another's of this one, it holds parts of two inputs, which
    the planner's peak of one does not count.
    """
    by_device: dict[tuple[int, int], list[Event]] = {}
    for e in timeline.events:
        by_device.setdefault((e.stage, e.replica), []).append(e)
    return tuple(_curve(problem, solution, *device, events) for device, events in sorted(by_device.items()))


def _curve(problem: Problem, solution: Solution, stage: int, replica: int, events: list[Event]) -> MemoryCurve:
    solved = solution.stages[stage]
    nodes = {v for k in solved.kernels for v in problem.kernels[k].nodes}
    weights = float(sum(w.size_bytes for w in problem.weights if not nodes.isdisjoint(w.nodes)))
    live_in = sum(e.size_bytes for e in problem.edges if e.src not in nodes and not nodes.isdisjoint(e.dsts))
    results = sum(
        e.size_bytes for e in problem.edges if e.src in nodes and (e.is_output or not nodes.issuperset(e.dsts))
    )
    working = solved.memory_bytes - weights - live_in - results  # beyond what outlives the computation
    changes: list[tuple[float, float]] = []
    for n in sorted({e.input_index for e in events}):
        mine = [e for e in events if e.input_index == n]
        compute = next((e for e in mine if e.kind == "compute"), None)
        if compute is None:
            continue
        arrival = min(e.start_s for e in mine)
        gone = max(e.finish_s for e in mine)
        changes += [(arrival, live_in), (compute.finish_s, -live_in)]
        changes += [(compute.start_s, results), (gone, -results)]
        changes += [(compute.start_s, working), (compute.finish_s, -working)]
    held, times, amounts = weights, [0.0], [weights]
    for at, change in sorted(changes):  # what ends is freed before what begins
        held += change
        if at > times[-1]:
            times.append(at)
            amounts.append(held)
        else:
            amounts[-1] = held
    return MemoryCurve(stage, replica, tuple(times), tuple(amounts))
