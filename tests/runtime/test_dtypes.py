"""Tensors of every dtype cross from one process to another bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import tvm
from tvm import relax

from tests.runtime.programs import two_cpus
from tvmhet.runtime import HetRuntime, PipelineProgram, StageProgram, ValueSpec
from tvmhet.runtime.program import numpy_dtype

DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int8", "uint8", "bool")


def _move_all(shapes: dict[str, tuple[int, ...]]) -> tvm.IRModule:
    """main(x0..) = every input, one axis longer: moves bits, computes nothing."""
    builder = relax.BlockBuilder()
    params = [relax.Var(name, relax.TensorType(shape, name)) for name, shape in shapes.items()]
    with builder.function("main", params):
        with builder.dataflow():
            moved = [builder.emit(relax.op.concat([p, p], axis=0)) for p in params]
            out = builder.emit_output(relax.Tuple(moved))
        builder.emit_func_output(out)
    return builder.finalize()


def test_every_dtype_crosses_two_processes(compile_stage: Callable[[str, tvm.IRModule], Path]) -> None:
    rng = np.random.default_rng(0)
    once, twice, four = ({d: (k, 3, 5) for d in DTYPES} for k in (1, 2, 4))
    names = {k: tuple(f"{d}_{k}" for d in DTYPES) for k in (1, 2, 4)}
    stages = (
        StageProgram(0, "s0", compile_stage("move_1", _move_all(once)), names[1], names[2], ("cpu0",)),
        StageProgram(1, "s1", compile_stage("move_2", _move_all(twice)), names[2], names[4], ("cpu1",)),
    )
    values = {
        name: ValueSpec.of(name, shapes[d], d)
        for k, shapes in ((1, once), (2, twice), (4, four))
        for d, name in zip(DTYPES, names[k], strict=True)
    }
    program = PipelineProgram(values, names[1], names[4], stages, {}, two_cpus())
    inputs = [rng.integers(0, 2, (1, 3, 5)).astype(numpy_dtype(d)) for d in DTYPES]
    with HetRuntime(program) as runtime:
        for array, got in zip(inputs, runtime(*inputs), strict=True):
            assert got.dtype == array.dtype
            np.testing.assert_array_equal(got, np.concatenate([array] * 4))
        tensors = [torch.from_numpy(rng.integers(0, 2, (1, 3, 5))).to(getattr(torch, d)) for d in DTYPES]
        for tensor, back in zip(tensors, runtime(*tensors), strict=True):
            assert back.dtype == tensor.dtype and torch.equal(back, torch.cat([tensor] * 4))


@pytest.mark.parametrize("shape", [(), (0, 4), (1,)])
def test_scalars_and_empty_tensors(compile_stage: Callable[[str, tvm.IRModule], Path], shape: tuple[int, ...]) -> None:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(shape, "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            out = builder.emit_output(relax.Tuple([builder.emit(relax.op.add(x, relax.const(1.0)))]))
        builder.emit_func_output(out)
    library = compile_stage(f"plus_one_{len(shape)}_{sum(shape)}", builder.finalize())
    values = {name: ValueSpec.of(name, shape, "float32") for name in ("x", "y")}
    program = PipelineProgram(
        values, ("x",), ("y",), (StageProgram(0, "s", library, ("x",), ("y",), ("cpu0",)),), {}, two_cpus(), "single"
    )
    for inline in (False, True):
        with HetRuntime(program, inline=inline) as runtime:
            got = runtime(np.full(shape, 2, "float32"))
            np.testing.assert_array_equal(got, np.full(shape, 3, "float32"))


def test_a_passed_through_value_is_copied(compile_stage: Callable[[str, tvm.IRModule], Path]) -> None:
    """A stage may return its input, or a reshaped view of it; the results are the caller's own all the same."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4, 6), "bfloat16"))
    with builder.function("main", [x]):
        with builder.dataflow():
            view = builder.emit(relax.op.reshape(x, (6, 4)))
            out = builder.emit_output(relax.Tuple([x, view, x]))
        builder.emit_func_output(out)
    library = compile_stage("pass_through", builder.finalize())
    values = {
        n: ValueSpec.of(n, s, "bfloat16") for n, s in {"x": (4, 6), "a": (4, 6), "b": (6, 4), "c": (4, 6)}.items()
    }
    stage = StageProgram(0, "s", library, ("x",), ("a", "b", "c"), ("cpu0",))
    program = PipelineProgram(values, ("x",), ("b", "a", "c", "a"), (stage,), {}, two_cpus())
    x_in = np.arange(24).reshape(4, 6).astype(numpy_dtype("bfloat16"))
    for inline in (False, True):
        with HetRuntime(program, inline=inline) as runtime:
            first = runtime(x_in)
            runtime(np.zeros_like(x_in))
            for got, want in zip(first, (x_in.reshape(6, 4), x_in, x_in, x_in), strict=True):
                np.testing.assert_array_equal(got, want)
            assert not any(np.shares_memory(first[1], other) for other in (x_in, first[0], first[2], first[3]))
