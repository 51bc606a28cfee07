"""PackWeights: products read their weights in panels; everything else stays."""

import numpy as np
import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from tvmhet.errors import BadGraph
from tvmhet.ir.transform.pack_weights import PackWeights, in_panels, panel_shape


@I.ir_module
class Before:
    @R.function
    def main(
        x: R.Tensor((2, 3), "float32"),
        w: R.Tensor((3, 4), "float32"),
        v: R.Tensor((4, 5), "float32"),
        b: R.Tensor((4,), "float32"),
    ):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            y = R.matmul(x, w)
            z = R.add(y, b)
            u = R.matmul(z, v)
            R.output(u)
        return u


@I.ir_module
class Expected:
    @T.prim_func(private=True, s_tir=True)
    def matmul_panels(
        x: T.Buffer((T.int64(2), T.int64(3)), "float32"),
        w: T.Buffer((T.int64(2), T.int64(3), T.int64(2)), "float32"),
        matmul: T.Buffer((T.int64(2), T.int64(4)), "float32"),
    ):
        T.func_attr({"tirx.noalias": True})
        for m, n, k in T.grid(T.int64(2), T.int64(4), T.int64(3)):
            with T.sblock("matmul"):
                vm, vn, vk = T.axis.remap("SSR", [m, n, k])
                with T.init():
                    matmul[vm, vn] = T.float32(0.0)
                matmul[vm, vn] = matmul[vm, vn] + x[vm, vk] * w[vn // T.int64(2), vk, vn % T.int64(2)]

    @R.function
    def main(
        x: R.Tensor((2, 3), "float32"),
        w: R.Tensor((2, 3, 2), "float32"),
        v: R.Tensor((4, 5), "float32"),
        b: R.Tensor((4,), "float32"),
    ):
        R.func_attr({"num_input": 1})
        cls = Expected
        with R.dataflow():
            y = R.call_tir(cls.matmul_panels, (x, w), out_ty=R.Tensor((2, 4), "float32"))
            z = R.add(y, b)
            u = R.matmul(z, v)
            R.output(u)
        return u


def test_a_product_reads_panels():
    given_mod = Before.clone()
    tvm.ir.assert_structural_equal(PackWeights({"w": 2})(given_mod), Expected)
    tvm.ir.assert_structural_equal(given_mod, Before)  # the input is left as it was
    assert PackWeights({})(given_mod).same_as(given_mod)


@I.ir_module
class Steps:
    @R.function
    def main(x: R.Tensor((2, 4), "float32"), w: R.Tensor((4, 4), "float32")):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            y = R.matmul(x, w)
            z = R.matmul(y, w)
            R.output(z)
        return z


def test_all_products_of_a_weight_read_its_panels():
    packed = PackWeights({"w": 2})(Steps)
    assert packed.script().count("R.call_tir") == 2 and "R.matmul" not in packed.script()
    assert [list(map(int, p.ty.shape)) for p in packed["main"].params] == [[2, 4], [2, 4, 2]]


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"b": 2}, "'b' is not read by products alone"),
        ({"x": 2}, "'x' is not read"),
        ({"w": 3}, "4 columns, no multiple of 3"),
        ({"none": 2}, "'none'"),
    ],
)  # fmt: skip
def test_other_weights_are_refused(columns, text):
    with pytest.raises((BadGraph, RuntimeError), match=text):
        PackWeights(columns)(Before)


@given(st.lists(st.integers(1, 3), max_size=2), st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))
def test_panels_hold_the_weight(batch, depth, count, columns):
    weight = np.random.default_rng(0).normal(size=(*batch, depth, count * columns)).astype("float32")
    made = in_panels(weight, columns)
    assert made.shape == panel_shape(weight.shape, columns) and np.shares_memory(made, weight)
    for n in range(count * columns):
        np.testing.assert_array_equal(made[..., n // columns, :, n % columns], weight[..., :, n])
