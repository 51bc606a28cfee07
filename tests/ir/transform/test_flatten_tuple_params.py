"""Tuples among main's parameters become their tensors, for the module and for the values given."""

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from tests.ir.test_importers import run
from tvmhet.errors import BadInput
from tvmhet.ir.importers import from_relax
from tvmhet.ir.transform.flatten_tuple_params import FlattenTupleParams, leaf_names

A, B, C = (np.full(4, n, "float32") for n in (1, 2, 3))


@I.ir_module
class Before:
    @R.function
    def main(
        x: R.Tensor((4,), "float32"),
        w: R.Tuple(R.Tensor((4,), "float32"), R.Tuple(R.Tensor((4,), "float32"))),
        w_0: R.Tensor((4,), "float32"),
    ) -> R.Tensor((4,), "float32"):
        a = R.add(x, w[0])
        b = R.multiply(a, w[1][0])
        c = R.subtract(b, w_0)
        return c


@I.ir_module
class Expected:
    @R.function
    def main(
        x: R.Tensor((4,), "float32"),
        w_0_: R.Tensor((4,), "float32"),
        w_1_0: R.Tensor((4,), "float32"),
        w_0: R.Tensor((4,), "float32"),
    ) -> R.Tensor((4,), "float32"):
        a = R.add(x, w_0_)
        b = R.multiply(a, w_1_0)
        c = R.subtract(b, w_0)
        return c


def test_each_tensor_is_a_parameter():
    before = Before.clone()
    after = FlattenTupleParams()(Before)
    clean = tvm.transform.Sequential([relax.transform.CanonicalizeBindings(), relax.transform.DeadCodeElimination()])
    tvm.ir.assert_structural_equal(clean(after)["main"], clean(Expected)["main"])
    assert [str(p.name) for p in after["main"].params] == ["x", "w_0_", "w_1_0", "w_0"]
    tvm.ir.assert_structural_equal(Before, before)
    assert FlattenTupleParams()(after).same_as(after)


def test_names_that_exist_already_are_left_to_their_owners():
    assert leaf_names(Before["main"]) == {"x": ("x",), "w": ("w_0_", "w_1_0"), "w_0": ("w_0",)}


def test_such_a_model_is_cut_and_computes_the_same():
    model = from_relax(Before)
    assert model.whole_reason is None and model.input_names == ("x", "w_0_", "w_1_0", "w_0")
    np.testing.assert_array_equal(run(model, A, B, C, A), (A + B) * C - A)


def test_values_are_given_as_the_tuple_is_nested():
    model = from_relax(Before, {"w": (B, [C])})
    assert model.input_names == ("x", "w_0") and list(model.params) == ["w_0_", "w_1_0"]
    np.testing.assert_array_equal(run(model, A, A), (A + B) * C - A)
    with pytest.raises(BadInput, match="parameter 'w' is a tuple of 2 tensors and 3 were given"):
        from_relax(Before, {"w": (B, C, C)})
