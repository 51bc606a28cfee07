"""Predict a file of operators: one JSON object a line in, one answer a line out, in the same order.

    {"op": "softmax", "rows": 8192, "cols": 1024}
        ──► {"seconds": 4.1e-05, "low": 3.6e-05, "high": 5.0e-05, "source": "learned", "in_range": true}

A line that cannot be read stops the run with its number: an answer is never guessed. Lines that are equal are read and
priced once a batch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from tvmhet.cluster.device import DeviceType
from tvmhet.cost.boosted import Dispatch, LearnedModel
from tvmhet.cost.exchanges import predict_exchanges
from tvmhet.cost.generated import Floats, generated_s, library_start_s, maker_ratio
from tvmhet.cost.model import CostModel, KernelDesc, Predictions
from tvmhet.cost.network import Network
from tvmhet.cost.operators import ExchangeDesc, parse
from tvmhet.errors import BadInput, HetError

Desc = KernelDesc | ExchangeDesc
_BATCH = 100_000


def predict_jsonl(
    source: Path, out: Path, device: DeviceType, dispatch: Dispatch = "published", model: CostModel | None = None
) -> int:
    """Answer every operator of `source` on `device`, write the answers to `out`, and return how many there were.

    `model` replaces the shipped learned model. `out` appears whole or not at all. Raises BadInput with the line's
    number for a line that is no operator or that the device cannot compute, and for a file that cannot be read.
    """
    answering = Assumed(device, model or LearnedModel.load(device, dispatch), dispatch == "queued")
    with reading(source) as lines, written_whole(out) as answers:
        return predict_lines(lines, answers, device, answering)


@contextmanager
def reading(source: Path) -> Iterator[TextIO]:
    """Open a file of operators. Raises BadInput if it cannot be read, or is no text."""
    try:
        with source.open(encoding="utf-8") as lines:
            yield lines
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(
            f"operators cannot be read from {str(source)!r}: {error}", "give a file of JSON lines"
        ) from error


@contextmanager
def written_whole(out: Path) -> Iterator[TextIO]:
    """Give a file that becomes `out` when the block ends well, and nothing otherwise."""
    part = out.with_name(out.name + ".part")
    try:
        with part.open("w", encoding="utf-8") as answers:
            yield answers
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)


def predict_lines(
    lines: Iterable[str], answers: TextIO, device: DeviceType, model: CostModel, network: Network | None = None
) -> int:
    """Write the answer of every operator of `lines` to `answers`; return how many. Blank lines have no answer.

    `network` replaces the shipped model of exchanges.

    Raises BadInput with the line's number, after the answers of whole batches before it.
    """
    done, network = 0, network or Network.load()
    for numbers, texts in _batches(lines):
        first = {text: number for number, text in zip(reversed(numbers), reversed(texts), strict=True)}
        own = dict.fromkeys(texts)
        descs = [read_line(first[text], text) for text in own]
        _check_dtypes([first[text] for text in own], descs, device)
        where = dict(zip(own, _answers([first[t] for t in own], descs, device, model, network), strict=True))
        answers.writelines([where[text] for text in texts])
        done += len(texts)
    return done


@dataclass(frozen=True, slots=True)
class Assumed:
    """A model of the library's kernels, in which TVM-generated ones take the assumed multiple of the library's time.

    Of its work alone where the model's times are `queued` on a GPU, as plans have it. Their source is "assumed", and
    half and twice that multiple join the interval.
    """

    device: DeviceType
    model: CostModel
    queued: bool = False

    def predict(self, descs: Sequence[KernelDesc]) -> Predictions:
        """Return one prediction per kernel, in order. Raises BadInput for a dtype that the device cannot compute."""
        plain = self.model.predict(descs)
        made = np.array([d.maker == "tvm" for d in descs], dtype=np.bool_)
        if not made.any():
            return plain
        ratio = np.array([maker_ratio(self.device, d) for d in descs])
        start_s = library_start_s(self.device, [d.root for d in descs])

        def times(library_s: Floats, ratio: Floats) -> Floats:
            if not self.queued or self.device.is_cpu:
                return library_s * ratio
            out: Floats = np.where(made, generated_s(self.device, library_s, ratio, start_s), library_s)
            return out

        return Predictions(
            seconds=times(plain.seconds, ratio),
            low=times(plain.low, ratio * np.where(made, 0.5, 1.0)),
            high=times(plain.high, ratio * np.where(made, 2.0, 1.0)),
            in_range=plain.in_range & ~made,
            source=tuple("assumed" if m else s for m, s in zip(made, plain.source, strict=True)),
        )


def read_line(number: int, line: str) -> Desc:
    """Return the operator that a line describes. Raises BadInput with the line's number."""
    try:
        record = json.loads(line)
        if type(record) is dict and line.count(":") != len(record):
            record = json.loads(line, object_pairs_hook=_once)
        return parse(record)
    except (json.JSONDecodeError, RecursionError) as error:
        raise BadInput(f"line {number} is no JSON object: {error}", "write one operator a line") from error
    except HetError as error:
        raise BadInput(f"line {number}: {error.problem}", error.remedy) from error


