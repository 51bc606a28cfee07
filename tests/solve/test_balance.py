"""Load problems against exhaustive search."""

from __future__ import annotations

import itertools
import math
import random

import networkx as nx
import pytest

from tvmhet.errors import BadGraph, BadTime, EmptyCluster
from tvmhet.solve.balance import Effort, balance
from tvmhet.solve.contract import contract
from tvmhet.solve.load_chain import over_core
from tvmhet.solve.loads import LoadProblem, LoadType, fractional_bound

FAST = Effort(anneal_moves=20_000, anneal_rounds=2, seeds=2, cpsat_s=2.0)


def random_loads(seed: int, *, groups: bool = False) -> LoadProblem:
    """Draw up to 7 nodes on one to three accelerators and perhaps a slow host."""
    rng = random.Random(seed)
    n = rng.randint(1, 7)
    edges = tuple((u, v) for v in range(n) for u in range(v) if rng.random() < 0.35)
    times = tuple((rng.choice([math.inf, *range(1, 9)]) * 1.0, rng.randint(5, 30) * 1.0) for _ in range(n))
    sizes = tuple(float(rng.randint(0, 5)) for _ in range(n))
    sends = tuple(rng.choice([0.0, 0.5, 1.0, 3.0]) for _ in range(n))
    types = (LoadType("acc", rng.randint(1, 3), rng.choice([9.0, 100.0])), LoadType("cpu", 1, math.inf, 0.0))
    colors = tuple(rng.choice([-1, -1, 0, 1]) for _ in range(n)) if groups else ()
    return LoadProblem(times, sizes, sends, edges, types, colors)


def random_training(seed: int) -> LoadProblem:
    """Draw up to 4 forward nodes, and backward nodes that share their devices or are free; gradients flow back."""
    rng = random.Random(seed)
    n = rng.randint(2, 4)
    ahead = [(u, v) for v in range(n) for u in range(v) if rng.random() < 0.5]
    back = [(n + v, n + u) for u, v in ahead] + [(u, n + v) for u, v in ahead if rng.random() < 0.5]
    turn = [(v, n + v) for v in range(n) if rng.random() < 0.5]
    types = (
        LoadType("acc", rng.randint(2, 3), rng.choice([12.0, 100.0])),
        LoadType("cpu", rng.randint(0, 1), math.inf, 0.0),
    )
    return LoadProblem(
        tuple((rng.randint(1, 9) * 1.0, rng.randint(5, 30) * 1.0) for _ in range(2 * n)),
        tuple(float(rng.randint(0, 5)) for _ in range(2 * n)),
        tuple(rng.choice([0.0, 0.5, 1.0, 3.0]) for _ in range(2 * n)),
        (*ahead, *back, *turn),
        types,
        (*range(n), *(v if rng.random() < 0.8 else -1 for v in range(n))),
        (True,) * n + (False,) * n,
    )


def exhaustive(problem: LoadProblem, contiguous: bool) -> float:
    """Try every assignment. Shares nothing with the package."""
    slots = [t for t, kind in enumerate(problem.types) for _ in range(kind.num_devices)]
    best = math.inf
    for home in itertools.product(range(len(slots)), repeat=problem.num_nodes):
        if any(
            home[u] != home[v]
            for u in range(problem.num_nodes)
            for v in range(u)
            if problem.group and problem.group[u] == problem.group[v] >= 0
        ):
            continue
        if contiguous:
            ahead = problem.forward or (True,) * problem.num_nodes
            graph = nx.DiGraph(
                (home[u], home[v]) for u, v in problem.edges if home[u] != home[v] and ahead[u] and ahead[v]
            )
            if not nx.is_directed_acyclic_graph(graph):
                continue
        worst = 0.0
        for d, t in enumerate(slots):
            mine = [v for v in range(problem.num_nodes) if home[v] == d]
            if sum(problem.memory_bytes[v] for v in mine) > problem.types[t].memory_bytes:
                worst = math.inf
                break
            crossing = {u for u, v in problem.edges if (home[u] == d) != (home[v] == d)}
            load = sum(problem.time_s[v][t] for v in mine)
            worst = max(worst, load + problem.types[t].transfer_scale * sum(problem.send_s[u] for u in crossing))
        best = min(best, worst)
    return best


@pytest.mark.parametrize("seed", range(60))
def test_contiguous_plans_equal_exhaustive_search(seed):
    problem = random_loads(seed)
    plan = balance(problem, contiguous=True, effort=FAST)
    assert plan.objective == pytest.approx(exhaustive(problem, True))
    assert plan.lower_bound <= plan.objective * (1 + 1e-9) or math.isinf(plan.objective)


@pytest.mark.parametrize("seed", range(60))
def test_contiguous_training_plans_equal_exhaustive_search(seed):
    problem = random_training(seed)
    plan = balance(problem, contiguous=True, effort=FAST)
    assert plan.objective == pytest.approx(exhaustive(problem, True))
    assert plan.lower_bound <= plan.objective * (1 + 1e-9) or math.isinf(plan.objective)


@pytest.mark.parametrize("seed", range(40))
def test_free_plans_equal_exhaustive_search_with_nodes_that_share_a_device(seed):
    problem = random_loads(seed, groups=True)
    best = exhaustive(problem, False)
    plan = balance(problem, contiguous=False, effort=FAST)
    assert plan.objective == pytest.approx(best)
    assert plan.lower_bound <= best * (1 + 1e-9) or math.isinf(best)


