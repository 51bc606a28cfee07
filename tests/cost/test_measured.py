"""cost/measured: the database keeps what it was given, through crashes, damage and company."""

import multiprocessing
import os
import signal
import sqlite3
import time
from dataclasses import replace

import pytest

from tvmhet.cost.measure import Measurement
from tvmhet.cost.measured import KernelKey, MeasuredKernels, default_path
from tvmhet.errors import BadBundle, BadInput

KEY = KernelKey("0123abcd", '{"kind": "llvm"}', "Test CPU", "generated, 1 thread", "0.27.0")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / "measured.db"


def ok(*times_s, busy=False):
    return Measurement("ok", times_s, busy)


def test_all_times_come_back(path):
    with MeasuredKernels(path) as db:
        assert db.median_s(KEY) is None and not db.has(KEY)
        assert db.insert(KEY, ok(3e-6, 1e-6, 2e-6))
    with MeasuredKernels(path) as db:
        assert db.runs(KEY) == (ok(3e-6, 1e-6, 2e-6),)
        assert db.median_s(KEY) == 2e-6
        assert db.median_s(replace(KEY, device="other")) is None


@pytest.mark.parametrize("field", ["kernel_hash", "target", "device", "toolchain", "tvm_version"])
def test_every_part_of_the_key_counts(path, field):
    with MeasuredKernels(path) as db:
        db.insert(KEY, ok(1.0))
        assert db.median_s(replace(KEY, **{field: "ff"})) is None


def test_the_calmest_run_counts(path):
    with MeasuredKernels(path) as db:
        db.insert(KEY, ok(1.0, busy=True))
        assert db.median_s(KEY) == 1.0
        db.insert(KEY, ok(5.0))
        db.insert(KEY, ok(4.0, 4.0, 9.0))
        assert db.median_s(KEY) == 4.0


def test_failures_are_kept_and_give_no_time(path):
    with MeasuredKernels(path) as db:
        assert db.insert(KEY, Measurement("timeout", note="killed"))
        assert db.has(KEY) and db.median_s(KEY) is None
        assert db.runs(KEY)[0].note == "killed"


@pytest.mark.parametrize("times", [(float("nan"),), (1.0, -1.0), (float("inf"),), (0.0,), ()])
def test_unsound_runs_go_to_the_quarantine(path, times):
    with MeasuredKernels(path) as db:
        assert not db.insert(KEY, Measurement("ok", times))
        assert db.num_runs() == 0 and db.median_s(KEY) is None
        assert len(db.quarantined()) == 1 and "kernel 0123abcd on Test CPU" in db.quarantined()[0]


def test_rows_that_others_spoiled_are_put_aside_when_read(path):
    with MeasuredKernels(path) as db:
        db.insert(KEY, ok(1.0))
        db.insert(KEY, ok(2.0))
    with sqlite3.connect(path) as raw:
        raw.execute("UPDATE runs SET times_s = '[-1]' WHERE times_s = '[1.0]'")
    with MeasuredKernels(path) as db:
        assert db.median_s(KEY) == 2.0
        assert db.num_runs() == 1 and "time -1 s" in db.quarantined()[0]


def test_a_file_that_is_no_database(path):
    path.parent.mkdir()
    path.write_text("this is a text, and long enough to be one " * 50)
    with pytest.raises(BadBundle, match=r"measured\.db.*cannot be used(.|\n)*move it away"):
        MeasuredKernels(path)


def test_a_damaged_page(path):
    with MeasuredKernels(path) as db:
        for i in range(2000):
            db.insert(KEY, ok(1.0 + i), taken_ns=i)
    data = bytearray(path.read_bytes())
    data[4096:] = os.urandom(len(data) - 4096)
    path.write_bytes(data)
    with MeasuredKernels(path) as db, pytest.raises(BadBundle, match="cannot be used"):
        db.runs(KEY)


def test_another_schema(path):
    MeasuredKernels(path).close()
    with sqlite3.connect(path) as raw:
        raw.execute("PRAGMA user_version = 99")
    with pytest.raises(BadBundle, match="has schema 99; this tvmhet reads schema 1"):
        MeasuredKernels(path)


