"""Bounds on the latency of one input when a host calls accelerators: the shortest chain of calls through a core.

Every accelerator is called once, so nodes that lie on one path take their turns: on the host one after the other, and
in a call all the time that the call lasts. passes/call_chain.cc finds the quickest such chain for a *core*, a set of
nodes with few downsets. A core is grown from a heavy path, by the side branches that raise the bound:

    path   o──o──o──o──o            each accelerator holds an interval of it, with all that lies between
    core   o──o──o──o──o            and a branch is before, in, after a call, or beside it
             `──o──'

The chain is exact when the core is the whole graph and no accelerator pays between two gates, as in residual networks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from tvmhet._passes import passes_func
from tvmhet.solve.call_graph import CallChain, CallGraph, call_graph, closed, heaviest_path, path_weights
from tvmhet.solve.loads import LoadProblem
from tvmhet.solve.pack import as_tensor

_MAX_PATH = 600  # longer paths are thinned to their heaviest nodes: the chain is quadratic in them
_MAX_STATES = 400  # downsets of a core
_MAX_BRANCHES = 24  # side branches tried, heaviest first
_PATIENCE = 4  # branches in a row that do not help


def call_chains(problem: LoadProblem) -> tuple[CallChain, ...]:
    """Return chains over several cores, the largest lower bound first; empty if the graph has no node."""
    if not problem.num_nodes:
        return ()
    graph = call_graph(problem)
    weights = path_weights(problem)
    chains: dict[tuple[int, ...], CallChain] = {}
    for weight in weights:
        path = tuple(_thinned(heaviest_path(graph, weight), weight))
        if path not in chains and (chain := _chain(graph, path)):
            chains[path] = chain
    start = max(chains, key=lambda path: chains[path].lower)
    grown = _grow(graph, start, chains[start], weights[2])
    return tuple(sorted((grown, *chains.values()), key=lambda c: -c.lower))


def _thinned(path: list[int], weight: Sequence[float]) -> list[int]:
    kept = set(sorted(path, key=lambda v: (-weight[v], v))[:_MAX_PATH])
    return [v for v in path if v in kept]


def _grow(graph: CallGraph, path: Sequence[int], chain: CallChain, weight: Sequence[float]) -> CallChain:
    """Add side branches to the core while the bound does not fall and the downsets stay few."""
    core = set(path)
    links = nx.Graph()
    links.add_nodes_from(v for v in range(graph.num_nodes) if v not in core)
    links.add_edges_from((u, v) for v in links for u in graph.preds[v] if u not in core)
    branches = [(sum(weight[v] for v in c), sorted(c)) for c in nx.connected_components(links)]
    heavy = sorted((b for b in branches if b[0] > 1e-6 * chain.lower), key=lambda b: (-b[0], b[1]))
    failed = 0
    for _, branch in heavy[:_MAX_BRANCHES]:
        tried = _chain(graph, core.union(branch))
        if tried and tried.lower >= chain.lower * (1 - 1e-12):
            chain, failed = tried, 0
            core.update(branch)
        elif (failed := failed + 1) == _PATIENCE:
            break
    return chain


def _chain(graph: CallGraph, core: Iterable[int]) -> CallChain | None:
    """Return the quickest chain over a core, or None if it has too many downsets."""
    kept = set(core)
    nodes = [v for v in graph.order if v in kept]
    inside = sum(1 << v for v in nodes)
    states = _downsets(nodes, [graph.above[v] & inside for v in nodes])
    if not states:
        return None
    gates = sum(1 << v for v in nodes if not inside & ~(graph.above[v] | graph.below[v] | 1 << v))
    sets = [_words(graph, s) for s in ([inside], [gates], states)]
    lower, calls = passes_func("tvmhet.CallChain")(
        [as_tensor(a) for a in (*graph.arrays, *sets)], graph.memory_bytes, graph.num_calls
    )
    home = np.zeros(graph.num_nodes, np.int32)
    pairs = list(calls)
    for d, (a, b) in enumerate(zip(pairs[::2], pairs[1::2], strict=True), 1):
        home[closed(graph, states[b] & ~states[a])] = d
    return CallChain(float(lower) * (1 - 1e-12), home)


def _downsets(nodes: Sequence[int], needs: Sequence[int]) -> list[int]:
    """Return every downset, small ones first; empty if there are too many."""
    limit = max(_MAX_STATES, len(nodes) + 1)
    layer, out = [0], [0]
    while layer:
        grown: dict[int, None] = {}
        for s in layer:
            for v, need in zip(nodes, needs, strict=True):
                if not s >> v & 1 and not need & ~s:
                    grown[s | 1 << v] = None
        layer = list(grown)
        out += layer
        if len(out) > limit:
            return []
    return out


def _words(graph: CallGraph, sets: Sequence[int]) -> NDArray[np.uint64]:
    size = 8 * max(1, -(-graph.num_nodes // 64))
    return np.frombuffer(b"".join(s.to_bytes(size, "little") for s in sets), np.uint64).reshape(len(sets), -1).copy()
