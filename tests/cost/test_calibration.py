"""Calibration files: measurements in, a fitted model out; the lines of kernels and back."""

import json

import numpy as np
import pytest

from tvmhet.cluster.catalog import device_type
from tvmhet.cost.boosted import LearnedModel
from tvmhet.cost.calibrate import candidates
from tvmhet.cost.calibration import MeasuredOps, error_of, fitted, model_for, read_measured, stored_path
from tvmhet.cost.model import KernelDesc
from tvmhet.cost.operators import SCHEMA, parse
from tvmhet.cost.record import record_of
from tvmhet.cost.schema import example_line
from tvmhet.errors import BadInput

T4 = device_type("t4")
CPU = device_type("cpu-x86-64-v3")


@pytest.mark.parametrize("op", [op for op in SCHEMA if "gpus" not in SCHEMA[op]])
def test_kernels_have_lines(op):
    desc = parse(json.loads(example_line(op)))
    assert isinstance(desc, KernelDesc) and parse(record_of(desc)) == desc


def test_every_candidate_has_a_line():
    for desc in candidates(T4):
        assert parse(record_of(desc)) == desc


def test_a_fused_kernel_has_none():
    one = parse({"op": "softmax", "rows": 4, "cols": 4})
    with pytest.raises(BadInput, match="has no line"):
        record_of(KernelDesc(one.ops * 2, 1.0, 4.0, 4.0, "float32"))


def test_written_times_are_read_again(tmp_path):
    descs = candidates(T4)[:5]
    measured = MeasuredOps("t4", descs, (1e-5, 2e-5, 3.3e-5, 1e-3, 0.25), "NVIDIA T4")
    measured.write(tmp_path / "new" / "t4.jsonl")
    assert read_measured(tmp_path / "new" / "t4.jsonl", T4) == measured
    with pytest.raises(BadInput, match="is of 't4', not of 'l4'"):
        read_measured(tmp_path / "new" / "t4.jsonl", device_type("l4"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"op": "softmax", "rows": 4, "cols": 4}', ":2: the measurement has no time"),
        ('{"op": "softmax", "rows": 4, "cols": 4, "ms": 1, "us": 1}', ":2: the measurement has ms and us"),
        ('{"op": "softmax", "rows": 4, "cols": 4, "seconds": 0}', ":2: seconds is 0"),
        ('{"op": "softmax", "rows": 4, "cols": 4, "seconds": NaN}', ":2: seconds is nan"),
        ('{"op": "softmax", "rows": 4, "cols": 4, "seconds": "1"}', ":2: seconds is '1'"),
        ('{"op": "softmax", "rows": 4, "seconds": 1}', ":2: softmax: field 'cols' is missing"),
        ('{"op": "softmax", "rows": 4, "cols": 4, "maker": "tvm", "seconds": 1}', ":2: softmax cannot calibrate"),
        ("[1]", r":2: a measurement is \[1\]"),
        ("{", ":2: no JSON object"),
    ],
)
def test_bad_measurements_name_their_line(tmp_path, line, message):
    path = tmp_path / "m.jsonl"
    path.write_text('{"op": "softmax", "rows": 4, "cols": 4, "us": 12}\n' + line + "\n")
    with pytest.raises(BadInput, match=message):
        read_measured(path, T4)


def test_an_empty_file_is_no_calibration(tmp_path):
    (tmp_path / "m.jsonl").write_text("\n")
    with pytest.raises(BadInput, match="no measurement"):
        read_measured(tmp_path / "m.jsonl", T4)
    with pytest.raises(BadInput, match="cannot be read"):
        read_measured(tmp_path / "gone.jsonl", T4)


def test_a_cpu_types_families_are_scaled():
    """Rooflines times 3 for products and 0.5 for softmax, and 10 us a call: the fit finds all three."""
    model, pool = LearnedModel.load(CPU), candidates(CPU)
    wanted = {"linear": 3.0, "softmax": 0.5}
    descs = tuple(d for d in pool if d.root.family in wanted)
    true = 1e-5 + model.predict(descs).seconds * [wanted[d.root.family] for d in descs]
    some = range(0, len(descs), 7)
    found = fitted(model, MeasuredOps(CPU.name, tuple(descs[i] for i in some), tuple(float(true[i]) for i in some)))
    predictions = found.predict(pool)
    assert error_of(found, descs, true) < 0.2 < error_of(model, descs, true)
    assert {s for d, s in zip(pool, predictions.source, strict=True) if d.root.family in wanted} == {"calibrated"}
    others = [i for i, d in enumerate(pool) if d.root.family not in wanted]
    plain = model.predict([pool[i] for i in others])
    np.testing.assert_array_equal(predictions.seconds[others], plain.seconds)


def test_stored_times_are_used(tmp_path, monkeypatch):
    monkeypatch.setenv("TVMHET_CACHE_DIR", str(tmp_path))
    descs = tuple(d for d in candidates(T4) if d.root.family == "softmax")
    plain = model_for(T4)
    slow = plain.predict(descs).seconds * 2
    MeasuredOps("t4", descs, tuple(map(float, slow))).write(stored_path(T4))
    for model in (model_for(T4), model_for(T4, "published", stored_path(T4))):
        assert error_of(model, descs, slow) < 0.2 < error_of(plain, descs, slow)
        assert set(model.predict(descs).source) == {"calibrated"}
