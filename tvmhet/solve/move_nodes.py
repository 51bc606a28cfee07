"""Local search on the latency of one input: move a few neighbouring nodes to another device, keep what is quicker."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

_LARGEST = 16  # nodes moved at once


def move_nodes(
    home: Sequence[int],
    preds: Sequence[Sequence[int]],
    num_slots: int,
    value: Callable[[Sequence[int]], float],
    tries: int,
) -> tuple[list[int], float]:
    """Return the best placement found (the slot of each node) and its value, after `tries` evaluations."""
    rng = random.Random(0)
    readers: list[list[int]] = [[] for _ in preds]
    for v, p in enumerate(preds):
        for u in p:
            readers[u].append(v)
    best, best_value = list(home), value(home)
    for _ in range(tries):
        v, to = rng.randrange(len(best)), rng.randrange(num_slots)
        if to == best[v]:
            continue
        tried = list(best)
        for u in _clump(v, best, preds, readers, rng.randint(1, _LARGEST), rng.random() < 0.5):
            tried[u] = to
        if (new := value(tried)) < best_value:
            best, best_value = tried, new
    return best, best_value


def _clump(
    start: int,
    home: Sequence[int],
    preds: Sequence[Sequence[int]],
    readers: Sequence[Sequence[int]],
    size: int,
    upwards: bool,
) -> list[int]:
    """Up to `size` nodes of the same device: `start` and what lies above it, or below, nearest first."""
    found, at = [start], 0
    while at < len(found) and len(found) < size:
        for u in preds[found[at]] if upwards else readers[found[at]]:
            if home[u] == home[start] and u not in found and len(found) < size:
                found.append(u)
        at += 1
    return found
