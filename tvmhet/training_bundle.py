"""A built training step as a directory: the functions of every stage and replica, one file each, and initial values.

    bundle/  manifest.json   stage0.forward0.so  stage0.backward0.so  stage0.reduce0.so  stage0.update0.0.so ...
             params.safetensors                     (CUDA: stage0.forward0.cubins ...)

Replicas on one device type share their files. The optimiser's tensors start at zero and are not stored.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from tvmhet.bundle import (
    PARAMS,
    covered,
    export_cubins,
    load_params,
    opened,
    save_params,
    whole_directory,
    write_manifest,
)
from tvmhet.dealt import Dealt
from tvmhet.errors import BadBundle
from tvmhet.ir.optimizers import optimizer_tree, read_optimizer
from tvmhet.plans import Plan
from tvmhet.runtime.described import bind_described, describe_devices
from tvmhet.runtime.program import ValueSpec
from tvmhet.runtime.training_program import Action, Function, Noise, Share, TrainingProgram, TrainingStage
from tvmhet.training_interface import TrainingInterface

_ONE_EACH = ("batch", "loss", "scalars", "num_microbatches", "memory_bytes", "max_norm")


def export_training(
    model: TrainingInterface, program: TrainingProgram, plan: Plan | None, seed: int, directory: Path
) -> Path:
    """Write the bundle. Raises BadInput if `directory` exists and is not empty; it appears whole or not at all."""
    with whole_directory(directory) as folder:
        files = _copy_libraries(program, folder)
        cubins = _copy_cubins(program, files, folder)
        held = frozenset(model.held(model.torch_names))
        stored = {n: v for n, v in program.state.items() if n in held}
        tree = dataclasses.asdict(dataclasses.replace(program, state={}, constants={}))
        stages = [_with_files(stage, files, cubins) for stage in tree["stages"]]
        content = {
            "kind": "training",
            "plan": None if plan is None else json.loads(plan.to_json()),
            "seed": seed,
            "model": dataclasses.asdict(model) | {"optimizer": optimizer_tree(model.optimizer)},
            "params": save_params(folder, stored | dict(program.constants)),
            "constants": list(program.constants),
            "state": list(program.state),
            "stages": stages,
            "values": list(tree["values"].values()),
            "noise": tree["noise"],
            "orders": {d: [list(a) for a in order] for d, order in program.orders.items()},
            "devices": describe_devices(program.bindings.values()),
            **{key: tree[key] for key in _ONE_EACH},
        }
        write_manifest(folder, content)
    return directory


def read_training(directory: str | Path) -> tuple[TrainingInterface, TrainingProgram, Plan | None, int]:
    """Return what a trainer is made of: interface, program bound to this machine's devices, plan, seed.

    Raises BadBundle for a file that is missing, changed or of another kind, PlanMismatch for another TVM.
    """
    with opened(directory) as (folder, manifest):
        if manifest["kind"] != "training":
            raise BadBundle(f"bundle {str(folder)!r} is one for inference", "read it with tvmhet.load")
        model = _interface(manifest["model"])
        plan = None if manifest["plan"] is None else Plan.from_json(json.dumps(manifest["plan"]), "the bundle's plan")
        return model, _program(folder, manifest, model), plan, manifest["seed"]


def _functions(stage: TrainingStage) -> Iterator[tuple[str, Function]]:
    """Every function of a stage with its name in the bundle."""
    for r, (forward, backward, share) in enumerate(zip(stage.forward, stage.backward, stage.shares, strict=True)):
        yield f"forward{r}", forward
        yield f"backward{r}", backward
        for name, function in (("reduce", share.reduce), ("norm", share.norm)):
            if function is not None:
                yield f"{name}{r}", function
        yield from ((f"update{r}.{i}", update) for i, update in enumerate(share.updates))


def _copy_libraries(program: TrainingProgram, folder: Path) -> dict[Path, str]:
    """Copy each library once, under the name of the first function that it holds; return the names."""
    files: dict[Path, str] = {}
    for stage in program.stages:
        for name, function in _functions(stage):
            if function.library not in files:
                files[function.library] = f"stage{stage.index}.{name}.so"
                shutil.copyfile(function.library, folder / files[function.library])
    return files


def _copy_cubins(program: TrainingProgram, files: Mapping[Path, str], folder: Path) -> dict[Path, str | None]:
    """Write the cubins of each library that has CUDA source; return their files' names by library."""
    known = {f.library: f.cubins for stage in program.stages for _, f in _functions(stage)}

    def write(library: Path) -> str | None:
        return export_cubins(library, known[library], (folder / files[library]).with_suffix(".cubins"))

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # NVRTC compiles outside the interpreter's lock
        return dict(zip(known, pool.map(write, known), strict=True))


