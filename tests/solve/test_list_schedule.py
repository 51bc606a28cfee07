"""List schedules: the example of the HEFT paper, memory, and calls that never wait for themselves."""

from __future__ import annotations

import math
import random

import networkx as nx
import numpy as np
import pytest

from tvmhet.solve.list_schedule import Slot, Tasks, etf, heft, upward_ranks_s

_COST = [
    14,
    16,
    9,
    13,
    19,
    18,
    11,
    13,
    19,
    13,
    8,
    17,
    12,
    13,
    10,
    13,
    16,
    9,
    7,
    15,
    11,
    5,
    11,
    14,
    18,
    12,
    20,
    21,
    7,
    16,
]
_EDGES = {
    (0, 1): 18, (0, 2): 12, (0, 3): 9, (0, 4): 11, (0, 5): 14, (1, 7): 19, (1, 8): 16, (2, 6): 23, (3, 7): 27,
    (3, 8): 23, (4, 8): 13, (5, 7): 15, (6, 9): 17, (7, 9): 11, (8, 9): 13,
}  # fmt: skip


def paper(slots) -> Tasks:
    """Figure 3 of Topcuoglu et al. (TPDS 2002), with transfers that belong to the producer: its mean edge."""
    preds = [[u for u in range(10) if (u, v) in _EDGES] for v in range(10)]
    move = np.zeros((10, 3, 3))
    for u in range(10):
        out = [c for (a, _), c in _EDGES.items() if a == u]
        move[u] = np.mean(out) if out else 0.0
    return Tasks(np.array(_COST, float).reshape(10, 3), preds, move, np.ones(10), slots)


def test_upward_ranks_are_those_of_the_paper_when_transfers_are_free():
    tasks = paper([Slot(k, math.inf, False) for k in range(3)])
    free = Tasks(tasks.time_s, tasks.preds, tasks.move_s * 0, tasks.memory_bytes, tasks.slots)
    rank = upward_ranks_s(free)
    assert rank[9] == pytest.approx(14.667, abs=1e-3)
    assert rank[8] == pytest.approx(16.667 + 14.667, abs=1e-3)
    assert rank[0] == pytest.approx(61.0, abs=1e-3)


def test_heft_sends_each_task_where_it_ends_first():
    fast_and_slow = Tasks(
        np.array([[1.0, 5.0], [9.0, 2.0]]), [[], []], np.zeros((2, 2, 2)), np.ones(2), [Slot(0, 9.0), Slot(1, 9.0)]
    )
    assert heft(fast_and_slow) == [0, 1]
    near = Tasks(
        np.array([[1.0, 1.5], [1.0, 1.5]]), [[], [0]], np.full((2, 2, 2), 5.0), np.ones(2), [Slot(0, 9.0), Slot(1, 9.0)]
    )
    assert heft(near) == [0, 0]


def test_heft_fills_gaps():
    # b waits for a transfer on slot 0; c fits in the gap before it.
    tasks = Tasks(
        np.array([[math.inf, 1.0], [4.0, math.inf], [2.0, math.inf]]),
        [[], [0], []],
        np.full((3, 2, 2), 3.0),
        np.ones(3),
        [Slot(0, 9.0, False), Slot(1, 9.0, False)],
    )
    assert heft(tasks) == [1, 0, 0]


@pytest.mark.parametrize("schedule", [heft, etf])
def test_memory_is_kept_or_nothing_is_returned(schedule):
    times = np.ones((3, 1))
    two = Tasks(times, [[], [0], [1]], np.zeros((3, 1, 1)), np.array([2.0, 2.0, 2.0]), [Slot(0, 4.0), Slot(0, 4.0)])
    home = schedule(two)
    assert home is not None
    assert sorted(home.count(s) for s in (0, 1)) == [1, 2]
    assert schedule(Tasks(times, two.preds, two.move_s, two.memory_bytes, two.slots[:1])) is None


@pytest.mark.parametrize("schedule", [heft, etf, lambda t: etf(t, {v: p[0] for v, p in enumerate(t.preds) if p})])
@pytest.mark.parametrize("seed", range(60))
def test_calls_never_wait_for_themselves(schedule, seed):
    rng = random.Random(seed)
    n = rng.randint(2, 14)
    preds = [sorted(rng.sample(range(v), min(v, rng.randint(0, 3)))) for v in range(n)]
    slots = [Slot(rng.randrange(2), 99.0) for _ in range(3)] + [Slot(1, math.inf, one_call=False, parallel=True)]
    time_s = np.array([[rng.randint(1, 9), rng.randint(1, 9)] for _ in range(n)], float)
    move = np.array([[[rng.randint(0, 3)] * 2] * 2 for _ in range(n)], float)
    home = schedule(Tasks(time_s, preds, move, np.ones(n), slots))
    assert home is not None
    task = [("call", s) if slots[s].one_call else ("node", v) for v, s in enumerate(home)]
    quotient = nx.DiGraph((task[u], task[v]) for v in range(n) for u in preds[v] if task[u] != task[v])
    assert nx.is_directed_acyclic_graph(quotient)


def test_a_favourite_child_stays_with_its_parent():
    # Without favourites ETF sends the second child of 0 elsewhere only when it may start sooner.
    tasks = Tasks(
        np.full((3, 1), 2.0), [[], [0], [0]], np.full((3, 1, 1), 1.0), np.ones(3), [Slot(0, 9.0), Slot(0, 9.0)]
    )
    home = etf(tasks, {2: 0})
    assert home is not None
    assert home[2] == home[0] != home[1]
