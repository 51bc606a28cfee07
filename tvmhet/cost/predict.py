"""Predict a file of operators: one JSON object a line in, one answer a line out, in the same order.

    {"op": "softmax", "rows": 8192, "cols": 1024}
        ──► {"seconds": 4.1e-05, "low": 3.6e-05, "high": 5.0e-05, "source": "learned", "in_range": true}

A line that cannot be read stops the run with its number: an answer is never guessed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TextIO

import numpy as np

from tvmhet.cluster.device import DeviceType
from tvmhet.cost.boosted import Dispatch, LearnedModel
from tvmhet.cost.generated import generated_ratio
from tvmhet.cost.model import CostModel, KernelDesc, Predictions
from tvmhet.cost.operators import parse
from tvmhet.errors import BadInput, HetError

_BATCH = 100_000


def predict_jsonl(
    source: Path, out: Path, device: DeviceType, dispatch: Dispatch = "published", model: CostModel | None = None
) -> int:
    """Answer every operator of `source` on `device`, write the answers to `out`, and return how many there were.

    Blank lines are skipped. `model` replaces the shipped learned model. Raises BadInput with the line's number for a
    line that is no operator or that the device cannot compute, and for a file that cannot be read.
    """
    model = model or LearnedModel.load(device, dispatch)
    done = 0
    try:
        with source.open(encoding="utf-8") as lines, out.open("w", encoding="utf-8") as answers:
            for numbers, descs in _batches(lines):
                _answer(numbers, descs, device, model, answers)
                done += len(descs)
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"operators cannot be read from {source} or written: {error}", "check both files") from error
    return done


def predict_ops(descs: Sequence[KernelDesc], device: DeviceType, model: CostModel) -> Predictions:
    """Return predictions in which TVM-generated kernels take the assumed multiple of the library's time.

    Their source is "assumed", and half and twice that multiple join the interval.
    """
    plain = model.predict(descs)
    ratio = np.array([generated_ratio(device.kind, d) for d in descs])
    made = np.array([d.maker == "tvm" for d in descs], dtype=np.bool_)
    return Predictions(
        seconds=plain.seconds * ratio,
        low=plain.low * ratio * np.where(made, 0.5, 1.0),
        high=plain.high * ratio * np.where(made, 2.0, 1.0),
        in_range=plain.in_range & ~made,
        source=tuple("assumed" if m else s for m, s in zip(made, plain.source, strict=True)),
    )


def _batches(lines: TextIO) -> Iterator[tuple[list[int], list[KernelDesc]]]:
    """Yield line numbers and descriptions, a hundred thousand at a time."""
    numbered = ((i, line) for i, line in enumerate(lines, 1) if line.strip())
    while batch := list(islice(numbered, _BATCH)):
        yield [i for i, _ in batch], [_read(i, line) for i, line in batch]


def _read(number: int, line: str) -> KernelDesc:
    try:
        return parse(json.loads(line))
    except json.JSONDecodeError as error:
        raise BadInput(f"line {number} is no JSON object: {error}", "write one operator a line") from error
    except HetError as error:
        raise BadInput(f"line {number}: {error.problem}", error.remedy) from error


def _answer(
    numbers: Sequence[int], descs: Sequence[KernelDesc], device: DeviceType, model: CostModel, answers: TextIO
) -> None:
    try:
        found = predict_ops(descs, device, model)
    except HetError as error:
        raise BadInput(f"{_first_refused(numbers, descs, model)}: {error.problem}", error.remedy) from error
    columns = (found.seconds.tolist(), found.low.tolist(), found.high.tolist(), found.source, found.in_range.tolist())
    answers.writelines(
        f'{{"seconds": {s:.6g}, "low": {lo:.6g}, "high": {hi:.6g}, "source": "{src}", "in_range": {str(ok).lower()}}}\n'
        for s, lo, hi, src, ok in zip(*columns, strict=True)
    )


def _first_refused(numbers: Sequence[int], descs: Sequence[KernelDesc], model: CostModel) -> str:
    """Name the first line that the model refuses alone; bisects, so that a long file is not priced line by line."""
    low, high = 0, len(descs)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            model.predict(descs[low:middle])
            low = middle
        except HetError:
            high = middle
    return f"line {numbers[low]}"
