"""Plans that ran: kept and found again, made again by what is known now, and chosen by what they took."""

from dataclasses import replace
from functools import partial

import pytest

import tvmhet
from tests.placed import cpus
from tests.small_models import SMALL_MODELS
from tvmhet.candidates import MAKERS, candidate_kernels
from tvmhet.choosing import best_plan, predicted_best, prices_on, takes_races
from tvmhet.cluster.units import duration
from tvmhet.context import beside, keep_context
from tvmhet.cost.measure import Measurement
from tvmhet.errors import BadBundle
from tvmhet.graph.placement import KernelPlacement, StagePlacement
from tvmhet.graph.rewrites import Merge, Recompute
from tvmhet.ir.prepare import prepare
from tvmhet.plans import Plan
from tvmhet.proposing import CHOICES
from tvmhet.raced import Placed, Raced, _key, expected_s, keep_race, last_race, made_again
from tvmhet.rewriting import Wanted
from tvmhet.solve import Objective
from tvmhet.solve.ablate import fuse_first, no_fusion
from tvmhet.solve.price_limits import PriceLimits
from tvmhet.times import Candidates, measured_key

TWO = cpus(v2=1, v3=1)
V2, V3 = TWO.device_types()
WANTED = Wanted(Objective.THROUGHPUT, MAKERS, {})
OTHERS = {
    "latency": replace(WANTED, objective=Objective.LATENCY),
    "makers": replace(WANTED, makers=("tvm",)),
}


@pytest.fixture(scope="module")
def prepared():
    return prepare(tvmhet.from_torch(*SMALL_MODELS["conv"]()))


ONE_ROUND = '[{"rounds": 1, "rewrites": [], "stages": []}]'  # of a record with two of them


def again(placed, prepared, database, cluster=TWO, wanted=WANTED):
    price_on = partial(prices_on, database=database, together=wanted.objective is Objective.THROUGHPUT)
    return made_again(placed, prepared, cluster, wanted, price_on)


def test_the_last_race_counts_and_comes_back_as_it_was(prepared, database):
    kernels = KernelPlacement("", ("a", "b"), "tvm"), KernelPlacement("", ("c",), "library")
    stages = StagePlacement(0, kernels[:1], V2.name, ("v2:0",)), StagePlacement(1, kernels[1:], V3.name, ("v3:0",))
    rewritten = (Recompute("a", (("b",), ("c",))),), (Merge((("c", "d"), ("e", "f"))),)
    race = Raced(Placed(rewritten, stages), 2.0, (3.0, 5.0)), Raced(Placed((), stages[:1]), 1.0, (4.0,))
    assert last_race(database, prepared, TWO, WANTED) == ()
    keep_race(database, prepared, TWO, WANTED, race[::-1])
    keep_race(database, prepared, TWO, WANTED, race)
    assert last_race(database, prepared, TWO, WANTED) == race
    for other in OTHERS.values():
        assert last_race(database, prepared, TWO, other) == ()
    assert last_race(database, prepared, cpus(v2=2, v3=1), WANTED) == ()
    assert not database.quarantined()


@pytest.mark.parametrize("note", ["", "{", "[{}]", "[1]", '[{"rewrites": [], "stages": [["v2"]]}]', "[]", ONE_ROUND])
def test_a_damaged_race_is_one_clear_error(note, prepared, database):
    database.insert(_key(prepared, TWO, WANTED), Measurement("ok", (1.0, 2.0, 3.0), note=note))
    with pytest.raises(BadBundle, match="no-race"):
        best_plan(prepared, TWO, database, WANTED)
    best_plan(prepared, TWO, database, replace(WANTED, kinds=CHOICES - {"race"}))


@pytest.mark.parametrize("objective", [Objective.THROUGHPUT, Objective.LATENCY])
@pytest.mark.parametrize("name", ["conv", "attention"])
def test_a_plan_is_made_again_as_it_was(name, objective, database):
    prepared, wanted = prepare(tvmhet.from_torch(*SMALL_MODELS[name]())), replace(WANTED, objective=objective)
    for search in (wanted.search, fuse_first, no_fusion):
        kinds = CHOICES if search is wanted.search else frozenset()
        plan = predicted_best(prepared, TWO, database, replace(wanted, search=search, kinds=kinds))
        found = again(Placed.of(plan), prepared, database, wanted=wanted)
        assert (found.stages, found.rewrites, found.timeline) == (plan.stages, plan.rewrites, plan.timeline)
        assert found.objective_value == pytest.approx(plan.objective_value, rel=1e-12)
        assert (found.cluster_key, found.lower_bound, found.solver) == (plan.cluster_key, 0.0, "as it ran")


