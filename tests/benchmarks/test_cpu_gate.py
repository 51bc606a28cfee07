"""benchmarks/cpu_gate_figures: whole models from kernels of others; benchmarks/cpu_gate_kinds: models made of dice."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

from benchmarks import cpu_gate_figures as figures
from benchmarks.cpu_gate_kinds import MODELS
from benchmarks.here import cpu_types
from tvmhet.cost.cpu_pool import drawn
from tvmhet.cost.model import to_text
from tvmhet.kernel_keys import LIBRARY_CALL_S

DEVICE = "cpu-x86-64-v3"
POOL = drawn(400)
PER_MODEL = 20


def truth_s(desc):
    return 8e-6 + desc.flop / 40e9 + (desc.read_bytes + desc.write_bytes) / 20e9


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def model_of(name, descs, calls=1):
    kernels = [[f"{name}/{i}", d.maker, to_text(d)] for i, d in enumerate(descs)] * calls
    guess = [1.0] * len(kernels)
    return {"model": name, "model_bytes": 1e6, "kernels": kernels, "shipped_s": guess, "sheet_s": guess}


@pytest.fixture
def folder(tmp_path):
    """19 training models, and one gate model whose kernels none of them has; the second of two runs is the faster."""
    parts = [POOL[i : i + PER_MODEL] for i in range(0, len(POOL), PER_MODEL)]
    training = [model_of(f"t{i}", part) for i, part in enumerate(parts[1:])]
    gate = model_of("g", parts[0], calls=2)
    times = [
        {"model": row["model"], "matched": True, "times_s": [truth_s(d) * slow for d in part] * calls}
        for slow in (1.5, 1.0, 1.3)
        for row, part, calls in [(gate, parts[0], 2), *((r, p, 1) for r, p in zip(training, parts[1:], strict=True))]
    ]
    times += [{"model": "g", "matched": False, "times_s": [1e-9]}]
    write(tmp_path / "training.jsonl", training)
    write(tmp_path / "gate.jsonl", [gate, {"model": "bad", "error": "UnsupportedOperator: so"}])
    write(tmp_path / "times.jsonl", times)
    write(tmp_path / "operators.jsonl", [{"kernel": to_text(POOL[0]), "seconds": None}])
    return tmp_path


def test_the_faster_run_counts(folder):
    assert figures.fastest(folder)["t0"].tolist() == [truth_s(d) for d in POOL[PER_MODEL : 2 * PER_MODEL]]
    (first, *_), (same, *_) = (figures.kernels_of(r, figures.fastest(folder)["g"]) for r in 2 * [gate_row(folder)])
    assert first == same and first.inside_bytes == 1e6


def test_models_chosen_later_are_summed_up_apart(folder, monkeypatch):
    assert not any("chosen later" in line for line in figures.report(DEVICE, folder))
    other = gate_row(folder) | {"model": "h"}
    runs = figures.read_rows(folder / "times.jsonl")
    write(folder / "gate.jsonl", [gate_row(folder), other])
    write(folder / "times.jsonl", [*runs, *(r | {"model": "h"} for r in runs if r["model"] == "g")])
    monkeypatch.setattr(figures, "LATER", ("h",))
    lines = list(figures.report(DEVICE, folder))
    assert sum("chosen later: 1 models" in line for line in lines) == 3
    assert sum("looked at before: 1 models" in line for line in lines) == 3


def gate_row(folder):
    return figures.read_rows(folder / "gate.jsonl")[0]


def test_kernels_called_twice_count_once(folder):
    assert len(figures.kernels_of(gate_row(folder), figures.fastest(folder)["g"])) == PER_MODEL


def test_operators_are_called_as_a_plan_calls_them(folder):
    assert figures.operators(folder) == []
    write(folder / "operators.jsonl", [{"kernel": to_text(POOL[0]), "seconds": 1e-3}])
    (found,) = figures.operators(folder)
    assert found.desc == POOL[0] and found.seconds == 1e-3 + LIBRARY_CALL_S and found.inside_bytes == 0


def test_gate_models_are_predicted_from_training_models(folder):
    head, good, bad, *summary, noise = figures.report(DEVICE, folder)
    assert head.endswith(f"{len(POOL) - PER_MODEL} measured kernels, 19 other models")
    total_ms = 2e3 * sum(truth_s(d) for d in POOL[:PER_MODEL])
    assert f"{total_ms:.2f} ms" in good and bad.startswith("bad") and bad.endswith("UnsupportedOperator: so")
    error = float(re.search(r"profiled ([+-][\d.]+)%", good)[1])
    assert abs(error) < 25
    assert [line.split(":")[0] for line in summary] == ["profiled", "shipped", "data sheet"]
    assert all("1 models" in line for line in summary) and "within 10%: 0% (0)" in summary[1]
    assert (
        noise
        == "1 models: the second fastest run takes 30.0% (median) longer than the fastest, of 100% over 10% longer"
    )


@pytest.mark.slow
def test_training_models_are_left_out_and_gate_models_unseen(folder):
    *lines, summary = figures.left_out(DEVICE, folder)
    assert sorted(line.split()[0] for line in lines) == sorted(f"t{i}" for i in range(19))
    assert "left out: 19 models" in summary
    rows = figures.read_rows(folder / "times.jsonl")
    slower = [row | {"times_s": [9 * s for s in row["times_s"]]} if row["model"] == "t0" else row for row in rows]
    write(folder / "times.jsonl", slower)
    changed = next(line for line in figures.left_out(DEVICE, folder) if line.startswith("t0 "))
    assert float(re.search(r"([+-][\d.]+)%", changed)[1]) < -80  # nothing of its own is learned


@pytest.mark.slow
def test_weights_stay_as_they_are_in_models_that_say_so(tmp_path):
    models = ["words?2@tvm", "words?2@unpacked"]
    options = ["--device", cpu_types()[-1], "--folder", str(tmp_path), "--models", ",".join(models)]
    subprocess.run([sys.executable, "-m", "benchmarks.cpu_gate", "build", "training", *options], check=True)
    packed, unpacked = figures.read_rows(tmp_path / "training.jsonl")
    assert [packed["model"], unpacked["model"]] == models
    assert any(len(shape) == 3 for shape, _ in packed["args"])
    assert all(len(shape) < 3 for shape, _ in unpacked["args"])
    assert all(row["difference"] < 1e-5 * row["largest"] for row in (packed, unpacked))


def test_worst_kernels_are_of_models_that_are_off(folder):
    rows = figures.read_rows(folder / "times.jsonl")
    write(
        folder / "times.jsonl",
        [r | {"times_s": [3 * s for s in r["times_s"]]} if r["model"] == "g" else r for r in rows],
    )
    first, *kernels = figures.worst_kernels(DEVICE, folder)
    assert first.startswith("g, ") and len(kernels) == 6 and all("us, predicted" in line for line in kernels)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_models_made_of_dice(name):
    with torch.no_grad():
        results = []
        for seed in (1, 1, 2):
            model, inputs = MODELS[name](seed)
            found = model(*inputs)
            results.append(found[0] if isinstance(found, tuple) else found)
            assert bool(torch.isfinite(results[-1]).all())
    np.testing.assert_array_equal(results[0], results[1])
    assert results[0].shape != results[2].shape or not torch.equal(results[0], results[2])
