"""Checkpoints of a training run: one safetensors file that appears whole or not at all, and loads into torch.

tensors   "layer1.weight", ...           the module's state dict, a tied weight once
          "optimizer/layer1.weight/exp_avg", ...
metadata  schema, step, seed, optimizer, tied (which names share a tensor)
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from tvmhet.errors import BadBundle, BadInput
from tvmhet.runtime.tensors import to_torch

if TYPE_CHECKING:
    import torch

CHECKPOINT_SCHEMA = 1
_OPTIMIZER = "optimizer/"


@dataclass(frozen=True)
class Checkpoint:
    """What a run resumes from: tensors by torch's names, the optimiser's by (name, tensor), and where it stood."""

    tensors: Mapping[str, np.ndarray[Any, Any]]
    optimizer_tensors: Mapping[tuple[str, str], np.ndarray[Any, Any]]
    tied: Mapping[str, str]  # name in the state dict -> name among `tensors`
    step: int
    seed: int
    optimizer: str


def write_checkpoint(path: Path, checkpoint: Checkpoint) -> Path:
    """Write the file beside its place, flush it to the disk, then move it there. A reader sees the old or the new.

    Raises BadInput where that cannot be: a full disk, a folder, a device; what was there stays.
    """
    if path.exists() and not path.is_file():  # moving a file onto a device would take its place
        raise BadInput(f"checkpoint {str(path)!r} is a folder or a device", "give the path of a file")
    tensors = dict(checkpoint.tensors)
    tensors |= {f"{_OPTIMIZER}{n}/{s}": v for (n, s), v in checkpoint.optimizer_tensors.items()}
    metadata = {
        "schema": str(CHECKPOINT_SCHEMA),
        "step": str(checkpoint.step),
        "seed": str(checkpoint.seed),
        "optimizer": checkpoint.optimizer,
        "tied": json.dumps(dict(checkpoint.tied), sort_keys=True),
    }
    try:
        _write({n: np.array(v, order="C") for n, v in tensors.items()}, metadata, path)
    except (OSError, SafetensorError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise BadInput(
            f"checkpoint {str(path)!r} cannot be written: {why}", "make room, or give another path; training may go on"
        ) from error
    return path


def _write(tensors: dict[str, np.ndarray[Any, Any]], metadata: dict[str, str], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    os.close(handle)
    fresh = Path(name)
    try:
        save_file(tensors, fresh, metadata)
        fresh.chmod(0o644)
        _flush(fresh)
        os.replace(fresh, path)
        _flush(path.parent)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Return a checkpoint. Raises BadBundle for a file that is missing, cut short or none of ours."""
    path = Path(path)
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise BadBundle(f"checkpoint {str(path)!r} cannot be read: {error}", "give a file that save wrote") from error
    if metadata.get("schema") != str(CHECKPOINT_SCHEMA):
        raise BadBundle(
            f"checkpoint {str(path)!r} has schema {metadata.get('schema')!r}, this version reads {CHECKPOINT_SCHEMA}",
            "give a file that save of this version wrote",
        )
    own = {n: v for n, v in tensors.items() if not n.startswith(_OPTIMIZER)}
    kept = {
        (n.removeprefix(_OPTIMIZER).rpartition("/")[0], n.rpartition("/")[2]): v
        for n, v in tensors.items()
        if n.startswith(_OPTIMIZER)
    }
    where = json.loads(metadata["tied"])
    return Checkpoint(own, kept, where, int(metadata["step"]), int(metadata["seed"]), metadata["optimizer"])


def torch_state_dict(path: str | Path) -> dict[str, torch.Tensor]:
    """Return what `module.load_state_dict` takes from a checkpoint."""
    checkpoint = read_checkpoint(path)
    return {n: to_torch(checkpoint.tensors[canonical].copy()) for n, canonical in checkpoint.tied.items()}