@pytest.mark.parametrize("seed", range(40))
def test_the_fractional_bound_holds(seed):
    problem = random_loads(seed)
    assert fractional_bound(problem) <= exhaustive(problem, False) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(60))
def test_the_bound_of_a_core_holds(seed):
    problem = random_training(seed) if seed % 2 else random_loads(seed, groups=True)
    blocks = contract(problem, contiguous=True)
    best = exhaustive(problem, True)
    for most in (2, 3, 5, 9):  # downsets
        plan, bound = over_core(problem, blocks, 0.0, math.inf, most, 10_000)
        assert bound <= best * (1 + 1e-9)
        assert plan is None or plan.value >= best * (1 - 1e-9)


def test_cores_prove_what_all_downsets_are_too_many_for():
    loose = [(0.1, 9.0)] * 40  # nodes without any order
    chain = [(float(t), 90.0) for t in (5, 4, 6, 5, 7, 3, 5, 6)]
    types = (LoadType("acc", 4), LoadType("cpu", 1, math.inf, 0.0))
    times = (*loose, *chain)
    edges = tuple((40 + i, 41 + i) for i in range(7))
    plan = balance(LoadProblem(times, (0.0,) * 48, (3.0,) * 48, edges, types), effort=FAST)
    assert plan.lower_bound >= 17.0  # one of four devices holds an end and a middle of the chain, or three nodes


def test_free_is_never_worse_than_contiguous():
    for seed in range(30):
        problem = random_loads(seed)
        tied = balance(problem, contiguous=True, effort=FAST).objective
        assert balance(problem, contiguous=False, effort=FAST).objective <= tied * (1 + 1e-9)


def test_free_placements_fit_where_no_contiguous_one_does():
    types = (LoadType("acc", 2, 10.0),)
    problem = LoadProblem(((1.0,),) * 4, (7.0, 4.0, 3.0, 6.0), (0.0,) * 4, ((0, 1), (1, 2), (2, 3)), types)
    refused = balance(problem, contiguous=True, effort=FAST)
    assert math.isinf(refused.lower_bound)
    assert "no contiguous placement" in refused.reason
    assert "10.2 % more memory on every device" in refused.reason
    assert balance(problem, contiguous=False, effort=FAST).objective == 2.0


def test_a_packing_that_does_not_exist_is_proved():
    problem = LoadProblem(((1.0,),) * 3, (6.0, 6.0, 6.0), (0.0,) * 3, (), (LoadType("acc", 2, 10.0),))
    plan = balance(problem, contiguous=False, effort=FAST)
    assert math.isinf(plan.lower_bound)
    assert "20.3 % more memory on every device" in plan.reason


def test_more_bytes_than_all_devices_hold_are_counted():
    problem = LoadProblem(((1.0,),) * 3, (8.0, 8.0, 8.0), (0.0,) * 3, (), (LoadType("acc", 2, 10.0),))
    assert "4 more than all devices hold together" in balance(problem).reason


def test_a_group_that_fits_nowhere_is_named():
    problem = LoadProblem(((1.0,), (1.0,)), (6.0, 6.0), (0.0, 0.0), (), (LoadType("acc", 2, 10.0),), (0, 0))
    assert "2 more than" in balance(problem).reason


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"time_s": ((math.nan,),)}, BadTime),
        ({"time_s": ((-1.0,),)}, BadTime),
        ({"memory_bytes": (-1.0,)}, BadGraph),
        ({"edges": ((0, 5),)}, BadGraph),
        ({"types": (LoadType("acc", 0),)}, EmptyCluster),
    ],
)
def test_bad_numbers_are_refused(change, error):
    good = {"time_s": ((1.0,),), "memory_bytes": (1.0,), "send_s": (0.0,), "edges": (), "types": (LoadType("acc", 1),)}
    with pytest.raises(error):
        LoadProblem(**(good | change))


def test_little_memory_is_kept_to_the_byte():
    """Annealing finds 73 here; CP-SAT must know how few bytes a device holds to find what fits."""
    problem = random_loads(9238, groups=True)
    assert max(problem.memory_bytes) < 1024
    plan = balance(problem, contiguous=False, effort=FAST)
    assert plan.objective == pytest.approx(exhaustive(problem, False))
    assert plan.lower_bound == pytest.approx(plan.objective, rel=1e-5)


@pytest.mark.parametrize("contiguous", [True, False])
def test_devices_that_hold_no_node_do_not_lower_the_bound(contiguous):
    """Nine nodes in a row of 1 s on three devices; twenty devices that are ten times as fast hold none of them."""
    types = (LoadType("acc", 3, 100.0), LoadType("small", 20, 5.0))
    edges = tuple((v, v + 1) for v in range(8))
    problem = LoadProblem(((1.0, 0.1),) * 9, (6.0,) * 9, (0.2,) * 9, edges, types)
    plan = balance(problem, contiguous=contiguous, effort=Effort())
    alone = balance(
        LoadProblem(((1.0,),) * 9, (6.0,) * 9, (0.2,) * 9, edges, types[:1]), contiguous=contiguous, effort=Effort()
    )
    assert plan.objective == pytest.approx(alone.objective) == pytest.approx(3.4)
    assert plan.lower_bound == pytest.approx(alone.lower_bound) and plan.lower_bound >= 3.0
