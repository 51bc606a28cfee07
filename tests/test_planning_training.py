"""`plan(mode="training")` on a small real model: figures that belong together, options that are kept, bad input."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

import tvmhet
from tvmhet.errors import BadBatch, BadInput, Infeasible

CLUSTER = tvmhet.ClusterSpec.of({"a100": 1, "t4": 2})


def tower(batch: int) -> tvmhet.Model:
    """Three wide linear layers: compute-bound enough that stages pay."""
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    return tvmhet.from_torch(nn.Sequential(*layers), torch.zeros(batch, 1024))


@pytest.fixture(scope="module")
def model() -> tvmhet.Model:
    return tower(256)


@pytest.fixture(scope="module")
def plan(model) -> tvmhet.Plan:
    return tvmhet.plan(model, cluster=CLUSTER, mode="training", global_batch=2048)


def test_a_plan_holds_the_whole_iteration(plan):
    figures = plan.training
    assert (figures.global_batch, figures.microbatch_size, figures.num_microbatches) == (2048, 256, 8)
    assert plan.objective_value == figures.iteration_s >= figures.pipeline_s >= 0
    assert plan.lower_bound <= figures.iteration_s
    assert figures.simulated_s == pytest.approx(figures.iteration_s, rel=0.15)
    assert plan.throughput_per_s == pytest.approx(2048 / figures.iteration_s)
    assert len(figures.stages) == len(plan.stages)
    assert sorted(o for s in plan.stages for o in s.placement.ops) == sorted(
        set(o for s in plan.stages for o in s.placement.ops)
    )
    assert all(s.memory_bytes > 4 * t.weight_bytes for s, t in zip(plan.stages, figures.stages, strict=True))


def test_a_plan_is_the_same_after_a_file(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    assert tvmhet.Plan.load(tmp_path / "plan.json") == plan


def test_the_table_shows_all_parts(plan):
    text = str(plan)
    columns = ("forward", "backward", "transfer", "all-reduce", "update", "memory")
    for word in (*columns, "bubble", "micro-batches", "schedule", "assumed: forward x"):
        assert word in text
    kinds = {e["cat"] for e in plan.to_trace()["traceEvents"] if e["ph"] == "X"}
    assert {"forward", "backward"} <= kinds


def test_the_micro_batch_is_chosen_among_the_models_given(model):
    sizes = [tower(64), model]
    made = tvmhet.plan(sizes, cluster=CLUSTER, mode="training", global_batch=2048)
    alone = [tvmhet.plan(m, cluster=CLUSTER, mode="training", global_batch=2048) for m in sizes]
    assert made.objective_value == pytest.approx(min(p.objective_value for p in alone), rel=0.03)
    assert made.training.microbatch_size in (64, 256)


def test_options_are_kept(model):
    kept = tvmhet.plan(
        model,
        cluster=CLUSTER,
        mode="training",
        global_batch=1024,
        optimizer="sgd",
        schedules=("gpipe",),
        recompute=False,
    )
    assert kept.training.schedule == "gpipe"
    assert not any(s.recompute for s in kept.training.stages)
    pinned = tvmhet.plan(model, cluster=CLUSTER, mode="training", global_batch=1024, pin={"*": "t4"})
    assert {s.placement.device_type for s in pinned.stages} == {"t4"}


def test_replicas_on_unlike_types_share_the_batch(model):
    mixed = tvmhet.plan(model, cluster=CLUSTER, mode="training", global_batch=2048, unlike_replicas=True)
    apart = tvmhet.plan(model, cluster=CLUSTER, mode="training", global_batch=2048)
    assert mixed.objective_value <= apart.objective_value * (1 + 1e-9)


def test_momentum_takes_more_memory_than_sgd_and_adamw_more_still(model):
    one = tvmhet.ClusterSpec.of({"a100": 1})
    made = [
        tvmhet.plan(model, cluster=one, mode="training", global_batch=256, optimizer=o).stages[0].memory_bytes
        for o in ("sgd", "momentum", "adamw")
    ]
    weights = 3 * (1024 * 1024 + 1024) * 4
    assert [b - a for a, b in pairwise(made)] == [weights, weights]
    assert made[0] >= 3 * weights  # a backward pass reads the sums of gradients so far and makes new ones


def test_bad_input_is_named(model):
    with pytest.raises(BadBatch, match="1000 is no multiple of the micro-batch of 256"):
        tvmhet.plan(model, cluster=CLUSTER, mode="training", global_batch=1000)
    with pytest.raises(BadInput, match="global batch"):
        tvmhet.plan(model, cluster=CLUSTER, mode="training")
    for wrong in (0, -4, "8", 8.0, True):
        with pytest.raises(BadBatch, match="whole number of samples"):
            tvmhet.plan(model, cluster=CLUSTER, mode="training", global_batch=wrong)
    with pytest.raises(BadInput, match=r"microbatch is 2\.0"):
        tvmhet.plan(model, cluster=CLUSTER, mode="training", global_batch=8, microbatch=2.0)
    with pytest.raises(BadInput, match="'adam' is unknown"):
        tvmhet.plan(model, cluster=CLUSTER, mode="training", global_batch=256, optimizer="adam")
    with pytest.raises(BadInput, match="schedule 'zb'"):
        tvmhet.plan(model, cluster=CLUSTER, mode="training", global_batch=256, schedules=("zb",))
    for wrong in ({"schedules": "1f1b"}, {"recompute": "maybe"}, {"unlike_replicas": 1}):
        with pytest.raises(BadInput, match=f"{next(iter(wrong))} is "):
            tvmhet.plan(model, cluster=CLUSTER, mode="training", global_batch=256, **wrong)
    with pytest.raises(BadInput, match="global_batch was given"):
        tvmhet.plan(model, cluster=CLUSTER, global_batch=256)


def test_a_model_that_fits_no_mix_is_refused_with_the_bytes(model):
    groups = CLUSTER.device_types()
    small = tuple(replace(d, memory_bytes=8 * 2**20) for d in groups)
    nodes = tuple(replace(n, devices=tuple((small[groups.index(d)], c) for d, c in n.devices)) for n in CLUSTER.nodes)
    with pytest.raises(Infeasible, match="more memory"):
        tvmhet.plan(model, cluster=replace(CLUSTER, nodes=nodes), mode="training", global_batch=256)
