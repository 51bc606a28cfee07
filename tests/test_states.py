"""Models with states, from import to bundle: every call's result is torch's, whose module keeps them itself."""

from __future__ import annotations

import copy
import threading

import numpy as np
import pytest
import torch
import tvm
from torch import nn
from tvm.script import relax as R

import tvmhet
from tests.placed import BEST, cpus
from tests.stateful import Decoder, Recurrent, step
from tvmhet.errors import BadInput, NotSupported, WorkerFailed
from tvmhet.graph.opgraph import OpGraph
from tvmhet.ir.prepare import prepare
from tvmhet.solve import Objective

TWO = cpus(v2=1, **{BEST: 1})
PINS = {"words": "cpu-x86-64-v2", "attentions_0*": "cpu-x86-64-v2", "head": f"cpu-x86-64-{BEST}"}


def decoder(num_sessions=1):
    model = Decoder().eval()
    return model, tvmhet.from_torch(model, step(3, 0), num_sessions=num_sessions)


def assert_same(got, want):
    np.testing.assert_allclose(np.asarray(got), want.detach().numpy(), rtol=1e-4, atol=1e-5)


def pinned_in_two(model):
    plan = tvmhet.plan(model, cluster=TWO, pin=PINS)
    assert len(plan.stages) > 1
    return plan


def test_calls_follow_torch_on_two_devices_and_from_a_bundle(tmp_path):
    model, imported = decoder()
    first = copy.deepcopy(model)
    assert [s.name for s in imported.states] == [f"attentions.{i}.{n}" for i in (0, 1) for n in ("keys", "values")]
    plan = pinned_in_two(imported)
    with tvmhet.build(imported, cluster=TWO, plan=plan) as lib:
        for at, token in enumerate([3, 7, 1, 9]):
            assert_same(lib(*step(token, at)), model(*step(token, at)))
        assert_same(lib.state()["attentions.1.values"], model.attentions[1].values)
        lib.export(tmp_path / "bundle")
    with tvmhet.load(tmp_path / "bundle") as lib:  # begins with what the model had when it was imported
        for at, token in enumerate([5, 6]):
            assert_same(lib(*step(token, at)), first(*step(token, at)))


def test_a_session_is_read_set_and_begun_anew():
    model, imported = decoder()
    with tvmhet.build(imported, cluster=TWO, plan=pinned_in_two(imported)) as lib:
        for at in range(3):
            lib(*step(at, at)), model(*step(at, at))
        kept, before = lib.state(), copy.deepcopy(model)
        assert_same(lib(*step(8, 3)), model(*step(8, 3)))
        lib.set_state(kept)
        assert_same(lib(*step(2, 3)), before(*step(2, 3)))
        lib.reset()
        assert not any(value.any() for value in lib.state().values())
        assert_same(lib(*step(4, 0)), Decoder().eval()(*step(4, 0)))
        one = {"attentions.0.keys": torch.from_numpy(kept["attentions.0.keys"])}
        lib.set_state(one)  # others stay as they are
        now = lib.state()
        assert (now["attentions.0.keys"] == kept["attentions.0.keys"]).all() and now["attentions.1.keys"].any()
        with pytest.raises(BadInput, match=r"'keys' is no state of the model(.|\n)*it has 4: attentions.0.keys"):
            lib.set_state({"keys": kept["attentions.0.keys"]})
        with pytest.raises(BadInput, match=r"'attentions.0.keys' must be \(1, 2, 16, 16\) float32"):
            lib.set_state({"attentions.0.keys": np.zeros(3, "float32")})


