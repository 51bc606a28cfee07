"""Times of CPU kernels by those that were measured on a processor of the same vendor, for machines without their own.

    measured/cpu_<vendor>_<family>_<level>.jsonl.gz ──► train.py ──► trained/cpu_<vendor>_<family>_<level>.ubj, its card

The trees give the time over what the data sheet allows, so that one set serves several CPU types of such a machine:
those of the processor's family come first, then those of the type's instruction set (`<level>`), or the nearest to it,
then those of the model whose number is nearest.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from tvmhet._data import data_path
from tvmhet.cluster.catalog import device_type
from tvmhet.cluster.cpu import LEVELS, processor_family, processor_vendor
from tvmhet.cluster.device import DeviceType
from tvmhet.cost.card import read_booster
from tvmhet.cost.learned_cpu import LearnedCpu, MeasuredKernel, learn
from tvmhet.cost.model import from_text, to_text
from tvmhet.errors import BadModel

_SCHEMA = 1
#: How far another processor of the same family may be from the measured one in either direction: assumed.
_ELSEWHERE = 1.5
#: Of another family: 39 models on AMD's family 25 took 1.8 times (median) what family 26 teaches (`cpu_gate.txt`).
_OTHER_FAMILY = 2.0


def shipped_cpu(device: DeviceType, vendor: str | None = None, family: str | None = None) -> LearnedCpu | None:
    """Return what kernels of a processor of `vendor` and `family` (default: this machine's) teach of a CPU type.

    None for GPUs, and where no processor of that vendor was measured. Raises BadModel if the shipped files are damaged.
    """
    name = processor_vendor() if vendor is None else vendor
    if not (device.is_cpu and name.isalnum()):
        return None
    cards = {path: _read(path) for path in sorted(data_path("trained").glob(f"cpu_{name}_*.yaml"))}
    if not cards:
        return None
    wanted = processor_family() if family is None else family
    nearest = min(cards, key=lambda path: _distance(path, cards[path], wanted, device))
    card, beyond = cards[nearest], _ELSEWHERE if _family(nearest) == wanted else _OTHER_FAMILY
    kinds = {(str(maker), str(kind)): [float(v) for v in row] for maker, kind, *row in card["kinds"]}
    return LearnedCpu(
        device=device,
        trees=card["trees"],
        spread={kind: (row[0] / beyond, row[1] * beyond) for kind, row in kinds.items()},
        sizes={kind: ((row[2], row[3]), (row[4], row[5])) for kind, row in kinds.items()},
        num_kernels=int(card["num_kernels"]),
        measured_on=str(card["processor"]),
    )


def _distance(path: Path, card: Mapping[str, Any], family: str, device: DeviceType) -> tuple[bool, int, int]:
    """How far a card's kernels are from what is wanted: another family, instruction sets between, Intel's numbers."""
    own = _family(path)
    numbers = [int(name.rpartition("-")[2] or 0) for name in (own, family) if "-" in name]
    return own != family, _apart(card, device), abs(numbers[0] - numbers[1]) if len(numbers) == 2 else 0


def _family(card: Path) -> str:
    return card.stem.split("_")[2]


def _apart(card: Mapping[str, Any], device: DeviceType) -> int:
    """How many instruction sets lie between the CPU type that a card's kernels were measured on and another."""
    levels = [kind.target.get("mcpu") for kind in (device_type(str(card["device"])), device)]
    places = [LEVELS.index(level) if level in LEVELS else len(LEVELS) for level in levels]
    return abs(places[0] - places[1])


@lru_cache(maxsize=8)
def _read(path: Path) -> Mapping[str, Any]:
    """Read a card and its trees."""
    try:
        card: dict[str, Any] = yaml.safe_load(path.read_text())
        well_formed = card["schema"] == _SCHEMA and all(len(row) == 8 for row in card["kinds"])
        well_formed = well_formed and bool(card["num_kernels"]) and isinstance(card["device"], str)
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise BadModel(f"model card {path.name} cannot be read: {error!r}", "restore it or retrain") from error
    if not well_formed:
        raise BadModel(f"model card {path.name} is not of schema {_SCHEMA}", "restore it or retrain")
    return {**card, "trees": read_booster(path.with_suffix(".ubj"), str(card["sha256"]))}


def write_measured(path: Path, about: Mapping[str, str], kernels: Sequence[MeasuredKernel]) -> None:
    """Write measured kernels to train from: a line of `about` (processor, device type, versions), then one a line."""
    lines = [json.dumps(dict(about))]
    lines += [
        json.dumps({"kernel": to_text(k.desc), "seconds": k.seconds, "inside_bytes": k.inside_bytes}) for k in kernels
    ]
    text = "".join(f"{line}\n" for line in lines).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text, mtime=0))  # the same bytes again from the same kernels


def train(measured: Path, out: Path) -> LearnedCpu:
    """Learn the kernels that `write_measured` wrote; write trees and card to `out`, and return what was learned."""
    head, *lines = gzip.decompress(measured.read_bytes()).decode().splitlines()
    about = json.loads(head)
    rows = [json.loads(line) for line in lines]
    kernels = [MeasuredKernel(from_text(row["kernel"]), row["seconds"], row["inside_bytes"]) for row in rows]
    found = learn(device_type(about["device"]), kernels)
    trees = bytes(found.trees.save_raw("ubj"))
    name = measured.name.partition(".")[0]
    kinds = [
        [*kind, *(float(f"{v:.4g}") for v in (*ends, *found.sizes[kind][0], *found.sizes[kind][1]))]
        for kind, ends in found.spread.items()
    ]
    card = {
        "schema": _SCHEMA,
        "model": f"{name}.ubj",
        "sha256": hashlib.sha256(trees).hexdigest(),
        **about,
        "trained_on": {measured.name: hashlib.sha256(measured.read_bytes()).hexdigest()},
        "num_kernels": len(kernels),
        "fields": ["maker", "family", "tenth of measured over predicted", "nine tenths", "least FLOP", "least bytes",
                   "most FLOP", "most bytes"],
        "kinds": kinds,
    }  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.ubj").write_bytes(trees)
    (out / f"{name}.yaml").write_text(yaml.safe_dump(card, sort_keys=False, width=120, default_flow_style=None))
    return found
