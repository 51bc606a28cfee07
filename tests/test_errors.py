"""Errors: codes that never clash; for every bad input one clear text: the thing, its value, the limit, the remedy."""

import ast
import math
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import tvmhet
from tests.placed import cpus
from tvmhet import errors
from tvmhet.cluster import ClusterSpec
from tvmhet.cost.table import Entry
from tvmhet.errors import HetError
from tvmhet.solve import Kernel

CLASSES = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, HetError)]
PACKAGE = Path(tvmhet.__file__).parent


def test_every_class_has_a_code_of_its_own():
    codes = [c.code for c in CLASSES]
    assert len(set(codes)) == len(codes)
    assert sorted(codes) == [f"TVMHET-E{i:03d}" for i in range(len(codes))]  # appended, never left out
    assert all("code" in vars(c) and c.__doc__ for c in CLASSES)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda c: c.__name__)
def test_a_text_starts_with_its_code_and_ends_with_its_remedy(kind):
    error = kind("x is 3, the limit is 2", "make it smaller")
    assert str(error) == f"[{kind.code}] x is 3, the limit is 2\n  remedy: make it smaller"
    assert (error.problem, error.remedy) == ("x is 3, the limit is 2", "make it smaller")
    assert isinstance(error, ValueError)
    assert str(kind("alone")) == f"[{kind.code}] alone"


def raises():
    """Every `raise SomeHetError(...)` of the package: (place, call)."""
    names = {c.__name__ for c in CLASSES}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            call = node.exc if isinstance(node, ast.Raise) else None
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in names:
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}", call


def test_no_error_is_raised_without_a_remedy():
    without = [place for place, call in raises() if len(call.args) < 2 and not any(
        isinstance(a, ast.Starred) for a in call.args) and "remedy" not in {k.arg for k in call.keywords}]  # fmt: skip
    assert without == []


# ---- one bad input each: what raises, which class, and what the text must hold


class Histogram(nn.Module):
    def forward(self, x):
        return torch.histc(x, bins=4)


def linear():
    torch.manual_seed(0)
    return tvmhet.from_torch(nn.Sequential(nn.Linear(64, 64), nn.ReLU()), (torch.randn(2, 64),))


def tight():
    return ClusterSpec.from_dict({"nodes": [{"devices": {"cpu-x86-64-v3": {"count": 1, "memory": "1 KiB"}}}]})


def broken_onnx(tmp_path):
    (tmp_path / "broken.onnx").write_bytes(b"not a model")
    tvmhet.from_onnx(tmp_path / "broken.onnx")


def another_module(_):
    plan = tvmhet.plan(linear(), cluster=cpus(v3=1))
    other = tvmhet.from_torch(nn.Sequential(nn.Linear(32, 32)), (torch.randn(2, 32),))
    tvmhet.build(other, cluster=cpus(v3=1), plan=plan)


