"""The whole flow on small models: plan, build, run over several device types, equal to plain TVM; what it refuses."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import tvm
from torch import nn
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

import tvmhet
from tests.placed import THREE, assert_same, cpus, plain, run_stages
from tests.small_models import SMALL_MODELS
from tvmhet.arguments import ABLATIONS, LESSER_KINDS
from tvmhet.cluster import ClusterSpec
from tvmhet.deploy import deploy
from tvmhet.emit.cache import StageCache, default_cache_dir
from tvmhet.errors import BadInput, Infeasible, NotSupported, PlanMismatch
from tvmhet.graph.rewrites import Merge, Recompute
from tvmhet.ir.prepare import prepare
from tvmhet.nested import flat
from tvmhet.plans import Plan

LEFT_OUT = {"no-recompute": Recompute, "no-merge": Merge}
TWO = cpus(v2=1, v3=1)


@pytest.fixture(autouse=True, scope="module")
def own_caches(tmp_path_factory):
    """A cache of stages and a database of measurements that no other run wrote."""
    patch = pytest.MonkeyPatch()
    patch.setenv("TVMHET_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    yield
    patch.undo()


@cache
def case(name):
    """The model, its inputs, and the undivided model's answer."""
    module, inputs = SMALL_MODELS[name]()
    model = tvmhet.from_torch(module, inputs)
    return model, inputs, plain(model, *inputs)


def placed(model, plan, cluster):
    """The program of a plan, not yet running."""
    return deploy(prepare(model), plan, cluster, StageCache(default_cache_dir()))


# ---- the same answer, whatever the cluster


@pytest.mark.parametrize("cluster", [TWO, THREE], ids=["two", "three"])
@pytest.mark.parametrize("name", SMALL_MODELS)
def test_a_planned_model_gives_plain_tvms_answer(name, cluster):
    model, inputs, want = case(name)
    plan = tvmhet.plan(model, cluster=cluster)
    assert {s.placement.device_type for s in plan.stages} <= set(cluster.counts())
    assert_same(run_stages(placed(model, plan, cluster), *inputs), want)


def test_workers_give_it_too_in_order_and_as_the_caller_gave_it():
    model, inputs, want = case("branches")
    pin = {"left*": "cpu-v2", "right*": "cpu-v3"}
    with tvmhet.build(model, cluster=TWO, pin=pin) as lib:
        assert len(lib.plan.stages) > 1
        got = flat([lib(*inputs)])
        assert all(isinstance(t, torch.Tensor) for t in got)
        assert_same(got, want)
        many = [(inputs[0] * k, inputs[1]) for k in range(6)]
        for given, answer in zip(many, lib.map([tuple(x.numpy() for x in pair) for pair in many]), strict=True):
            assert all(isinstance(a, np.ndarray) for a in flat(answer))
            assert_same(flat(answer), plain(model, *given))
        stats = lib.benchmark(*inputs, num_inputs=4, warmup=1)
        text = lib.report(stats)
    assert "predicted" in text and "measured" in text
    assert stats.throughput_per_s > 0


def test_one_device_runs_in_this_process_and_equals_plain_tvm():
    model, inputs, want = case("conv")
    with tvmhet.build(model, cluster=cpus(v3=1), inline=True) as lib:
        assert len(lib.plan.stages) == 1 and len(lib.plan.stages[0].placement.devices) == 1
        assert_same(lib(*inputs), want)


def test_generated_kernels_alone_need_no_library():
    model, inputs, want = case("conv")
    plan = tvmhet.plan(model, cluster=TWO, makers=("tvm",))
    assert {k.maker for s in plan.stages for k in s.kernels} == {"tvm"}
    program = placed(model, plan, TWO)
    assert not any(s.needs_library for s in program.stages)
    assert_same(run_stages(program, *inputs), want)


def test_an_ir_module_with_constants_is_a_model_too():
    got = {}
    for cluster in (cpus(v3=1), TWO):
        with tvmhet.build(Affine, cluster=cluster, inline=cluster is not TWO) as lib:
            got[cluster] = lib(np.arange(6, dtype="float32").reshape(2, 3))
    for result in got.values():
        np.testing.assert_array_equal(result, np.arange(6, dtype="float32").reshape(2, 3) * 3 + 1)


@I.ir_module
class Affine:
    @R.function
    def main(x: R.Tensor((2, 3), "float32")) -> R.Tensor((2, 3), "float32"):
        with R.dataflow():
            scaled = R.multiply(x, R.const(3.0, "float32"))
            out = R.add(scaled, R.const(1.0, "float32"))
            R.output(out)
        return out


# ---- constraints do what they say


def types_of(plan, graph, prefix):
    return {plan.stage_of(o.name).placement.device_type for o in graph.operators if o.name.startswith(prefix)}


