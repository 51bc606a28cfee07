"""tvmhet database: a summary, and a way out and in."""

from tvmhet.cost.measure import Measurement
from tvmhet.cost.measured import KernelKey, MeasuredKernels

KEY = KernelKey("a0", "{}", "some cpu", "torch 2", "0.27.0")


def test_out_and_in_again(tvmhet, tmp_path):
    with MeasuredKernels(tmp_path / "cache" / "measured.db") as db:
        db.insert(KEY, Measurement("ok", (1.0,)), taken_ns=1)
        db.insert(KEY, Measurement("timeout"), taken_ns=2)
    status, out, _ = tvmhet("database")
    assert status == 0 and "2 runs in " in out and "some cpu: 1 ok" in out and "some cpu: 1 timeout" in out
    assert tvmhet("database", "--export", "runs.jsonl")[:2] == (0, "2 runs in runs.jsonl\n")
    status, out, _ = tvmhet("database", "--path", "new.db", "--import", "runs.jsonl")
    assert (status, out) == (0, "2 new runs, 0 known, 0 rows that are no runs\n")


def test_mistakes(tvmhet):
    status, _, err = tvmhet("database", "--import", "gone.jsonl")
    assert status == 2 and "TVMHET-E011" in err
    assert tvmhet("database", "--import", "a", "--export", "b")[0] == 2