BAD_INPUTS = {
    "unknown device type": (
        lambda _: ClusterSpec.of({"v10": 1}), "UnknownDeviceType", ["'v10'", "did you mean", "'v100'"],
    ),
    "bare number": (
        lambda _: ClusterSpec.from_yaml("nodes:\n  - devices:\n      v100: {count: 2, memory: 16}\n"),
        "BadQuantity", [":3:", "16", "unit", "GiB"],
    ),
    "unknown key": (
        lambda _: ClusterSpec.from_yaml("nodes:\n  - devcies: {v100: 2}\n"),
        "BadClusterFile", [":2:", "'devcies'", "devices"],
    ),
    "a model that fits nowhere": (
        lambda _: tvmhet.plan(linear(), cluster=tight()),
        "Infeasible", ["operator '0'", "17408 bytes", "1024 bytes", "the smallest mend is 16384 bytes more memory"],
    ),
    "unsupported operator": (
        lambda _: tvmhet.from_torch(Histogram(), (torch.ones(4),)),
        "UnsupportedOperator", ["aten.histc", "node 'histc'", "replace it"],
    ),
    "a plan for another model": (another_module, "PlanMismatch", ["made for module", "plan this module again"]),
    "a plan that is a path": (
        lambda _: tvmhet.build(linear(), cluster=cpus(v3=1), plan="plan.json"),
        "BadInput", ["the plan is a str", "Plan.load(path)"],
    ),
    "a cluster that is a dict": (
        lambda _: tvmhet.plan(linear(), cluster={"v100": 1}), "BadInput", ["the cluster is a dict", "ClusterSpec.of("],
    ),
    "a time limit that is None": (
        lambda _: tvmhet.plan(linear(), cluster=cpus(v3=1), time_limit_s=None),
        "BadInput", ["time limit is None s", "0 s or more"],
    ),
    "a mode that is misspelt": (
        lambda _: tvmhet.plan(linear(), cluster=cpus(v3=1), mode="train"),
        "BadInput", ["mode is 'train'", '"inference" or "training"'],
    ),
    "an import mode that is misspelt": (
        lambda _: tvmhet.from_torch(nn.Linear(2, 2), (torch.ones(1, 2),), mode="train"),
        "BadInput", ["mode is 'train'", '"inference" or "training"'],
    ),
    "a function for a module": (
        lambda _: tvmhet.from_torch(torch.relu, (torch.ones(1),)),
        "BadInput", ["the model is a builtin_function_or_method", "torch.nn.Module"],
    ),
    "no example inputs": (
        lambda _: tvmhet.from_torch(nn.Linear(2, 2), None),
        "BadInput", ["inputs are a NoneType", "tuple of the tensors"],
    ),
    "makers that are text": (
        lambda _: tvmhet.plan(linear(), cluster=cpus(v3=1), makers="tvm"),
        "BadInput", ["makers is the text 'tvm'", "makers=('tvm',)"],
    ),
    "a deadline that is text": (
        lambda _: tvmhet.plan(
            linear(), cluster=cpus(v3=1).with_prices({"cpu-x86-64-v3": 1.0}), objective="cost", deadline_s="50 ms"
        ),
        "BadInput", ["the deadline is '50 ms' s", "a number"],
    ),
    "devices that are a list": (
        lambda _: ClusterSpec.of(["v100"]),
        "BadClusterFile", ["the devices are ['v100']", 'ClusterSpec.of({"v100": 2})'],
    ),
    "a time limit that is NaN": (
        lambda _: tvmhet.plan(linear(), cluster=cpus(v3=1), time_limit_s=math.nan),
        "BadInput", ["time limit is nan s", "0 s or more"],
    ),
    "an empty cluster": (lambda _: ClusterSpec.of({"v100": 0}), "EmptyCluster", ["no device", "at least one device"]),
    "a broken ONNX file": (broken_onnx, "BadModel", ["broken.onnx", "11 bytes", "export it again"]),
    "a missing ONNX file": (lambda path: tvmhet.from_onnx(path / "no.onnx"), "BadModel", ["no.onnx", "does not exist"]),
    "a time that is NaN": (
        lambda _: Kernel((0,), (math.nan,)), "BadTime", ["time nan s", ">= 0 s"],
    ),
    "a negative time": (lambda _: Kernel((0,), (-1.0,)), "BadTime", ["time -1.0 s", ">= 0 s"]),
    "a NaN given by the user": (
        lambda _: Entry(math.nan, math.nan, math.nan, "given"), "BadTime", ["nan"],
    ),
    "inputs of the wrong shape": (
        lambda _: tvmhet.build(linear(), cluster=cpus(v3=1), inline=True)(np.zeros((2, 63), "float32")),
        "BadInput", ["(2, 63)", "(2, 64)"],
    ),
    "a plan that is none": (
        lambda path: (path / "p.json").write_text("{}") and tvmhet.Plan.load(path / "p.json"),
        "BadBundle", ["p.json", "is not a plan"],
    ),
    "a plan that is not there": (
        lambda path: tvmhet.Plan.load(path / "p.json"), "BadBundle", ["p.json", "check the path"],
    ),
    "pins that are a list": (
        lambda _: tvmhet.plan(linear(), cluster=cpus(v3=1), pin=["0"]),
        "BadInput", ["the pins are a list", 'pin={"conv1": "a100"}'],
    ),
    "a symbolic dim of a model that has none": (
        lambda _: tvmhet.plan(linear(), cluster=cpus(v3=1), bind_shapes={"n": 3}),
        "BadInput", ["bind_shapes names 'n'", "has no symbolic dim", "leave it out"],
    ),
    "an operator like none of the plan": (
        lambda _: tvmhet.plan(linear(), cluster=cpus(v3=1)).explain("zzz"),
        "BadInput", ["no operator 'zzz'", "names look like 0, 0_add"],
    ),
    "a torch module as ONNX": (
        lambda _: tvmhet.from_onnx(nn.Linear(2, 2)), "BadModel", ["the ONNX model is a Linear", "ModelProto"],
    ),
    "training without a loss": (
        lambda _: tvmhet.from_torch(nn.Linear(2, 2), (torch.ones(1, 2),), mode="training"),
        "BadInput", ["there is no loss", 'loss="cross_entropy"'],
    ),
    "a training step with dims to bind": (
        lambda _: tvmhet.from_torch(
            nn.Linear(2, 2), (torch.ones(1, 2),), mode="training", loss="mse", bind_shapes={"n": 1}
        ),
        "BadInput", ["shapes are not fixed", "leave out dynamic_shapes, bind_shapes and num_sessions"],
    ),
    "a market that is a name": (
        lambda _: tvmhet.recommend(linear(), market="aws", throughput_per_s=1.0),
        "BadInput", ["the market is a str", 'Market.shipped("aws")'],
    ),
    "a negative budget to profile": (
        lambda _: tvmhet.profile(linear(), cluster=cpus(v3=1), budget_s=-1.0),
        "BadInput", ["the budget is -1.0 s", "0 or more seconds"],
    ),
    "a negative number of trials": (
        lambda _: tvmhet.tune(linear(), cluster=cpus(v3=1), budget_s=1.0, trials=-1),
        "BadInput", ["the budget is -1 trials", "0 or more"],
    ),
    "no input in flight": (
        lambda _: list(tvmhet.build(linear(), cluster=cpus(v3=1), inline=True).map([], max_in_flight=0)),
        "BadInput", ["max_in_flight is 0", "1 or more"],
    ),
    "more inline than one stage": (
        lambda _: tvmhet.build(linear(), cluster=cpus(v2=1, v3=1), inline=True, pin={"0": "cpu-v2", "relu": "cpu-v3"}),
        "NotSupported", ["2 stages", "leave inline out"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_bad_input_gets_one_clear_error_and_leaves_nothing_half_written(name, tmp_path, monkeypatch):
    monkeypatch.setenv("TVMHET_CACHE_DIR", str(tmp_path / "cache"))
    call, kind, words = BAD_INPUTS[name]
    with pytest.raises(HetError) as caught:
        call(tmp_path)
    error = caught.value
    assert type(error).__name__ == kind
    assert error.remedy, str(error)
    missing = [w for w in words if w not in str(error)]
    assert not missing, f"{missing} not in: {error}"
    assert re.match(r"\[TVMHET-E\d{3}\] ", str(error)) and len(str(error)) < 700
    left = [p for p in tmp_path.rglob("*") if p.name.startswith((".new-", ".p.json-", "tvmhet-")) or p.suffix == ".tmp"]
    assert left == []


def test_errors_travel_between_processes():
    error = pickle.loads(pickle.dumps(errors.WorkerFailed("a stage raised", "mend it", device="cpu0", stage="s0")))
    assert (error.problem, error.remedy, error.device, error.stage) == ("a stage raised", "mend it", "cpu0", "s0")
    assert str(error).count("TVMHET-E013") == 1


def test_an_unknown_keyword_is_pythons_own_error():
    with pytest.raises(TypeError, match="unexpected keyword argument 'objectve'"):
        tvmhet.plan(linear(), cluster=cpus(v3=1), objectve="latency")
    with pytest.raises(TypeError, match=r"plan\(\) got an unexpected keyword argument 'recomputation'"):
        tvmhet.plan(linear(), cluster=cpus(v3=1), mode="training", global_batch=8, recomputation=True)
    with pytest.raises(TypeError, match=r"build\(\) got an unexpected keyword argument 'budget'"):
        tvmhet.build(linear(), cluster=cpus(v3=1), budget=3)


def test_a_database_may_be_named_by_text(tmp_path):
    tvmhet.plan(linear(), cluster=cpus(v3=1), database=str(tmp_path / "kernels.db"))
    assert (tmp_path / "kernels.db").is_file()