@pytest.mark.parametrize("objective", ["throughput", "latency"])
def test_pins_by_name_and_by_pattern(objective):
    model, _, _ = case("conv")
    graph = tvmhet.extract_graph(model)
    pin = {"c1": "cpu-x86-64-v2", "fc*": "cpu-v3", "soft???": "cpu-v3"}
    plan = tvmhet.plan(model, cluster=TWO, pin=pin, objective=objective)
    assert plan.stage_of("c1").placement.device_type == "cpu-x86-64-v2"
    assert types_of(plan, graph, "fc") == types_of(plan, graph, "softmax") == {"cpu-x86-64-v3"}
    assert plan.objective == objective


def test_a_pin_may_name_the_family_of_the_clusters_type():
    model, _, _ = case("conv")
    mixed = tvmhet.ClusterSpec.of({"v100-pcie-16gb": 1, "t4": 1})
    plan = tvmhet.plan(model, cluster=mixed, pin={"c1": "v100"})
    assert plan.stage_of("c1").placement.device_type == "v100-pcie-16gb"
    with pytest.raises(BadInput, match="no device type 'v10'"):
        tvmhet.plan(model, cluster=mixed, pin={"c1": "v10"})


def test_zero_devices_of_a_type_are_none():
    model, _, _ = case("conv")
    plan = tvmhet.plan(model, cluster=cpus(v2=1, v3=0))
    assert {s.placement.device_type for s in plan.stages} == {"cpu-x86-64-v2"}
    with pytest.raises(BadInput, match=r"no device type 'cpu-v3'[\s\S]*it has cpu-x86-64-v2"):
        tvmhet.plan(model, cluster=cpus(v2=1, v3=0), pin={"c1": "cpu-v3"})


def tight(memory, count=1):
    return ClusterSpec.from_dict({"nodes": [{"devices": {"cpu-x86-64-v3": {"count": count, "memory": memory}}}]})


def test_an_operator_too_big_for_every_device_is_named_with_its_bytes():
    model, _, _ = case("conv")
    with pytest.raises(Infeasible) as error:
        tvmhet.plan(model, cluster=tight("4 KiB"))
    text = str(error.value)
    need = 4 * (2 * 8 * 8 * 8 + 8 * 8 * 3 * 3)  # input, result and weight of the second convolution
    assert f"[TVMHET-E004] memory: operator 'c2' alone needs {need} bytes" in text
    assert (
        f"has 4096 bytes (the cluster has 1 x cpu-x86-64-v3)\n  remedy: the smallest mend is {need - 4096} bytes"
        in text
    )


def test_a_tight_memory_limit_is_kept_on_every_device():
    model, inputs, want = case("conv")
    need = tvmhet.plan(model, cluster=tight("1 GiB")).stages[0].memory_bytes
    limit = int(need * 0.8)
    with pytest.raises(Infeasible, match="1 more device"):
        tvmhet.plan(model, cluster=tight(f"{limit} B"))
    cluster = tight(f"{limit} B", count=2)
    plan = tvmhet.plan(model, cluster=cluster)
    assert len(plan.stages) > 1 and all(s.memory_bytes <= limit for s in plan.stages)
    assert_same(run_stages(placed(model, plan, cluster), *inputs), want)


def test_replicas_share_the_load_of_a_stage():
    model, _, _ = case("conv")
    alone, four = (tvmhet.plan(model, cluster=cpus(v3=n)) for n in (1, 4))
    assert four.period_s < alone.period_s / 3
    assert max(len(s.placement.devices) for s in four.stages) > 1
    used = [d for s in four.stages for d in s.placement.devices]
    assert len(set(used)) == len(used) == 4


def test_latency_and_throughput_are_what_they_promise():
    model, _, _ = case("attention")
    fast, wide = (tvmhet.plan(model, cluster=THREE, objective=o) for o in ("latency", "throughput"))
    assert fast.latency_s <= wide.latency_s * (1 + 1e-9)
    assert wide.period_s <= fast.period_s * (1 + 1e-9)
    for plan in (fast, wide):
        assert 0 < plan.lower_bound <= plan.objective_value * (1 + 1e-9)


@pytest.mark.parametrize("name", ABLATIONS)
def test_an_ablated_plan_says_so_and_builds_to_the_same_answer(name):
    model, inputs, want = case("conv")
    joint, lesser = (tvmhet.plan(model, cluster=TWO, ablate=a) for a in ("", name))
    assert joint.objective_value <= lesser.objective_value * (1 + 1e-9)
    kernels = [k for s in lesser.stages for k in s.placement.kernels]
    if name == "no-library":
        assert {k.maker for k in kernels} == {"tvm"}
    elif name in LESSER_KINDS:
        assert not any(isinstance(r, LEFT_OUT[name]) for batch in lesser.rewrites for r in batch)
    else:
        assert lesser.rewrites == ()
        assert {"fuse-first": "fusion first", "place-first": "placement first", "no-fusion": "without fusion"}[
            name
        ] in lesser.solver
    if name == "no-fusion":
        assert all(len(k.ops) == 1 for k in kernels)
    assert_same(run_stages(placed(model, lesser, TWO), *inputs), want)


