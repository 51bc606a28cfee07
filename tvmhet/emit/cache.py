"""Compiled stages on disk, found by content: a hash first, then structural equality.

    <cache>/stages/<hash of module>-<hash of target and versions>/   module.json   stage.so   card.json

An entry is written beside its place and renamed into it, so a reader never sees half of one. A hash collision, or an
entry that cannot be read, is a miss. A CUDA stage has its source beside it too (`cubins.py`).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm

from tvmhet._data import default_cache_dir, keeping
from tvmhet._tvm import TVM_VERSION, structural_equal, structural_hash
from tvmhet.emit.cubins import sources_beside
from tvmhet.emit.lower import lowering_version

__all__ = ["StageCache", "default_cache_dir", "target_digest"]

Traces = Mapping[str, str] | None  # tuned schedules by the hash of their function


def target_digest(description: Mapping[str, Any], plain: bool, traces: Traces = None) -> str:
    """Hash of everything but the module that decides the code: target, TVM, our lowering or TVM's own, schedules."""
    parts: list[Any] = [dict(description), TVM_VERSION, "plain" if plain else _lowering(description)]
    text = json.dumps([*parts, dict(traces)] if traces else parts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _lowering(description: Mapping[str, Any]) -> int:
    return lowering_version(str(description.get("kind", "")))


@dataclass(frozen=True, slots=True)
class StageCache:
    """A directory of compiled stages."""

    root: Path

    def place(
        self, mod: tvm.IRModule, description: Mapping[str, Any], plain: bool = False, traces: Traces = None
    ) -> Path:
        """Where the entry of this module, target and tuned schedules is or would be."""
        digest = target_digest(description, plain, traces)
        return self.root / "stages" / f"{structural_hash(mod) & (2**64 - 1):016x}-{digest}"

    def find(
        self, mod: tvm.IRModule, description: Mapping[str, Any], plain: bool = False, traces: Traces = None
    ) -> Path | None:
        """Return the compiled library of an equal module for an equal target and schedules, or None."""
        place = self.place(mod, description, plain, traces)
        library = place / "stage.so"
        try:
            card = json.loads((place / "card.json").read_text())
            if card["sha256"] != hashlib.sha256(library.read_bytes()).hexdigest():
                return None
            known = tvm.ir.load_json((place / "module.json").read_text())
        except (OSError, ValueError, KeyError, TypeError, RuntimeError):  # RuntimeError: TVM cannot read its own file
            return None
        return library if structural_equal(known, mod) else None

    def add(
        self, mod: tvm.IRModule, description: Mapping[str, Any], plain: bool, library: Path, traces: Traces = None
    ) -> Path:
        """Move `library` into the cache; return where it lies.

        A sound equal entry stays, so that whoever found it can read it; a damaged one is replaced. Raises BadInput
        where the cache cannot be written.
        """
        if (known := self.find(mod, description, plain, traces)) is not None:
            library.unlink()
            return known
        place = self.place(mod, description, plain, traces)
        with keeping(self.root):
            place.parent.mkdir(parents=True, exist_ok=True)
            fresh = Path(tempfile.mkdtemp(dir=place.parent, prefix=".new-"))
            try:
                shutil.move(library, fresh / "stage.so")
                if (sources := sources_beside(library)).is_file():
                    shutil.move(sources, sources_beside(fresh / "stage.so"))
                (fresh / "module.json").write_text(tvm.ir.save_json(mod))
                digest = hashlib.sha256((fresh / "stage.so").read_bytes()).hexdigest()
                card = {
                    "sha256": digest,
                    "target": dict(description),
                    "tvm": TVM_VERSION,
                    "lowering": _lowering(description),
                }
                (fresh / "card.json").write_text(json.dumps(card, sort_keys=True))
                if place.exists():
                    shutil.rmtree(place, ignore_errors=True)
                os.replace(fresh, place)
            except OSError:
                shutil.rmtree(fresh, ignore_errors=True)
                if not (place / "stage.so").exists():  # another process may have put an equal entry there meanwhile
                    raise
        return place / "stage.so"