def _with_files(tree: Any, files: Mapping[Path, str], cubins: Mapping[Path, str | None]) -> Any:
    """Return plain data with each function's paths replaced by the names of its files."""
    if isinstance(tree, dict):
        own = {"library": files[tree["library"]], "cubins": cubins[tree["library"]]} if "library" in tree else {}
        return {key: _with_files(value, files, cubins) for key, value in tree.items() if key not in own} | own
    return [_with_files(value, files, cubins) for value in tree] if isinstance(tree, list | tuple) else tree


def _interface(tree: Mapping[str, Any]) -> TrainingInterface:
    dealt = {n: Dealt(tuple(d["names"]), d["axis"], tuple(d["runs"])) for n, d in tree["dealt"].items()}
    own = {"optimizer": read_optimizer(tree["optimizer"]), "trained": tuple(tree["trained"]), "dealt": dealt}
    return TrainingInterface(**{**tree, **own})


def _program(folder: Path, manifest: Mapping[str, Any], model: TrainingInterface) -> TrainingProgram:
    params = {n: np.array(v) for n, v in load_params(covered(folder, manifest, PARAMS), manifest["params"]).items()}
    given = {n: params[n] for n in manifest["state"] if n in params}
    zeros = {f"{p}.{s}": np.zeros_like(given[p]) for p in model.held(model.trained) for s in model.optimizer.state}
    scalars = {key: manifest[key] for key in _ONE_EACH}
    return TrainingProgram(
        **{**scalars, "batch": tuple(manifest["batch"]), "scalars": tuple(manifest["scalars"])},
        values={v["name"]: _value(v) for v in manifest["values"]},
        noise=tuple(Noise(_value(n["spec"]), n["kind"]) for n in manifest["noise"]),
        stages=tuple(_stage(folder, manifest, tree) for tree in manifest["stages"]),
        state={n: given[n] if n in given else zeros[n] for n in manifest["state"]},
        constants={n: params[n] for n in manifest["constants"]},
        orders={d: tuple(Action(*a) for a in order) for d, order in manifest["orders"].items()},
        bindings=bind_described(manifest["devices"]),
    )


def _value(tree: Mapping[str, Any]) -> ValueSpec:
    return ValueSpec(**{**tree, "shape": tuple(tree["shape"])})


def _stage(folder: Path, manifest: Mapping[str, Any], tree: Mapping[str, Any]) -> TrainingStage:
    def function(own: Mapping[str, Any]) -> Function:
        names = {key: tuple(own[key]) for key in ("inputs", "outputs")}
        files = {"library": covered(folder, manifest, own["library"])}
        if own.get("cubins"):
            files["cubins"] = covered(folder, manifest, own["cubins"])
        return Function(**{**own, **names, **files})

    def share(own: Mapping[str, Any]) -> Share:
        reduce, norm = (None if own[key] is None else function(own[key]) for key in ("reduce", "norm"))
        return Share(tuple(own["parameters"]), reduce, norm, tuple(function(f) for f in own["updates"]))

    lists = {key: tuple(tree[key]) for key in ("devices", "parameters", "after_forward", "after_backward")}
    return TrainingStage(
        index=tree["index"],
        planned=tree["planned"],
        buffers=tree["buffers"],
        **lists,
        microbatches=tuple(tuple(own) for own in tree["microbatches"]),
        forward=tuple(function(f) for f in tree["forward"]),
        backward=tuple(function(f) for f in tree["backward"]),
        shares=tuple(share(s) for s in tree["shares"]),
    )
