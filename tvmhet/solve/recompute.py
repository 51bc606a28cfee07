"""Which nodes of a stage recompute: one configuration per node, least time within the memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

#: Up to so many changes are chosen exactly, whatever their kinds (`kFewSwaps` of the C++ search).
FEW_SWAPS = 20

#: Steps of one such choice (`kMostTries` of the C++ search): the best so far is taken then.
MOST_TRIES = 2000

#: (extra seconds, saved bytes, node, configuration).
Swap = tuple[float, float, int, int]


@dataclass(frozen=True, slots=True)
class Choice:
    """Seconds, and memory A * samples + B, of one configuration of one node."""

    time_s: float
    memory_per_sample: float
    memory_fixed: float

    def memory(self, samples: int) -> float:
        """Return bytes when `samples` are in flight."""
        return self.memory_per_sample * samples + self.memory_fixed


def cheapest_choice(
    nodes: Sequence[Sequence[Choice]], samples: int, memory_bytes: float
) -> tuple[float, tuple[int, ...]]:
    """Return (seconds, chosen configuration of each node); seconds is inf if nothing fits.

    Exact when the nodes that have a real choice have two configurations each and are few, or fall into at most three
    kinds of equal nodes, as repeated layers do; else greedy by seconds per byte saved, with needless changes undone.
    """
    fastest = [min(range(len(row)), key=lambda i: (row[i].time_s, row[i].memory(samples))) for row in nodes]
    need = math.fsum(row[i].memory(samples) for row, i in zip(nodes, fastest, strict=True)) - memory_bytes
    seconds = math.fsum(row[i].time_s for row, i in zip(nodes, fastest, strict=True))
    if need <= 0:
        return seconds, tuple(fastest)
    swaps: dict[tuple[float, float], list[tuple[int, int]]] = {}  # (extra seconds, saved bytes) -> (node, config)
    for v, (row, f) in enumerate(zip(nodes, fastest, strict=True)):
        for i, c in enumerate(row):
            saved = row[f].memory(samples) - c.memory(samples)
            if saved > 0:
                swaps.setdefault((c.time_s - row[f].time_s, saved), []).append((v, i))
    several = len({v for who in swaps.values() for v, _ in who}) < sum(len(who) for who in swaps.values())
    counts = None if several or len(swaps) > 3 else _exact(swaps, need)
    chosen = list(fastest)
    if counts is not None:
        for (key, who), n in zip(swaps.items(), counts, strict=True):
            seconds += key[0] * n
            for v, i in who[:n]:
                chosen[v] = i
        return seconds, tuple(chosen)
    if len(swaps) <= 3 and not several:
        return math.inf, ()
    each = sorted(((extra, saved, v, i) for (extra, saved), who in swaps.items() for v, i in who), key=_by_ratio)
    if not several and len(each) <= FEW_SWAPS:
        extra, taken = _least_extra(each, need)
        for _, _, v, i in taken:
            chosen[v] = i
        return (seconds + extra, tuple(chosen)) if extra < math.inf else (math.inf, ())
    return _greedy(nodes, chosen, swaps, need, samples)


def _exact(swaps: dict[tuple[float, float], list[tuple[int, int]]], need: float) -> tuple[int, ...] | None:
    """Return how many nodes of each kind to change; None if changing all is not enough."""
    kinds = [(extra, saved, len(who)) for (extra, saved), who in swaps.items()]
    if sum(saved * n for _, saved, n in kinds) < need:
        return None
    best: tuple[float, tuple[int, ...]] | None = None
    *others, (extra, saved, most) = kinds
    for counts in product(*(range(n + 1) for _, _, n in others)):
        rest = need - sum(s * n for (_, s, _), n in zip(others, counts, strict=True))
        last = max(0, math.ceil(rest / saved - 1e-12))
        if last > most:
            continue
        cost = extra * last + sum(x * n for (x, _, _), n in zip(others, counts, strict=True))
        if best is None or cost < best[0]:
            best = (cost, (*counts, last))
    return best[1] if best else None


def _by_ratio(swap: Swap) -> tuple[float, int, int]:
    extra, saved, v, i = swap
    return extra / saved, v, i


def _least_extra(swaps: Sequence[Swap], need: float) -> tuple[float, tuple[Swap, ...]]:
    """Return the least extra seconds that save `need`, and the swaps: branch and bound with a part of the last one."""
    best: tuple[float, tuple[Swap, ...]] = math.inf, ()
    tries = MOST_TRIES

    def search(at: int, rest: float, extra: float, taken: tuple[Swap, ...]) -> None:
        nonlocal best, tries
        if rest <= 0:
            best = min(best, (extra, taken), key=lambda b: b[0])
            return
        left, bound = rest, extra
        for more, saved, _, _ in swaps[at:]:
            bound += more * min(1.0, left / saved)
            left -= saved
            if left <= 0:
                break
        tries -= left <= 0 and bound < best[0]
        if left > 0 or bound >= best[0] or tries < 0:
            return
        search(at + 1, rest - swaps[at][1], extra + swaps[at][0], (*taken, swaps[at]))
        search(at + 1, rest, extra, taken)

    search(0, need, 0.0, ())
    return best


def _greedy(
    nodes: Sequence[Sequence[Choice]],
    chosen: list[int],
    swaps: dict[tuple[float, float], list[tuple[int, int]]],
    need: float,
    samples: int,
) -> tuple[float, tuple[int, ...]]:
    ranked = sorted((extra / saved, v, i) for (extra, saved), who in swaps.items() for v, i in who)
    before = list(chosen)
    for _, v, i in ranked:
        if need <= 0:
            break
        gain = nodes[v][chosen[v]].memory(samples) - nodes[v][i].memory(samples)
        if gain > 0:
            need -= gain
            chosen[v] = i
    if need > 0:
        return math.inf, ()
    for _, v, _ in reversed(ranked):  # undo what is not needed, the dearest first
        give_back = nodes[v][before[v]].memory(samples) - nodes[v][chosen[v]].memory(samples)
        if chosen[v] != before[v] and need + give_back <= 0:
            need += give_back
            chosen[v] = before[v]
    return math.fsum(row[i].time_s for row, i in zip(nodes, chosen, strict=True)), tuple(chosen)
