"""The command line: what it prints and writes, one message per mistake, nothing half-written, quick help."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tvmhet import cli
from tvmhet.cli.options import parse_splits
from tvmhet.cli.run import busy_note
from tvmhet.errors import BadInput
from tvmhet.model_source import InputShape, parse_input_shape, random_inputs
from tvmhet.plans import Plan

CLUSTER = "nodes: [{name: here, devices: {cpu-x86-64-v2: 1, cpu-x86-64-v3: 1}, link: shm}]\n"
TOY = """
import torch

class Toy(torch.nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.first, self.second = torch.nn.Linear(32, width), torch.nn.Linear(width, 8)

    def forward(self, x):
        return torch.softmax(self.second(torch.relu(self.first(x))), -1)

def toy():
    torch.manual_seed(0)
    return Toy().eval(), (torch.randn(4, 32),)

def wide():
    return Toy(96).eval(), (torch.randn(4, 32),)

class Counts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(32, 8)
        self.register_buffer("calls", torch.zeros(8))

    def forward(self, x):
        self.calls += 1
        return self.first(x) + self.calls

def counts():
    return Counts().eval(), (torch.randn(4, 32),)

class Counts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(32, 8)
        self.register_buffer("calls", torch.zeros(8))

    def forward(self, x):
        self.calls += 1
        return self.first(x) + self.calls

def counts():
    return Counts().eval(), (torch.randn(4, 32),)

def bare():
    return Toy().eval()

def broken():
    return 1 // 0

def no_model():
    return "a string"

constant = 1
"""


@pytest.fixture
def folder(tvmhet, tmp_path, monkeypatch):
    """The working folder with a cluster file and a module of models."""
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    (tmp_path / "toy_models.py").write_text(TOY)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "toy_models", raising=False)
    return tmp_path


def test_plan_prints_a_table_and_writes_what_was_asked(folder, tvmhet):
    files = ["--out", "p.json", "--html", "p.html", "--trace", "p.trace", "--dot", "p.dot"]
    status, out, err = tvmhet("plan", "toy_models:toy", "--cluster", "cluster.yaml", *files)
    assert status == 0 and err == ""
    assert out.startswith("plan of toy_models:toy\n") and "lower bound" in out and "times from" in out
    assert max(map(len, out.splitlines())) <= 100
    plan = Plan.load("p.json")
    assert plan.model == "toy_models:toy" and plan.objective == "throughput"
    assert Path("p.html").read_text().startswith("<!DOCTYPE html>")
    assert json.loads(Path("p.trace").read_text()) == plan.to_trace()
    assert Path("p.dot").read_text() == plan.to_dot()


def test_plan_as_json_is_the_saved_plan(folder, tvmhet):
    args = ["plan", "toy_models:toy", "--cluster", "cluster.yaml", "--out", "p.json", "--json"]
    status, out, _ = tvmhet(*args, "--objective", "latency")
    assert status == 0 and out == Path("p.json").read_text()
    assert json.loads(out)["objective"] == "latency"


def test_plan_for_cost_keeps_its_limits(folder, tvmhet):
    devices = "{cpu-x86-64-v2: {count: 1, price: 0.01 USD/h}, cpu-x86-64-v3: {count: 1, price: 0.5 USD/h}}"
    (folder / "priced.yaml").write_text(f"nodes: [{{name: here, devices: {devices}, link: shm}}]\n")
    args = ["plan", "toy_models:toy", "--cluster", "priced.yaml", "--objective", "cost"]
    status, out, err = tvmhet(*args, "--samples", "1000000", "--budget", "100")
    assert status == 0 and err == ""
    assert "1 x cpu-x86-64-v2" in out and "USD per million inputs" in out and "the job of 1000000 samples" in out
    status, _, err = tvmhet(*args, "--deadline", "1e-9", "--throughput-floor", "10")
    assert status != 0 and "TVMHET-E004" in err and "give a deadline of" in err


def test_plan_for_training_prints_its_parts(folder, tvmhet):
    args = ["plan", "toy_models:toy", "--cluster", "cluster.yaml", "--mode", "training", "--global-batch", "32"]
    files = ["--out", "p.json", "--html", "p.html", "--trace", "p.trace", "--dot", "p.dot"]
    status, out, err = tvmhet(*args, "--optimizer", "sgd", "--schedule", "1f1b", *files)
    assert status == 0 and err == ""
    assert out.startswith("training plan of toy_models:toy\n") and "8 of 4 samples" in out and "bubble" in out
    assert max(map(len, out.splitlines())) <= 100
    assert Plan.load("p.json").training.schedule == "1f1b"
    assert "backward" in Path("p.html").read_text()
    status, _, err = tvmhet(*args[:-1], "30")
    assert status != 0 and "TVMHET-E021" in err
    status, _, err = tvmhet("plan", "toy_models:toy", "--cluster", "cluster.yaml", "--global-batch", "32")
    assert status != 0 and "mode" in err


def test_pins_are_kept(folder, tvmhet):
    for device in ("cpu-x86-64-v2", "cpu-x86-64-v3"):
        args = ["--pin", f"*={device}", "--makers", "tvm", "--json"]
        status, out, _ = tvmhet("plan", "toy_models:toy", "--cluster", "cluster.yaml", *args)
        stages = json.loads(out)["stages"]
        assert status == 0 and {s["placement"]["device_type"] for s in stages} == {device}
        assert {k["maker"] for s in stages for k in s["placement"]["kernels"]} == {"tvm"}


def test_a_bare_module_takes_the_shapes_given(folder, tvmhet):
    args = ["--cluster", "cluster.yaml", "--json"]
    assert tvmhet("plan", "toy_models:bare", *args, "--inputs", "2x32:float32")[0] == 0
    status, _, err = tvmhet("plan", "toy_models:bare", *args)
    assert status == 2 and "give --inputs" in err


def test_an_exported_program_is_a_model(folder, tvmhet):
    import torch

    layer = torch.nn.Linear(16, 4)
    torch.export.save(torch.export.export(layer, (torch.randn(2, 16),)), "layer.pt2")
    status, out, _ = tvmhet("plan", "layer.pt2", "--cluster", "cluster.yaml")
    assert status == 0 and out.startswith("plan of layer.pt2")
    status, _, err = tvmhet("plan", "layer.pt2", "--cluster", "cluster.yaml", "--inputs", "2x16")
    assert status == 2 and "has its shapes in the file" in err


def test_onnx_takes_shapes_and_named_dims(folder, tvmhet):
    onnx = pytest.importorskip("onnx")
    make, kind = onnx.helper, onnx.TensorProto.FLOAT
    x, y = make.make_tensor_value_info("x", kind, ["n", 8]), make.make_tensor_value_info("y", kind, ["n", 8])
    graph = make.make_graph([make.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
    onnx.save(make.make_model(graph, opset_imports=[make.make_opsetid("", 17)]), "relu.onnx")
    args = ["plan", "relu.onnx", "--cluster", "cluster.yaml", "--json"]
    for extra in (["--bind", "n=4"], ["--inputs", "4x8:float32"]):
        status, out, err = tvmhet(*args, *extra)
        assert status == 0, err
        assert json.loads(out)["whole_reason"] == ""
    status, _, err = tvmhet(*args, "--inputs", "4x8:int64")
    assert status == 2 and "'x' of 'relu.onnx' is float32" in err
    status, _, err = tvmhet(*args, "--inputs", "4x8", "--inputs", "1")
    assert status == 2 and "has 1 inputs (x), --inputs gives 2" in err


def test_build_then_run(folder, tvmhet):
    """A plan on one worker, to be quick; the bundle runs, and the run is traced."""
    args = ["toy_models:toy", "--cluster", "cluster.yaml"]
    assert tvmhet("plan", *args, "--pin", "*=cpu-x86-64-v2", "--out", "p.json")[0] == 0
    status, out, err = tvmhet("build", *args, "--plan", "p.json", "--out", "bundle")
    assert status == 0, err
    assert "bundle written to bundle" in out and Path("bundle/manifest.json").is_file()
    status, out, err = tvmhet("run", "bundle", "--num-inputs", 3, "--trace", "run.json")
    assert status == 0, err
    assert "toy_models:toy: predicted and measured, 3 inputs alone" in out
    names = [
        e["args"]["name"]
        for e in json.loads(Path("run.json").read_text())["traceEvents"]
        if e["ph"] == "M" and "name" in e["args"]
    ]
    assert "measured: toy_models:toy" in names
    status, _, err = tvmhet("build", *args, "--out", "bundle")
    assert status == 2 and "not empty" in err
    status, _, err = tvmhet("build", *args, "--plan", "p.json", "--tune", 5, "--out", "b2")
    assert status == 2 and "a plan was given" in err and not Path("b2").exists()
    status, _, err = tvmhet("build", "toy_models:wide", "--cluster", "cluster.yaml", "--plan", "p.json", "--out", "b2")
    assert status == 2 and "TVMHET-E006" in err and not Path("b2").exists()


CLUSTER_ARGS = ["--cluster", "cluster.yaml"]
MISTAKES = {
    "no such onnx": (["plan", "gone.onnx", *CLUSTER_ARGS], "E008", "'gone.onnx' does not exist"),
    "no such pt2": (["plan", "gone.pt2", *CLUSTER_ARGS], "E008", "'gone.pt2' does not exist"),
    "no kind of model": (["plan", "model.txt", *CLUSTER_ARGS], "E008", "give a .onnx file, a .pt2 file"),
    "no such module": (["plan", "gone_models:toy", *CLUSTER_ARGS], "E008", "no Python module 'gone_models'"),
    "no such function": (["plan", "toy_models:tiny", *CLUSTER_ARGS], "E008", "it has Counts, Toy, bare, broken"),
    "not a function": (["plan", "toy_models:constant", *CLUSTER_ARGS], "E008", "no function 'constant'"),
    "no model returned": (["plan", "toy_models:no_model", *CLUSTER_ARGS], "E008", "returned a str"),
    "no such cluster": (["plan", "toy_models:toy", "--cluster", "gone.yaml"], "E003", "gone.yaml: cannot be read"),
    "unknown device": (["plan", "toy_models:toy", "--cluster", "typo.yaml"], "E001", "cpu-x86-64-v3"),
    "offers only": (["plan", "toy_models:toy", "--cluster", "market.yaml"], "E007", "not rented yet"),
    "pin without type": (["plan", "toy_models:toy", *CLUSTER_ARGS, "--pin", "first"], "E014", "--pin conv1=a100"),
    "pin twice": (["plan", "toy_models:toy", *CLUSTER_ARGS, "--pin", "a=t4", "--pin", "a=l4"], "E014", "'a' twice"),
    "pin of nothing": (["plan", "toy_models:toy", *CLUSTER_ARGS, "--pin", "zz=cpu-v2"], "E014", "'zz'"),
    "bind below one": (["plan", "toy_models:toy", *CLUSTER_ARGS, "--bind", "n=0"], "E014", "at least 1"),
    "no shape": (["plan", "toy_models:toy", *CLUSTER_ARGS, "--inputs", "4by32"], "E014", "1x3x224x224:float32"),
    "no dtype": (["plan", "toy_models:toy", *CLUSTER_ARGS, "--inputs", "4x32:float99"], "E014", "'float99' is unknown"),
    "no objective": (["plan", "toy_models:toy", *CLUSTER_ARGS, "--objective", "speed"], "E014", "throughput"),
    "no price": (["plan", "toy_models:toy", *CLUSTER_ARGS, "--objective", "cost"], "E014", "have no price"),
    "no cost": (["plan", "toy_models:toy", *CLUSTER_ARGS, "--deadline", "1"], "E014", 'use objective="cost"'),
    "no ablation": (["plan", "toy_models:toy", *CLUSTER_ARGS, "--ablate", "fuse"], "E014", "use one of fuse-first"),
    "no maker": (["plan", "toy_models:toy", *CLUSTER_ARGS, "--makers", "cublas"], "E014", "cublas"),
    "no folder": (
        ["plan", "toy_models:toy", *CLUSTER_ARGS, "--html", "gone/p.html"],
        "E014",
        "folder of 'gone/p.html'",
    ),
    "no plan": (["build", "toy_models:toy", *CLUSTER_ARGS, "--plan", "gone.json", "--out", "b"], "E011", "'gone.json'"),
    "no bundle": (["run", "gone"], "E011", "'gone'"),
    "no device": (["devices", "a10O"], "E001", "a10"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_message_and_leaves_nothing(mistake, folder, tvmhet):
    args, code, words = MISTAKES[mistake]
    (folder / "typo.yaml").write_text(CLUSTER.replace("v3", "v33"))
    (folder / "market.yaml").write_text("market: [{type: t4, price: 0.35 USD/h, max_count: 2}]\n")
    before = {p.name for p in folder.iterdir()}
    status, out, err = tvmhet(*args)
    assert status == 2 and out == ""
    assert err.startswith(f"error: [TVMHET-{code}] ") and words in err
    assert "Traceback" not in err
    assert {p.name for p in folder.iterdir()} - before <= {"__pycache__", "cache"}


def test_a_model_of_any_shape_is_placed_whole_and_runs_when_given_one(folder, tvmhet):
    onnx = pytest.importorskip("onnx")
    make, kind = onnx.helper, onnx.TensorProto.FLOAT
    x, y = make.make_tensor_value_info("x", kind, ["n", 8]), make.make_tensor_value_info("y", kind, ["n", 8])
    graph = make.make_graph([make.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
    onnx.save(make.make_model(graph, opset_imports=[make.make_opsetid("", 17)]), "relu.onnx")
    status, out, err = tvmhet("build", "relu.onnx", "--cluster", "cluster.yaml", "--out", "bundle")
    assert status == 0, err
    assert "unknown" in out and "placed whole: " in out
    status, _, err = tvmhet("run", "bundle")
    assert status == 2 and "--inputs SHAPE:DTYPE" in err
    status, out, err = tvmhet("run", "bundle", "--inputs", "5x8", "--num-inputs", 2)
    assert status == 0, err
    assert "2 inputs alone" in out


@pytest.mark.parametrize(("load", "busy"), [(0.2, False), (64.0, True)])
def test_a_busy_machine_is_named(load, busy, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    assert [("load average 64.0, 2 cores" in note) for note in busy_note()] == [True] * busy


def test_usage_errors_are_the_parsers(tvmhet):
    status, _, err = tvmhet("plan", "toy_models:toy")
    assert status == 2 and "--cluster" in err


def test_a_defect_shows_its_traceback(folder, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["tvmhet", "plan", "toy_models:broken", "--cluster", "cluster.yaml"])
    with pytest.raises(ZeroDivisionError):
        cli.main()


def test_devices(tvmhet):
    status, out, _ = tvmhet("devices")
    assert status == 0 and "a100-sxm-80gb" in out and "this machine" in out
    assert max(map(len, out.splitlines())) <= 100
    status, out, _ = tvmhet("devices", "V100")
    assert status == 0 and out.startswith("v100-") and "sm_70" in out and "source" in out
    status, out, _ = tvmhet("devices", "v100", "--json")
    assert status == 0 and [d["kind"] for d in json.loads(out)] == ["cuda"]


def test_version(tvmhet):
    from tvmhet import __version__

    assert tvmhet("--version")[:2] == (0, f"tvmhet {__version__}\n")


@pytest.mark.parametrize("args", [["--help"], ["plan", "--help"], ["devices"], ["devices", "t4", "--json"]])
def test_help_and_devices_do_not_wait_for_torch_or_tvm(args):
    program = f"""
        import sys
        from tvmhet.cli import main
        sys.argv = ["tvmhet", *{args!r}]
        try:
            main()
        except SystemExit as end:
            assert not end.code
        heavy = {{"torch", "tvm", "tvm_ffi", "ortools", "xgboost"}} & sys.modules.keys()
        assert not heavy, heavy
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, stdout=subprocess.DEVNULL, timeout=60)


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("1x3x224x224:float32", InputShape((1, 3, 224, 224), "float32")),
        ("128", InputShape((128,))),
        ("scalar:int64", InputShape((), "int64")),
    ],
)
def test_input_shapes(text, shape):
    assert parse_input_shape(text) == shape


