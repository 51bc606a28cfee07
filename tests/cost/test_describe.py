"""Operators of a graph become the right families and sizes; fused kernels move live-ins and live-outs only."""

from __future__ import annotations

from typing import Any

import pytest

from tvmhet.cost.describe import describe
from tvmhet.cost.model import KernelDesc, OpDesc
from tvmhet.cost.operators import parse
from tvmhet.cost.record import record_of
from tvmhet.errors import BadInput
from tvmhet.graph.opgraph import Operator, OpGraph, PatternKind, Tensor

Shape = tuple[int, ...]


def _bytes(shape: Shape) -> int:
    total = 4
    for s in shape:
        total *= s
    return total


def one(family: str, ins: list[Shape], out: Shape, **attrs: Any) -> KernelDesc:
    """Describe a graph of one operator."""
    tensors = [Tensor(f"i{i}", s, "float32", _bytes(s), -1, (0,)) for i, s in enumerate(ins)]
    tensors.append(Tensor("out", out, "float32", _bytes(out), 0, (), is_output=True))
    op = Operator("op", family, attrs, tuple(range(len(ins))), (len(ins),), 10.0, 0, 0, PatternKind.OPAQUE)
    return describe(OpGraph((op,), tuple(tensors), tuple(range(len(ins))), (len(ins),)), [0], "tvm")


@pytest.mark.parametrize(
    ("family", "ins", "out", "attrs", "expected"),
    [
        ("matmul", [(2, 5, 7), (7, 11)], (2, 5, 11), {}, ("linear", (1, 10, 11, 7))),
        ("matmul", [(2, 3, 5, 7), (2, 3, 7, 11)], (2, 3, 5, 11), {}, ("matmul", (6, 5, 11, 7))),
        ("matmul", [(7,), (7, 11)], (11,), {}, ("linear", (1, 1, 11, 7))),
        ("matmul", [(3, 5, 7), (7,)], (3, 5), {}, ("linear", (1, 15, 1, 7))),
        (
            "nn.conv2d",
            [(2, 3, 8, 9), (16, 3, 3, 5)],
            (2, 16, 6, 5),
            {"groups": 1},
            ("conv2d", (2, 3, 8, 9, 16, 3, 5, 6, 5, 1)),
        ),
        (
            "nn.conv2d",
            [(2, 8, 9, 4), (3, 3, 1, 4)],
            (2, 6, 7, 4),
            {"groups": 4, "data_layout": "NHWC", "kernel_layout": "HWIO"},
            ("conv2d", (2, 4, 8, 9, 4, 3, 3, 6, 7, 4)),
        ),
        ("nn.conv1d", [(2, 3, 9), (4, 3, 3)], (2, 4, 7), {}, ("conv2d", (2, 3, 1, 9, 4, 1, 3, 1, 7, 1))),
        (
            "nn.conv3d",
            [(1, 3, 4, 8, 8), (5, 3, 2, 3, 3)],
            (1, 5, 3, 6, 6),
            {},
            ("conv2d", (3, 6, 8, 8, 5, 3, 3, 6, 6, 1)),
        ),
        ("add", [(4, 5), (5,)], (4, 5), {}, ("elementwise", (25, 20))),
        ("nn.softmax", [(2, 6, 8)], (2, 6, 8), {"axis": -1}, ("softmax", (12, 8))),
        ("nn.layer_norm", [(2, 6, 8), (8,), (8,)], (2, 6, 8), {"axes": [-1]}, ("layer_norm", (12, 8))),
        ("nn.batch_norm", [(2, 6, 4, 4), (6,), (6,)], (2, 6, 4, 4), {"axis": 1}, ("batch_norm", (6, 32))),
        ("mean", [(2, 6, 4, 4)], (2, 6), {"axis": [2, 3]}, ("reduction", (12, 16))),
        ("sum", [(2, 6)], (), {"axis": None}, ("reduction", (1, 12))),
        ("take", [(100, 8), (5,)], (5, 8), {"axis": 0}, ("embedding", (5, 100, 8))),
        ("nn.max_pool2d", [(2, 3, 8, 8)], (2, 3, 4, 4), {"pool_size": [2, 2]}, ("pooling", (2, 3, 8, 8, 2, 2, 4, 4))),
        ("nn.adaptive_avg_pool2d", [(2, 3, 7, 7)], (2, 3, 1, 1), {}, ("pooling", (2, 3, 7, 7, 7, 7, 1, 1))),
        ("nn.attention", [(2, 64, 8, 16)] * 3, (2, 64, 8, 16), {}, ("attention_prefill", (2, 8, 8, 64, 64, 16, 0))),
        (
            "nn.attention",
            [(2, 1, 8, 16), (2, 64, 2, 16), (2, 64, 2, 16)],
            (2, 1, 8, 16),
            {},
            ("attention_decode", (2, 8, 2, 1, 64, 16, 0)),
        ),
        ("permute_dims", [(4, 5)], (5, 4), {}, ("movement", (20, 20))),
        ("strided_slice", [(1000, 5)], (2, 5), {}, ("movement", (10, 10))),
        ("zeros", [], (4,), {}, ("movement", (0, 4))),
        ("fancy.op", [(4,)], (4,), {}, ("generic", ())),
        ("matmul", [(4,)], (4,), {}, ("generic", ())),  # breaks the rule: one operand
    ],
)
def test_each_family(
    family: str, ins: list[Shape], out: Shape, attrs: dict[str, Any], expected: tuple[str, Shape]
) -> None:
    (op,) = one(family, ins, out, **attrs).ops
    assert (op.family, op.sizes) == expected
    assert isinstance(op, OpDesc) and op.dtype == "float32"


