"""Exports and imports of measured kernels: the same rows in both formats, bad rows counted, files whole or absent."""

import json
import sys
from dataclasses import replace

import pytest

from tvmhet.cost.measure import Measurement
from tvmhet.cost.measured import ImportCount, KernelKey, MeasuredKernels
from tvmhet.cost.model import OpDesc, to_text
from tvmhet.cost.runs_file import export_runs, import_runs
from tvmhet.cost.workload import kernel_of
from tvmhet.errors import BadBundle, MissingPackage

DESCRIPTION = to_text(kernel_of(OpDesc("softmax", (8, 16), "float32", "softmax"), "tvm"))
KEY = KernelKey("a0", '{"kind": "llvm"}', "cpu", "torch 2", "0.27.0")


@pytest.fixture
def db(tmp_path):
    with MeasuredKernels(tmp_path / "measured.db") as database:
        database.insert(KEY, Measurement("ok", (1.0, 2.5e-6), busy=True, note="busy"), taken_ns=2**61)
        database.insert(replace(KEY, kernel_hash="ff"), Measurement("crash", note='said "no"'), taken_ns=2)
        database.describe(KEY.kernel_hash, DESCRIPTION)
        yield database


@pytest.mark.parametrize("name", ["runs.jsonl", "runs.parquet"])
def test_round_trip(db, tmp_path, name):
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    assert export_runs(db, tmp_path / name) == 2
    with MeasuredKernels(tmp_path / "other.db") as other:
        assert import_runs(other, tmp_path / name) == ImportCount(2, 0, 0)
        assert import_runs(other, tmp_path / name) == ImportCount(0, 2, 0)
        assert list(other.records()) == list(db.records())
        assert other.runs(KEY) == db.runs(KEY)
        assert [d for _, _, d, _ in other.described(KEY.target, KEY.device, KEY.tvm_version)] == [DESCRIPTION]
        export_runs(other, tmp_path / ("again-" + name))
    assert (tmp_path / name).read_bytes() == (tmp_path / ("again-" + name)).read_bytes()
    assert not list(tmp_path.glob("*.part"))


def test_bad_rows_are_counted(db, tmp_path):
    good = next(iter(db.records()))
    changes = ({"times_s": [-1]}, {"status": "fine"}, {"kernel_hash": "XY"}, {"times_s": None}, {"more": 1},
               {"description": "a kernel"}, {"description": 3})  # fmt: skip
    lines = [json.dumps(good)[:30], "[]", json.dumps(good | {"taken_ns": 7}), *(json.dumps(good | c) for c in changes)]
    (tmp_path / "b.jsonl").write_text("\n".join(lines))
    assert import_runs(db, tmp_path / "b.jsonl") == ImportCount(1, 0, 9)


def test_files_of_older_versions_have_no_descriptions(db, tmp_path):
    rows = [{k: v for k, v in record.items() if k != "description"} for record in db.records()]
    (tmp_path / "old.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with MeasuredKernels(tmp_path / "other.db") as other:
        assert import_runs(other, tmp_path / "old.jsonl") == ImportCount(2, 0, 0)
        assert import_runs(other, tmp_path / "old.jsonl") == ImportCount(0, 2, 0)
        assert other.described(KEY.target, KEY.device, KEY.tvm_version) == []


@pytest.mark.parametrize("name", ["runs.jsonl", "runs.parquet"])
def test_files_that_cannot_be_read(db, tmp_path, name):
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
        (tmp_path / name).write_bytes(b"PAR1 and no more")
        with pytest.raises(BadBundle, match="cannot be read"):
            import_runs(db, tmp_path / name)
    with pytest.raises(BadBundle, match="cannot be read"):
        import_runs(db, tmp_path / f"gone-{name}")


def test_parquet_without_its_package(db, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingPackage, match=r"pip install tvmhet\[parquet\]"):
        export_runs(db, tmp_path / "runs.parquet")
    assert not list(tmp_path.glob("runs*"))