@pytest.mark.parametrize("text", ["", "x", "1x", "1x-2", "1x2:", "1 x 2", "1,2", "scalar2"])
def test_bad_input_shapes(text):
    with pytest.raises(BadInput, match="1x3x224x224:float32"):
        parse_input_shape(text)


def test_random_inputs_are_repeatable_and_valid_indices():
    import torch

    shapes = [InputShape((3, 2)), InputShape((4,), "int64"), InputShape((), "bool"), InputShape((2,), "bfloat16")]
    first, second = random_inputs(shapes, 1), random_inputs(shapes, 1)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert [t.dtype for t in first] == [torch.float32, torch.int64, torch.bool, torch.bfloat16]
    assert set(first[1].tolist()) <= {0, 1}
    assert not torch.equal(first[0], random_inputs(shapes, 2)[0])


def test_training_takes_splits(folder, tvmhet):
    """The cluster has no machine with two GPUs: the plan says so."""
    args = ["plan", "toy_models:toy", "--cluster", "cluster.yaml", "--mode", "training", "--global-batch", "32"]
    status, out, _ = tvmhet(*args, "--splits", "2")
    assert status == 0 and "no split over 2 devices" in out


def test_build_takes_splits(folder, tvmhet):
    (folder / "pair.yaml").write_text("nodes: [{name: here, devices: {cpu-x86-64-v3: 2}}]\n")
    (folder / "splits.yaml").write_text("- {degree: 2, times_s: {'*': 1e-9}}\n")
    args = ["build", "toy_models:toy", "--cluster", "pair.yaml", "--splits", "splits.yaml"]
    status, out, err = tvmhet(*args, "--objective", "latency", "--out", "team")
    assert status == 0 and err == "" and "1 x 2 split cpu-x86-64-v3" in out and len(list(Path("team").glob("*.so"))) > 2
    status, out, _ = tvmhet("run", "team", "--num-inputs", "2")
    assert status == 0 and "1 x 2 split" in out


