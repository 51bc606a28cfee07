"""Small compiled stages, made once per session, and programs that chain them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tvm
from tvm import relax

from tests.runtime.programs import add_scale_module, full, specs, two_cpus
from tvmhet.runtime import PipelineProgram, StageProgram


@pytest.fixture(scope="session")
def compile_stage(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, tvm.IRModule], Path]:
    """Return a function that compiles a module for plain x86-64 and returns its library; one name compiles once."""
    folder = tmp_path_factory.mktemp("stages")
    target = tvm.target.Target({"kind": "llvm"})

    def compile_once(name: str, module: tvm.IRModule) -> Path:
        path = folder / f"{name}.so"
        if not path.exists():
            pipeline = relax.get_default_pipeline(target)
            tvm.compile(module, target=target, relax_pipeline=pipeline).export_library(str(path))
        return path

    return compile_once


@pytest.fixture(scope="session")
def add_scale(compile_stage: Callable[[str, tvm.IRModule], Path]) -> Callable[..., Path]:
    """Return a function that gives the library of `main(x0.., w) = (s, 2 s, ..)`, s the sum of all."""

    def library(num_inputs: int = 1, num_outputs: int = 1, dtype: str = "float32") -> Path:
        name = f"add_scale_{num_inputs}_{num_outputs}_{dtype}"
        return compile_stage(name, add_scale_module(num_inputs, num_outputs, dtype))

    return library


@pytest.fixture(scope="session")
def skip_program(add_scale: Callable[..., Path]) -> PipelineProgram:
    """Four stages on two devices, with a skip over two stages, a replicated stage, and outputs of every kind.

    x -> a -> (h, 2h) -> b -> c(h, b) -> d(c, x)      a, c on cpu0; b on both in turn; d on cpu1
    """
    stages = (
        StageProgram(0, "a", add_scale(1, 2), ("x",), ("h", "h2"), ("cpu0",), ("w1",)),
        StageProgram(1, "b", add_scale(1, 1), ("h2",), ("b",), ("cpu0", "cpu1"), ("w10",)),
        StageProgram(2, "c", add_scale(2, 1), ("h", "b"), ("c",), ("cpu0",), ("w1",)),
        StageProgram(3, "d", add_scale(2, 1), ("c", "x"), ("y",), ("cpu1",), ("w10",)),
    )
    return PipelineProgram(
        specs("x", "h", "h2", "b", "c", "y", "w1"),  # the spec of a parameter is allowed, and not used
        ("x",),
        ("y", "h", "x", "w1", "y"),
        stages,
        {"w1": full(1), "w10": full(10)},
        two_cpus(),
    )
