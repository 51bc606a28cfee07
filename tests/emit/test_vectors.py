"""CUDA kernels that go element by element: as serial loops, their threads give what the unscheduled kernel does."""

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

from tests.emit.cpu.kernels import kernel, run
from tests.emit.test_apart import CUDA, scheduled, serial
from tvmhet.emit.vectors import vectors

IMAGE, CHANNEL = (4, 345, 14, 14), (1, 345, 1, 1)


#: What is made of which operands, and how many of them are read as vectors.
CASES = {
    "residual": ([IMAGE, CHANNEL, IMAGE], lambda x, b, y: op.nn.relu(op.add(op.add(x, b), y)), 2),
    "gelu": ([IMAGE, CHANNEL], lambda x, b: op.nn.gelu(op.add(x, b)), 1),
    "rows": ([(1100, 256), (256,), (1100, 1)], lambda x, b, r: op.multiply(op.add(x, b), r), 1),
    "twice": ([(1024, 512)], lambda x: op.multiply(x, op.add(x, x)), 1),
    "one axis": ([(300_000,)], op.exp, 1),
    "pixels of no multiple of four": ([(8, 841, 7, 7)] * 2, op.add, 2),
    "no multiple of a block's values": ([(4, 67_204)], lambda x: op.multiply(x, op.exp(x)), 1),
}
LEFT = {
    "few values": ([(4, 1000)], op.exp),
    "a channel ends inside a vector": ([(8, 841, 7, 7), (1, 841, 1, 1)], op.add),
    "another order": ([(640, 512)], lambda x: op.permute_dims(x)),
    "a padding": ([(640, 512)], lambda x: op.nn.pad(x, [0, 0, 2, 2])),
    "a concatenation": ([(640, 512)] * 2, lambda x, y: op.concat([x, y], axis=1)),
    "a part": ([(640, 1024)], lambda x: op.strided_slice(x, [1], [4], [1024])),
    "two places of a tensor": ([(640, 512)], lambda x: op.subtract(x, op.strided_slice(x, [1], [0], [1]))),
    "two rows of a tensor": ([(640, 512)], lambda x: op.subtract(x, op.strided_slice(x, [0], [0], [1]))),
    "a reduction": ([(640, 512)], lambda x: op.sum(x, axis=1)),
    "two blocks": ([(640, 512)], lambda x: op.nn.softmax(x)),
}


@pytest.mark.parametrize("name", CASES)
def test_four_values_a_thread(name):
    shapes, make, num_vectors = CASES[name]
    func = kernel(make, *shapes)
    fast, report = scheduled(func)
    assert report.applied == {"vectors": 1}
    assert fast.script().count("T.vectorized(") == num_vectors + 1  # and the result
    values = [np.random.default_rng(0).uniform(-1, 1, s).astype("float32") for s in shapes]
    np.testing.assert_allclose(run(serial(fast), values), run(func, values), rtol=1e-5, atol=1e-6)
    source = tvm.compile(tvm.IRModule({"main": fast}), target=CUDA).mod.imports[0].inspect_source("cuda")
    assert source.count("*(float4*)(") == 2 * (num_vectors + 1)  # each from memory to registers or back


@pytest.mark.parametrize("name", LEFT)
def test_others_are_left(name):
    shapes, make = LEFT[name]
    assert vectors(kernel(make, *shapes)) is None


@pytest.mark.parametrize(("dtype", "taken"), [("float16", True), ("int32", True), ("float64", False), ("int8", False)])
def test_values_of_other_types(dtype, taken):
    fast = vectors(kernel(lambda x: op.add(x, x), (1024, 512), dtype=dtype))
    assert (fast is not None) == taken
    if fast is not None:
        tvm.compile(tvm.IRModule({"main": fast.mod["main"].with_attr("global_symbol", "main")}), target=CUDA)


def test_a_mask_is_left():
    compared = kernel(lambda x, y: op.where(op.greater(x, y), x, y), (1024, 512), (1024, 512))
    assert vectors(compared) is not None  # its mask is never stored
    builder = relax.BlockBuilder()
    mask, x = (
        relax.Var("m", relax.TensorType((1024, 512), "bool")),
        relax.Var("x", relax.TensorType((1024, 512), "float32")),
    )
    with builder.function("main", [mask, x]):
        builder.emit_func_output(builder.emit_te(tvm.topi.where, mask, x, x))
    (func,) = [f for f in builder.get().functions.values() if isinstance(f, tvm.tirx.PrimFunc)]
    assert vectors(func) is None
