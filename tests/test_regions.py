"""Whole models over regions with one line between them, and over devices that run several stages."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tvmhet
from tests.placed import assert_same, cpus
from tvmhet import ClusterSpec, Plan

REGIONS = """
nodes:
  - {name: near, devices: {v100: 8}, region: east}
  - {name: far, devices: {a100: 8}, region: west}
network:
  bandwidth: 100 Gbit/s
  latency: 5 us
  regions: [{between: [east, west], bandwidth: RATE, latency: 50 us}]
"""


class Row(nn.Module):
    """Linear layers in a row, one of them read again further on."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.l = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x):
        h = x = torch.relu(self.l[0](x))
        for layer in self.l[1:]:
            x = torch.tanh(layer(x))
        return x + h


def planned(rate: str) -> Plan:
    model = tvmhet.from_torch(Row(1024, 6).eval(), (torch.randn(64, 1024),))
    cluster = ClusterSpec.from_yaml(REGIONS.replace("RATE", rate))
    return tvmhet.plan(model, cluster=cluster, pin={"l_0": "v100", "l_5": "a100"})


def test_a_plan_says_what_crosses_the_line():
    plan = planned("1 Gbit/s")
    there, back = plan.lines
    result_bytes = 64 * 1024 * 4
    assert (there.name, back.name) == ("east -> west", "west -> east")
    assert there.size_bytes == result_bytes, "once, though it is read again at the end"
    assert there.load_s == pytest.approx(result_bytes / 0.125e9)
    assert max(there.load_s, back.load_s) <= plan.objective_value < 1.2 * there.load_s
    assert plan.objective_value >= max(s.load_s for s in plan.stages)
    busy = f"{there.load_s / plan.objective_value:.0%}".replace("%", " %")
    assert f"east -> west: 256.0 KiB in 2.1 ms, {busy} busy" in str(plan).replace("\n              ", " ")
    assert "simulated" in plan.solver, "more devices would only wait for the line"
    assert Plan.from_json(plan.to_json()) == plan
    assert planned("100 Gbit/s").objective_value < plan.objective_value / 5


def test_two_cpu_types_take_turns(tmp_path):
    module, x = Row(64, 4).eval(), torch.randn(8, 64)
    model, cluster = tvmhet.from_torch(module, (x,)), cpus(v2=1, v3=1)
    pins = {f"l_{i}": f"cpu-x86-64-{'v2' if i % 2 == 0 else 'v3'}" for i in range(4)}
    with pytest.raises(tvmhet.HetError):
        tvmhet.plan(model, cluster=cluster, pin=pins)
    plan = tvmhet.plan(model, cluster=cluster, pin=pins, virtual_stages=True)
    assert any("take turns on the same devices" in note for note in plan.notes)
    devices = [s.placement.devices for s in plan.stages]
    assert len(devices) >= 4
    assert devices[0] == devices[2] != devices[1] == devices[3]
    assert plan.period_s == pytest.approx(
        sum(s.load_s for s in plan.stages if s.placement.devices == devices[0]), rel=0.5
    )
    with tvmhet.build(model, cluster=cluster, plan=plan) as placed, torch.no_grad():
        assert_same(placed(x), module(x))
        inputs = [torch.randn(8, 64) for _ in range(20)]
        for got, given in zip(placed.map(inputs), inputs, strict=True):
            assert_same(got, module(given))
        placed.export(tmp_path / "bundle")
    with tvmhet.load(tmp_path / "bundle") as again, torch.no_grad():
        assert_same(again(x), module(x))
