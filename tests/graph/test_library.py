"""Which operators the library may make, which chains it joins, and the program that a plan carries."""

import json

import pytest

from tvmhet.errors import NotSupported
from tvmhet.graph.fusion import LegalKernel
from tvmhet.graph.library import LIBRARY_FAMILIES, bias_of, library_kernels, library_spec, place_kernel
from tvmhet.graph.opgraph import Operator, OpGraph, PatternKind, Tensor

CONV = {
    "strides": [1, 1], "padding": [1, 1, 1, 1], "dilation": [1, 1], "groups": 1,
    "data_layout": "NCHW", "kernel_layout": "OIHW", "out_layout": "NCHW", "out_dtype": "float32",
}  # fmt: skip
POOL = {
    "pool_size": [3, 3], "strides": [2, 2], "padding": [1, 1, 1, 1], "dilation": [1, 1], "ceil_mode": False,
    "count_include_pad": False, "layout": "NCHW", "out_layout": "NCHW",
}  # fmt: skip


def tensor(name, shape, dtype="float32", producer=-1, consumers=(), **more):
    return Tensor(name, shape, dtype, 4, producer, consumers, **more)


def operator(name, family, inputs, outputs, attrs=None):
    return Operator(name, family, attrs or {}, inputs, outputs, 1.0, 4, 4, PatternKind.ELEM_WISE, name)


def one(family, attrs, inputs, output):
    """A graph of one operator on tensors given as (shape, dtype)."""
    tensors = [tensor(f"i{k}", s, d, consumers=(0,)) for k, (s, d) in enumerate(inputs)]
    tensors.append(tensor("out", *output, producer=0, is_output=True))
    op = operator("op", family, tuple(range(len(inputs))), (len(inputs),), attrs)
    return OpGraph((op,), tuple(tensors), (0,), (len(inputs),))


def linear(bias_shape=(5,), family="add", bias_producer=-1, consumers=(1,), is_output=False, last="nn.relu"):
    """matmul(2x6, 6x5) -> add -> activation, with what breaks the chain as an argument."""
    tensors = (
        tensor("x", (2, 6), consumers=(0,)),
        tensor("w", (6, 5), consumers=(0,), is_param=True),
        tensor("mm", (2, 5), producer=0, consumers=consumers, is_output=is_output),
        tensor("b", bias_shape, producer=bias_producer, consumers=(1,), is_param=True),
        tensor("sum", (2, 5), producer=1, consumers=(2,)),
        tensor("y", (2, 5), producer=2, is_output=True),
    )
    operators = (
        operator("mm", "matmul", (0, 1), (2,)),
        operator("sum", family, (2, 3), (4,)),
        operator("y", last, (4,), (5,), {"axis": -1}),
    )
    return OpGraph(operators, tensors, (0,), (5,))


def chains(graph):
    return {k.ops for k in library_kernels(graph)}


def test_a_product_its_bias_and_its_activation_are_one_kernel():
    graph = linear()
    assert chains(graph) == {(0,), (0, 1), (0, 1, 2), (2,)}
    assert all(k.maker == "library" for k in library_kernels(graph))
    assert bias_of(graph, 0, 1) == 3


@pytest.mark.parametrize(
    ("change", "left"),
    [
        ({"bias_shape": (2, 5)}, {(0,), (2,)}),  # not one value per channel
        ({"bias_shape": (1, 5)}, {(0,), (0, 1), (0, 1, 2), (2,)}),
        ({"bias_shape": (1,)}, {(0,), (2,)}),
        ({"family": "multiply"}, {(0,), (2,)}),
        ({"is_output": True}, {(0,), (2,)}),  # the product is read outside
        ({"consumers": (1, 2)}, {(0,), (2,)}),
        ({"last": "nn.softmax"}, {(0,), (0, 1), (2,)}),  # the library makes it, but not as an epilogue
        ({"last": "negative"}, {(0,), (0, 1)}),
    ],
)
def test_what_breaks_the_chain(change, left):
    assert chains(linear(**change)) == left


