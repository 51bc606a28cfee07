"""tvmhet predict: answers to a file or standard output, whole or not at all; one message per mistake."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tvmhet.cost.operators import SCHEMA
from tvmhet.cost.schema import example_line

GPU = """my-gpu:
  architecture: Ada
  target: {kind: cuda, arch: sm_89}
  sms: 46
  lanes_per_sm: 128
  boost_clock: 2475 MHz
  memory: 12 GiB
  bandwidth: 504 GB/s
  l2: 36 MiB
  rates: {float32: 29.1 TFLOP/s, bfloat16: 58.3 TFLOP/s, float16: 58.3 TFLOP/s}
  power: 200 W
"""


@pytest.fixture
def ops(tmp_path):
    path = tmp_path / "ops.jsonl"
    path.write_text("".join(example_line(op) + "\n" for op in SCHEMA))
    return path


def test_the_schema_is_printed(tvmhet):
    status, out, err = tvmhet("predict", "--schema")
    assert status == 0 and err == ""
    assert all(example_line(op) in out for op in SCHEMA)


@pytest.mark.parametrize("device", ["h100", "gpu.yaml"])
def test_a_file_in_and_a_file_out(tvmhet, ops, device):
    Path("gpu.yaml").write_text(GPU)
    status, out, err = tvmhet("predict", "--device", device, "--ops", ops, "--out", "pred.jsonl")
    assert (status, out, err) == (0, "", "")
    answers = [json.loads(line) for line in Path("pred.jsonl").read_text().splitlines()]
    assert len(answers) == len(SCHEMA) and all(0 < a["low"] <= a["seconds"] <= a["high"] for a in answers)
    status, out, _ = tvmhet("predict", "--device", device, "--ops", ops)
    assert out == Path("pred.jsonl").read_text()


def test_standard_input(tvmhet, ops, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(ops.read_text()))
    status, out, _ = tvmhet("predict", "--device", "h100", "--ops", "-")
    assert status == 0 and len(out.splitlines()) == len(SCHEMA)


def test_queued_kernels_take_less(tvmhet):
    Path("one.jsonl").write_text(json.dumps({"op": "softmax", "rows": 8, "cols": 8}))
    args = ["predict", "--device", "t4", "--ops", "one.jsonl", "--dispatch"]
    published, queued = (json.loads(tvmhet(*args, how)[1])["seconds"] for how in ("published", "queued"))
    assert 0 < queued < published / 2


MODEL = """
import torch

def toy():
    layers = torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 8), torch.nn.Softmax(-1)
    return torch.nn.Sequential(*layers).eval(), (torch.randn(16, 64),)
"""


@pytest.mark.parametrize("device", ["t4", "gpu.yaml", "cpu-x86-64-v3"])
def test_a_whole_model(tvmhet, monkeypatch, device):
    Path("gpu.yaml").write_text(GPU)
    Path("toy_for_predict.py").write_text(MODEL)
    monkeypatch.syspath_prepend(str(Path().resolve()))
    args = ["predict", "--device", device, "--model", "toy_for_predict:toy"]
    status, out, err = tvmhet(*args, "--json")
    assert status == 0, err
    found = json.loads(out)
    kernels = found["kernels"]
    assert (
        found["seconds"] == pytest.approx(sum(k["seconds"] for k in kernels)) and found["seconds"] < found["latency_s"]
    )
    assert all(0 < k["low"] <= k["seconds"] <= k["high"] for k in kernels)
    assert {k["source"] for k in kernels} == {"roofline" if device.startswith("cpu") else "learned"}
    status, out, _ = tvmhet(*args)
    assert status == 0 and out.startswith("toy_for_predict:toy on ") and "times from" in out
    assert sum(" library " in line or " tvm " in line for line in out.splitlines()) == len(kernels)


MISTAKES = {
    "nothing to predict": (["--device", "h100"], "E014", "predict has no --ops"),
    "two things": (["--device", "h100", "--ops", "ops.jsonl", "--model", "m:f"], "E014", "--ops and --model"),
    "out of a model": (["--device", "h100", "--model", "m:f", "--out", "p"], "E014", "--model and one of --out"),
    "inputs of operators": (["--device", "h100", "--ops", "ops.jsonl", "--json"], "E014", "--ops and one of --inputs"),
    "no model": (["--device", "h100", "--model", "gone.onnx"], "E008", "gone.onnx"),
    "no device": (["--ops", "ops.jsonl"], "E014", "predict has no --device"),
    "unknown device": (["--device", "h1000", "--ops", "ops.jsonl"], "E001", "h100"),
    "no such file": (["--device", "h100", "--ops", "gone.jsonl"], "E014", "gone.jsonl"),
    "no device file": (["--device", "gone.yaml", "--ops", "ops.jsonl"], "E003", "gone.yaml"),
    "no folder": (["--device", "h100", "--ops", "ops.jsonl", "--out", "gone/p"], "E014", "folder of 'gone/p'"),
    "no dispatch": (["--device", "h100", "--ops", "ops.jsonl", "--dispatch", "fast"], "E014", "'fast'"),
    "bad line": (["--device", "h100", "--ops", "bad.jsonl"], "E014", "line 2: softmax: cols is -1"),
    "bad line, file": (["--device", "h100", "--ops", "bad.jsonl", "--out", "p"], "E014", "line 2: softmax: cols is -1"),
    "no dtype": (["--device", "p100-pcie-16gb", "--ops", "bf16.jsonl"], "E014", "line 1: .*bfloat16"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_message_and_leaves_nothing(mistake, tvmhet, ops):
    args, code, words = MISTAKES[mistake]
    Path("bad.jsonl").write_text('{"op": "softmax", "rows": 8, "cols": 8}\n{"op": "softmax", "rows": 8, "cols": -1}\n')
    Path("bf16.jsonl").write_text('{"op": "softmax", "rows": 8, "cols": 8, "dtype": "bfloat16"}\n')
    before = set(Path().iterdir())
    status, out, err = tvmhet("predict", *args)
    assert status == 2 and out == ""
    assert err.startswith(f"error: [TVMHET-{code}] ") and "remedy: " in err
    assert re.search(words, err)
    assert set(Path().iterdir()) == before


def test_python_runs_the_package_as_the_command_line(ops):
    command = [sys.executable, "-m", "tvmhet", "predict", "--device", "h100", "--ops", str(ops)]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout.splitlines()) == len(SCHEMA)
