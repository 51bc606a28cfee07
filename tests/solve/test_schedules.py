"""Who runs which micro-batch when: dealing, orders, and that nobody waits for ever."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tvmhet.solve.schedules import Pass, Schedule, deal, held, lags, linear_order, passes_of_replica, span


@given(st.integers(1, 40), st.data())
def test_equal_shares_go_in_turn(total, data):
    replicas = data.draw(st.integers(1, total))
    dealt = deal([passes_of_replica(total, replicas, r) for r in range(replicas)])
    assert dealt == tuple(tuple(range(r, total, replicas)) for r in range(replicas))


@given(st.lists(st.integers(1, 12), min_size=1, max_size=5))
def test_unlike_shares_are_spread(shares):
    dealt, total = deal(shares), sum(shares)
    assert sorted(m for own in dealt for m in own) == list(range(total))
    for n, own in zip(shares, dealt, strict=True):
        assert len(own) == n
        for i, m in enumerate(own):  # not far from the middle of the i-th of n equal parts
            assert abs(m + 0.5 - (i + 0.5) * total / n) < len(shares)


def in_turn_orders(schedule, replicas, total):
    """The orders as the papers give them: `window` forward passes, then one backward, one forward, in turn."""
    for k, r in enumerate(replicas):
        most = [math.ceil(total / x) for x in replicas]
        window = most[k] if schedule is Schedule.GPIPE else min(most[k], math.ceil(sum(replicas[k:]) / r))
        for first in range(r):
            mine, order = list(range(first, total, r)), []
            for i, m in enumerate(mine):
                order += [Pass(True, 0, mine[i - window])] if i >= window else []
                order.append(Pass(False, 0, m))
            yield k, mine, (*order, *(Pass(True, 0, m) for m in mine[max(0, len(mine) - window) :])), window


def test_the_second_wave_comes_in_the_valley_of_the_first():
    """Three stages, four micro-batches: the first holds two, on the others F of a wave follows B of the other."""
    shown = [
        " ".join(f"{'FB'[p.backward]}{p.microbatch}" for p in linear_order(range(4), lag))
        for lag in lags(Schedule.WAVELET, [1, 1, 1], 4)
    ]
    assert shown == ["F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]
    assert lags(Schedule.WAVELET, [1, 1], 4) == lags(Schedule.ONE_F_ONE_B, [1, 1], 4)
    assert lags(Schedule.WAVELET, [2, 2, 2, 2], 16) == (3, 3, 1, 0)  # two replicas: two waves of two


@settings(deadline=None)
@given(st.integers(1, 14), st.data(), st.sampled_from([Schedule.GPIPE, Schedule.ONE_F_ONE_B]))
def test_like_replicas_have_the_known_orders(total, data, schedule):
    replicas = data.draw(st.lists(st.integers(1, min(total, 5)), min_size=1, max_size=4))
    lag = lags(schedule, replicas, total)
    for k, mine, order, window in in_turn_orders(schedule, replicas, total):
        assert linear_order(mine, lag[k]) == order
        assert mine[0] or held(mine, lag[k]) == window  # the first replica has the most


@pytest.mark.parametrize("schedule", [Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.WAVELET])
@settings(deadline=None)
@given(st.data())
def test_unlike_replicas_never_wait_for_ever(schedule, data):
    total = data.draw(st.integers(1, 24))
    shares = []
    for _ in range(data.draw(st.integers(1, 4))):
        cuts = data.draw(st.lists(st.integers(1, total - 1), max_size=3, unique=True)) if total > 1 else []
        ends = [0, *sorted(cuts), total]
        shares.append([b - a for a, b in pairwise(ends)])
    lag = lags(schedule, [span(own) for own in shares], total)
    orders = [list(linear_order(mine, lag[k])) for k, own in enumerate(shares) for mine in deal(own)]
    stage = [k for k, own in enumerate(shares) for _ in own]
    done: set[tuple[int, bool, int]] = set()
    moved = True
    while moved:
        moved = False
        for k, order in zip(stage, orders, strict=True):
            while order:
                x = order[0]
                before = (k - 1, False) if not x.backward else (k + 1, True)
                if 0 <= before[0] < len(shares) and (*before, x.microbatch) not in done:
                    break
                if x.backward and (k, False, x.microbatch) not in done:
                    break
                done.add((k, x.backward, x.microbatch))
                del order[0]
                moved = True
    assert not any(orders)
