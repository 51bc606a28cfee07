"""Recomputed producers and merged products in plans: found where they pay, never worse, built to the same answer."""

import hashlib
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from torch import nn

import tvmhet
from tests.placed import BEST, assert_same, cpus, plain, run_stages
from tvmhet import zoo
from tvmhet.candidates import MAKERS
from tvmhet.cost.table import Entry
from tvmhet.deploy import deploy
from tvmhet.emit.cache import StageCache
from tvmhet.errors import BadGraph
from tvmhet.graph.copies import cheap_producers, reader_groups
from tvmhet.graph.merges import find_merges
from tvmhet.graph.rewrites import Merge, Recompute
from tvmhet.ir.prepare import prepare
from tvmhet.known_times import known_times
from tvmhet.planning import make_plan
from tvmhet.plans import Plan
from tvmhet.proposing import KINDS, MERGE, RECOMPUTE, variant_of
from tvmhet.rewriting import Planner, Wanted
from tvmhet.solve import IN_SECONDS, Objective

ONE, TWO = cpus(**{BEST: 1}), cpus(v2=1, **{BEST: 1})
AGAIN = Recompute("add", (("sum",), ("relu",)))
MERGED = Merge((("q", "q_add"), ("k", "k_add")))


class Mixed(nn.Module):
    """A sum that two reductions read, and two products of one tensor that meet in a third."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(64, 48), nn.Linear(64, 48)

    def forward(self, x, y):
        s = x + y
        return s.sum(-1), torch.relu(s).amax(0), self.q(x) @ self.k(x).T


@cache
def mixed():
    torch.manual_seed(0)
    inputs = (torch.randn(32, 64), torch.randn(32, 64))
    model = tvmhet.from_torch(Mixed().eval(), inputs)
    return model, inputs, plain(model, *inputs)


def price(seconds, prepared, candidates, cluster=TWO):
    """A table in which a kernel takes `seconds(its key, description, device type)`."""
    table = known_times(prepared, candidates, None, cluster, in_context=False)
    for name in table.device_types:
        times = [seconds(*pair, name) for pair in zip(candidates.keys, candidates.descs, strict=True)]
        table = table.with_entries(name, {i: Entry(t, t, t, "given") for i, t in enumerate(times)})
    return table


def per_kernel(_key, _desc, _name):
    """Every kernel takes as long: the fewest kernels are the best plan."""
    return 1e-3


def by_dice(seed, key, _desc, name):
    """The same kernel takes the same time everywhere on a type; nothing else is known of it."""
    return 1e-3 * (1 + hashlib.sha256(f"{seed} {key} {name}".encode()).digest()[0] / 64)


def planned(seconds, cluster=ONE, objective=Objective.LATENCY, kinds=KINDS, pin=None, model=None):
    prepared = prepare(model or mixed()[0])
    asked = partial(price, seconds, cluster=cluster)
    planner = Planner(cluster, asked, Wanted(objective, MAKERS, pin or {}, kinds))
    return planner.best(variant_of(prepared, MAKERS, asked))[0]


def test_both_are_found_where_kernels_are_what_counts():
    plan = planned(per_kernel)
    assert plan.rewrites == ((AGAIN,), (MERGED,))
    plain_plan = planned(per_kernel, kinds=frozenset())
    assert (plain_plan.num_kernels, plan.num_kernels) == (6, 4)  # the last product reads slices where they lie
    assert "add (in 2 kernels)" in str(plan) and "q + k" in str(plan)


@pytest.mark.parametrize(("kinds", "want"), [({RECOMPUTE}, ((AGAIN,),)), ({MERGE}, ((MERGED,),))])
def test_a_kind_that_is_left_out_is_not_used(kinds, want):
    assert planned(per_kernel, kinds=frozenset(kinds)).rewrites == want


def test_a_producer_is_computed_again_by_the_shipped_estimates():
    plan = tvmhet.plan(mixed()[0], cluster=ONE, objective="latency")
    lesser = tvmhet.plan(mixed()[0], cluster=ONE, objective="latency", ablate="no-recompute")
    assert (AGAIN,) in plan.rewrites
    assert plan.objective_value < lesser.objective_value


@pytest.mark.parametrize("cluster", [ONE, TWO], ids=["one", "two"])
def test_a_rewritten_plan_gives_plain_tvms_answer(cluster, tmp_path):
    model, inputs, want = mixed()
    plan = planned(per_kernel, cluster)
    assert plan.rewrites
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan
    program = deploy(prepare(model), again, cluster, StageCache(tmp_path / "cache"))
    assert_same(run_stages(program, *inputs), want)


def test_users_find_their_operators_in_a_rewritten_plan():
    plan = planned(per_kernel)
    for name in ("q", "q_add", "k", "k_add", "add", "sum"):
        assert plan.stage_of(name).index == 0
    assert "q_add_merged" in plan.explain("k")


@pytest.mark.parametrize("seed", range(6))
def test_no_plan_is_worse_for_having_rewrites(seed):
    objective = IN_SECONDS[seed % 2]
    values = {
        kinds: planned(partial(by_dice, seed), TWO, objective, kinds).objective_value
        for kinds in (frozenset(), frozenset({RECOMPUTE}), frozenset({MERGE}), KINDS)
    }
    assert values[KINDS] == min(values.values())
    assert values[frozenset()] == max(values.values())


@pytest.mark.parametrize("seed", range(6))
def test_the_proposal_is_the_best_of_all_rewrites(seed):
    """Of a model this small every combination can be planned; with free slices excluded the joint problem is exact."""
    asked = partial(price, partial(by_dice, seed), cluster=ONE)
    planner = Planner(ONE, asked, Wanted(Objective.LATENCY, MAKERS, {}))
    prepared = prepare(mixed()[0])
    short = Merge((("q",), ("k",)))
    every = [[], [(AGAIN,)], [(MERGED,)], [(AGAIN,), (MERGED,)], [(short,)], [(AGAIN,), (short,)]]
    exhaustive = [planner.plan(variant_of(prepared, MAKERS, asked, r)).objective_value for r in every]
    found = planner.best(variant_of(prepared, MAKERS, asked))[0].objective_value
    assert min(exhaustive) <= found * (1 + 1e-9)
    recompute_only = replace(planner, wanted=replace(planner.wanted, kinds=frozenset({RECOMPUTE})))
    alone = recompute_only.best(variant_of(prepared, MAKERS, asked))[0].objective_value
    assert alone <= min(exhaustive[:2]) * (1 + 2e-3)  # exact up to the gain that is asked for


def test_an_interrupted_search_gives_the_best_plan_so_far(monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("tvmhet.rewriting.Proposer.propose", interrupt)
    assert planned(per_kernel).rewrites == ()


def test_an_interrupted_plan_is_not_rewritten(monkeypatch):
    """The solver answers Ctrl-C with its best plan: the search is over, whatever could be rewritten."""

    def interrupted(*arguments, **options):
        made = make_plan(*arguments, **options)
        return replace(made, solver=made.solver + ", interrupted")

    monkeypatch.setattr("tvmhet.rewriting.make_plan", interrupted)
    assert planned(per_kernel).rewrites == ()


def test_the_same_plan_twice():
    assert planned(partial(by_dice, 3), TWO).to_json() == planned(partial(by_dice, 3), TWO).to_json()


def test_pinned_operators_are_left_alone():
    plan = planned(per_kernel, TWO, pin={"k*": "cpu-x86-64-v2", "add": f"cpu-x86-64-{BEST}"})
    assert plan.rewrites == ()
    assert plan.stage_of("k").placement.device_type == "cpu-x86-64-v2"


def test_a_plan_whose_rewrites_do_not_fit_is_refused(tmp_path):
    plan = replace(planned(per_kernel), rewrites=((Recompute("add", (("sum",), ("q",))),),))
    with pytest.raises(BadGraph, match="'add' is read by"):
        deploy(prepare(mixed()[0]), plan, ONE, StageCache(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("bert_base", {"layers": 2, "dim": 64, "heads": 4, "vocab": 100, "length": 16}),
        ("t5_small", {"layers": 2, "dim": 64, "heads": 4, "head_dim": 16, "source_length": 16, "target_length": 8}),
        ("inception_v3", {"image": 75, "shrink": 8, "num_classes": 10}),
    ],
)
def test_models_with_every_rewrite_give_plain_tvms_answer(name, sizes, tmp_path):
    """All products merged that can be, every cheap producer computed again for each group of readers."""
    module, inputs = zoo.get(name, **sizes)
    model = tvmhet.from_torch(module, inputs)
    prepared = prepare(model)
    merges = find_merges(prepared.graph)[0]
    inside = {member[-1] for merge in merges for member in merge.members}
    again = tuple(
        Recompute(graph.operators[i].name, tuple(tuple(graph.operators[r].name for r in g) for g in groups))
        for graph in [prepared.graph]
        for i in cheap_producers(graph, inside)
        if len(groups := reader_groups(graph, i)) > 1
        and not any({m[0] for m in merge.members} & {graph.operators[r].name for r in graph.successors(i)}
                    for merge in merges)
    )  # fmt: skip
    rewrites = tuple(batch for batch in (again, merges) if batch)
    asked = partial(price, per_kernel, cluster=ONE)
    variant = variant_of(prepared, MAKERS, asked, rewrites)
    plan = Planner(ONE, asked, Wanted(Objective.LATENCY, MAKERS, {})).plan(variant)
    assert plan.rewrites == rewrites
    program = deploy(prepared, plan, ONE, StageCache(tmp_path))
    assert_same(run_stages(program, *inputs), plain(model, *inputs))
