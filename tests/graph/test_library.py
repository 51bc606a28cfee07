"""Which operators the library may make, which chains it joins, and the program that a plan carries."""

import json

import pytest

from tvmhet.graph.fusion import LegalKernel
from tvmhet.graph.library import LIBRARY_FAMILIES, bias_of, library_kernels, library_spec, place_kernel
from tvmhet.graph.operands import with_moved_operands
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


ALONE = {(0,), (1,), (2,)}


def test_a_product_its_bias_and_its_activation_are_one_kernel():
    graph = linear()
    assert chains(graph) == ALONE | {(0, 1), (0, 1, 2)}
    assert all(k.maker == "library" for k in library_kernels(graph))
    assert bias_of(graph, 0, 1) == 3


@pytest.mark.parametrize(
    ("change", "joined"),
    [
        ({"bias_shape": (2, 5)}, set()),  # not one value per channel
        ({"bias_shape": (1, 5)}, {(0, 1), (0, 1, 2)}),
        ({"bias_shape": (1,)}, set()),
        ({"family": "multiply"}, set()),
        ({"is_output": True}, set()),  # the product is read outside
        ({"consumers": (1, 2)}, set()),
        ({"last": "nn.softmax"}, {(0, 1)}),  # the library makes it, but not as an epilogue
        ({"last": "negative"}, {(0, 1)}),
    ],
)
def test_what_breaks_the_chain(change, joined):
    assert chains(linear(**change)) == ALONE | joined


def straight(operators, tensors):
    """A graph of (family, inputs, attrs), the operators' results following `tensors`, given as (shape, dtype)."""
    shapes = [*tensors, *(o[3] for o in operators)]
    first = len(tensors)
    readers = {t: tuple(i for i, o in enumerate(operators) if t in o[1]) for t in range(len(shapes))}
    made = tuple(
        tensor(f"t{t}", *shape, producer=t - first if t >= first else -1, consumers=readers[t],
               is_output=t == len(shapes) - 1)
        for t, shape in enumerate(shapes)
    )  # fmt: skip
    ops = tuple(operator(f"op{i}", o[0], o[1], (first + i,), o[2]) for i, o in enumerate(operators))
    return OpGraph(ops, made, tuple(range(first)), (len(shapes) - 1,))


def number(value):
    return {"dtype": "float32", "shape": [], "value": value}


HEADS, KEYS, SCORES = ((1, 2, 5, 4), "float32"), ((1, 2, 4, 7), "float32"), ((1, 2, 5, 7), "float32")
VALUES, MASK = ((1, 2, 7, 4), "float32"), ((5, 7), "bool")


def attention(scale="multiply", mask="where", hidden="-inf", axis=-1):
    """Queries times keys, a scale, a mask, softmax, times values. Tensors 0 to 3: queries, keys, values, mask."""
    ops = [("matmul", (0, 1), {}, SCORES)]
    if scale:
        ops.append((scale, (3 + len(ops),), {"arg1": number(0.5)}, SCORES))
    made = 3 + len(ops)
    ops.append(("where", (3, made), {"arg2": number(hidden)}, SCORES) if mask == "where" else
               ("add", (made, 3), {}, SCORES))  # fmt: skip
    ops.append(("nn.softmax", (3 + len(ops),), {"axis": axis}, SCORES))
    ops.append(("matmul", (3 + len(ops), 2), {}, HEADS))
    return straight(ops, [HEADS, KEYS, VALUES, MASK if mask == "where" else ((1, 2, 5, 7), "float32")])


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, True),
        ({"scale": "divide"}, True),
        ({"scale": None}, True),
        ({"mask": "add"}, True),
        ({"hidden": 0.0}, False),  # hides nothing
        ({"axis": 2}, False),
        ({"scale": "power"}, False),
    ],
)
def test_attention_is_one_kernel(change, found):
    graph = attention(**change)
    whole = tuple(range(len(graph.operators)))
    assert (whole in chains(graph)) == found


