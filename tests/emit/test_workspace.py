"""What kernels are said to take while they run is what their code asks TVM's runtime for."""

import re

import pytest
from tvm import relax

from tests.emit.modules import chain
from tvmhet.emit.lower import lower_stage
from tvmhet.emit.workspace import workspaces

SIDES = [9, 28]


def convolutions(side):
    """A convolution of stride two by 3 x 3, and one by 1 x 1, of `side` x `side` images."""
    builder = relax.BlockBuilder()
    shapes = {"x": (2, 24, side, side), "w": (30, 24, 3, 3), "v": (17, 30, 1, 1)}
    x, w, v = (relax.Var(n, relax.TensorType(s, "float32")) for n, s in shapes.items())
    with builder.function("main", [x, w, v], attrs={"num_input": 1}):
        with builder.dataflow():
            y = builder.emit(relax.op.nn.conv2d(x, w, strides=2, padding=1))
            y = builder.emit_output(relax.op.nn.conv2d(y, v))
        builder.emit_func_output(relax.Tuple([y]))
    return builder.get()


def asked_for(executable):
    """The sizes of a page's quarter or more that generated code asks the runtime for, in order."""
    text = executable.mod.imports[0].inspect_source("ll")
    found = map(int, re.findall(r"call ptr %\d+\(i32 1, i32 [^,]+, i64 (\d+), i32 2, i32 32\)", text))
    return [n for n in found if n >= 1024]


@pytest.mark.parametrize("level", ["v3", "v4"])
@pytest.mark.parametrize("side", SIDES)
def test_convolutions_ask_for_what_is_said(side, level):
    target = {"kind": "llvm", "mcpu": f"x86-64-{level}", "num-cores": 1}
    said = [n for call in workspaces(convolutions(side), target) for n in call]
    assert said
    assert said == asked_for(lower_stage(convolutions(side), target)[0])


def test_elementwise_kernels_take_nothing():
    assert workspaces(chain("exp", "tanh", side=64), {"kind": "llvm", "mcpu": "x86-64-v3"}) == ()


def test_a_kernel_called_twice_counts_twice_in_order():
    target = {"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 1}
    builder = relax.BlockBuilder()
    x, w, v = (
        relax.Var(n, relax.TensorType(s, "float32"))
        for n, s in {"x": (2, 24, 14, 14), "w": (24, 24, 3, 3), "v": (24, 24, 5, 5)}.items()
    )
    with builder.function("main", [x, w, v], attrs={"num_input": 1}):
        with builder.dataflow():
            y = x
            for kernel, padding in ((w, 1), (v, 2), (w, 1)):
                y = builder.emit(relax.op.nn.conv2d(y, kernel, padding=padding))
            y = builder.emit_output(y)
        builder.emit_func_output(relax.Tuple([y]))
    first, second, third = workspaces(builder.get(), target)
    assert first == third != second
