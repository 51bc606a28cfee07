"""Other Relax functions become part of main, unless they call themselves or belong to another code generator."""

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from tests.ir.test_importers import run
from tvmhet.ir.importers import from_relax
from tvmhet.ir.transform.inline_functions import InlineFunctions

X = np.linspace(-1, 1, 8, dtype="float32").reshape(2, 4)


@I.ir_module
class Before:
    @R.function
    def inner(x: R.Tensor(("n", 4), "float32")) -> R.Tensor(("n", 4), "float32"):
        y = R.nn.relu(x)
        return y

    @R.function
    def block(x: R.Tensor((2, 4), "float32")) -> R.Tensor((2, 4), "float32"):
        cls = Before
        a = cls.inner(x)
        b = R.exp(a)
        return b

    @R.function
    def main(x: R.Tensor((2, 4), "float32")) -> R.Tensor((2, 4), "float32"):
        cls = Before
        u = cls.block(x)
        v = cls.block(u)
        return v


@I.ir_module
class Expected:
    @R.function
    def main(x: R.Tensor((2, 4), "float32")) -> R.Tensor((2, 4), "float32"):
        a = R.nn.relu(x)
        u = R.exp(a)
        b = R.nn.relu(u)
        v = R.exp(b)
        return v


@I.ir_module
class Countdown:
    @R.function
    def again(x: R.Tensor((2, 4), "float32"), n: R.Tensor((), "int32")) -> R.Tensor((2, 4), "float32"):
        cls = Countdown
        c = R.less(n, R.const(1, "int32"))
        if c:  # noqa: SIM108
            y = x
        else:
            y = cls.again(R.add(x, x), R.subtract(n, R.const(1, "int32")))
        return y

    @R.function
    def main(x: R.Tensor((2, 4), "float32"), n: R.Tensor((), "int32")) -> R.Tensor((2, 4), "float32"):
        cls = Countdown
        y = cls.again(x, n)
        return y


@I.ir_module
class Recursive:
    @R.function
    def main(x: R.Tensor((), "int32")) -> R.Tensor((), "int32"):
        cls = Recursive
        c = R.less(x, R.const(1, "int32"))
        if c:  # noqa: SIM108
            y = x
        else:
            y = cls.main(R.subtract(x, R.const(1, "int32")))
        return y


@I.ir_module
class Foreign:
    @R.function
    def block(x: R.Tensor((2, 4), "float32")) -> R.Tensor((2, 4), "float32"):
        R.func_attr({"Codegen": "another"})
        y = R.exp(x)
        return y

    @R.function
    def main(x: R.Tensor((2, 4), "float32")) -> R.Tensor((2, 4), "float32"):
        cls = Foreign
        y = cls.block(x)
        return y


def test_nested_and_repeated_calls_are_written_out():
    before = Before.clone()
    after = relax.transform.CanonicalizeBindings()(InlineFunctions()(Before))
    tvm.ir.assert_structural_equal(after["main"], relax.transform.CanonicalizeBindings()(Expected)["main"])
    tvm.ir.assert_structural_equal(Before, before)
    assert InlineFunctions()(Expected).same_as(Expected)


def test_such_a_model_is_cut_and_computes_the_same():
    model = from_relax(Before)
    assert model.whole_reason is None
    np.testing.assert_allclose(run(model, X), np.exp(np.exp(np.maximum(X, 0))), rtol=1e-6)


@pytest.mark.parametrize(("mod", "name"), [(Countdown, "again"), (Recursive, "main"), (Foreign, "block")])
def test_what_is_no_mere_text_stays(mod, name):
    assert InlineFunctions()(mod).same_as(mod)
    assert from_relax(mod).whole_reason == f"it calls the function {name!r}"


def test_a_function_that_calls_itself_runs():
    np.testing.assert_array_equal(run(from_relax(Countdown), X, np.array(3, "int32")), X * 8)
