"""Sets of one device: their prices and their bound, against exhaustive search."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import networkx as nx
import numpy as np
import pytest

from tests.solve.test_balance import FAST, exhaustive, random_loads, random_training
from tvmhet._passes import passes_func
from tvmhet.solve.balance import balance
from tvmhet.solve.contract import contract
from tvmhet.solve.load_columns import Columns, column_bound, columns_of
from tvmhet.solve.load_width import charged, narrow_order, widest
from tvmhet.solve.loads import LoadProblem, LoadType, device_load, device_slots, fractional_bound
from tvmhet.solve.pack import as_tensor, pack_lists


def most_valuable(times, values, nets, costs, before, budget):
    """Try every set of blocks that no path leaves and enters again."""
    n = len(times)
    graph = nx.DiGraph((u, v) for v in range(n) for u in before[v])
    graph.add_nodes_from(range(n))
    reach = {v: nx.descendants(graph, v) for v in range(n)}
    best = 0.0
    for r in range(n + 1):
        for chosen in map(set, itertools.combinations(range(n), r)):
            between = (w for u in chosen for w in reach[u] if w not in chosen)
            if any(reach[w] & chosen for w in between):
                continue
            paid = sum(c for net, c in zip(nets, costs, strict=True) if 0 < len(set(net) & chosen) < len(set(net)))
            if sum(times[v] for v in chosen) + paid <= budget:
                best = max(best, sum(values[v] for v in chosen))
    return best


@pytest.mark.parametrize("seed", range(80))
@pytest.mark.parametrize("staged", [False, True])
def test_the_most_valuable_set_equals_exhaustive_search(seed, staged):
    """`staged`: some nets are charged first, which bounds what a set can earn, then all."""
    rng = random.Random(seed)
    n = rng.randint(1, 9)
    times = [rng.choice([math.inf, *map(float, range(6))]) for _ in range(n)]
    values = [float(rng.randint(0, 6)) for _ in range(n)]
    nets = [rng.sample(range(n), rng.randint(1, min(n, 4))) for _ in range(rng.randint(0, 6))]
    costs = [rng.choice([0.0, 0.5, 1.0, 2.0]) for _ in nets]
    shuffled = rng.sample(range(n), n)  # the order need not follow the numbering
    before = [[] for _ in range(n)]
    for i, j in itertools.combinations(range(n), 2):
        if seed % 2 and rng.random() < 0.3:
            before[shuffled[j]].append(shuffled[i])
    budget = rng.uniform(0, 15)
    inside = np.zeros(n, np.uint8)
    level = np.array([rng.randint(1, 2) if staged else 2 for _ in costs], np.int32)
    arrays = (np.array(times), np.array(values), np.array(costs), *pack_lists(nets), *pack_lists(before), level)
    value, load, _ = passes_func("tvmhet.LoadPricing")(
        [as_tensor(a) for a in arrays], as_tensor(inside), budget, -1.0, 0.0, 10**6
    )
    assert value == pytest.approx(most_valuable(times, values, nets, costs, before, budget))
    chosen = set(np.flatnonzero(inside).tolist())
    assert sum(values[v] for v in chosen) == pytest.approx(value)
    paid = sum(c for net, c in zip(nets, costs, strict=True) if 0 < len(set(net) & chosen) < len(set(net)))
    assert load == pytest.approx(sum(times[v] for v in chosen) + paid)


@pytest.mark.parametrize("seed", range(60))
def test_nets_outside_the_states_cost_no_more_than_they_do(seed):
    """Charged in shares, a net makes no set too dear."""
    rng = random.Random(seed)
    n = rng.randint(2, 9)
    times = [float(rng.randint(0, 5)) for _ in range(n)]
    values = [float(rng.randint(0, 6)) for _ in range(n)]
    nets = [rng.sample(range(n), rng.randint(1, min(n, 4))) for _ in range(rng.randint(1, 6))]
    costs = [rng.choice([0.5, 1.0, 2.0]) for _ in nets]
    level = [rng.randint(0, 2) for _ in nets]
    budget = rng.uniform(0, 15)
    arrays = (np.array(times), np.array(values), np.array(costs), *pack_lists(nets), *pack_lists([[]] * n))
    value, _, _ = passes_func("tvmhet.LoadPricing")(
        [as_tensor(a) for a in (*arrays, np.array(level, np.int32))],
        as_tensor(np.zeros(n, np.uint8)),
        budget,
        -1.0,
        0.0,
        10**6,
    )
    assert value >= most_valuable(times, values, nets, costs, [[]] * n, budget) - 1e-9


@pytest.mark.parametrize("seed", range(60))
def test_the_bound_holds(seed):
    problem = random_training(seed) if seed % 2 else random_loads(seed, groups=True)
    for ordered in (False, True):
        best = exhaustive(problem, ordered)
        blocks = contract(problem, contiguous=ordered)
        for known in (best, 1.7 * best):
            bound = column_bound(problem, blocks, known, fractional_bound(problem), 10**6, ordered=ordered)
            assert bound <= best * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(60))
def test_the_bound_holds_where_more_tensors_are_charged_later(seed):
    problem = random_training(seed) if seed % 2 else random_loads(seed, groups=True)
    for ordered in (False, True):
        best = exhaustive(problem, ordered)
        columns = columns_of(problem, contract(problem, contiguous=ordered), ordered=ordered)
        if columns is None:
            continue
        columns.pricer.charge(0)
        bound = columns.raised(best, fractional_bound(problem), 10**7)
        assert bound <= best * (1 + 1e-9)
        dear = columns.pricer.charges_more(62, 0)
        if math.isfinite(best) and dear and bound < best * 0.99:
            assert columns.open_most == 62


@pytest.mark.parametrize("seed", range(40))
def test_devices_take_sets_that_fit_one_after_another(seed):
    problem = random_training(seed) if seed % 2 else random_loads(seed, groups=True)
    blocks, slots = contract(problem, contiguous=False), device_slots(problem)
    columns = columns_of(problem, blocks, ordered=False)
    budget = 1.2 * exhaustive(problem, False)
    if columns is None or not math.isfinite(budget):
        return
    home = columns.dive(budget, slots)
    assert home is not None
    assert all(math.isfinite(blocks.time_s[b, slots[d]]) for b, d in enumerate(home))
    rest = max(d for d in range(len(slots)) if slots[d] == min(slots))
    for d in set(range(len(slots))) - {rest}:
        mine = [v for b in np.flatnonzero(home == d) for v in blocks.nodes[b]]
        left = [v for v in mine if problem.time_s[v][slots[rest]] < math.inf]  # others may be what nobody took
        assert len(left) < len(mine) or device_load(problem, mine, slots[d]) <= budget * 1.01


def test_a_dive_finds_the_placement_without_transfers():
    """Two chains that share nothing: the most valuable set within the load of one is a whole chain."""
    edges = tuple((i, i + 1) for i in range(9) if i != 4)
    problem = LoadProblem(((1.0,),) * 10, (0.0,) * 10, (0.4,) * 10, edges, (LoadType("acc", 2),))
    columns = columns_of(problem, contract(problem, contiguous=False), ordered=False)
    assert sorted(columns.dive(5.0, (0, 0)).tolist()) == [0] * 5 + [1] * 5
    assert device_load(problem, np.flatnonzero(columns.dive(5.0, (0, 0)) == 0).tolist(), 0) == pytest.approx(5.0)


def chain(n: int, num_devices: int) -> LoadProblem:
    """A chain of nodes of 1 s whose results take 0.4 s to move."""
    types = (LoadType("acc", num_devices),)
    return LoadProblem(((1.0,),) * n, (0.0,) * n, (0.4,) * n, tuple((i, i + 1) for i in range(n - 1)), types)


def test_the_bound_charges_transfers():
    problem = chain(12, 4)  # three nodes each: the ends send or receive once, the middles do both
    assert fractional_bound(problem) == pytest.approx(3.0)
    bound = column_bound(problem, contract(problem, contiguous=True), 3.8, 3.0, 10**6, ordered=True)
    assert bound == pytest.approx(3.8, rel=1e-5)


def test_more_types_hold_too():
    rng = random.Random(3)
    types = (LoadType("a", 1), LoadType("b", 1, math.inf, 0.5), LoadType("c", 1, math.inf, 0.0))
    for _ in range(20):
        times = tuple(tuple(float(rng.randint(1, 9)) for _ in types) for _ in range(6))
        edges = tuple((u, v) for v in range(6) for u in range(v) if rng.random() < 0.4)
        problem = LoadProblem(times, (0.0,) * 6, (1.0,) * 6, edges, types)
        best = exhaustive(problem, False)
        bound = column_bound(problem, contract(problem, contiguous=False), best, 0.0, 10**6, ordered=False)
        assert 0.5 * best <= bound <= best * (1 + 1e-9)


def test_without_work_the_bound_is_the_one_given():
    problem = chain(12, 4)
    assert column_bound(problem, contract(problem, contiguous=True), 3.8, 3.0, 0, ordered=True) == 3.0


def test_orders_keep_few_nets_open():
    nets = [[i, i + 1] for i in range(0, 20, 2)] + [[i, i + 1] for i in range(1, 19, 2)]
    order = narrow_order(20, nets)
    rank = {v: i for i, v in enumerate(order)}
    assert sorted(order) == list(range(20))
    assert max(sum(rank[a] <= i < rank[b] or rank[b] <= i < rank[a] for a, b in nets) for i in range(20)) == 1


def test_the_dearest_nets_are_charged():
    spans = [[0, 10], *([i, 9] for i in range(1, 7))]
    cost = charged(spans, np.array([5.0, 1.0, 2.0, 3.0, 4.0, 6.0, 7.0]), 5)
    assert cost.tolist() == [5.0, 0.0, 0.0, 3.0, 4.0, 6.0, 7.0]


def test_nets_with_the_same_blocks_so_far_count_once():
    spans = [[0, v] for v in range(1, 9)]
    costs = np.arange(1.0, 9.0)
    assert charged(spans, costs, 2).tolist() == costs.tolist()  # that block's side, and the nets that end
    assert widest(spans, costs) == 2


def test_wide_graphs_have_a_bound_too():
    n = 60
    times = ((5.0,), *((1.0,) for _ in range(n)), (5.0,))
    edges = (*((0, v) for v in range(1, n + 1)), *((v, n + 1) for v in range(1, n + 1)))
    problem = LoadProblem(times, (0.0,) * (n + 2), (0.1,) * (n + 2), edges, (LoadType("acc", 4),))
    bound = column_bound(problem, contract(problem, contiguous=True), 25.0, 17.5, 10**5, ordered=True)
    assert 17.5 <= bound <= 25.0


@pytest.mark.parametrize("contiguous", [False, True])
def test_an_interrupt_while_bounding_returns_the_best_so_far(monkeypatch, contiguous):
    problem = random_loads(4, groups=True)

    calls = []

    def interrupted(*_):
        calls.append(1)
        raise KeyboardInterrupt

    monkeypatch.setattr(Columns, "raised", interrupted)
    plan = balance(problem, contiguous=contiguous, effort=replace(FAST, max_downsets=1))
    best = exhaustive(problem, contiguous)
    assert calls == [1]
    assert plan.objective >= best * (1 - 1e-9)
    assert plan.lower_bound <= best


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("close", [False, True])
def test_a_gap_above_one_percent_gets_a_second_effort(monkeypatch, contiguous, close):
    problem = random_loads(4, groups=True)
    spent = []

    def raised(self, value, lower, max_entries, *_):
        spent.append(max_entries)
        return 0.995 * value if close else lower

    monkeypatch.setattr(Columns, "raised", raised)
    balance(problem, contiguous=contiguous, effort=replace(FAST, max_downsets=1, more_entries=77))
    assert spent
    assert (77 in spent) == (not close)
