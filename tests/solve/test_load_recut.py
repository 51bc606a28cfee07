"""Pairs of devices cut anew: never worse, and better where no single move and no swap is."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from tests.solve.test_balance import random_loads, random_training
from tvmhet.solve.contract import contract
from tvmhet.solve.load_chain import valued
from tvmhet.solve.load_recut import loads, recut
from tvmhet.solve.load_sets import SetPricer
from tvmhet.solve.loads import LoadProblem, LoadType, device_load, device_slots


def start_of(problem: LoadProblem, seed: int):
    """Any placement on devices that can run the blocks."""
    rng, blocks, slots = random.Random(seed), contract(problem, contiguous=False), device_slots(problem)
    home = [rng.choice([d for d, t in enumerate(slots) if math.isfinite(row[t])]) for row in blocks.time_s]
    return blocks, valued(problem, blocks, np.array(home, np.int32), slots)


@pytest.mark.parametrize("seed", range(60))
def test_a_placement_gets_no_worse_and_keeps_its_blocks(seed):
    problem = random_training(seed) if seed % 2 else random_loads(seed, groups=True)
    blocks, start = start_of(problem, seed)
    if not math.isfinite(start.value):
        return
    pricer = SetPricer(problem, blocks, ordered=False)
    found = recut(problem, blocks, pricer, start, 10**5)
    assert found.value <= start.value * (1 + 1e-12)
    assert found.value == valued(problem, blocks, found.home, found.slots).value
    assert all(math.isfinite(blocks.time_s[b, found.slots[d]]) for b, d in enumerate(found.home))
    assert np.array_equal(recut(problem, blocks, pricer, start, 10**5).home, found.home)
    nodes = [[v for b in np.flatnonzero(found.home == d) for v in blocks.nodes[b]] for d in range(len(found.slots))]
    expected = [device_load(problem, vs, t) for vs, t in zip(nodes, found.slots, strict=True)]
    assert loads(problem, blocks, found) == pytest.approx(expected)


def test_many_blocks_change_places_at_once():
    """7 + 5 against 4 + 4 + 4, where 12 against 12 takes three blocks for two: no move and no swap improves it."""
    times = (7.0, 5.0, 4.0, 4.0, 4.0)
    problem = LoadProblem(tuple((t,) for t in times), (0.0,) * 5, (0.0,) * 5, (), (LoadType("acc", 2),))
    blocks = contract(problem, contiguous=False)
    start = valued(problem, blocks, np.array([0, 1, 0, 1, 1], np.int32), (0, 0))  # 11 and 13
    assert start.value == 13.0
    pricer = SetPricer(problem, blocks, ordered=False)
    found = recut(problem, blocks, pricer, start, 10**5)
    assert found.value == 12.0
    assert recut(problem, blocks, pricer, start, 0) is start


def test_memory_is_kept():
    types = (LoadType("acc", 2, 2.0),)
    problem = LoadProblem(((6.0,), (1.0,), (1.0,), (1.0,)), (1.0,) * 4, (0.0,) * 4, (), types)
    blocks = contract(problem, contiguous=False)
    start = valued(problem, blocks, np.array([0, 0, 1, 1], np.int32), (0, 0))
    found = recut(problem, blocks, SetPricer(problem, blocks, ordered=False), start, 10**5)
    assert found.value == 7.0
