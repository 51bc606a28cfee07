"""The micro-batch as a decision: numbers at other sizes, and a step that is traced again at the one chosen."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import tvmhet
from tests.placed import cpus
from tests.solve.training_problems import random_iteration
from tvmhet.cluster.spec import ClusterSpec
from tvmhet.errors import BadBatch, BadInput
from tvmhet.training_batch import scaled, sizes_near

GROUPS = ClusterSpec.of({"a100": 1, "t4": 2}).groups()


def step(batch: int, module: nn.Module | None = None, loss: str = "mse"):
    torch.manual_seed(0)
    module = module or nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    return module, tvmhet.from_torch(module, torch.ones(batch, 16), loss=loss, optimizer="sgd", lr=0.1, mode="training")


@given(st.integers(1, 64), st.integers(1, 512))
def test_sizes_divide_the_global_batch_and_are_near(size, global_batch):
    sizes = sizes_near(size, global_batch)
    assert 1 <= len(sizes) <= 6
    assert sizes == sorted(set(sizes))
    assert all(global_batch % s == 0 for s in sizes)
    assert size in sizes or global_batch % size


@given(st.integers(0, 10_000), st.sampled_from([2, 3, 8]))
def test_scaled_numbers_grow_with_the_samples_and_weights_do_not(seed, times):
    micro = random_iteration(seed, most_groups=2).options[0]
    groups = GROUPS[: len(micro.forward.groups)]
    assert scaled(micro, micro.size, groups) == micro
    more = scaled(micro, times * micro.size, groups)
    assert more.forward.weights == micro.forward.weights
    assert [e.size_bytes for e in more.forward.edges] == [times * e.size_bytes for e in micro.forward.edges]
    for before, after in zip(micro.forward.kernels, more.forward.kernels, strict=True):
        for a, b in zip(before.time_s, after.time_s, strict=True):
            assert a <= b <= times * a * (1 + 1e-12)


def test_a_step_is_traced_again_at_another_size():
    _, made = step(4)
    again = made.at_batch(2)
    assert made.at_batch(4) is made
    assert made.at_batch(2) is again
    assert again.batch_size == again.at_batch(2).batch_size == 2
    assert again.params.keys() == made.params.keys()
    with pytest.raises(BadBatch, match="micro-batches of 4 samples, not 0"):
        made.at_batch(0)


@pytest.mark.slow
def test_one_call_chooses_the_micro_batch_and_trains_as_torch():
    module, made = step(2)
    cluster = cpus(v3=1)
    data = [(torch.randn(24, 16), torch.randn(24, 4)) for _ in range(2)]
    want = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).double()
    want.load_state_dict(module.state_dict())
    optimizer = torch.optim.SGD(want.parameters(), lr=0.1)
    options = {"cluster": cluster, "global_batch": 24, "makers": ("tvm",)}
    with tvmhet.build(made, microbatch="auto", **options) as trainer:
        size = trainer.plan.training.microbatch_size
        assert size > 2  # a small step is mostly overhead: fewer micro-batches are faster
        assert trainer.program.num_microbatches == 24 // size
        losses = trainer.fit(data)
    for (x, y), loss in zip(data, losses, strict=True):
        optimizer.zero_grad()
        expected = nn.functional.mse_loss(want(x.double()), y.double())
        expected.backward()
        optimizer.step()
        np.testing.assert_allclose(loss, expected.item(), rtol=1e-5)
    plan = tvmhet.plan(made, cluster=cluster, mode="training", global_batch=24, makers=("tvm",), microbatch=3)
    assert (plan.training.microbatch_size, plan.training.num_microbatches) == (3, 8)
    with tvmhet.build(made, plan=plan, **options) as trainer:
        np.testing.assert_allclose(trainer.train_step(data[0]), losses[0], rtol=1e-5)


def test_bad_sizes_are_named():
    _, made = step(2)
    options = {"cluster": ClusterSpec.of({"a100": 1}), "mode": "training", "global_batch": 24}
    with pytest.raises(BadBatch, match="24 is no multiple of the micro-batch of 5"):
        tvmhet.plan(made, microbatch=5, **options)
    with pytest.raises(BadInput, match="microbatch is 'most'"):
        tvmhet.plan(made, microbatch="most", **options)
    with pytest.raises(BadInput, match="give one training step"):
        tvmhet.plan([made, made.at_batch(4)], microbatch="auto", **options)


def test_the_cheapest_plan_has_the_micro_batch_that_is_cheapest():
    _, made = step(2)
    cluster = ClusterSpec.of({"a100": 1, "t4": 4}).with_prices({"a100": 40.0, "t4": 0.5})
    ask = {"cluster": cluster, "mode": "training", "global_batch": 24, "objective": "cost"}
    cost = {size: tvmhet.plan(made, microbatch=size, **ask).objective_value for size in sizes_near(2, 24)}
    chosen = tvmhet.plan(made, microbatch="auto", **ask)
    assert chosen.objective_value <= min(cost.values()) * 1.05  # the step of the front
    fastest = tvmhet.plan(made, microbatch="auto", **{**ask, "objective": "throughput"})
    assert chosen.objective_value < fastest.usd_per_h * fastest.training.iteration_s / 3600