def test_operands_that_are_one_number_are_told_apart() -> None:
    names = [one("multiply", [(4, 5), other], (4, 5)).ops[0].name for other in ((4, 5), (5,), ())]
    assert names == ["multiply", "multiply", "multiply_scalar"]


def chain() -> OpGraph:
    """x, w -> matmul -> t0 -> add(t0, b) -> t1 -> relu -> t2 (output); t1 is also read by tanh -> t3 (output)."""
    tensors = (
        Tensor("x", (8, 16), "float32", 512, -1, (0,)),
        Tensor("w", (16, 4), "float32", 256, -1, (0,), is_param=True),
        Tensor("b", (4,), "float32", 16, -1, (1,), is_param=True),
        Tensor("t0", (8, 4), "float32", 128, 0, (1,)),
        Tensor("t1", (8, 4), "float32", 128, 1, (2, 3)),
        Tensor("t2", (8, 4), "float32", 128, 2, (), is_output=True),
        Tensor("t3", (8, 4), "float32", 128, 3, (), is_output=True),
    )
    ew = PatternKind.ELEM_WISE
    ops = (
        Operator("mm", "matmul", {}, (0, 1), (3,), 1024.0, 768, 128, PatternKind.OUT_EWISE_FUSABLE),
        Operator("add", "add", {}, (3, 2), (4,), 32.0, 144, 128, PatternKind.BROADCAST),
        Operator("relu", "nn.relu", {}, (4,), (5,), 32.0, 128, 128, ew),
        Operator("tanh", "tanh", {}, (4,), (6,), 32.0, 128, 128, ew),
    )
    return OpGraph(ops, tensors, (0,), (5, 6))


def test_what_stays_inside_a_kernel_costs_no_traffic() -> None:
    g = chain()
    whole = describe(g, [0, 1, 2, 3], "tvm")
    assert (whole.read_bytes, whole.write_bytes, whole.flop) == (512 + 256 + 16, 256, 1120)
    head = describe(g, [0, 1, 2], "tvm")
    assert (head.read_bytes, head.write_bytes) == (784, 256)  # t1 leaves for tanh
    assert [op.name for op in head.ops] == ["", "add", "relu"] and head.root.family == "linear"


def test_order_of_the_members_does_not_matter() -> None:
    assert describe(chain(), [2, 0, 1], "library") == describe(chain(), [0, 1, 2], "library")


def test_gathering_reads_what_it_gathers() -> None:
    assert one("take", [(100_000, 8), (5,)], (5, 8), axis=0).read_bytes == 160 + 20


def test_an_empty_or_repeated_kernel_is_refused() -> None:
    for ops in ([], [1, 1]):
        with pytest.raises(BadInput):
            describe(chain(), ops, "tvm")


def test_a_window_says_how_far_its_elements_lie_apart() -> None:
    shapes: list[Shape] = [(1, 3, 20, 20), (4, 3, 3, 3)]
    (near,) = one("nn.conv2d", shapes, (1, 4, 18, 18), dilation=[1, 1]).ops
    far = one("nn.conv2d", shapes, (1, 4, 12, 8), dilation=[4, 6])
    assert near.name == "" and far.root.name == "dilated 6"
    line = {"op": "conv2d", "n": 1, "c": 3, "h": 20, "w": 20, "oc": 4, "kh": 3, "kw": 3, "dilation": 6}
    again = parse({**line, "dtype": "float32"})
    assert isinstance(again, KernelDesc) and again.root.name == "dilated 6"
    assert parse(record_of(again)) == again
