"""Services are priced with rewritten operators where that makes no type slower; what is recommended then builds."""

import pytest
import torch
from torch import nn

import tvmhet
from tests.placed import assert_same, plain
from tvmhet.cluster import Market
from tvmhet.errors import BadInput
from tvmhet.recommending import Goal, Job, flow, service
from tvmhet.recommending.measurements import Measured

CPUS = """
network: {bandwidth: 10 Gbit/s, latency: 20 us}
offers:
  - {type: cpu-x86-64-v2, price: 0.02 USD/h, max_instances: 1}
  - {type: cpu-x86-64-v3, price: 0.05 USD/h, max_instances: 1}
"""
GPUS = """
offers:
  - {type: t4, price: 0.53 USD/h, max_instances: 1}
  - {type: l4, price: 0.69 USD/h, max_instances: 2}
"""


class Attention(nn.Module):
    """Three products of one input, which one merged product makes."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(256, 256) for _ in range(4))

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        return self.o(torch.softmax(q @ k.transpose(-1, -2), -1) @ v)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return tvmhet.from_torch(Attention().eval(), (torch.randn(64, 256),))


def test_a_service_is_no_slower_than_the_plan_of_its_devices(model):
    """As `plan` rewrites too; without rewrites it is slower."""
    market = Market.from_text(GPUS)
    study = flow.study_of(model, market=market)
    assert study.rewrites
    for name in ("t4", "l4"):
        made = service.answer(study.on(market.where(types=[name])), Job(Goal.TIME))
        rewritten = tvmhet.plan(model, cluster=made.pipelines[0].cluster)
        as_it_is = tvmhet.plan(model, cluster=made.pipelines[0].cluster, ablate="no-merge")
        one_s = 1 / made.best.rate_per_s * sum(made.best.devices.values())
        assert one_s <= rewritten.period_s * (1 + 1e-6) < as_it_is.period_s
        assert made.pipelines[0].plan.rewrites == study.rewrites


def test_what_is_recommended_builds_and_runs(model):
    made = tvmhet.recommend(model, market=Market.from_text(CPUS), objective="time")
    assert made.pipelines[0].plan.rewrites and "products made as one" in str(made.pipelines[0].plan.notes)
    x = torch.randn(64, 256)
    with tvmhet.build(model, cluster=made.pipelines[0].cluster, plan=made.pipelines[0].plan) as lib:
        assert_same(lib(x), plain(model, x))


def test_kernels_of_the_model_as_it_is_and_rewritten_may_be_measured(model):
    market = Market.from_text(GPUS)
    study = flow.study_of(model, market=market)
    _, own = flow.candidates_of(model)
    ours = next(k for k in study.candidates.keys if k not in own.keys)
    theirs = next(k for k in own.keys if k not in study.candidates.keys)
    known = [Measured("t4", ours, 1e-6), Measured("t4", theirs, 1e-6)]
    assert flow.study_of(model, market=market, measurements=known).candidates.keys
    with pytest.raises(BadInput, match="'k' is none of this model's"):
        flow.study_of(model, market=market, measurements=[Measured("t4", "k", 1.0)])
