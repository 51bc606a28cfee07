"""A built model as a directory: what it is, one library per stage, the parameters.

    bundle/  manifest.json   stage0.so  stage1.so ...   params.safetensors   (CUDA: stage1.cubins)

The manifest holds the plan, the interface, and the sha256 of every other file. Libraries are code: load bundles only
from people you would run programs from. Hashes are checked before anything is loaded; they prove that the bundle is
whole, not who made it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tvmhet import _tvm
from tvmhet.emit.cubins import make_cubins
from tvmhet.errors import BadBundle, BadInput, MissingPackage, PlanMismatch
from tvmhet.plans import Plan
from tvmhet.results import read_structure, structure_tree
from tvmhet.runtime.arena import StoredParams
from tvmhet.runtime.cubins import write_cubins
from tvmhet.runtime.described import bind_described, describe_devices
from tvmhet.runtime.program import PipelineProgram, StageProgram, StateProgram, ValueSpec
from tvmhet.runtime.whole import WholeProgram

_LOG = logging.getLogger("tvmhet.bundle")
BUNDLE_SCHEMA = 1
_MANIFEST, PARAMS = "manifest.json", "params.safetensors"
#: Parameters of dtypes that safetensors' numpy side does not know are stored as integers of the same width.
_STORED_AS = {1: "uint8", 2: "uint16"}


def export_bundle(plan: Plan, program: PipelineProgram | WholeProgram, directory: Path) -> Path:
    """Write the bundle. Raises BadInput if `directory` exists and is not empty; it appears whole or not at all."""
    with whole_directory(directory) as folder:
        _write(plan, program, folder)
    return directory


@contextmanager
def whole_directory(directory: Path) -> Iterator[Path]:
    """Give a folder to write to, which becomes `directory` where nothing raised. Raises BadInput if that is in use."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise BadInput(f"the bundle directory {str(directory)!r} is not empty", "give a new directory")
    directory.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}-"))
    try:
        yield fresh
        fresh.chmod(0o755)
        if directory.exists():
            directory.rmdir()
        os.replace(fresh, directory)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def read_bundle(directory: str | Path) -> tuple[Plan, PipelineProgram | WholeProgram]:
    """Return the plan and the program of a bundle, bound to this machine's devices.

    Raises BadBundle for a file that is missing, changed or of another schema, PlanMismatch for another TVM.
    """
    with opened(directory) as (folder, manifest):
        if manifest["kind"] == "training":
            raise BadBundle(f"bundle {str(folder)!r} is one for training", "read it with tvmhet.load_trainer")
        params = load_params(covered(folder, manifest, PARAMS), manifest["params"])
        plan = Plan.from_json(json.dumps(manifest["plan"]), "the bundle's plan")
        whole = manifest["kind"] == "whole"
        read = _whole_program if whole else _pipeline
        program: PipelineProgram | WholeProgram = read(folder, manifest, params)
    return plan, program


