"""Latency of one input when a host calls accelerators: the second objective of Tarnawski et al. (NeurIPS 2020).

The host runs its nodes as soon as their inputs exist. An accelerator runs all of its nodes as one call: it starts when
its last input exists, receives, computes and sends; its results are seen when it ends. Each accelerator is called once,
so what it holds is contiguous.

    chains of calls ──► intervals of linear orders ──► chain of segments ──► annealing ──► CP-SAT
    (bound, starts)     (starts)                       (bound, start)        (plan)        (bound)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tvmhet._passes import passes_func
from tvmhet.errors import NotSupported
from tvmhet.solve.call_chain import call_chains
from tvmhet.solve.contract import Blocks, contract
from tvmhet.solve.load_fit import impossible
from tvmhet.solve.loads import LoadPlan, LoadProblem
from tvmhet.solve.offload_bound import Home, latency_bound
from tvmhet.solve.orders import linear_orders, successors
from tvmhet.solve.pack import as_tensor, pack_lists
from tvmhet.solve.segment_chain import segment_chain

Arrays = list[NDArray[np.float64] | NDArray[np.int32]]

_PROVED = 1e-6  # a gap up to this is called optimal
_MAX_STATES = 10_000  # downsets of a segment of the second chain


def offload(
    problem: LoadProblem, *, moves: int = 60_000, rounds: int = 6, seeds: int = 4, bound_s: float = 4.0
) -> LoadPlan:
    """Return the best placement found for the latency of one input, with a lower bound.

    Type 0 are the accelerators, type 1 is the host (unlimited, unless it has no device). `moves` of annealing in each
    of `rounds`, for `seeds` seeds; `bound_s` seconds of CP-SAT for the bound. Plans list the accelerators first and the
    host's nodes, where there is a host, last.
    """
    if len(problem.types) != 2 or problem.types[1].transfer_scale != 0:
        raise NotSupported(f"latency with {len(problem.types)} types of device", "give accelerators and the host")
    problem = _hosted(problem)
    count = min(max(0, problem.types[0].num_devices), problem.num_nodes)
    blocks = contract(problem, contiguous=False)
    if reason := impossible(problem, blocks):
        return LoadPlan((), (), math.inf, math.inf, False, "none", reason)
    arrays = _arrays(problem, blocks, count)
    chains = call_chains(problem)
    lower = max((c.lower for c in chains), default=0.0)
    starts = [(c.home, "chain of calls") for c in chains]
    found = _best(problem, blocks, arrays, starts)
    if found is None or found[1] - lower > _PROVED * found[1]:
        orders = _over_orders(problem, contract(problem, contiguous=True), count)
        starts = [*starts, *((h, "intervals of linear orders") for h in orders)]
        found = _best(problem, blocks, arrays, starts)
    if problem.num_nodes and (found is None or found[1] - lower > _PROVED * found[1]):
        chain = segment_chain(problem, found[1] if found else math.inf, max_states=_MAX_STATES)
        lower = max(lower, chain.lower)
        starts = [*starts, (chain.home, "chain of segments")]
        found = _best(problem, blocks, arrays, starts)
    if found is None and math.isfinite(lower):
        lower, home = latency_bound(problem, blocks, None, _longest(problem, count), lower, bound_s)
        found = _best(problem, blocks, arrays, [] if home is None else [(home, "CP-SAT")])
    if found is None:
        proved = "there is no placement" if math.isinf(lower) else "no placement was found"
        reason = f"memory: {proved} in which every call fits its accelerator; add memory or accelerators"
        return LoadPlan((), (), math.inf, lower, False, "none", reason)
    best, value, name = found
    homes = [h for h, _ in [*starts, (best, name)] if math.isfinite(_value(problem, blocks, arrays, h))]
    for s in range(seeds if value - lower > _PROVED * value else 0):
        home = (best if s % 2 else homes[s % len(homes)]).copy()
        annealed = _anneal(arrays, home, moves, rounds, s)
        if annealed < value * (1 - 1e-9):
            best, value, name = home, annealed, "annealing"
    lower, home = latency_bound(problem, blocks, best, value, lower, bound_s)
    if home is not None and (searched := _value(problem, blocks, arrays, home)) < value * (1 - 1e-9):
        best, value, name = home, searched, "CP-SAT"
    slots = (*range(1, count + 1), *([0] if problem.types[1].num_devices > 0 else []))
    devices = tuple(tuple(int(v) for v in np.flatnonzero(best == d)) for d in slots)
    types = tuple(0 if d else 1 for d in slots)
    return LoadPlan(devices, types, value, lower, value - lower <= _PROVED * value, name)


def _longest(problem: LoadProblem, count: int) -> float:
    """Return seconds that no placement exceeds: everything one after the other, each tensor into every call."""
    slowest = (max(s for s in t if math.isfinite(s)) for t in problem.time_s)
    return max(math.fsum(slowest) + (1 + count) * math.fsum(problem.send_s), 1e-300)


def _hosted(problem: LoadProblem) -> LoadProblem:
    """Let nothing run on a host that has no device."""
    if problem.types[1].num_devices > 0:
        return problem
    return replace(problem, time_s=tuple((t[0], math.inf) for t in problem.time_s))


def call_latency(problem: LoadProblem) -> Callable[[Home], float]:
    """Return a function: placement (0: the host, d: accelerator d) -> makespan, or inf if it breaks a rule."""
    problem = _hosted(problem)
    blocks = contract(problem, contiguous=False)
    arrays = _arrays(problem, blocks, max(0, problem.types[0].num_devices))
    return lambda home: _value(problem, blocks, arrays, home)


def _best(
    problem: LoadProblem, blocks: Blocks, arrays: Arrays, starts: list[tuple[Home, str]]
) -> tuple[Home, float, str] | None:
    """Return the quickest legal placement with its makespan and where it comes from, or None."""
    legal = [
        (home, value, name) for home, name in starts if math.isfinite(value := _value(problem, blocks, arrays, home))
    ]
    return min(legal, key=lambda f: f[1], default=None)


def _value(problem: LoadProblem, blocks: Blocks, arrays: Arrays, home: Home) -> float:
    """Return the makespan of a placement; inf if it breaks a rule."""
    if any(len(set(home[list(nodes)].tolist())) > 1 for nodes in blocks.nodes):
        return math.inf
    for d in set(home[home > 0].tolist()):
        if sum(problem.memory_bytes[v] for v in np.flatnonzero(home == d)) > problem.types[0].memory_bytes:
            return math.inf
    return _anneal(arrays, home.copy(), 0, 0, 0)


def _arrays(problem: LoadProblem, blocks: Blocks, count: int) -> Arrays:
    preds: list[set[int]] = [set() for _ in range(problem.num_nodes)]
    for u, v in problem.edges:
        preds[v].add(u)
    before = [sorted(p) for p in preds]
    host = np.array([t[1] for t in problem.time_s], np.float64)
    return [
        np.array([t[0] for t in problem.time_s], np.float64),
        host,
        np.array(problem.memory_bytes, np.float64),
        np.array(problem.send_s, np.float64),
        np.array([math.inf, *[problem.types[0].memory_bytes] * count], np.float64),
        *pack_lists(before),
        *pack_lists(successors(before)),
        *pack_lists(blocks.nodes),
    ]


def _anneal(arrays: Arrays, home: Home, moves: int, rounds: int, seed: int) -> float:
    """Anneal `home` in place (not at all with 0 rounds) and return its makespan."""
    tensors = [as_tensor(a) for a in arrays]
    return float(passes_func("tvmhet.LatencyAnneal")(tensors, as_tensor(home), moves, rounds, 0.05, seed + 1))


def _over_orders(problem: LoadProblem, blocks: Blocks, count: int) -> list[Home]:
    """Return a placement per linear order: the least sum of host times and calls, one interval per accelerator."""
    homes = []
    for order in linear_orders(blocks.preds):
        home = np.zeros(problem.num_nodes, np.int32)
        for d, (i, j) in enumerate(_intervals(problem, blocks, order, count), 1):
            for b in order[i:j]:
                home[list(blocks.nodes[b])] = d
        homes.append(home)
    return homes


def _intervals(problem: LoadProblem, blocks: Blocks, order: tuple[int, ...], count: int) -> list[tuple[int, int]]:
    """Choose up to `count` intervals of `order` for accelerators; the rest is the host's."""
    n = len(order)
    call = _calls(problem, blocks, order)
    best = np.full((count + 1, n + 1), math.inf)
    back = np.full((count + 1, n + 1), -1, np.int64)  # start of the interval that ends here; -1: the host
    best[:, 0] = 0.0
    for j in range(1, n + 1):
        best[:, j] = best[:, j - 1] + blocks.time_s[order[j - 1], 1]
        for k in range(1, count + 1):
            ends = best[k - 1, :j] + call[:j, j]
            i = int(ends.argmin()) if j else 0
            if ends[i] < best[k, j]:
                best[k, j], back[k, j] = ends[i], i
    k, j, out = int(best[:, n].argmin()), n, []
    while j:
        i = int(back[k, j])
        if i >= 0:
            out.append((i, j))
            k, j = k - 1, i
        else:
            j -= 1
    return out[::-1]


