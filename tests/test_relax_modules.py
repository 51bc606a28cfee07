"""Modules as people write them in Relax: tuples in and out, shapes, numbers and functions of their own."""

import json

import numpy as np
import pytest
import torch
import tvm
from tvm.relax.frontend import nn
from tvm.script import ir as I
from tvm.script import relax as R

import tvmhet
from tests.ir.transform.test_inline_functions import Before as Functions
from tests.placed import cpus
from tvmhet.errors import BadBundle, BadInput, WorkerFailed

TWO = cpus(v2=1, v3=1)
X = np.linspace(-1, 1, 16, dtype="float32").reshape(4, 4)


@I.ir_module
class Nested:
    @R.function
    def main(x: R.Tensor((4, 4), "float32"), t: R.Tuple(R.Tensor((4, 4), "float32"), R.Tensor((4, 4), "float32"))):
        with R.dataflow():
            a = R.nn.relu(x)
            b = R.matmul(a, t[0])
            c = R.exp(b)
            R.output(a, b, c)
        return (a, (b, (c, t[1])))


def nested_result(a, b):
    relu = np.maximum(X, 0)
    return relu, (relu @ a, (np.exp(relu @ a), b))


def assert_nested(got, want):
    assert type(got) is type(want)
    if isinstance(want, tuple):
        for g, w in zip(got, want, strict=True):
            assert_nested(g, w)
    else:
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_tuples_go_in_and_come_out_as_the_module_has_them(tmp_path):
    other = X + 1
    with tvmhet.build(Nested, cluster=TWO, pin={"relu": "cpu-v2", "exp": "cpu-v3"}) as lib:
        assert not lib.plan.whole_reason and len(lib.plan.stages) == 2
        assert_nested(lib(X, (other, X)), nested_result(other, X))
        assert_nested(lib(X, [other, X]), nested_result(other, X))
        assert_nested(lib(X, other, X), nested_result(other, X))
        for got in lib.map([(X, (other, X)), (X, other, X)]):
            assert_nested(got, nested_result(other, X))
        with pytest.raises(BadInput, match=r"the model takes 3 inputs \(x, t_0, t_1\); got 2"):
            lib(X, (other,))
        folder = lib.export(tmp_path / "bundle")
    with tvmhet.load(folder) as lib:
        assert_nested(lib(X, (other, X)), nested_result(other, X))
        as_torch = lib(torch.from_numpy(X), (torch.from_numpy(other), torch.from_numpy(X)))
        assert isinstance(as_torch[1][1][0], torch.Tensor)


@pytest.mark.parametrize(("structure", "message"), [(5, "structure 5"), ([None, [None, "x"]], "structure 'x'")])
def test_a_bundle_whose_results_are_no_nest_is_refused(tmp_path, structure, message):
    with tvmhet.build(Nested, cluster=TWO) as lib:
        folder = lib.export(tmp_path / "bundle")
    manifest = folder / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "structure": structure}))
    with pytest.raises(BadBundle, match=message):
        tvmhet.load(folder)


class Mlp(nn.Module):
    """TVM's own way to write a model."""

    def __init__(self):
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 4), nn.RMSNorm(8, axes=-1, bias=False)

    def forward(self, x):
        return self.down(nn.op.silu(self.up(self.norm(x))))


def test_weights_in_one_tuple_are_weights():
    spec = {"forward": {"x": nn.spec.Tensor((2, 8), "float32"), "$": {"param_mode": "packed", "effect_mode": "none"}}}
    mod, params = Mlp().export_tvm(spec)[:2]
    rng = np.random.default_rng(0)
    weights = [rng.standard_normal([int(n) for n in p.shape]).astype("float32") for _, p in params]
    x = rng.standard_normal((2, 8)).astype("float32")
    packed = str(mod["forward"].params[1].name)
    with tvmhet.build(tvmhet.from_relax(mod, {packed: weights}), cluster=TWO) as lib:
        got = lib(x)
    with tvmhet.build(mod, cluster=TWO) as lib:
        np.testing.assert_allclose(lib(x, weights), got, rtol=1e-6)
    up, bias, down, last, norm = map(torch.from_numpy, weights)
    y = torch.nn.functional.rms_norm(torch.from_numpy(x), (8,), norm, 1e-5)
    want = torch.nn.functional.silu(y @ up.T + bias) @ down.T + last
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@I.ir_module
class Shapes:
    @R.function
    def main(x: R.Tensor(("n", 4), "float32"), s: R.Shape(["n", "m"]), k: R.Prim("int64")):
        y = R.add(x, x)
        return y


@pytest.mark.parametrize("shape", [(4, 9), tvm.runtime.ShapeTuple((4, 9))], ids=["tuple", "shape"])
def test_a_whole_model_takes_shapes_and_numbers(shape):
    with tvmhet.build(Shapes, cluster=TWO) as lib:
        assert lib.plan.whole_reason
        np.testing.assert_array_equal(lib(X, shape, 3), X + X)
        with pytest.raises(BadInput, match="the model refused its inputs"):
            lib(X, (5, 9), 3)
        with pytest.raises(BadInput, match=r"input 1 is a dict, not a tensor"):
            lib(X, {}, 3)


@tvm.register_global_func("tvmhet.tests.twice")
def twice(a):
    return tvm.runtime.tensor(a.numpy() * 2)


@I.ir_module
class Packed:
    @R.function
    def main(x: R.Tensor((4, 4), "float32")) -> R.Tensor((4, 4), "float32"):
        with R.dataflow():
            y = R.call_pure_packed("tvmhet.tests.twice", x, ty_args=R.Tensor((4, 4), "float32"))
            z = R.add(y, x)
            R.output(z)
        return z


def test_a_function_of_this_process_runs_in_it_and_is_named_elsewhere():
    with tvmhet.build(Packed, cluster=cpus(v2=1), inline=True) as lib:
        np.testing.assert_array_equal(lib(X), X * 3)
    remedy = pytest.raises(WorkerFailed, match=r"no function 'tvmhet.tests.twice'(.|\n)*inline=True")
    with tvmhet.build(Packed, cluster=cpus(v2=1)) as lib, remedy:
        lib(X)


def test_a_module_of_several_functions_is_placed_on_several_devices():
    x = X[:2]
    with tvmhet.build(Functions, cluster=TWO, pin={"relu": "cpu-v2", "exp_1": "cpu-v3"}) as lib:
        assert len(lib.plan.stages) == 2
        np.testing.assert_allclose(lib(x), np.exp(np.exp(np.maximum(x, 0))), rtol=1e-6)