@pytest.mark.slow
def test_build_takes_splits_of_a_training_step(folder, tvmhet):
    (folder / "pair.yaml").write_text("nodes: [{name: here, devices: {cpu-x86-64-v3: 2}}]\n")
    (folder / "splits.yaml").write_text("- {degree: 2, times_s: {'*': 1e-9}, backward_times_s: {'*': 1e-9}}\n")
    (folder / "large_models.py").write_text(
        "import torch\n\ndef large():\n"
        "    layers = torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 256)\n"
        "    return torch.nn.Sequential(*layers), (torch.randn(32, 256),)\n"
    )
    args = ["build", "large_models:large", "--cluster", "pair.yaml", "--splits", "splits.yaml", "--makers", "tvm"]
    status, out, err = tvmhet(*args, "--mode", "training", "--loss", "mse", "--global-batch", "128", "--out", "step")
    assert status == 0 and err == "" and "1 x 2 split cpu-x86-64-v3" in out and Path("step/manifest.json").exists()


def test_a_model_with_states_is_built_for_sessions(folder, tvmhet):
    place = ["toy_models:counts", "--cluster", "cluster.yaml", "--makers", "tvm", "--sessions", "3"]
    status, out, _ = tvmhet("plan", *place)
    assert status == 0 and "for 3 sessions" in out
    status, out, err = tvmhet("build", *place, "--out", "bundle")
    assert status == 0 and err == "" and "for 3 sessions" in out
    assert json.loads(Path("bundle/manifest.json").read_text())["num_sessions"] == 3
    status, out, _ = tvmhet("run", "bundle", "--num-inputs", "3")
    assert status == 0 and "throughput" in out
    status, out, _ = tvmhet("profile", *place, "--budget", "5")
    assert status == 0 and out.startswith("measured")
    for command in ("plan", "profile"):
        status, _, err = tvmhet(command, "toy_models:toy", "--cluster", "cluster.yaml", "--sessions", "2")
        assert status == 2 and "2 sessions of a model without state" in err
    training = ["--mode", "training", "--loss", "mse", "--global-batch", "4", "--sessions", "2"]
    status, _, err = tvmhet("plan", "toy_models:toy", "--cluster", "cluster.yaml", *training)
    assert status == 2 and "the model is a training step" in err


@pytest.mark.parametrize(("text", "splits"), [("", []), ("2, 4", [2, 4]), ("splits.yaml", "splits.yaml")])
def test_splits_are_degrees_or_a_file(text, splits):
    assert parse_splits(text) == splits