def _check_dtypes(numbers: Sequence[int], descs: Sequence[Desc], device: DeviceType) -> None:
    """Refuse floating dtypes that the device has no rate for: code that emulates them is nothing a model has seen."""
    known = {*device.peak_flop_per_s, *(("float8_e4m3fn", "float8_e5m2") if "float8" in device.peak_flop_per_s else ())}
    for number, desc in zip(numbers, descs, strict=True):
        if isinstance(desc, KernelDesc) and desc.dtype not in known and "float" in desc.dtype:
            raise BadInput(
                f"line {number}: device type {device.name!r} cannot compute {desc.root.family} in {desc.dtype}",
                f"use one of {', '.join(sorted(known))}, or another device type",
            )


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dict of an object whose keys must differ: JSON's readers would keep the last of two in silence."""
    record = dict(pairs)
    if len(record) != len(pairs):
        twice = next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))
        raise BadInput(f"field {twice!r} is given twice", "give each value once")
    return record


def _batches(lines: Iterable[str]) -> Iterator[tuple[list[int], list[str]]]:
    """Yield line numbers and lines, a hundred thousand at a time."""
    numbered = ((i, line.strip()) for i, line in enumerate(lines, 1))
    full = ((i, line) for i, line in numbered if line)
    while batch := list(islice(full, _BATCH)):
        yield [i for i, _ in batch], [line for _, line in batch]


def _answers(
    numbers: Sequence[int], descs: Sequence[Desc], device: DeviceType, model: CostModel, network: Network
) -> list[str]:
    """Return the answer line of each operator."""
    kernels = [i for i, d in enumerate(descs) if isinstance(d, KernelDesc)]
    lines = [""] * len(descs)
    if kernels:
        picked = [d for d in descs if isinstance(d, KernelDesc)]
        places = [numbers[i] for i in kernels]
        try:
            found = model.predict(picked)
        except HetError as error:
            raise _at_first_refused(places, picked, model) from error
        for i, text in zip(kernels, _texts(found), strict=True):
            lines[i] = text
    exchanges = [(i, d) for i, d in enumerate(descs) if isinstance(d, ExchangeDesc)]
    if exchanges:
        try:
            found = predict_exchanges([d for _, d in exchanges], device, network)
        except HetError as error:
            raise BadInput(f"line {numbers[exchanges[0][0]]}: {error.problem}", error.remedy) from error
        for (i, _), text in zip(exchanges, _texts(found), strict=True):
            lines[i] = text
    return lines


def _texts(found: Predictions) -> list[str]:
    columns = (found.seconds.tolist(), found.low.tolist(), found.high.tolist(), found.source, found.in_range.tolist())
    return [
        f'{{"seconds": {s:.6g}, "low": {lo:.6g}, "high": {hi:.6g}, "source": "{src}", "in_range": {str(ok).lower()}}}\n'
        for s, lo, hi, src, ok in zip(*columns, strict=True)
    ]


def _at_first_refused(numbers: Sequence[int], descs: Sequence[KernelDesc], model: CostModel) -> HetError:
    """Return the error of the first line that the model refuses alone; bisects, so that a long file takes no longer."""
    low, high = 0, len(descs)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            model.predict(descs[low:middle])
            low = middle
        except HetError:
            high = middle
    try:
        model.predict(descs[low:high])
    except HetError as error:
        return BadInput(f"line {numbers[low]}: {error.problem}", error.remedy)
    raise AssertionError("the model refused kernels together but none alone")