@pytest.mark.parametrize("inline", [False, True])
def test_sessions_do_not_see_each_other(inline):
    """Three at once from threads of their own; in this process one call after another."""
    model, imported = decoder(num_sessions=3)
    models = [copy.deepcopy(model) for _ in range(3)]
    cluster = cpus(**{BEST: 1}) if inline else cpus(v2=1, **{BEST: 2})
    wrong = []

    def talk(session):
        with torch.no_grad():
            for at in range(6):
                given = step((7 * session + 3 * at) % 50, at)
                got, want = lib.sessions[session](*given), models[session](*given)
                if not torch.allclose(got, want, rtol=1e-4, atol=1e-5):
                    wrong.append((session, at))

    with tvmhet.build(imported, cluster=cluster, inline=inline) as lib:
        threads = [threading.Thread(target=talk, args=(s,)) for s in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong and len(lib.sessions) == 3
        with torch.no_grad():
            assert_same(lib.sessions[1].state()["attentions.0.keys"], models[1].attentions[0].keys)
        before = [s.state() for s in lib.sessions]
        lib.benchmark(*step(1, 6), num_inputs=4)
        after = [s.state() for s in lib.sessions]
        assert all((a[n] == b[n]).all() for a, b in zip(before, after, strict=True) for n in a)


def test_a_stream_is_one_session_in_order():
    model, imported = decoder()
    with tvmhet.build(imported, cluster=TWO, plan=pinned_in_two(imported)) as lib:
        given = [step(5 * at % 50, at) for at in range(8)]
        for got, inputs in zip(lib.map(given), given, strict=True):
            assert_same(got, model(*inputs))


def test_a_call_that_fails_leaves_the_states():
    model, imported = decoder()
    with tvmhet.build(imported, cluster=TWO, plan=pinned_in_two(imported)) as lib:
        assert_same(lib(*step(1, 0)), model(*step(1, 0)))
        with pytest.raises(BadInput):
            lib(torch.tensor([[1]]), torch.tensor([0, 1]))
        assert_same(lib(*step(2, 1)), model(*step(2, 1)))
        lib.close()
        with pytest.raises((NotSupported, WorkerFailed)):
            lib(*step(2, 1))


def test_an_input_and_a_result_become_a_state():
    """The reader of the memory and what renews it are on two devices."""
    model = Recurrent().eval()
    imported = tvmhet.from_torch(model, (torch.zeros(2, 8), torch.zeros(2, 8)))
    memory = torch.randn(2, 8)
    made = tvmhet.with_state(imported, {"memory": 0}, initial={"memory": memory}, num_sessions=2)
    assert made.input_names == ("x",) and made.num_states == 1
    pin = {"own": f"cpu-x86-64-{BEST}", "other": "cpu-x86-64-v2", "*tanh*": f"cpu-x86-64-{BEST}"}
    with tvmhet.build(made, cluster=TWO, pin=pin) as lib:
        assert len(lib.plan.stages) > 1
        for _ in range(4):
            x = torch.randn(2, 8)
            want = model(memory, x)
            got = lib(x)
            memory = want["memory"]
            assert set(got) == {"y"}
            assert_same(got["y"], want["y"])
            assert_same(lib.state()["memory"], memory)


@R.function
def main(total: R.Tensor((4,), "float32"), x: R.Tensor((4,), "float32"), w: R.Tensor((4,), "float32")):
    with R.dataflow():
        now = R.add(total, R.multiply(x, w))
        out = (now, R.sum(now))
        R.output(out)
    return out


def test_a_relax_module_has_states():
    """Counted among its results, which have no structure but that of the function."""
    imported = tvmhet.from_relax(tvm.IRModule({"main": main}), {"w": np.full(4, 2, "float32")})
    made = tvmhet.with_state(imported, {"total": 0}, initial={"total": np.ones(4, "float32")})
    with tvmhet.build(made, cluster=cpus(**{BEST: 1}), makers=("tvm",), inline=True) as lib:
        assert [float(lib(np.full(4, x, "float32"))) for x in (1, 2, 3)] == [12, 28, 52]


class Delayed(nn.Module):
    """What no kernel makes: an input that is kept, a state that becomes another; and a result that is a state, too."""

    def __init__(self):
        super().__init__()
        for name in ("last", "before", "same", "count"):
            self.register_buffer(name, torch.zeros(4))
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        y = self.fc(x) - self.last + 2 * self.before
        self.before.copy_(self.last)
        self.last.copy_(x)
        self.same.copy_(y)
        self.count.add_(1)
        return y, self.same + self.count


@pytest.mark.parametrize("inline", [False, True])
def test_what_no_stage_makes_alone_is_copied(inline):
    torch.manual_seed(0)
    model = Delayed().eval()
    imported = tvmhet.from_torch(model, (torch.zeros(4),))
    assert len(imported.states) == 4
    with tvmhet.build(imported, cluster=cpus(**{BEST: 1}), inline=inline) as lib, torch.no_grad():
        for _ in range(5):
            x = torch.randn(4)
            for got, want in zip(lib(x), model(x), strict=True):
                assert_same(got, want)
        for name, value in lib.state().items():
            assert_same(value, getattr(model, name))


class Pair(nn.Module):
    """Two inputs of one shape, and one result for both."""

    def forward(self, a, b, x):
        now = torch.tanh(a + 2 * b + x)
        return now, now.sum()


def test_two_states_become_one_result():
    inputs = tuple(torch.zeros(4) for _ in range(3))
    made = tvmhet.with_state(tvmhet.from_torch(Pair(), inputs), {"a": 0, "b": 0})
    a = b = torch.zeros(4)
    with tvmhet.build(made, cluster=cpus(**{BEST: 1})) as lib:
        for _ in range(4):
            x = torch.randn(4)
            a = b = Pair()(a, b, x)[0]
            assert_same(lib(x), a.sum())
        assert_same(lib.state()["b"], b)


class Wide(nn.Module):
    """A model that cannot be cut, for control flow, and that counts its calls."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x):
        self.count.add_(x)
        return torch.cond(x.sum() > 0, lambda t: t + 1, lambda t: t - 1, (x,)) + self.count


def test_a_model_that_is_placed_whole(tmp_path):
    model = Wide().eval()
    imported = tvmhet.from_torch(model, (torch.zeros(4),), num_sessions=2)
    assert imported.whole_reason
    first = copy.deepcopy(model)
    with tvmhet.build(imported, cluster=cpus(**{BEST: 1})) as lib:
        for i in range(4):
            x = torch.full((4,), float(i - 2))
            assert_same(lib(x), model(x))
        assert_same(lib.state()["count"], model.count)
        assert_same(lib.sessions[1](x), first(x))
        lib.set_state({"count": np.full(4, 5, "float32")})
        assert_same(lib(x), torch.full((4,), 8.0))
        lib.reset()
        assert not lib.state()["count"].any()
        lib.benchmark(x, num_inputs=2)
        assert not lib.state()["count"].any()
        lib.export(tmp_path / "bundle")
    with tvmhet.load(tmp_path / "bundle") as lib:
        assert_same(lib.sessions[1](x), torch.full((4,), 3.0))
    with pytest.raises(NotSupported, match="states of a model that cannot be cut"):
        tvmhet.with_state(imported, {"x": 0})


def test_one_session_is_planned_for_latency_and_several_for_throughput():
    """Calls of a session do not overlap: a pipeline without enough sessions stands idle."""
    model = Decoder(layers=6, dim=256, heads=4, length=64).eval()
    one, many = (tvmhet.from_torch(model, step(3, 0), num_sessions=n) for n in (1, 8))
    cluster = tvmhet.ClusterSpec.of({"cpu-x86-64-v2": 1, "cpu-x86-64-v3": 1})
    alone, full = (tvmhet.plan(m, cluster=cluster, makers=("tvm",)) for m in (one, many))
    latency = tvmhet.plan(one, cluster=cluster, objective="latency", makers=("tvm",))
    assert full.period_s < alone.latency_s == latency.latency_s and len(full.stages) > len(alone.stages)
    assert (alone.objective, full.objective) == (Objective.LATENCY.value, Objective.THROUGHPUT.value)
    assert any("results of one session come every" in n and "of least latency" in n for n in alone.notes)
    assert any("8 sessions" in note for note in full.notes)


def test_a_plan_counts_the_memory_of_every_session():
    _, one = decoder()
    _, many = decoder(num_sessions=8)
    cluster = tvmhet.ClusterSpec.of({"v100-pcie-16gb": 1})
    few, more = (tvmhet.plan(m, cluster=cluster).stages[0].memory_bytes for m in (one, many))
    assert more - few == 2 * 7 * one.state_bytes
    assert prepare(one).key != prepare(many).key


def test_what_is_not_supported_says_so():
    model, imported = decoder()
    with pytest.raises(NotSupported, match="splits of a model with 4 states"):
        tvmhet.plan(imported, cluster=tvmhet.ClusterSpec.of({"t4": 2}), splits=[2])
    with pytest.raises(BadInput, match="number of sessions is 0"):
        tvmhet.from_torch(model, step(1, 0), num_sessions=0)
    with pytest.raises(BadInput, match="2 sessions of a model without state"):
        tvmhet.from_torch(nn.Linear(4, 4), (torch.zeros(4),), num_sessions=2)
    cell = tvmhet.from_torch(Recurrent().eval(), (torch.zeros(2, 8), torch.zeros(2, 8)))
    for renewed, text in [
        ({"m": 0}, r"'m' is no input of the model(.|\n)*memory, x"),
        ({"memory": 2}, r"'memory' becomes result 2(.|\n)*has 2, counted from 0"),
        ({"memory": 1}, r"'memory' is \(2, 8\) float32 and result 1 is \(2,\) float32"),
    ]:
        with pytest.raises(BadInput, match=text):
            tvmhet.with_state(cell, renewed)
    with pytest.raises(BadInput, match="'x' has a first value and is no state"):
        tvmhet.with_state(cell, {"memory": 0}, initial={"x": torch.zeros(2, 8)})
    with pytest.raises(BadInput, match="value of parameter 'memory'"):
        tvmhet.with_state(cell, {"memory": 0}, initial={"memory": torch.zeros(3)})
    echo = tvmhet.from_torch(nn.ReLU(), (torch.zeros(4),))
    with pytest.raises(BadInput, match="all results of the model are states"):
        tvmhet.with_state(echo, {echo.input_names[0]: 0})


def test_states_over_several_machines_are_refused():
    pytest.importorskip("ray", reason="running on several machines needs ray")
    _, imported = decoder()
    lib = tvmhet.build(imported, cluster=TWO, plan=pinned_in_two(imported))
    with pytest.raises(NotSupported, match=r"4 states over several machines(.|\n)*one machine"):
        lib.on_ray()


def test_the_graph_knows_states():
    _, imported = decoder()
    graph = prepare(imported).operator_graph
    assert isinstance(graph, OpGraph) and len(graph.given) == 2 and len(graph.returned) == 1
    assert [graph.tensors[a].shape for a, _ in graph.states] == [(1, 2, 16, 16)] * 4
