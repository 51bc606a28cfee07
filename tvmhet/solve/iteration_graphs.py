"""The state graphs on which iterations are planned, and whether a search over one of them is exact."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from tvmhet.solve.iteration import IterationProblem
from tvmhet.solve.pack import StateGraph
from tvmhet.solve.problem import Problem
from tvmhet.solve.schedules import Schedule
from tvmhet.solve.state_graphs import all_graphs


def state_graphs(problem: IterationProblem, option: int) -> list[StateGraph]:
    """Return the graph of all downsets where they are few, else those of several linear orders."""
    forward = problem.options[option].forward
    shape = _Shape(tuple((e.src, e.dsts) for e in forward.edges), tuple(k.nodes for k in forward.kernels), forward)
    return list(_graphs(shape))


@dataclass(frozen=True)
class _Shape:
    """What the states depend on, for the cache: one model is planned on many clusters."""

    edges: tuple[tuple[int, tuple[int, ...]], ...]
    kernels: tuple[tuple[int, ...], ...]
    forward: Problem = field(compare=False)


@lru_cache(maxsize=8)
def _graphs(shape: _Shape) -> tuple[StateGraph, ...]:
    return tuple(all_graphs(shape.forward))


def is_roomy(problem: IterationProblem, option: int) -> bool:
    """Does all of the model fit every device at once?"""
    forward = problem.options[option].forward
    count = problem.num_microbatches(option)
    state = 1 + problem.gradient_ratio + problem.state_ratio
    total = state * sum(w.size_bytes for w in forward.weights) + sum(e.size_bytes for e in forward.edges)
    total += (count + 1) * sum(w.size_bytes for w in problem.options[option].stashes)
    total += max((k.workspace_bytes for k in forward.kernels), default=0)
    return all(total <= g.memory_bytes for g in problem.groups)


def is_plain(problem: IterationProblem, option: int) -> bool:
    """Is every kernel one node, so that a slower fusion cannot need less memory?"""
    return all(len(k.nodes) == 1 for k in problem.options[option].forward.kernels)


def search_is_exact(problem: IterationProblem, option: int) -> bool:
    """Does the search's own bound hold for every plan?

    Not where a slower fusion could matter: for its memory, or for its longer backward pass, which hides more of an
    all-reduce on a device that has time.
    """
    forward = problem.options[option].forward
    one_link = len({(x.latency_s, x.byte_per_s) for row in forward.links for x in row}) == 1
    plain = is_plain(problem, option) and Schedule.WAVELET not in problem.schedules
    fastest = is_roomy(problem, option) and problem.reduce_overlap == 0
    return one_link and (fastest or plain) and Schedule.INTERLEAVED not in problem.schedules