def test_one_device_alone_is_priced_as_one_alone(prepared, database):
    """Together both take ten times as long, so that the best plan is of one."""
    for device in (V2, V3):
        keep_context(database, prepared.key, device, (1.0,), 1.0)
        keep_context(database, prepared.key, device, (10.0,), 1.0, beside(1))
    plan = predicted_best(prepared, TWO, database, WANTED)
    assert len(Placed.of(plan).devices) == 1
    assert again(Placed.of(plan), prepared, database).objective_value == plan.objective_value
    assert again(Placed.of(plan), prepared, database).cluster_key == TWO.content_hash()


def test_what_can_no_longer_be_made_is_none(prepared, database):
    placed = Placed.of(predicted_best(prepared, TWO, database, WANTED))
    first, *others = placed.stages
    unknown = replace(first, kernels=(replace(first.kernels[0], ops=("nobody",)), *first.kernels[1:]))
    assert again(replace(placed, stages=(unknown, *others)), prepared, database) is None
    assert again(replace(placed, rewrites=((Recompute("nobody", (("a",), ("b",))),),)), prepared, database) is None
    one = cpus(v2=0, v3=1)
    assert again(placed, prepared, database, cluster=one) is None
    fail(prepared, database, placed.stages[0].kernels[0], placed.stages[0].device_type)
    assert again(placed, prepared, database) is None


def fail(prepared, database, kernel, device_type):
    """Say of a kernel that it crashes there."""
    candidates = Candidates.of(prepared.graph, candidate_kernels(prepared.graph, MAKERS))
    (i,) = candidates.indices([kernel])
    device = next(d for d in TWO.device_types() if d.name == device_type)
    database.insert(measured_key(candidates.keys[i], kernel.maker, device), Measurement("crash"))


def rivals(prepared, database):
    """The plan that is predicted best, and a slower one."""
    best = predicted_best(prepared, TWO, database, WANTED)
    slower = predicted_best(prepared, TWO, database, replace(WANTED, search=no_fusion, kinds=frozenset()))
    assert slower.objective_value > best.objective_value
    return best, slower


def race_of(prepared, database, *pairs):
    """Keep a race of plans that took the same in each of eight rounds, or what is listed."""
    rounds = [(plan, took_s if isinstance(took_s, tuple) else (took_s,) * 8) for plan, took_s in pairs]
    raced = [Raced(Placed.of(plan), plan.objective_value, took_s) for plan, took_s in rounds]
    keep_race(database, prepared, TWO, WANTED, raced)


def test_surely_is_by_the_sign_test():
    def sure(faster, slower):
        one, other = (
            Raced(Placed((), ()), 1.0, rounds) for rounds in zip(*[(1, 2)] * faster, *[(2, 1)] * slower, strict=True)
        )
        return one.is_surely_faster(other)

    # C(n, k) / 2^n summed: 1/32, 1/16, 9/256, 37/256, 8/128
    assert [sure(5, 0), sure(4, 0), sure(7, 1), sure(6, 2), sure(6, 1)] == [True, False, True, False, False]
    assert not Raced(Placed((), ()), 1.0, (1.0,) * 8).is_surely_faster(Raced(Placed((), ()), 1.0, (1.0,) * 8))
    short = Raced(Placed((), ()), 1.0, (0.1,) * 2)  # left after two rounds
    assert not short.is_surely_faster(Raced(Placed((), ()), 1.0, (1.0,) * 8))


def test_a_faster_median_within_the_noise_changes_nothing(prepared, database):
    best, slower = rivals(prepared, database)
    race_of(prepared, database, (best, (3e-3,) * 8), (slower, (2e-3,) * 6 + (4e-3,) * 2))
    plan = best_plan(prepared, TWO, database, WANTED)
    assert replace(plan, notes=(), ran_s=0.0) == replace(best, notes=())
    race_of(prepared, database, (best, (3e-3,) * 8), (slower, (2e-3,) * 7 + (4e-3,)))
    assert Placed.of(best_plan(prepared, TWO, database, WANTED)) == Placed.of(slower)


