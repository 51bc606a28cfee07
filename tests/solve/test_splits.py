"""Tensor split in inference: `solve`, `cheapest` and the front against exhaustive search, and laws."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import replace

import hypothesis
import pytest

from tests.oracle_splits import best_split, best_virtual_split, trades
from tests.solve.problems import random_problem
from tvmhet.errors import BadGraph, BadTime, BrokenSolution
from tvmhet.solve import (
    IN_SECONDS,
    DeviceGroup,
    Edge,
    Kernel,
    Link,
    Objective,
    Problem,
    Split,
    Status,
    Weight,
    check,
    simulate,
    solve,
    with_splits,
)
from tvmhet.solve.cheapest import cheapest
from tvmhet.solve.price import price_front
from tvmhet.solve.price_limits import PriceLimits
from tvmhet.solve.splits import with_devices, without_teams

BOTH = pytest.mark.parametrize("objective", IN_SECONDS)
_SAME = 1e-9


def random_splits(problem: Problem, seed: int) -> tuple[Split, ...]:
    """Splits in 2 and in 4 of some groups: from a third of one device's time to more than it, some kernels not."""
    rng = random.Random(seed)
    out = []
    for g, group in enumerate(problem.groups):
        for degree in (2, 4):
            if group.num_devices >= degree and rng.random() < 0.8:
                factor = rng.choice([0.3, 0.5, 0.7, 1.2])
                times = (k.time_s[g] * factor + rng.choice([0.0, 0.5]) for k in problem.kernels)
                out.append(Split(g, degree, tuple(math.inf if rng.random() < 0.1 else t for t in times)))
    return tuple(out)


def drawn(seed: int, tight: bool = False, **kwargs: object) -> tuple[Problem, tuple[Split, ...]]:
    """A problem whose devices have prices, and its splits."""
    problem = random_problem(seed, most_nodes=5, most_groups=3, most_devices=6, tight=tight, **kwargs)
    rng = random.Random(seed)
    groups = tuple(replace(g, usd_per_h=rng.choice([1.0, 2.0, 3.5])) for g in problem.groups)
    weights = tuple(replace(w, is_whole=rng.random() < 0.3) for w in problem.weights)
    problem = replace(problem, groups=groups, kernels=problem.kernels[:9], weights=weights)
    return problem, random_splits(problem, seed)


def compared(problem: Problem, splits: tuple[Split, ...], objective: Objective) -> str:
    """How the answer stands to the best there is: "none", "best" or "proved"."""
    joined = with_splits(problem, splits)
    solution = solve(joined, objective)
    check(joined, solution, objective)
    best = best_split(problem, splits, objective is Objective.LATENCY)
    assert (solution.status is Status.INFEASIBLE) == math.isinf(best)
    if math.isinf(best):
        return "none"
    assert solution.lower_bound <= best * (1 + _SAME)
    assert solution.objective >= best * (1 - _SAME)
    same = solution.objective <= best * (1 + _SAME)
    assert same or solution.status is Status.FEASIBLE
    return "proved" if same and solution.status is Status.OPTIMAL else "best" if same else "worse"


def surveyed(seeds: range, objective: Objective, least: int, *, tight: bool) -> None:
    """Every answer of these problems is the best there is and proved to be."""
    found = [compared(p, s, objective) for p, s in (drawn(seed, tight) for seed in seeds) if s]
    print(f"{objective.value}: {found.count('proved')} of {len(found) - found.count('none')} proved")
    assert not {"best", "worse"} & set(found)
    assert found.count("proved") >= least


@BOTH
@pytest.mark.parametrize("tight", [False, True])
def test_answers_are_the_best(objective, tight):
    surveyed(range(60), objective, 25, tight=tight)


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("tight", [False, True])
def test_thousands_of_answers_are_the_best(objective, tight):
    surveyed(range(1000, 1500), objective, 180, tight=tight)


