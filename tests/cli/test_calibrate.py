"""tvmhet calibrate: a list to measure elsewhere, its times back, and predictions that use them."""

import json
from pathlib import Path

import pytest


def lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_a_list_out_and_its_times_back(tvmhet):
    """Every kernel twice as slow as predicted: predictions with the times are about twice as long."""
    status, out, _ = tvmhet("calibrate", "--device", "l4", "--list", "ops.jsonl", "--count", 30)
    assert status == 0 and "30 kernels in ops.jsonl" in out
    dry = tvmhet("calibrate", "--device", "l4", "--dry-run", "--count", 30)[1]
    assert dry == Path("ops.jsonl").read_text()
    ops = lines("ops.jsonl")
    assert tvmhet("predict", "--device", "l4", "--ops", "ops.jsonl", "--out", "plain.jsonl")[0] == 0
    plain = lines("plain.jsonl")
    timed = [{**op, "seconds": 2 * answer["seconds"]} for op, answer in zip(ops, plain, strict=True)]
    Path("times.jsonl").write_text("".join(json.dumps(t) + "\n" for t in timed))
    status, out, err = tvmhet("calibrate", "--device", "l4", "--measurements", "times.jsonl", "--out", "l4.jsonl")
    assert status == 0, err
    assert "30 kernels" in out and "before" in out
    assert tvmhet("predict", "--device", "l4", "--ops", "ops.jsonl", "--out", "again.jsonl")[0] == 0
    assert lines("again.jsonl") == plain  # --out keeps it from the user's folder
    args = ["--ops", "ops.jsonl", "--calibration", "l4.jsonl"]
    status, out, _ = tvmhet("predict", "--device", "l4", *args)
    fitted = [json.loads(line) for line in out.splitlines()]
    ratios = sorted(a["seconds"] / b["seconds"] for a, b in zip(fitted, plain, strict=True))
    assert sum(a["source"] == "calibrated" for a in fitted) >= 25  # a group with one kernel is left as it is
    assert ratios[len(ratios) // 2] == pytest.approx(2, rel=0.25)
    status, _, err = tvmhet("predict", "--device", "t4", *args)
    assert status == 2 and "is of 'l4', not of 't4'" in err


def test_times_are_kept_for_later_predictions(tvmhet, tmp_path):
    op = {"op": "softmax", "rows": 4096, "cols": 1024}
    timed = [{**op, "ms": 1}, {**op, "rows": 64, "ms": 0.5}]
    Path("times.jsonl").write_text("".join(json.dumps(t) + "\n" for t in timed))
    assert tvmhet("calibrate", "--device", "t4", "--measurements", "times.jsonl")[0] == 0
    assert (tmp_path / "cache" / "calibration" / "t4.jsonl").is_file()
    Path("ops.jsonl").write_text(json.dumps(op) + "\n")
    assert json.loads(tvmhet("predict", "--device", "t4", "--ops", "ops.jsonl")[1])["source"] == "calibrated"


REPORT = """
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
     1048576        262144     float     sum      -1    400.0    2.62    2.62      0   400.0    2.62    2.62      0
    16777216       4194304     float     sum      -1   4000.0    4.19    4.19      0  4000.0    4.19    4.19      0
   134217728      33554432     float     sum      -1  30000.0    4.47    4.47      0 30000.0    4.47    4.47      0
"""


def test_a_report_of_nccl_tests_is_used_beside_kernels(tvmhet):
    Path("report.txt").write_text(REPORT)
    op = {"op": "softmax", "rows": 4096, "cols": 1024}
    ops = [{"op": "all_reduce", "gpus": 2, "bytes": 16777216}, op]
    Path("ops.jsonl").write_text("".join(json.dumps(o) + "\n" for o in ops))
    Path("times.jsonl").write_text("".join(json.dumps({**op, "rows": r, "ms": 1}) + "\n" for r in (4096, 8192)))
    status, out, err = tvmhet("calibrate", "--device", "t4", "--nccl-tests", "report.txt", "--exchange", "all_reduce:2")
    assert status == 0 and "3 exchanges (all_reduce among 2)" in out, err
    assert tvmhet("calibrate", "--device", "t4", "--measurements", "times.jsonl")[0] == 0
    lines = tvmhet("predict", "--device", "t4", "--ops", "ops.jsonl")[1].splitlines()
    reduced, kernel = map(json.loads, lines)
    assert reduced["seconds"] == pytest.approx(4e-3, rel=0.1) and reduced["in_range"]
    assert kernel["source"] == "calibrated"
    status, _, err = tvmhet("calibrate", "--device", "t4", "--nccl-tests", "report.txt", "--exchange", "gossip:2")
    assert status == 2 and "OP:GPUS" in err


MISTAKES = {
    "two ways": (["--dry-run", "--list", "ops.jsonl"], "more than one of"),
    "no folder": (["--list", "gone/ops.jsonl"], "folder of 'gone/ops.jsonl'"),
    "no file": (["--measurements", "gone.jsonl"], "'gone.jsonl' cannot be read"),
    "not here": ([], "this machine has no 'b200'"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_message(mistake, tvmhet):
    args, words = MISTAKES[mistake]
    status, out, err = tvmhet("calibrate", "--device", "b200", *args)
    assert status == 2 and out == "" and words in err and "remedy: " in err