# ---- plans are data


def test_a_plan_is_saved_loaded_and_built(tmp_path):
    model, inputs, want = case("conv")
    plan = tvmhet.plan(model, cluster=TWO)
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan and again.to_json() == plan.to_json()
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
    assert_same(run_stages(placed(model, again, TWO), *inputs), want)


SCRIPT = """
import tvmhet
from tests.placed import THREE
from tests.small_models import conv
module, inputs = conv()
print(tvmhet.plan(tvmhet.from_torch(module, inputs), cluster=THREE).to_json(), end="")
"""


def test_two_processes_make_the_same_bytes():
    model, _, _ = case("conv")
    here = tvmhet.plan(model, cluster=THREE).to_json()
    checkout = Path(__file__).parent.parent
    other = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=checkout, capture_output=True, text=True, check=True, timeout=120
    )
    assert other.stdout == here


def test_a_plan_of_another_module_or_cluster_is_refused():
    model, _, _ = case("conv")
    other, _, _ = case("branches")
    plan = tvmhet.plan(model, cluster=TWO, pin={"c1": "cpu-v2"})
    with pytest.raises(PlanMismatch, match=r"TVMHET-E006.*made for module [0-9a-f]{12}, this module is"):
        tvmhet.build(other, cluster=TWO, plan=plan)
    with pytest.raises(PlanMismatch, match=r"devices that the cluster does not have, for example '.*cpu-x86-64-v2:0'"):
        tvmhet.build(model, cluster=cpus(v3=1), plan=plan)


def set_ops(stage):
    stage["placement"]["kernels"][0]["ops"] = ["no_such_operator"]


def set_type(stage):
    stage["placement"]["device_type"] = "cpu-x86-64-v3"