def _calls(problem: LoadProblem, blocks: Blocks, order: tuple[int, ...]) -> NDArray[np.float64]:
    """Return call[i, j]: seconds of one accelerator with order[i:j]; inf where it does not fit."""
    n = len(order)
    rank = np.empty(n, np.int64)
    rank[list(order)] = np.arange(n)
    time_s = blocks.time_s[list(order), 0]
    work = np.concatenate([[0.0], np.cumsum(np.where(np.isfinite(time_s), time_s, 0.0))])
    barred = np.concatenate([[0], np.cumsum(~np.isfinite(time_s))])
    memory = np.concatenate([[0.0], np.cumsum([blocks.memory_bytes[b] for b in order])])
    call = np.full((n + 1, n + 1), math.inf)
    for i in range(n + 1):
        span = work[i:] - work[i]
        fits = (memory[i:] - memory[i] <= problem.types[0].memory_bytes) & (barred[i:] == barred[i])
        call[i, i:] = np.where(fits, span, math.inf)
    for src, readers, cost in zip(blocks.net_src, blocks.net_readers, blocks.net_cost_s, strict=True):
        s = rank[src]
        reads = np.sort(rank[list(readers)])
        call[: s + 1, s + 1 : reads[-1] + 1] += cost  # holds the maker, not the last reader
        for i in range(s + 1, reads[-1] + 1):  # holds a reader, not the maker
            call[i, reads[np.searchsorted(reads, i)] + 1 :] += cost
    return call
