"""Local search by moving nodes: repeatable, never worse than its start, and it crosses to a clear optimum."""

from __future__ import annotations

from tvmhet.solve.move_nodes import move_nodes

PREDS = [[], [0], [1], [], [3], [4]]


def spread(home) -> float:
    """Two chains of three: apart and each whole is best."""
    broken = sum(home[u] != home[v] for v, p in enumerate(PREDS) for u in p)
    return max(home.count(0), home.count(1)) + broken


def test_two_chains_come_apart():
    home, value = move_nodes([0] * 6, PREDS, 2, spread, 200)
    assert value == spread(home) == 3
    assert len(set(home[:3])) == len(set(home[3:])) == 1


def test_it_is_repeatable_and_never_worse():
    start = [0, 1, 0, 1, 0, 1]
    first = move_nodes(start, PREDS, 2, spread, 20)
    assert first == move_nodes(start, PREDS, 2, spread, 20)
    assert first[1] <= spread(start)
    assert start == [0, 1, 0, 1, 0, 1]