def undominated(found: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """(seconds, rent) that no other beats in both, cheapest rent first."""
    out: list[tuple[float, float]] = []
    for rent, seconds in sorted((rent, seconds) for seconds, rent in found):
        if not out or seconds < out[-1][0] * (1 - _SAME):
            out.append((seconds, rent))
    return out


def test_fronts_and_prices_are_the_best():
    mixed = 0
    for seed in range(60):
        problem, splits = drawn(seed, tight=seed % 2 == 0)
        found = list(trades(problem, splits)) if splits else []
        if not found:
            continue
        joined = with_splits(problem, splits)
        front = price_front(joined, step=1e-9)
        assert [(p.period_s, p.usd_per_h) for p in front.plans] == [pytest.approx(t) for t in undominated(found)]
        mixed += any(joined.groups[s.group].degree > 1 for p in front.plans for s in p.stages)
        slowest_s = 1.3 * min(seconds for seconds, _ in found)
        for limits in (PriceLimits(), PriceLimits(throughput_per_s=1 / slowest_s)):
            answer = cheapest(joined, limits)
            check(joined, answer, Objective.COST)
            within = [seconds * rent / 3600 for seconds, rent in found if seconds <= slowest_s or not limits.any]
            assert answer.objective == pytest.approx(min(within))
            assert answer.lower_bound <= min(within) * (1 + _SAME)
    assert mixed > 10


def test_virtual_stages_keep_their_bound():
    found = []
    for seed in range(40):
        problem = random_problem(seed, most_nodes=4, most_groups=2, most_devices=5, tight=seed % 2 == 0, one_link=False)
        if not (splits := random_splits(problem, seed)):
            continue
        joined = with_splits(problem, splits)
        answer = solve(joined, virtual_stages=True)
        check(joined, answer)
        best = best_virtual_split(problem, splits)
        assert (answer.status is Status.INFEASIBLE) == math.isinf(best)
        if best < math.inf:
            assert answer.lower_bound <= best * (1 + _SAME) and answer.objective >= best * (1 - _SAME)
            found.append(answer.objective <= best * (1 + _SAME))
    assert sum(found) >= 0.9 * len(found) > 15


SEEDS = hypothesis.strategies.integers(0, 10_000)


@BOTH
@hypothesis.given(seed=SEEDS)
@hypothesis.settings(max_examples=40)
def test_a_split_never_hurts_and_one_that_is_slower_is_never_used(objective, seed):
    problem, splits = drawn(seed)
    alone = solve(problem, objective)
    faster = solve(with_splits(problem, splits), objective)
    assert faster.objective <= alone.objective * (1 + 1e-6) or alone.status is Status.INFEASIBLE
    slower = tuple(
        replace(s, forward_s=tuple(k.time_s[s.group] * 1.01 for k in problem.kernels), degree=2) for s in splits[:1]
    )
    joined = with_splits(problem, slower)
    answer = solve(joined, objective)
    assert all(joined.groups[s.group].degree == 1 for s in answer.stages)
    assert answer.objective == pytest.approx(alone.objective)


@BOTH
@hypothesis.given(seed=SEEDS, exponent=hypothesis.strategies.integers(-20, 20))
@hypothesis.settings(max_examples=25)
def test_scaling_all_times_scales_the_answer(objective, seed, exponent):
    problem, splits = drawn(seed)
    factor = 2.0**exponent

    def slower(link: Link) -> Link:
        return Link(link.latency_s * factor, link.byte_per_s / factor)

    scaled = replace(
        problem,
        kernels=tuple(replace(k, time_s=tuple(t * factor for t in k.time_s)) for k in problem.kernels),
        groups=tuple(replace(g, stage_overhead_s=g.stage_overhead_s * factor) for g in problem.groups),
        links=tuple(tuple(map(slower, row)) for row in problem.links),
        host_links=tuple(map(slower, problem.host_links)),
    )
    wider = tuple(replace(s, forward_s=tuple(t * factor for t in s.forward_s)) for s in splits)
    answer, other = solve(with_splits(problem, splits), objective), solve(with_splits(scaled, wider), objective)
    assert other.objective == pytest.approx(answer.objective * factor) or answer.status is Status.INFEASIBLE


def chain(num_nodes: int, weight_bytes: int, group: DeviceGroup) -> Problem:
    """Nodes of 1 s in a row, each with a weight."""
    link = Link(0.0, 100.0)
    return Problem(
        num_nodes,
        tuple(Kernel((v,), (1.0,)) for v in range(num_nodes)),
        (Edge(-1, (0,), 1), *(Edge(v, (v + 1,), 1) for v in range(num_nodes - 1)), Edge(num_nodes - 1, (), 1, True)),
        tuple(Weight((v,), weight_bytes) for v in range(num_nodes)),
        (group,),
        ((link,),),
        (link,),
    )


@BOTH
def test_a_weight_that_fits_no_device_is_split(objective):
    problem = chain(2, 100, DeviceGroup("a", 4, 60.0, 1.0))
    alone = solve(problem, objective)
    assert alone.status is Status.INFEASIBLE and "alone needs 102 bytes" in alone.reason
    joined = with_splits(problem, [Split(0, 2, (0.7, 0.7))])
    answer = solve(joined, objective)
    check(joined, answer, objective)
    assert [(s.group, s.num_replicas, s.memory_bytes) for s in answer.stages] == [(1, 1, 52), (1, 1, 52)]
    none = solve(with_splits(replace(problem, weights=(Weight((0,), 200),)), [Split(0, 2, (0.7, 0.7))]), objective)
    assert none.status is Status.INFEASIBLE and "a / 2" in none.reason


def test_what_is_short_is_devices_not_teams():
    problem = with_splits(chain(3, 100, DeviceGroup("a", 4, 60.0, 1.0)), [Split(0, 2, (0.7,) * 3)])
    reason = solve(problem).reason
    assert "does not fit 4 x 'a' of" in reason and "2 more devices of 'a'" in reason


def test_the_checker_counts_the_devices_of_teams():
    problem = with_splits(chain(2, 1, DeviceGroup("a", 4, 60.0)), [Split(0, 2, (0.5, 0.5)), Split(0, 4, (0.3, 0.3))])
    answer = solve(problem)
    check(problem, answer)
    stage = replace(answer.stages[0], kernels=(0,), num_replicas=1)
    more = replace(answer, stages=(replace(stage, group=2), replace(stage, kernels=(1,), group=0)))
    with pytest.raises(BrokenSolution, match="5 devices of 'a' are used, there are 4"):
        check(problem, more)
    with pytest.raises(BrokenSolution, match="claims"):
        check(problem, replace(answer, stages=tuple(replace(s, memory_bytes=99) for s in answer.stages)))


def test_splits_that_are_no_use_hide_no_plan():
    """Many modes leave the search fewer labels and cuts: here it found less than without them."""
    rng = random.Random(150)
    tensors = []
    for v in range(149):
        more = rng.random() < 0.3 and v < 147
        tensors.append(Edge(v, (v + 1, v + 3) if more else (v + 1,), rng.randint(1, 50)))
    times = [(t := rng.uniform(1, 9), 2 * t * rng.uniform(0.8, 1.2)) for _ in range(150)]
    link = Link(0.01, 100.0)
    problem = Problem(
        150,
        tuple(Kernel((v,), t) for v, t in enumerate(times)),
        (Edge(-1, (0,), 100), *tensors, Edge(149, (), 5, True)),
        tuple(Weight((v,), 20) for v in range(150)),
        (DeviceGroup("a", 8, 750, 3.0), DeviceGroup("b", 16, 562.5, 1.0)),
        ((link, link), (link, Link(0.01, 30.0))),
        (link, link),
    )
    splits = [Split(g, d, tuple(1.25 * t[g] / d + 0.02 for t in times)) for g in (0, 1) for d in (2, 4, 8)]
    joined = with_splits(problem, splits)
    answer = solve(joined)
    check(joined, answer)
    assert answer.objective <= solve(problem).objective * (1 + _SAME)


def test_a_split_stage_runs_in_the_simulator_as_planned():
    problem = with_splits(chain(4, 1, DeviceGroup("a", 8, 60.0)), [Split(0, 4, (0.2,) * 4)])
    answer = solve(problem)
    assert {problem.groups[s.group].degree for s in answer.stages} == {4}
    assert simulate(problem, answer, 60).period_s == pytest.approx(answer.objective)


def test_teams_follow_the_devices_of_their_group():
    problem = with_splits(chain(2, 1, DeviceGroup("a", 5, 60.0, 2.0)), [Split(0, 2, (0.5, 0.5))])
    assert [(g.name, g.num_devices, g.usd_per_h) for g in problem.groups] == [("a", 5, 2.0), ("a / 2", 2, 4.0)]
    assert [g.num_devices for g in with_devices(problem, [3, 9]).groups] == [3, 1]
    assert without_teams(problem) == chain(2, 1, DeviceGroup("a", 5, 60.0, 2.0))


@pytest.mark.parametrize(
    "splits",
    [
        [Split(0, 1, (1.0, 1.0))],
        [Split(1, 2, (1.0, 1.0))],
        [Split(0, 2, (1.0,))],
        [Split(0, 2, (1.0, math.nan))],
        [Split(0, 2, (1.0, 1.0)), Split(0, 2, (2.0, 2.0))],
    ],
)
def test_a_bad_split_is_refused(splits):
    with pytest.raises(BadTime):
        with_splits(chain(2, 1, DeviceGroup("a", 4, 60.0)), splits)


@pytest.mark.parametrize("change", [{"num_devices": 3}, {"usd_per_h": 1.0}, {"team_of": 1}, {"degree": 1}])
def test_a_bad_team_is_refused(change):
    problem = with_splits(chain(2, 1, DeviceGroup("a", 4, 60.0, 1.0)), [Split(0, 2, (0.5, 0.5))])
    with pytest.raises(BadGraph):
        replace(problem, groups=(problem.groups[0], replace(problem.groups[1], **change)))
