"""The CUDA source of a compiled stage is kept beside it, so that a bundle can carry cubins made of it.

    compile:  stage.so, stage.cuda.json: the target's architecture and the source of each device module
    export:   a cubin per source, and what ptxas says of each kernel

Cubins are made when a bundle is written and not at every build: on a machine with a GPU, TVM compiles the source where
it is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tvm

from tvmhet.emit.nvrtc import Cubin, compile_cubin, cuda_sources


def sources_beside(library: Path) -> Path:
    """Where the CUDA source of a compiled stage is kept."""
    return library.with_suffix(".cuda.json")


def keep_sources(module: tvm.runtime.Module, target: Mapping[str, Any], library: Path) -> None:
    """Write the CUDA source of a stage beside its library; nothing for a stage without any."""
    if (sources := cuda_sources(module)) and "arch" in target:
        sources_beside(library).write_text(json.dumps({"arch": str(target["arch"]), "sources": sources}))


def make_cubins(library: Path) -> dict[str, Cubin]:
    """Return the cubin of each kept source of a compiled stage; nothing for a stage of which none was kept.

    Raises MissingPackage without NVRTC, UnsupportedOperator for source that does not compile.
    """
    if not sources_beside(library).is_file():
        return {}
    kept = json.loads(sources_beside(library).read_text())
    return {source: compile_cubin(source, kept["arch"]) for source in kept["sources"]}