def kind_of(directory: str | Path) -> str:
    """Return "pipeline", "whole" or "training"; "" for what is no bundle, of which its reader says why."""
    try:
        return str(json.loads((Path(directory) / _MANIFEST).read_text())["kind"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


@contextmanager
def opened(directory: str | Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Give the folder and the manifest of a bundle whose hashes are right; what fails meanwhile is BadBundle."""
    folder = Path(directory)
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        if manifest["schema"] != BUNDLE_SCHEMA:
            raise BadBundle(
                f"bundle {str(folder)!r} has schema {manifest['schema']}, this tvmhet reads {BUNDLE_SCHEMA}",
                "build it again",
            )
        if manifest["tvm"] != _tvm.TVM_VERSION:
            raise PlanMismatch(
                f"bundle {str(folder)!r} was built by TVM {manifest['tvm']}, this is TVM {_tvm.TVM_VERSION}",
                "install that TVM, or build the bundle again",
            )
        for name, digest in sorted(manifest["sha256"].items()):
            _check_file(folder, name, digest)
        yield folder, manifest
    except OSError as error:
        raise BadBundle(f"bundle {str(folder)!r} cannot be read: {error}", "check the path") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, BadBundle | PlanMismatch):
            raise
        raise BadBundle(f"bundle {str(folder)!r} is damaged: {error!r}", "build it again") from error


def _write(plan: Plan, program: PipelineProgram | WholeProgram, folder: Path) -> None:
    manifest: dict[str, Any] = {"plan": json.loads(plan.to_json()), "params": save_params(folder, program.params)}
    manifest |= _describe_whole(folder, program) if isinstance(program, WholeProgram) else _describe(folder, program)
    write_manifest(folder, manifest)


def write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    """Write the manifest of a bundle all of whose other files are there."""
    manifest = {"schema": BUNDLE_SCHEMA, "tvm": _tvm.TVM_VERSION, **content}
    manifest["sha256"] = {name: _digest(folder / name) for name in sorted(p.name for p in folder.iterdir())}
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")


def _describe(folder: Path, program: PipelineProgram) -> dict[str, Any]:
    stages = []
    for stage in program.stages:
        shutil.copyfile(stage.library, folder / f"stage{stage.index}.so")
        cubins = export_cubins(stage.library, stage.cubins, folder / f"stage{stage.index}.cubins")
        stages.append({**dataclasses.asdict(stage), "library": f"stage{stage.index}.so", "cubins": cubins})
    return {
        "kind": "pipeline",
        "stages": stages,
        "values": [dataclasses.asdict(v) for v in program.values.values()],
        "inputs": program.inputs,
        "outputs": program.outputs,
        "structure": structure_tree(program.structure),
        "states": [dataclasses.asdict(s) for s in program.states],
        "num_sessions": program.num_sessions,
        "devices": describe_devices(program.bindings.values()),
    }


def export_cubins(library: Path, known: Path | None, out: Path) -> str | None:
    """Write the cubins of a compiled stage, copied from `known` if given; return the file's name.

    None for a library that runs from its source only: of a CPU, or made where NVRTC is missing.
    """
    if known is not None:
        shutil.copyfile(known, out)
        return out.name
    try:
        made = make_cubins(library)
    except MissingPackage as error:
        _LOG.info("%s: the bundle carries source: %s", out.name, error)
        return None
    if not made:
        return None
    arch = next(iter(made.values())).arch
    kernels = [dataclasses.asdict(kernel) for cubin in made.values() for kernel in cubin.kernels]
    write_cubins(out, arch, {source: cubin.code for source, cubin in made.items()}, kernels)
    return out.name


def _describe_whole(folder: Path, program: WholeProgram) -> dict[str, Any]:
    shutil.copyfile(program.library, folder / "whole.so")
    device = {"device": program.device_id, "device_kind": program.kind, "ordinal": program.ordinal}
    structure = None if program.structure is None else structure_tree(program.structure)
    states = {"states": program.states, "num_sessions": program.num_sessions}
    return {"kind": "whole", "inputs": program.inputs, "structure": structure, **states, **device}


def _pipeline(folder: Path, manifest: Mapping[str, Any], params: Mapping[str, Any]) -> PipelineProgram:
    return PipelineProgram(
        values={v["name"]: ValueSpec(**{**v, "shape": tuple(v["shape"])}) for v in manifest["values"]},
        inputs=tuple(manifest["inputs"]),
        outputs=tuple(manifest["outputs"]),
        stages=tuple(_stage(folder, manifest, s) for s in manifest["stages"]),
        params=params,
        bindings=bind_described(manifest["devices"]),
        structure=read_structure(manifest["structure"]),
        states=tuple(StateProgram(**s) for s in manifest.get("states", ())),
        num_sessions=manifest.get("num_sessions", 1),
    )


def covered(folder: Path, manifest: Mapping[str, Any], name: str) -> Path:
    """The path of a file of the bundle; BadBundle for one whose hash was not checked."""
    if name not in manifest["sha256"]:
        raise BadBundle(f"bundle {str(folder)!r} names {name!r}, which its hashes do not cover", "build it again")
    return folder / name


def _stage(folder: Path, manifest: Mapping[str, Any], tree: Mapping[str, Any]) -> StageProgram:
    names = {key: tuple(tree[key]) for key in ("inputs", "outputs", "devices", "params")}
    cubins = covered(folder, manifest, tree["cubins"]) if tree.get("cubins") else None
    return StageProgram(**{**tree, **names, "library": covered(folder, manifest, tree["library"]), "cubins": cubins})


def _whole_program(folder: Path, manifest: Mapping[str, Any], params: Mapping[str, Any]) -> WholeProgram:
    return WholeProgram(
        covered(folder, manifest, "whole.so"),
        tuple(manifest.get("inputs") or (f"x{i}" for i in range(manifest["num_inputs"]))),  # older ones have no names
        params,
        manifest["device"],
        manifest["device_kind"],
        manifest.get("ordinal", 0),
        None if manifest.get("structure") is None else read_structure(manifest["structure"]),
        tuple(manifest.get("states", ())),
        manifest.get("num_sessions", 1),
    )


def save_params(folder: Path, params: Mapping[str, Any]) -> list[dict[str, str]]:
    """Write the parameters' file; return names and dtypes, for the manifest."""
    arrays, described = {}, []
    for i, (name, value) in enumerate(params.items()):
        array = np.asarray(value if isinstance(value, np.ndarray) else value.numpy(), order="C")
        described.append({"name": name, "dtype": array.dtype.name})
        known = array.dtype.kind in "fiub" and array.dtype.name in np.sctypeDict
        arrays[f"p{i}"] = array if known else array.view(_STORED_AS[array.dtype.itemsize])
    save_file(arrays, str(folder / PARAMS))
    return described


def load_params(path: Path, described: list[dict[str, str]]) -> StoredParams:
    """Read the parameters to where kernels will read them: safetensors' own reader would make a second copy.

    The file is the length of a JSON header (8 bytes, little-endian), the header, and the tensors' bytes.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        entries = [header[f"p{i}"] for i in range(len(described))]
        specs = (ValueSpec.of(d["name"], e["shape"], d["dtype"]) for d, e in zip(described, entries, strict=True))
        params = StoredParams(specs)
        for entry, memory in zip(entries, params.memory().values(), strict=True):
            begin, end = entry["data_offsets"]
            file.seek(8 + length + begin)
            if end - begin != len(memory) or file.readinto(memory) != len(memory):
                raise ValueError(f"{path.name} has {end - begin} bytes for a parameter of {len(memory)}")
    return params


def _check_file(folder: Path, name: str, digest: str) -> None:
    path = folder / name
    if Path(name).name != name or not path.is_file():
        raise BadBundle(f"bundle {str(folder)!r} has no file {name!r}", "copy the whole directory")
    if _digest(path) != digest:
        raise BadBundle(f"{name!r} of bundle {str(folder)!r} was changed after it was built", "build it again")


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