F32, F16, I64 = "float32", "float16", "int64"
IMAGE, KERNEL = ((1, 4, 8, 8), F32), ((6, 4, 3, 3), F32)
CASES = {
    "conv": ("nn.conv2d", CONV, [IMAGE, KERNEL], ((1, 6, 8, 8), F32), True),
    "conv, padding of two sides": (
        "nn.conv2d",
        {**CONV, "padding": [0, 0, 1, 1]},
        [IMAGE, KERNEL],
        ((1, 6, 7, 7), F32),
        False,
    ),
    "conv, NHWC": ("nn.conv2d", {**CONV, "data_layout": "NHWC"}, [IMAGE, KERNEL], ((1, 6, 8, 8), F32), False),
    "conv, HWIO": ("nn.conv2d", {**CONV, "kernel_layout": "HWIO"}, [IMAGE, KERNEL], ((1, 6, 8, 8), F32), False),
    "conv, result of another dtype": (
        "nn.conv2d",
        CONV,
        [((1, 4, 8, 8), F16), ((6, 4, 3, 3), F16)],
        ((1, 6, 8, 8), F32),
        False,
    ),
    "conv of integers": ("nn.conv2d", CONV, [((1, 4, 8, 8), "int8")] * 2, ((1, 6, 8, 8), "int8"), False),
    "pool": ("nn.max_pool2d", POOL, [IMAGE], ((1, 4, 4, 4), F32), True),
    "pool, padded more than half": (
        "nn.max_pool2d",
        {**POOL, "padding": [2, 2, 2, 2]},
        [IMAGE],
        ((1, 4, 5, 5), F32),
        False,
    ),
    "mean pool, dilated": ("nn.avg_pool2d", {**POOL, "dilation": [2, 2]}, [IMAGE], ((1, 4, 2, 2), F32), False),
    "norm of the last dims": (
        "nn.layer_norm",
        {"axes": [-1]},
        [((2, 5), F32), ((5,), F32), ((5,), F32)],
        ((2, 5), F32),
        True,
    ),
    "norm of the first dim": (
        "nn.layer_norm",
        {"axes": [0]},
        [((2, 5), F32), ((2,), F32), ((2,), F32)],
        ((2, 5), F32),
        False,
    ),
    "rows": ("take", {"axis": 0, "mode": "fast"}, [((9, 5), F32), ((3,), I64)], ((3, 5), F32), True),
    "rows, clipped": ("take", {"axis": 0, "mode": "clip"}, [((9, 5), F32), ((3,), I64)], ((3, 5), F32), True),
    "rows, NaN": ("take", {"axis": 0, "mode": "nan"}, [((9, 5), F32), ((3,), I64)], ((3, 5), F32), False),
    "rows by float": ("take", {"axis": 0, "mode": "fast"}, [((9, 5), F32), ((3,), F32)], ((3, 5), F32), False),
    "columns": ("take", {"axis": 1, "mode": "fast"}, [((9, 5), F32), ((3,), I64)], ((9, 3), F32), False),
    "vector times matrix": ("matmul", {}, [((6,), F32), ((6, 5), F32)], ((5,), F32), False),
    "unlike dtypes": ("matmul", {}, [((2, 6), F16), ((6, 5), F32)], ((2, 5), F32), False),
    "relu of integers": ("nn.relu", {}, [((3,), "int32")], ((3,), "int32"), False),
    "a constant argument": ("tanh", {"arg0": 1}, [((3,), F32)], ((3,), F32), False),
    "another family": ("sin", {}, [((3,), F32)], ((3,), F32), False),
}


@pytest.mark.parametrize("name", CASES)
def test_what_the_library_takes(name):
    family, attrs, inputs, output, taken = CASES[name]
    assert chains(one(family, attrs, inputs, output)) == ({(0,)} if taken else set())


def test_a_spec_is_a_program_over_live_ins():
    graph = linear()
    assert json.loads(library_spec(graph, (0, 1, 2))) == [
        ["matmul", {}, ["i0", "i1"]],
        ["bias", {}, ["o0", "i2"]],
        ["nn.relu", {"axis": -1}, ["o1"]],
    ]
    placed = place_kernel(graph, LegalKernel((0, 1), "library"))
    assert (placed.name, placed.ops, placed.maker) == ("sum", ("mm", "sum"), "library")
    assert placed.spec == library_spec(graph, (0, 1))
    assert place_kernel(graph, LegalKernel((0, 1))).spec == ""


@pytest.mark.parametrize("ops", [(1,), (1, 2)])
def test_an_add_that_is_no_bias_has_no_spec(ops):
    with pytest.raises(NotSupported, match="the library cannot make 'sum'"):
        library_spec(linear(), ops)


def test_the_table_names_families_as_operators_do():
    assert all(name == name.strip() and not name.startswith("relax.") for name in LIBRARY_FAMILIES)