def test_a_database_of_something_else(path):
    path.parent.mkdir()
    with sqlite3.connect(path) as raw:
        raw.execute("CREATE TABLE recipes (name TEXT)")
    with pytest.raises(BadBundle, match="has schema 0"):
        MeasuredKernels(path)


def test_counts_by_device_and_status(path):
    with MeasuredKernels(path) as db:
        db.insert(KEY, ok(1.0), taken_ns=1)
        db.insert(KEY, ok(1.0), taken_ns=2)
        db.insert(replace(KEY, device="other"), Measurement("crash"))
        assert db.counts() == {(KEY.device, "ok"): 2, ("other", "crash"): 1}


def _insert_many(path, device, count):
    with MeasuredKernels(path) as db:
        for i in range(count):
            db.insert(replace(KEY, device=device), ok(1.0 + i), taken_ns=i)


def test_concurrent_writers_and_readers(path):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_insert_many, args=(path, f"cpu{i}", 50)) for i in range(4)]
    for w in writers:
        w.start()
    with MeasuredKernels(path) as db:
        while any(w.is_alive() for w in writers):
            assert 0 <= db.num_runs() <= 200
    assert [w.exitcode for w in writers] == [0] * 4
    with MeasuredKernels(path) as db:
        assert db.num_runs() == 200


@pytest.mark.parametrize("round_", range(5))
def test_kill_nine_at_any_moment(path, round_):
    """Every run up to some point is there, whole, and nothing after it; and the file still takes new ones."""
    child = multiprocessing.get_context("fork").Process(target=_insert_many, args=(path, "cpu", 100_000))
    child.start()
    with MeasuredKernels(path) as db:
        while db.num_runs() < 1 + 40 * round_:
            time.sleep(0.001)
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    key = replace(KEY, device="cpu")
    with MeasuredKernels(path) as db:
        runs = db.runs(key)
        assert len(runs) > 40 * round_
        assert [r.times_s for r in runs] == [(1.0 + i,) for i in range(len(runs))]
        assert db.quarantined() == ()
        assert db.insert(key, ok(0.5))
        assert db.median_s(key) == 0.5


def test_where_it_lies(monkeypatch, tmp_path):
    monkeypatch.setenv("TVMHET_CACHE_DIR", str(tmp_path / "mine"))
    assert default_path() == tmp_path / "mine" / "measured.db"
    monkeypatch.delenv("TVMHET_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_path() == tmp_path / "xdg" / "tvmhet" / "measured.db"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_path() == tmp_path / ".cache" / "tvmhet" / "measured.db"


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(BadInput, match=r"file' cannot be written: File exists\n  remedy: .*TVMHET_CACHE_DIR"):
        MeasuredKernels(tmp_path / "file" / "measured.db")


def test_bad_keys():
    with pytest.raises(BadInput, match="not lower-case hex"):
        replace(KEY, kernel_hash="0xAB")
    with pytest.raises(BadInput, match="has no device"):
        replace(KEY, device="")


def test_descriptions_come_with_the_calmest_time(path):
    with MeasuredKernels(path) as db:
        db.describe(KEY.kernel_hash, "a kernel")
        db.insert(KEY, ok(3.0, busy=True))
        db.insert(KEY, ok(5.0))
        db.insert(replace(KEY, kernel_hash="ff"), ok(1.0))  # nobody said what it computes
        db.insert(replace(KEY, toolchain="other"), Measurement("crash"))
        known = [(KEY.kernel_hash, KEY.toolchain, "a kernel", 5.0)]
        assert db.described(KEY.target, KEY.device, KEY.tvm_version) == known
        assert db.described(KEY.target, "other CPU", KEY.tvm_version) == []


def test_files_without_descriptions_get_them(path):
    with MeasuredKernels(path) as db:
        db.insert(KEY, ok(1.0))
    with sqlite3.connect(path) as old:
        old.execute("DROP TABLE kernels")
    with MeasuredKernels(path) as db:
        db.describe(KEY.kernel_hash, "a kernel")
        assert len(db.described(KEY.target, KEY.device, KEY.tvm_version)) == 1
