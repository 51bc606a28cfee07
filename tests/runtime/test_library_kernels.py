"""A stage whose kernel is the library's: its worker registers the kernels before it loads the stage."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.runtime.programs import two_cpus
from tvmhet.errors import WorkerFailed
from tvmhet.ir.attrs import LIBRARY_FUNCTION
from tvmhet.runtime import HetRuntime, PipelineProgram, StageProgram, ValueSpec

SIDE = 64


def _library_matmul() -> tvm.IRModule:
    builder = relax.BlockBuilder()
    ty = relax.TensorType((SIDE, SIDE), "float32")
    x, w = relax.Var("x", ty), relax.Var("w", ty)
    spec = tvm.ir.StringImm(json.dumps([["matmul", {}, ["i0", "i1"]]]))
    with builder.function("main", [x, w]):
        with builder.dataflow():
            product = builder.emit(relax.op.call_dps_packed(LIBRARY_FUNCTION, (spec, x, w), ty))
            out = builder.emit_output(relax.Tuple([product]))
        builder.emit_func_output(out)
    return builder.finalize()


@pytest.fixture
def program(compile_stage: Callable[[str, tvm.IRModule], Path]) -> PipelineProgram:
    library = compile_stage("library_matmul", _library_matmul())
    rng = np.random.default_rng(0)
    params = {f"w{k}": rng.standard_normal((SIDE, SIDE)).astype("float32") for k in range(2)}
    stages = tuple(
        StageProgram(k, f"s{k}", library, (f"v{k}",), (f"v{k + 1}",), (f"cpu{k}",), (f"w{k}",), needs_library=True)
        for k in range(2)
    )
    values = {f"v{k}": ValueSpec.of(f"v{k}", (SIDE, SIDE), "float32") for k in range(3)}
    return PipelineProgram(values, ("v0",), ("v2",), stages, params, two_cpus(), structure="single")


def test_library_kernels_run_in_workers(program: PipelineProgram) -> None:
    x = np.random.default_rng(1).standard_normal((SIDE, SIDE)).astype("float32")
    want = x @ program.params["w0"] @ program.params["w1"]
    with HetRuntime(program) as runtime:
        for got in runtime.map([x] * 10):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)


def test_a_stage_that_does_not_ask_for_them_says_what_is_missing(program: PipelineProgram) -> None:
    stages = tuple(replace(s, needs_library=False) for s in program.stages)
    with pytest.raises(WorkerFailed, match=LIBRARY_FUNCTION):
        HetRuntime(replace(program, stages=stages)).start()