def test_of_plans_that_ran_the_faster_is_chosen(prepared, database):
    best, slower = rivals(prepared, database)
    race_of(prepared, database, (best, 3e-3), (slower, 2e-3))
    plan = best_plan(prepared, TWO, database, WANTED)
    assert Placed.of(plan) == Placed.of(slower)
    assert plan.objective_value == pytest.approx(slower.objective_value)
    assert plan.lower_bound <= best.lower_bound and plan.status == "feasible"
    assert plan.notes[-1] == "it took 2 ms an input when profile ran it against one other plan"
    assert best_plan(prepared, TWO, database, WANTED).to_json() == plan.to_json()
    tvmhet.build(prepared.model, cluster=TWO, plan=plan).close()
    race_of(prepared, database, (best, 1e-3), (slower, 2e-3))
    plan = best_plan(prepared, TWO, database, WANTED)
    assert replace(plan, notes=(), ran_s=0.0) == replace(best, notes=())
    assert plan.notes == (*best.notes, "it took 1 ms an input when profile ran it against one other plan")


def test_a_plan_that_ran_is_expected_to_take_what_it_took(prepared, database):
    best, slower = rivals(prepared, database)
    race_of(prepared, database, (best, 2e-3), (slower, 3e-3))
    plan = best_plan(prepared, TWO, database, WANTED)
    assert plan.ran_s == plan.expected_period_s == 1 / plan.throughput_per_s == 2e-3
    assert (plan.period_s, plan.latency_s, plan.expected_latency_s) == (best.period_s, best.latency_s, best.latency_s)
    text = f"500 inputs/s (one every 2 ms as it ran, {duration(best.period_s)} by its kernels)"
    assert text in str(plan) and "as it ran" not in str(best)
    assert Plan.from_json(plan.to_json()) == plan
    assert "ran_s" in plan.to_json() and "ran_s" not in best.to_json()
    alone = replace(plan, objective="latency")
    assert (alone.expected_latency_s, alone.expected_period_s) == (2e-3, best.period_s)
    assert f"2 ms for one input alone as it ran, {duration(best.latency_s)} by its kernels" in str(alone)


def test_plans_that_are_asked_for_otherwise_are_as_predicted(prepared, database):
    best, slower = rivals(prepared, database)
    race_of(prepared, database, (best, 3e-3), (slower, 2e-3))
    name = prepared.graph.operators[0].name
    where = best.stage_of(name).placement.device_type
    for wanted in (
        replace(WANTED, pin={name: where}),
        replace(WANTED, kinds=CHOICES - {"race"}),
        replace(WANTED, limits=PriceLimits(), objective=Objective.COST),
        replace(WANTED, search=fuse_first, kinds=frozenset()),
        *OTHERS.values(),
    ):
        assert takes_races(wanted) == (wanted in OTHERS.values())
        if wanted.objective is not Objective.COST:
            assert best_plan(prepared, TWO, database, wanted) == predicted_best(prepared, TWO, database, wanted)


def test_a_plan_that_did_not_run_is_expected_to_be_off_as_those_that_did(prepared, database):
    best, slower = rivals(prepared, database)
    raced = [
        Raced(Placed.of(slower), slower.objective_value, (1.5 * slower.objective_value,)),
        Raced(Placed((), ()), 1.0, (1.1,)),
        Raced(Placed((), Placed.of(slower).stages[:1]), 1.0, (1.2,)),
    ]
    assert expected_s(best, raced) == pytest.approx(1.2 * best.objective_value)
    assert expected_s(slower, raced) == pytest.approx(1.5 * slower.objective_value)
    faster = replace(slower, objective_value=0.5 * slower.objective_value)  # its kernels were tuned since
    assert expected_s(faster, raced) == pytest.approx(0.75 * slower.objective_value)


def test_what_failed_since_it_ran_is_not_chosen(prepared, database):
    best, slower = rivals(prepared, database)
    race_of(prepared, database, (best, 3e-3), (slower, 2e-3))
    other = next(k for s in Placed.of(slower).stages for k in s.kernels if k not in best_kernels(best))
    where = next(s.device_type for s in Placed.of(slower).stages if other in s.kernels)
    fail(prepared, database, other, where)
    plan = best_plan(prepared, TWO, database, WANTED)
    assert Placed.of(plan) == Placed.of(best)


def best_kernels(plan):
    return [k for s in Placed.of(plan).stages for k in s.kernels]