def test_a_residual_and_its_relu_join_a_convolution_and_no_matmul():
    image = ((1, 4, 8, 8), "float32")
    tensors = [image, ((4, 4, 3, 3), "float32"), image]
    rest = [("add", (3, 2), {}, image), ("nn.relu", (4,), {}, image)]
    assert {(0, 1), (0, 1, 2)} <= chains(straight([("nn.conv2d", (0, 1), CONV, image), *rest], tensors))
    square = [((8, 8), "float32")] * 3
    rest = [("add", (3, 2), {}, square[0]), ("nn.relu", (4,), {}, square[0])]
    assert chains(straight([("matmul", (0, 1), {}, square[0]), *rest], square)) == ALONE


def test_permuted_operands_are_read_where_they_lie():
    tensors = [((2, 6), "float32"), ((5, 6), "float32")]
    ops = [("permute_dims", (1,), {"axes": None}, ((6, 5), "float32")), ("matmul", (0, 2), {}, ((2, 5), "float32"))]
    graph = straight(ops, tensors)
    assert chains(graph) == {(0,), (1,), (0, 1)}
    assert with_moved_operands(graph, [LegalKernel((0,)), LegalKernel((1,))]) == (LegalKernel((0, 1)),)
    assert with_moved_operands(graph, [LegalKernel((1,), "library")]) == ()
    twice = straight([*ops, ("add", (3, 2), {}, ((6, 5), "float32"))], tensors)  # the transposed weight is read again
    assert (0, 1) not in chains(twice)


@pytest.mark.parametrize(("part", "in_place"), [((1, 4, 8, 8), True), ((1, 12, 8, 8), True), ((1, 12, 4, 8), False)])
def test_a_convolution_reads_slices_of_channels_where_they_lie(part, in_place):
    tensors = [((1, 12, 8, 8), "float32"), ((4, part[1], 3, 3), "float32")]
    ops = [("strided_slice", (0,), {}, (part, "float32")), ("nn.conv2d", (2, 1), CONV, ((1, 4, *part[2:]), "float32"))]
    found = with_moved_operands(straight(ops, tensors), [LegalKernel((1,))])
    assert found == ((LegalKernel((0, 1)),) if in_place else ())


def test_operands_that_are_views_are_read_where_they_lie():
    cut = {"arg1": [1], "arg2": [4], "arg3": [8], "assume_inbound": False}
    tensors = [((2, 8), "float32"), ((2, 5), "float32")]
    ops = [
        ("strided_slice", (0,), cut, ((2, 4), "float32")),
        ("reshape", (2,), {"arg1": [4, 2]}, ((4, 2), "float32")),
        ("permute_dims", (3,), {"axes": [1, 0]}, ((2, 4), "float32")),
        ("permute_dims", (4,), {"axes": [1, 0]}, ((4, 2), "float32")),
        ("matmul", (5, 1), {}, ((4, 5), "float32")),
    ]
    alone = {(i,) for i in range(5)}
    assert chains(straight(ops, tensors)) == {*alone, (3, 4)}  # of two permutations only the last is a view here
    ops[3:] = [("matmul", (4, 1), {}, ((2, 5), "float32"))]
    tensors[1] = ((4, 5), "float32")
    assert chains(straight(ops, tensors)) == {*alone} - {(4,)} | {(2, 3), (0, 1, 2, 3)}
    read = ("add", (3, 3), {}, ((4, 2), "float32"))  # the reshaped operand is read again
    assert (0, 1, 2, 3) not in chains(straight([*ops, read], tensors))


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
    "a number beside a tensor": ("add", {"arg1": number(2.0)}, [((3,), F32)], ((3,), F32), True),
    "a tensor constant": ("add", {"arg1": {"dtype": F32, "shape": [3]}}, [((3,), F32)], ((3,), F32), False),
    "sum of integers": ("add", {}, [((3,), I64)] * 2, ((3,), I64), False),
    "a branch of another dtype": ("where", {}, [((3,), "bool"), ((3,), F16), ((3,), F32)], ((3,), F32), False),
    "a shape": ("reshape", {"arg1": [6]}, [((2, 3), F32)], ((6,), F32), True),
    "one slice": ("take", {"arg1": number(1), "axis": 1, "mode": "fast"}, [((2, 3), F32)], ((2,), F32), True),
    "a slice outside": ("take", {"arg1": number(3), "axis": 1, "mode": "fast"}, [((2, 3), F32)], ((2,), F32), False),
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


def test_the_table_names_families_as_operators_do():
    assert all(name == name.strip() and not name.startswith("relax.") for name in LIBRARY_FAMILIES)
