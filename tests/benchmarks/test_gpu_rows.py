"""benchmarks/gpu_rows: what is drawn is what was measured, and every operator can be described and run."""

from pathlib import Path

import torch

from benchmarks.gpu_rows import compare, draw, parse_row, read
from tvmhet.emit.library_worker import alone

MEASURED = Path(__file__).parent.parent.parent / "cost_models" / "measured" / "gpu_h200-sxm-141gb.jsonl.gz"


def test_the_shipped_operators_are_those_of_the_seed():
    about, rows = read(MEASURED)
    assert about["gpu"] == "NVIDIA H200" and len(rows) == 3000
    assert [{key: row[key] for key in drawn} for row, drawn in zip(rows, draw(3000), strict=True)] == draw(3000)
    assert draw(100) == draw(3000)[:100]


def test_every_operator_runs_as_it_is_described():
    ran = set()
    for row in draw(600):
        desc = parse_row(row)
        if desc.flop < 1e8 and desc.read_bytes + desc.write_bytes < 4e6:
            made = alone(torch, row, "cpu")()
            written = 0 if made is None else made.element_size() * made.numel()
            assert made is None or written == desc.write_bytes, row
            ran.add((row["op"], row["dtype"]))
    assert len(ran) >= 10


def test_errors_are_told_by_operator_and_way(capsys):
    compare(MEASURED, "h200-sxm-141gb")
    lines = capsys.readouterr().out.splitlines()
    assert "NVIDIA H200" in lines[0] and len(lines) == 2 + 2 * 16
    assert any(line.startswith("queued_s  softmax") for line in lines)
