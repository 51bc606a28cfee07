"""Schedules on disk: kept per device type, continued, and left alone when they are of something else."""

from dataclasses import replace

import pytest

from tvmhet.cost.measure import Measurement
from tvmhet.cost.measured import KernelKey
from tvmhet.cost.tuning_store import Trial, TuningStore, kept_schedules, tuning_path
from tvmhet.errors import BadBundle
from tvmhet.graph.schedule import TunedSchedule

KEY = KernelKey("ab", '{"kind": "llvm"}', "Some CPU", "lowering 1; 1 cores", "0.27")
FIRST, SECOND = (TunedSchedule("f0", f'[["{name}"],[]]') for name in ("x", "y"))
OK, CRASH = Measurement("ok", (2e-5, 1e-5)), Measurement("crash", note="SIGSEGV")


@pytest.fixture
def store(tmp_path):
    with TuningStore(tmp_path / "measured.tuning" / "cpu.db") as opened:
        yield opened


def test_trials_come_back_in_order_with_their_status(store):
    store.add(KEY, Trial(FIRST, CRASH))
    store.add(KEY, Trial(SECOND, OK))
    assert store.trials(KEY, "f0") == (Trial(FIRST, CRASH), Trial(SECOND, OK))


def test_only_kept_schedules_are_for_plans(store):
    store.add(KEY, Trial(FIRST, OK))
    assert store.kept(KEY) == {}
    store.keep(KEY, FIRST)
    assert store.kept(KEY) == {"ab": (FIRST,)}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"tvm_version": "0.28"}, "another TVM"),
        ({"target": '{"kind": "cuda"}'}, "another target"),
        ({"device": "Other CPU"}, "another processor"),
        ({"toolchain": "lowering 2; 1 cores"}, "another lowering"),
    ],
)
def test_records_of_something_else_are_counted_and_never_used(store, change, word):
    store.add(KEY, Trial(FIRST, OK))
    store.keep(KEY, FIRST)
    other = replace(KEY, **change)
    assert store.trials(other, "f0") == () and store.kept(other) == {}
    assert store.stale(other) == {word: 1} and store.tried(other) == ()
    assert store.stale(KEY) == {} and store.tried(KEY) == ("ab",)


def test_records_of_another_function_are_left_out(store):
    store.add(KEY, Trial(FIRST, OK))
    assert store.trials(KEY, "f1") == ()
    assert len(store.trials(KEY)) == 1


def test_a_schedule_without_a_run_is_tried_again(store):
    store.add(KEY, Trial(FIRST, OK))
    store._runs._db.execute("DELETE FROM runs")  # as if the process was killed between the two
    assert store.trials(KEY, "f0") == ()
    store.add(KEY, Trial(FIRST, OK))
    assert store.trials(KEY, "f0") == (Trial(FIRST, OK),)


def test_one_file_per_device_type_beside_the_database(tmp_path):
    a, b = (tuning_path(tmp_path / "measured.db", t) for t in ("cpu-x86-64-v2", "my/gpu 1"))
    assert a == tmp_path / "measured.tuning" / "cpu-x86-64-v2.db" and b.name == "my_gpu_1.db"
    assert kept_schedules(tmp_path / "measured.db", "cpu-x86-64-v2", KEY) == {}
    assert not a.exists()  # asking makes no file


def test_a_file_that_is_no_store_is_refused(tmp_path):
    path = tmp_path / "cpu.db"
    path.write_text("not a database, but long enough to be read as one" * 20)
    with pytest.raises(BadBundle, match=r"cpu\.db"):
        TuningStore(path)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"function": 1, "trace": []}', '{"function": "f", "trace": "x"}'])
def test_a_schedule_that_cannot_be_read_is_refused(text):
    with pytest.raises(BadBundle, match="tuned schedule"):
        TunedSchedule.from_text(text)


def test_a_schedule_survives_its_text():
    assert TunedSchedule.from_text(FIRST.to_text()) == FIRST
    assert FIRST.digest != SECOND.digest != TunedSchedule("f1", SECOND.trace).digest