CHANGES = {
    "another operator": (set_ops, r"TVMHET-E010.*'no_such_operator', which main does not have"),
    "another type": (set_type, r"TVMHET-E006.*runs 'cpu-x86-64-v3' on device '.*v2:0', which is 'cpu-x86-64-v2'"),
    "fewer inputs": (lambda stage: stage.update(inputs=[]), r"TVMHET-E006.*stage 0 of the plan has inputs \[\]"),
    "weights swapped": (lambda stage: stage["weights"].reverse(), r"TVMHET-E006.*stage 0 of the plan has weights"),
    "no outputs": (lambda stage: stage.update(outputs=[]), r"TVMHET-E006.*stage 0 of the plan has outputs \[\]"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_plan_that_was_changed_by_hand_is_refused_before_anything_is_compiled(change, tmp_path, monkeypatch):
    monkeypatch.setenv("TVMHET_CACHE_DIR", str(tmp_path / "cache"))
    model, _, _ = case("conv")
    pin = {"c1": "cpu-v2", "fc": "cpu-v3"}
    plan = tvmhet.plan(model, cluster=TWO, pin=pin, database=tmp_path / "empty.db")
    tree = json.loads(plan.to_json())
    apply, words = CHANGES[change]
    apply(tree["stages"][0])
    with pytest.raises(tvmhet.HetError, match=words):
        tvmhet.build(model, cluster=TWO, plan=Plan.from_json(json.dumps(tree)))
    assert not (tmp_path / "cache").exists()


# ---- what cannot be cut is placed whole


class Double(nn.Module):
    def forward(self, x):
        return torch.relu(x) * 2


def dynamic():
    batch = torch.export.Dim("batch", min=1, max=64)
    return tvmhet.from_torch(Double(), (torch.randn(4, 3),), dynamic_shapes=({0: batch},))


@I.ir_module
class Control:
    @R.function
    def main(x: R.Tensor((2,), "float32"), c: R.Tensor((), "bool")) -> R.Tensor((2,), "float32"):
        if c:  # noqa: SIM108
            y = R.exp(x)
        else:
            y = R.negative(x)
        return y


def test_dynamic_shapes_are_placed_whole_on_the_best_device_and_take_any_size():
    with tvmhet.build(dynamic(), cluster=TWO) as lib:
        assert lib.plan.whole_reason and "depend" in lib.plan.whole_reason
        assert lib.plan.stages[0].placement.device_type == "cpu-x86-64-v3"
        assert "whole" in str(lib.plan)
        for n in (1, 4, 7):
            x = torch.randn(n, 3)
            torch.testing.assert_close(lib(x), torch.relu(x) * 2)


def test_a_whole_model_takes_what_numpy_lacks():
    dims = ({0: torch.export.Dim("n", min=2, max=9)},)
    model = tvmhet.from_torch(Double(), (torch.ones(2, 3, dtype=torch.bfloat16),), dynamic_shapes=dims)
    with tvmhet.build(model, cluster=TWO) as lib:
        x = torch.tensor([[1.5, -2.0, 3.0]] * 4, dtype=torch.bfloat16)
        got = lib(x)
        assert got.dtype == torch.bfloat16 and torch.equal(got, torch.relu(x) * 2)
        with pytest.raises(BadInput, match=r"input 0 is a list, not a tensor"):
            lib([[1.0, 2.0, 3.0]])


def test_bound_shapes_are_cut():
    model = dynamic()
    (name,) = {str(v.name) for v in relax.analysis.defined_symbolic_vars(model.mod["main"])}
    plan = tvmhet.plan(model, cluster=TWO, bind_shapes={name: 4})
    assert not plan.whole_reason and plan.num_kernels >= 1
    assert [o.name for o in tvmhet.extract_graph(model, bind_shapes={name: 4}).operators] == ["relu", "multiply"]
    with pytest.raises(BadInput, match=rf"bind_shapes names 'nope'; the model's symbolic dims are \['{name}'\]"):
        tvmhet.plan(model, cluster=TWO, bind_shapes={"nope": 4})
    with pytest.raises(NotSupported, match="no operator graph"):
        tvmhet.extract_graph(model)


def test_control_flow_is_placed_whole_and_runs():
    x = np.array([1.0, 2.0], "float32")
    with tvmhet.build(Control, cluster=TWO) as lib:
        assert "control flow" in lib.plan.whole_reason
        np.testing.assert_allclose(lib(x, np.array(True)), np.exp(x), rtol=1e-6)
        np.testing.assert_array_equal(lib(x, np.array(False)), -x)


class Nothing(nn.Module):
    def forward(self, x, y):
        return y, x


def test_a_model_that_computes_nothing():
    x, y = torch.randn(2), torch.randn(3)
    with tvmhet.build(tvmhet.from_torch(Nothing(), (x, y)), cluster=TWO) as lib:
        got = lib(x, y)
    assert_same(got, (y, x))


def test_a_whole_model_must_fit_its_device():
    module = nn.Sequential(nn.Linear(64, 64), Double())
    batch = torch.export.Dim("batch", min=1, max=64)
    model = tvmhet.from_torch(module, (torch.randn(4, 64),), dynamic_shapes=({0: batch},))
    with pytest.raises(Infeasible, match=rf"parameters need {4 * 65 * 64} bytes; the largest device.*has 8192 bytes"):
        tvmhet.plan(model, cluster=tight("8 KiB"))


# ---- arguments


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"objective": "speed"}, "objective 'speed' is unknown"),
        ({"makers": ()}, "makers are ()"),
        ({"makers": ("cublas",)}, "makers are ('cublas',)"),
        ({"pin": {"nope*": "cpu-v2"}}, "pin 'nope*' matches none of"),
        ({"pin": {"c1": "v100"}}, "no device type 'v100'"),
        ({"pin": {"c1": "cpu-v2", "c*": "cpu-v3"}}, "contradict each other"),
        ({"ablate": "fuse"}, "ablation 'fuse' is unknown"),
        ({"ablate": "no-library", "makers": ("library",)}, "no-library leaves none of the makers"),
    ],
)
def test_bad_arguments_name_the_thing_and_the_remedy(arguments, text):
    model, _, _ = case("conv")
    with pytest.raises(BadInput) as error:
        tvmhet.plan(model, cluster=TWO, **arguments)
    assert text in str(error.value) and error.value.remedy


def test_a_torch_module_is_not_yet_a_model():
    with pytest.raises(BadInput, match=r"the model is a Conv2d[\s\S]*from_torch"):
        tvmhet.plan(nn.Conv2d(1, 1, 1), cluster=TWO)


def test_inputs_are_checked():
    model, inputs, _ = case("conv")
    with tvmhet.build(model, cluster=cpus(v3=1), inline=True) as lib:
        for wrong in ((), (inputs[0][0],), (inputs[0].double(),), inputs * 2):
            with pytest.raises(BadInput, match="TVMHET-E014"):
                lib(*wrong)


def test_planning_does_not_change_the_model():
    model, _, _ = case("attention")
    before = tvm.ir.save_json(model.mod)
    tvmhet.plan(model, cluster=TWO)
    assert tvm.ir.save_json(model.mod) == before
