"""Training plans against exhaustive search, written from the paper's formulas."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest

from tvmhet.errors import BadGraph
from tvmhet.solve.orders import closed_sets
from tvmhet.solve.recompute import Choice, cheapest_choice
from tvmhet.solve.replicated import ReplicatedProblem, plan_replicated
from tvmhet.solve.training import Config, TrainingProblem, plan_training


def random_training(seed: int) -> TrainingProblem:
    """Draw a chain of up to 4 nodes with tensor degrees 1 and perhaps 2, with and without recomputation."""
    rng = random.Random(seed)
    n = rng.randint(1, 4)
    edges = tuple((v, v + 1, float(rng.randint(0, 4))) for v in range(n - 1))
    configs = []
    for v in range(n):
        near = [x for x in (v - 1, v + 1) if 0 <= x < n]
        by = {}
        for t in (1, 2) if rng.random() < 0.6 else (1,):
            time, fixed = rng.randint(2, 9) / t, rng.randint(1, 6) / t
            into = tuple((x, rng.randint(0, 2) * (t - 1.0)) for x in near if x < v)
            out = tuple((x, rng.randint(0, 2) * (t - 1.0)) for x in near if x > v)
            plain = Config("plain", time, fixed, rng.randint(2, 8) / t, fixed, into, out)
            again = Config("again", time * 1.3, fixed, 1.0 / t, fixed + rng.randint(0, 2), into, out)
            by[t] = (plain, again)
        configs.append(by)
    return TrainingProblem(tuple(configs), edges, rng.randint(1, 5), rng.choice([14.0, 25.0, 100.0]), 10.0, 12)


def value(problem: TrainingProblem, cuts, degrees, names) -> float:
    """Slowest stage, inf where a rule is broken. `degrees` are (data, tensor) per stage, `names` a config per node."""
    bounds = [0, *cuts, len(problem.configs)]
    later, worst = 0, 0.0
    for s in reversed(range(len(bounds) - 1)):
        nodes, (d, t) = range(bounds[s], bounds[s + 1]), degrees[s]
        later += d
        time = memory = 0.0
        for v in nodes:
            if t not in problem.configs[v]:
                return math.inf
            c = problem.configs[v][t][names[v]]
            crossing = sum(x for a, b, x in problem.edges if v in (a, b) and (a in nodes) != (b in nodes))
            crossing += sum(x for w, x in (*c.in_bytes, *c.out_bytes) if w not in nodes)
            reduce = 4 * (d - 1) * c.parameter_bytes / d / problem.num_microbatches
            time += c.time_s / d + (2 * crossing / d + reduce) / problem.byte_per_s
            memory += c.memory_per_sample * math.ceil(later / d) + c.memory_fixed
        if memory > problem.memory_bytes:
            return math.inf
        worst = max(worst, time)
    return worst


def exhaustive(problem: TrainingProblem, ways: int = 2) -> float:
    n, best = len(problem.configs), math.inf
    pairs = [(d, t) for d in range(1, 6) for t in (1, 2) if d * t <= problem.num_devices and 12 % d == 0]
    for stages in range(1, n + 1):
        for cuts in itertools.combinations(range(1, n), stages - 1):
            for degrees in itertools.product(pairs, repeat=stages):
                if sum(d * t for d, t in degrees) > problem.num_devices:
                    continue
                for names in itertools.product(range(ways), repeat=n):
                    best = min(best, value(problem, cuts, degrees, names))
    return best


@pytest.mark.parametrize("seed", [*range(60), 7700100, 7700620])  # the last two: four kinds of nodes to recompute
def test_training_plans_equal_exhaustive_search(seed):
    problem = random_training(seed)
    plan, best = plan_training(problem), exhaustive(problem)
    assert plan.time_s == pytest.approx(best, rel=2e-6)
    assert plan.lower_bound_s <= best * (1 + 1e-9) or math.isinf(best)
    assert bool(plan.reason) == math.isinf(best)


@pytest.mark.parametrize("seed", range(80))
def test_the_choice_of_recomputation_is_the_cheapest(seed):
    rng = random.Random(seed)
    kinds = [(rng.randint(1, 5), rng.randint(1, 9)) for _ in range(rng.randint(1, 3))]
    nodes = []
    for _ in range(rng.randint(1, 7)):
        extra, saved = rng.choice(kinds)
        nodes.append([Choice(3.0, 0.0, 10.0), Choice(3.0 + extra, 0.0, 10.0 - saved)])
    limit = rng.randint(10, 80)
    best = min(
        (
            sum(row[i].time_s for row, i in zip(nodes, pick, strict=True))
            for pick in itertools.product((0, 1), repeat=len(nodes))
            if sum(row[i].memory_fixed for row, i in zip(nodes, pick, strict=True)) <= limit
        ),
        default=math.inf,
    )
    seconds, picked = cheapest_choice(nodes, 1, limit)
    assert seconds == pytest.approx(best)
    assert len(picked) == (0 if math.isinf(best) else len(nodes))


@pytest.mark.parametrize("seed", range(40))
def test_few_nodes_of_many_kinds_are_chosen_exactly(seed):
    rng = random.Random(seed)
    nodes = [
        [Choice(3.0, 0.0, 10.0), Choice(3.0 + rng.random(), 0.0, 10.0 - rng.uniform(1, 9))]
        for _ in range(rng.randint(4, 8))
    ]
    limit = rng.uniform(10, 80)
    best = min(
        (
            sum(row[i].time_s for row, i in zip(nodes, pick, strict=True))
            for pick in itertools.product((0, 1), repeat=len(nodes))
            if sum(row[i].memory_fixed for row, i in zip(nodes, pick, strict=True)) <= limit
        ),
        default=math.inf,
    )
    assert cheapest_choice(nodes, 1, limit)[0] == pytest.approx(best)


@pytest.mark.parametrize("seed", range(40))
def test_what_is_chosen_greedily_is_bounded_by_recomputing_in_part(seed):
    """Three configurations a node: greedy, so the plan may be worse than the best; the bound may not be above it."""
    problem, rng = random_training(seed), random.Random(seed)
    configs = tuple(
        {
            t: (plain, again, replace(again, name="half", time_s=plain.time_s * rng.uniform(1.0, 1.3),
                                      memory_per_sample=(plain.memory_per_sample + again.memory_per_sample) / 2))
            for t, (plain, again) in by.items()
        }
        for by in problem.configs
    )  # fmt: skip
    problem = replace(problem, configs=configs)
    plan, best = plan_training(problem), exhaustive(problem, ways=3)
    assert plan.lower_bound_s <= best * (1 + 1e-9) or math.isinf(best)
    assert plan.time_s >= best * (1 - 1e-9)
    assert plan.time_s == pytest.approx(best, rel=2e-6) or "greedily" in plan.solver or math.isinf(plan.time_s)


def test_thirty_layers_of_as_many_kinds_keep_a_close_bound():
    rng = random.Random(5)
    configs = tuple(
        {1: (Config("plain", 4.0 + rng.random(), 1.0, 8.0 + rng.random(), 1.0), Config("again", 6.0, 1.0, 1.0, 1.0))}
        for _ in range(30)
    )
    edges = tuple((v, v + 1, 1.0) for v in range(29))
    plan = plan_training(TrainingProblem(configs, edges, 2, 150.0, 10.0, 12))
    assert "greedily" in plan.solver and 0.95 * plan.time_s < plan.lower_bound_s < plan.time_s
    roomy = plan_training(TrainingProblem(configs, edges, 2, 1e9, 10.0, 12))
    assert "exact" in roomy.solver and roomy.lower_bound_s > 0.999 * roomy.time_s


def test_many_kinds_of_nodes_are_chosen_greedily_and_fit():
    rng = random.Random(1)
    nodes = [[Choice(1.0, 1.0, 9.0), Choice(1.0 + rng.random(), 0.5, rng.uniform(1, 9))] for _ in range(20)]
    seconds, picked = cheapest_choice(nodes, 3, 200.0)
    assert sum(row[i].memory(3) for row, i in zip(nodes, picked, strict=True)) <= 200.0
    assert seconds == pytest.approx(sum(row[i].time_s for row, i in zip(nodes, picked, strict=True)))


@pytest.mark.parametrize("seed", range(40))
def test_replicated_plans_equal_exhaustive_search(seed):
    rng = random.Random(seed)
    n, m, rate = rng.randint(1, 5), rng.randint(1, 5), 10.0
    time, weight, size = ([float(rng.randint(1, 9)) for _ in range(n)] for _ in range(3))
    problem = ReplicatedProblem(
        tuple(time), tuple(weight), tuple(size), tuple((v, v + 1) for v in range(n - 1)), m, rate
    )
    best = math.inf
    for stages in range(1, min(n, m) + 1):
        for cuts in itertools.combinations(range(1, n), stages - 1):
            bounds = [0, *cuts, n]
            for r in itertools.product(range(1, m + 1), repeat=stages):
                if sum(r) <= m:
                    worst = max([2 * size[c - 1] / rate for c in cuts], default=0.0)
                    for s in range(stages):
                        nodes = slice(bounds[s], bounds[s + 1])
                        worst = max(worst, max(sum(time[nodes]), 2 * (r[s] - 1) * sum(weight[nodes]) / rate) / r[s])
                    best = min(best, worst)
    plan = plan_replicated(problem)
    assert plan.time_s == pytest.approx(best)
    assert plan.lower_bound_s == pytest.approx(best)


@pytest.mark.parametrize("seed", range(40))
def test_replicated_plans_of_wide_graphs_are_the_best_of_all_downsets(seed):
    """With few states allowed, heavy tensors are what makes the search exact again."""
    rng = random.Random(seed)
    n = rng.randint(3, 7)
    edges = tuple((u, v) for v in range(n) for u in range(v) if rng.random() < 0.3)
    numbers = (tuple(float(rng.randint(1, 9)) for _ in range(n)) for _ in range(2))
    sizes = tuple(rng.choice([1.0, 5.0, 40.0, 200.0]) for _ in range(n))
    problem = ReplicatedProblem(*numbers, sizes, edges, rng.randint(1, 4), 10.0)
    exact, few = plan_replicated(problem), plan_replicated(problem, max_states=rng.choice([n, n + 2]))
    assert exact.solver == "exact over all downsets"
    assert few.lower_bound_s <= exact.time_s * (1 + 1e-9) <= few.time_s * (1 + 2e-9)
    if "joined" in few.solver:
        assert few.time_s == pytest.approx(exact.time_s)


def test_heavy_tensors_prove_a_plan_of_a_wide_graph():
    """Twenty branches have 2^20 downsets; each may be cut before its heavy tensor only, or not at all."""
    edges = tuple(x for b in range(20) for x in ((0, 1 + b), (1 + b, 21)))
    sizes = (500.0, *[500.0] * 20, 1.0)
    problem = ReplicatedProblem((1.0,) * 22, (0.0,) * 22, sizes, edges, 2, 10.0)
    plan = plan_replicated(problem)
    assert (plan.time_s, plan.lower_bound_s, plan.solver) == (11.0, 11.0, "exact over joined downsets")


def test_a_cycle_is_refused():
    with pytest.raises(BadGraph, match="cycle"):
        ReplicatedProblem((1.0, 1.0), (0.0, 0.0), (0.0, 0.0), ((0, 1), (1, 0)), 1, 1.0)


def test_a_long_chain_is_planned_over_all_suffixes():
    rng = random.Random(11)
    n = 450  # more than the suffixes that are listed in any case
    configs = []
    for _ in range(n):
        time = rng.uniform(1.0, 2.0)
        configs.append({1: (Config("plain", time, 1.0, 8.0, 1.0), Config("again", 1.3 * time, 1.0, 1.0, 1.0))})
    edges = tuple((v, v + 1, 1.0) for v in range(n - 1))
    plan = plan_training(TrainingProblem(tuple(configs), edges, 4, 6000.0, 10.0, 12))
    assert "all suffixes" in plan.solver
    assert plan.lower_bound_s >= plan.time_s * (1 - 1e-3)
    assert sorted(v for s in plan.stages for v in s.nodes) == list(range(n))


@pytest.mark.parametrize("seed", range(30))
def test_closed_sets_equal_those_among_all_subsets(seed):
    rng = random.Random(seed)
    n = rng.randint(0, 7)
    needs = [[u for u in range(v) if rng.random() < 0.4] for v in range(n)]
    subsets = [frozenset(v for v in range(n) if m >> v & 1) for m in range(1 << n)]
    closed = {s for s in subsets if all(s.issuperset(needs[v]) for v in s)}
    found = closed_sets(needs, 1 << n)
    assert set(found) == closed and len(found) == len(closed)
    assert [len(s) for s in found] == sorted(map(len, found))
    assert closed_sets(needs, len(closed) - 1) == []
