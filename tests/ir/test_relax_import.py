"""Any Relax module as a model: its entry, its parameters, and which modules are refused."""

import numpy as np
import pytest
from tvm.script import ir as I
from tvm.script import relax as R

from tests.ir.test_importers import run
from tvmhet.errors import BadInput, BadModel
from tvmhet.ir.importers import from_relax


@I.ir_module
class Plain:
    @R.function
    def predict(w: R.Tensor((3, 2), "float32"), x: R.Tensor((4, 3), "float32")) -> R.Tensor((4, 2), "float32"):
        y = R.matmul(x, w)
        z = R.nn.relu(y)
        return z


def test_relax_entry_is_found_and_parameters_move_behind():
    weight = np.random.default_rng(0).standard_normal((3, 2)).astype("float32")
    model = from_relax(Plain, {"w": weight})
    assert model.input_names == ("x",)
    assert model.whole_reason is None
    x = np.ones((4, 3), "float32")
    np.testing.assert_allclose(run(model, x), np.maximum(x @ weight, 0), rtol=1e-6)


def test_relax_without_parameters():
    assert from_relax(Plain).input_names == ("w", "x")


def test_relax_wrong_values():
    with pytest.raises(BadInput, match=r"no parameter 'v'"):
        from_relax(Plain, {"v": np.zeros(1)})
    with pytest.raises(BadInput, match=r"'w' is \(2, 3\) float32; 'main' declares"):
        from_relax(Plain, {"w": np.zeros((2, 3), "float32")})
    with pytest.raises(BadInput, match="not int"):
        from_relax(3)


def test_relax_control_flow_stays_whole():
    @I.ir_module
    class Branches:
        @R.function
        def main(c: R.Tensor((), "bool"), x: R.Tensor((4,), "float32")) -> R.Tensor((4,), "float32"):
            if c:  # noqa: SIM108
                y = R.nn.relu(x)
            else:
                y = R.negative(x)
            return y

    model = from_relax(Branches)
    assert model.whole_reason == "it has control flow (if)"
    np.testing.assert_array_equal(run(model, np.array(False), np.ones(4, "float32")), -np.ones(4))


def test_relax_without_entry():
    @I.ir_module
    class Two:
        @R.function
        def a(x: R.Tensor((4,), "float32")) -> R.Tensor((4,), "float32"):
            return x

        @R.function
        def b(x: R.Tensor((4,), "float32")) -> R.Tensor((4,), "float32"):
            return x

    with pytest.raises(BadModel, match=r"no function 'main' and 2 public functions \['a', 'b'\](.|\n)*entry=..."):
        from_relax(Two)
    with pytest.raises(BadModel, match=r"no function 'c'\n.*name one of \['a', 'b'\]"):
        from_relax(Two, entry="c")


@I.ir_module
class Steps:
    @R.function
    def prefill(x: R.Tensor((4,), "float32")) -> R.Tensor((4,), "float32"):
        y = R.exp(x)
        return y

    @R.function
    def decode(x: R.Tensor((4,), "float32"), w: R.Tensor((4,), "float32")) -> R.Tensor((4,), "float32"):
        cls = Steps
        y = cls.prefill(x)
        z = R.add(y, w)
        return z

    @R.function
    def main(x: R.Tensor((4,), "float32")) -> R.Tensor((4,), "float32"):
        cls = Steps
        y = cls.prefill(x)
        return y


def test_relax_entry_by_name():
    x = np.ones(4, "float32")
    model = from_relax(Steps, {"w": x}, entry="decode")
    assert model.whole_reason is None and model.input_names == ("x",) and list(model.params) == ["w"]
    np.testing.assert_allclose(run(model, x), np.exp(x) + 1, rtol=1e-6)
    for entry in (None, "main"):
        np.testing.assert_allclose(run(from_relax(Steps, entry=entry), x), np.exp(x), rtol=1e-6)


def test_an_entry_that_another_function_calls_keeps_its_name():
    with pytest.raises(BadModel, match=r"function 'decode' calls 'prefill' or 'main'"):
        from_relax(Steps, entry="prefill")
