"""The doors: what they return, what they refuse and in which words."""

import gc
import subprocess
import sys

import numpy as np
import onnx
import pytest
import torch
import tvm
from onnx import TensorProto, helper, numpy_helper
from torch import nn
from tvm import relax

from tvmhet.emit.lower import lower_plain
from tvmhet.errors import BadInput, BadModel, UnsupportedOperator
from tvmhet.ir.importers import from_exported, from_onnx, from_torch
from tvmhet.ir.model import Model, to_torch


def run(model, *inputs):
    executable = lower_plain(model.mod, {"kind": "llvm"})
    vm = relax.VirtualMachine(executable, tvm.cpu())
    result = vm["main"](*[tvm.runtime.tensor(np.asarray(x)) for x in inputs], *model.params.values())
    return result.numpy() if isinstance(result, tvm.runtime.Tensor) else [r.numpy() for r in result]


class Function(nn.Module):
    """A module that is one function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


# ---- torch


def test_inputs_come_first_and_parameters_have_values():
    torch.manual_seed(0)
    model = from_torch(nn.Linear(3, 2), (torch.randn(4, 3),))
    assert model.num_inputs == 1
    assert [str(p.name) for p in model.main.params[1:]] == list(model.params)
    assert model.whole_reason is None
    assert len(model.main.body.blocks) == 1


def test_parameters_share_memory_with_torch():
    module = nn.Embedding(1000, 8)
    model = from_torch(module, (torch.tensor([1, 2]),))
    (value,) = model.params.values()
    assert to_torch(value).data_ptr() == module.weight.data_ptr()


INDEX = [
    ("adjacent", lambda x, i, j: x[:, i, j]),
    ("leading", lambda x, i, j: x[i, j]),
    ("apart", lambda x, i, j: x[i, :, j]),
    ("one", lambda x, i, j: x[:, i]),
    ("matrix", lambda x, i, j: x[:, i[:, None], j[None, :]]),
    ("negative", lambda x, i, j: x[:, -i - 1, j]),
]
DTYPES = [
    ("cumsum of bools", lambda x, i, j: (x > 0).cumsum(1)),
    ("half product", lambda x, i, j: x.half() @ x.half().transpose(1, 2)),
    ("attention mask", lambda x, i, j: nn.functional.scaled_dot_product_attention(x, x, x, (x @ x.mT) > 0)),
    ("causal", lambda x, i, j: nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)),
    ("float mask", lambda x, i, j: nn.functional.scaled_dot_product_attention(x, x, x, x @ x.mT)),
    ("int times float", lambda x, i, j: i * 0.5),
    ("int plus float tensor", lambda x, i, j: i + x),
    ("int by int", lambda x, i, j: i / (j + 1)),
    ("alpha", lambda x, i, j: torch.sub(x, i, alpha=3)),
    ("compare int and float", lambda x, i, j: i > 0.5),
    ("scalar first", lambda x, i, j: 1 - x),
    ("last one", lambda x, i, j: x[:, -1]),
    ("put", lambda x, i, j: x.index_put((i[:2], j[:2]), x[:2, 0])),
    ("put and add", lambda x, i, j: x.index_add(1, i, x)),
    ("put inside", lambda x, i, j: torch.ops.aten.index_put(x, [None, i[:2]], x[:, :2])),
    ("strides of a part", lambda x, i, j: x[1:].as_strided((2, 2), (1, 4), x.stride(0) + 1) * 1),
    ("put apart", lambda x, i, j: torch.ops.aten.index_put(x, [i[:2], None, j[:2]], x[:2, :, 0] * 3)),
    ("put apart and add", lambda x, i, j: torch.ops.aten.index_put(x, [i[:2], None, i[:2]], x[0, :2], True)),
    ("put nowhere", lambda x, i, j: torch.ops.aten.index_put(x, [i[:0], None, j[:0]], x.sum())),
    ("scatter add", lambda x, i, j: torch.zeros(3, 4, 4).scatter_add(1, (x > 0).long(), x)),
    ("selu", lambda x, i, j: nn.functional.selu(x)),
    ("norm without weight", lambda x, i, j: nn.functional.layer_norm(x, (4,))),
    ("bfloat16 norm", lambda x, i, j: nn.functional.layer_norm(x.bfloat16(), (4,)).float()),
    ("half convolution", lambda x, i, j: nn.functional.conv1d(x.half(), x.half(), x[0, 0, :3].half())),
    ("not equal to itself", lambda x, i, j: (lambda y: y != y)(x.log())),
    ("numbers only", lambda x, i, j: (lambda y: torch.where(y == y, y, j.float()[:, None]))(x.log())),
    ("largest over dims", lambda x, i, j: x.amax((0, 2))),
    ("smallest", lambda x, i, j: x.min(-1).indices),
    ("variance", lambda x, i, j: torch.var_mean(x, (0, 2), correction=1)[0]),
    ("variance of the sample by default", lambda x, i, j: torch.var_mean(x, (0, 2), correction=None)[0]),
    ("variance of one", lambda x, i, j: torch.var_mean(x[:1], 0)[0]),
    ("truncated", lambda x, i, j: torch.div(i - 3, 2, rounding_mode="trunc")),
    ("floored", lambda x, i, j: torch.div(x, 0.3, rounding_mode="floor")),
    ("no key allowed", lambda x, i, j: nn.functional.scaled_dot_product_attention(x, x, x, (x.sum(-1) > 0)[..., None])),
    ("lower triangle", lambda x, i, j: x[:, torch.tril_indices(4, 4)[0], torch.tril_indices(4, 4)[1]]),
    ("clamp of ints", lambda x, i, j: i.clamp(min=1)),
    ("weighted addmm", lambda x, i, j: torch.addmm(x[0, 0], x[0], x[1, :, :].mT @ x[1], beta=0.5, alpha=2.0)),
    ("counting down", lambda x, i, j: torch.arange(9, 1, -2) + i),
    ("counting in steps", lambda x, i, j: torch.arange(1, 9, 2) + i),
    ("one hot", lambda x, i, j: nn.functional.one_hot(i, 5)),
    ("two results", lambda x, i, j: torch.topk(x, 2, -1).values),
    ("best in any order", lambda x, i, j: torch.topk(x, 2, 1, largest=False, sorted=False).indices.sort(1).values),
]


#: Half precision only.
RTOL = {"half product": 1e-2, "half convolution": 1e-2, "bfloat16 norm": 2e-2}


@pytest.mark.parametrize(("name", "function"), INDEX + DTYPES, ids=[n for n, _ in INDEX + DTYPES])
def test_what_the_front_end_gets_wrong(name, function):
    torch.manual_seed(0)
    inputs = (torch.randn(3, 4, 4), torch.tensor([2, 0, 1, 1]), torch.tensor([1, 2, 0, 3]))
    expected = function(*inputs)
    got = run(from_torch(Function(function), inputs), *[x.numpy() for x in inputs])
    assert got.dtype == expected.numpy().dtype
    np.testing.assert_allclose(got, expected.numpy(), rtol=RTOL.get(name, 1e-5), atol=RTOL.get(name, 1e-6))


def test_a_wrong_conversion_is_written_out():
    ints = torch.arange(6)
    got = run(from_torch(Function(lambda x: torch.atan2(x, x)), (ints,)), ints)
    np.testing.assert_allclose(got, torch.atan2(ints, ints), rtol=1e-6)


@pytest.mark.filterwarnings("error")
def test_a_failed_conversion_prints_nothing(capfd):
    ints = torch.arange(6)
    from_torch(Function(lambda x: torch.atan2(x.relu(), x)), (ints,))  # tried, refused, and written out
    gc.collect()
    assert capfd.readouterr().err == ""


def test_a_wrong_conversion_is_refused(monkeypatch):
    monkeypatch.setattr("tvmhet.ir.torch_import.definition_of", lambda _: None)
    ints = torch.arange(6)
    with pytest.raises(BadModel, match=r"atan2.*converts to \[6\] int64; torch says \[6\] float32"):
        from_torch(Function(lambda x: torch.atan2(x, x)), (ints,))


def test_an_unknown_operator_is_named_with_its_place():
    class Inner(nn.Module):
        def forward(self, x):
            return torch.polygamma(2, x)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = Inner()

        def forward(self, x):
            return self.part(x)

    with pytest.raises(UnsupportedOperator, match=r"TVMHET-E005.*polygamma.* \(node 'polygamma' in module 'part'\)"):
        from_torch(Outer(), (torch.randn(8),))


def test_wrong_number_of_inputs():
    with pytest.raises(BadInput, match=r"Linear.forward does not take 2 example inputs"):
        from_torch(nn.Linear(2, 2), (torch.zeros(2), torch.zeros(2)))


def test_untraceable_module():
    where = r"at test_importers.py:\d+ in <lambda>: `.*if x.sum\(\) > 0 else -x.*`: \w+"
    with pytest.raises(BadModel, match=rf"torch.export cannot trace Function {where}"):
        from_torch(Function(lambda x: x if x.sum() > 0 else -x), (torch.ones(2),))


def test_the_place_in_a_module_that_cannot_be_traced():
    class Gate(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    with pytest.raises(
        BadModel, match=r"at test_importers.py:\d+ in Gate.forward: `return x if x.sum\(\) > 0 else -x`"
    ):
        from_torch(nn.Sequential(nn.Linear(2, 2), Gate()), (torch.ones(2, 2),))


def test_dynamic_shape_is_whole_until_bound():
    module, x = nn.Linear(3, 2), torch.randn(4, 3)
    shapes = ({0: torch.export.Dim("n", min=2, max=64)},)
    free = from_torch(module, (x,), dynamic_shapes=shapes)
    assert free.whole_reason == "its shapes depend on n, which bind_shapes does not bind"
    bound = from_torch(module, (x,), dynamic_shapes=shapes, bind_shapes={"n": 5})
    assert bound.whole_reason is None
    assert [int(d) for d in bound.inputs[0].ty.shape.values] == [5, 3]
    with pytest.raises(BadInput, match=r"names 'm'; the model's symbolic dims are \['n'\]\n.*; n is dim 0 of 'input'$"):
        from_torch(module, (x,), dynamic_shapes=shapes, bind_shapes={"m": 5})
    with pytest.raises(BadInput, match=r"= 0\n.*at least 1"):
        from_torch(module, (x,), dynamic_shapes=shapes, bind_shapes={"n": 0})


class Scaled(nn.Module):
    def forward(self, x, parts, *more):
        return x * parts["a"].sum(1, keepdim=True) + more[0][1:]


BATCH, WIDTH = torch.export.Dim("batch"), torch.export.Dim("width")


def dims_by_tensor(x, parts, longer):
    shapes = torch.export.ShapesCollection()
    shapes[x], shapes[parts], shapes[longer] = {0: BATCH}, {0: BATCH, 1: WIDTH}, {0: BATCH + 1}
    return shapes


@pytest.mark.parametrize(
    "dims",
    [
        ({0: BATCH}, {"a": {0: BATCH, 1: WIDTH}}, ({0: BATCH + 1},)),
        ([BATCH, None], {"a": (BATCH, WIDTH)}, ([BATCH + 1, None],)),
        {"x": {0: BATCH}, "parts": {"a": {0: BATCH, 1: WIDTH}}, "more": ({0: BATCH + 1},)},
        dims_by_tensor,
    ],
    ids=["tuple", "lists", "dict", "by tensor"],
)
def test_dims_have_the_names_that_the_user_gave(dims):
    inputs = (torch.ones(4, 2), {"a": torch.ones(4, 3)}, torch.zeros(5, 2))
    dims = dims(inputs[0], inputs[1]["a"], inputs[2]) if callable(dims) else dims
    free = from_torch(Scaled(), inputs, dynamic_shapes=dims)
    assert {str(v.name) for v in relax.analysis.defined_symbolic_vars(free.main)} == {"batch", "width"}
    assert {str(k) for k in free.main.attrs["tir_var_lower_bound"]} == {"batch", "width"}
    bound = from_torch(Scaled(), inputs, dynamic_shapes=dims, bind_shapes={"batch": 7, "width": 2})
    assert [[int(d) for d in i.ty.shape.values] for i in bound.inputs] == [[7, 2], [7, 2], [8, 2]]


def test_dims_that_torch_chose_keep_its_names():
    free = from_torch(nn.Linear(3, 2), (torch.ones(4, 3),), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    (symbol,) = [str(v.name) for v in relax.analysis.defined_symbolic_vars(free.main)]
    assert (
        from_torch(
            nn.Linear(3, 2), (torch.ones(4, 3),), dynamic_shapes=({0: torch.export.Dim.AUTO},), bind_shapes={symbol: 6}
        ).whole_reason
        is None
    )


# ---- exported programs


def test_pt2_file(tmp_path):
    module, x = nn.Linear(3, 2), torch.randn(4, 3)
    torch.export.save(torch.export.export(module, (x,)), tmp_path / "m.pt2")
    got = run(from_exported(tmp_path / "m.pt2"), x.numpy())
    np.testing.assert_allclose(got, module(x).detach().numpy(), rtol=1e-5, atol=1e-6)


def test_pt2_file_missing_or_broken(tmp_path):
    with pytest.raises(BadModel, match="does not exist"):
        from_exported(tmp_path / "none.pt2")
    (tmp_path / "bad.pt2").write_bytes(b"not a program")
    with pytest.raises(BadModel, match=r"bad.pt2' \(13 bytes\) is no exported program"):
        from_exported(tmp_path / "bad.pt2")


# ---- ONNX


def onnx_model(nodes, inputs, outputs, initializers=(), opset=18):
    def info(name, dims, dtype=TensorProto.FLOAT):
        return helper.make_tensor_value_info(name, dtype, dims)

    arrays = [numpy_helper.from_array(v, n) for n, v in initializers]
    graph = helper.make_graph(nodes, "g", [info(*i) for i in inputs], [info(*o) for o in outputs], arrays)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


WEIGHT = np.random.default_rng(0).standard_normal((16, 8)).astype("float32")


def two_nodes():
    nodes = [
        helper.make_node("MatMul", ["x", "w.weight"], ["y"]),
        helper.make_node("ReduceSum", ["y", "axes"], ["z"], keepdims=0, name="sum"),
    ]
    initializers = [("w.weight", WEIGHT), ("axes", np.array([1]))]
    return onnx_model(nodes, [("x", [4, 16])], [("z", [4])], initializers)


def test_onnx_weights_are_parameters_and_axes_constants(tmp_path):
    onnx.save(two_nodes(), tmp_path / "m.onnx")
    model = from_onnx(tmp_path / "m.onnx")
    assert [v.numpy().shape for v in model.params.values()] == [(16, 8)]
    x = np.random.default_rng(1).standard_normal((4, 16)).astype("float32")
    np.testing.assert_allclose(run(model, x), (x @ WEIGHT).sum(1), rtol=1e-5, atol=1e-5)


def test_onnx_dims_and_constants():
    nodes = [helper.make_node("ReduceSum", ["x", "axes"], ["z"], keepdims=0)]
    proto = onnx_model(nodes, [("x", ["n", 3]), ("axes", [1], TensorProto.INT64)], [("z", ["n"])])
    free = from_onnx(proto, constants={"axes": np.array([1])})
    assert free.whole_reason == "its shapes depend on n, which bind_shapes does not bind"
    assert from_onnx(proto, constants={"axes": np.array([1])}, bind_shapes={"n": 4}).whole_reason is None
    bound = from_onnx(proto, constants={"axes": np.array([1])}, shapes={"x": (4, 3)})
    assert bound.input_names == ("x",)
    np.testing.assert_array_equal(run(bound, np.ones((4, 3), "float32")), [3, 3, 3, 3])
    with pytest.raises(BadInput, match=r"no input 'y'; its inputs are \['x', 'axes'\]"):
        from_onnx(proto, shapes={"y": (1,)})


def test_onnx_operator_without_converter_is_written_out():
    proto = onnx_model([helper.make_node("Celu", ["x"], ["z"], alpha=2.0)], [("x", [4])], [("z", [4])])
    x = np.array([-3, -1, 0, 2], "float32")
    expected = np.maximum(x, 0) + np.minimum(2 * np.expm1(x / 2), 0)
    np.testing.assert_allclose(run(from_onnx(proto), x), expected, rtol=1e-5)


def test_onnx_second_result_of_layer_norm_is_right():
    node = helper.make_node("LayerNormalization", ["x", "s"], ["z", "mean"], axis=-1)
    proto = onnx_model([node], [("x", [2, 8]), ("s", [8])], [("z", [2, 8]), ("mean", [2, 1])])
    x = np.random.default_rng(0).standard_normal((2, 8)).astype("float32")
    _, mean = run(from_onnx(proto), x, np.ones(8, "float32"))
    np.testing.assert_allclose(mean, x.mean(-1, keepdims=True), rtol=1e-5, atol=1e-6)


def test_onnx_dims_of_no_elements_are_sizes():
    node = helper.make_node("ReduceSum", ["x", "axes"], ["y"], keepdims=0)
    axes = numpy_helper.from_array(np.array([1]), "axes")
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, d) for n, d in (("x", [2, 0, 4]), ("y", [2, 4]))]
    graph = helper.make_graph([node], "g", infos[:1], infos[1:], [axes])
    model = from_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9))
    assert model.whole_reason is None
    assert (run(model, np.zeros((2, 0, 4), "float32")) == np.zeros((2, 4))).all()


@pytest.mark.parametrize("end", [None, 0, 2])
def test_onnx_shapes_that_are_results_are_tensors(end):
    node = helper.make_node("Shape", ["x"], ["s"], **({} if end is None else {"end": end}))
    relu = helper.make_node("Relu", ["x"], ["y"])
    infos = [("y", [3, 4, 5]), ("s", [len((3, 4, 5)[:end])], TensorProto.INT64)]
    y, s = run(from_onnx(onnx_model([node, relu], [("x", [3, 4, 5])], infos)), np.ones((3, 4, 5), "float32"))
    assert y.shape == (3, 4, 5) and s.dtype == np.int64
    assert s.tolist() == [3, 4, 5][:end]
    alone = from_onnx(onnx_model([node], [("x", [3, 4, 5])], infos[1:]))
    assert run(alone, np.ones((3, 4, 5), "float32")).tolist() == [3, 4, 5][:end]


def test_onnx_definitions_know_defaults_and_what_is_left_out():
    """A window names its dtype by an attribute that has a default; attention with a past has no mask here."""
    window = onnx_model(
        [helper.make_node("HannWindow", ["n"], ["w"]), helper.make_node("Mul", ["x", "w"], ["y"])],
        [("x", [8])], [("y", [8])], [("n", np.array(8))],
    )  # fmt: skip
    got = run(from_onnx(window), np.ones(8, "float32"))
    np.testing.assert_allclose(got, torch.hann_window(8).numpy(), rtol=1e-5, atol=1e-6)
    sizes = {"q": [1, 2, 3, 8], "k": [1, 2, 3, 8], "v": [1, 2, 3, 8], "pk": [1, 2, 4, 8], "pv": [1, 2, 4, 8]}
    node = helper.make_node("Attention", ["q", "k", "v", "", "pk", "pv"], ["y", "nk", "nv"])
    made = [("y", [1, 2, 3, 8]), ("nk", [1, 2, 7, 8]), ("nv", [1, 2, 7, 8])]
    model = from_onnx(onnx_model([node], list(sizes.items()), made, opset=23))
    q, k, v, pk, pv = (
        np.random.default_rng(i).standard_normal(s).astype("float32") for i, s in enumerate(sizes.values())
    )
    keys, values = np.concatenate([pk, k], 2), np.concatenate([pv, v], 2)
    want = nn.functional.scaled_dot_product_attention(*map(torch.from_numpy, (q, keys, values)))
    y, new_keys, _ = run(model, q, k, v, pk, pv)
    np.testing.assert_allclose(y, want.numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(new_keys, keys)


def test_onnx_unknown_operator_is_named():
    proto = onnx_model([helper.make_node("Frobnicate", ["x"], ["z"], name="odd")], [("x", [4])], [("z", [4])])
    with pytest.raises(UnsupportedOperator, match=r"Frobnicate \(node 'odd' making \['z'\]\) has no conversion"):
        from_onnx(proto)


def test_onnx_wrong_declared_type_is_refused():
    proto = onnx_model([helper.make_node("Relu", ["x"], ["z"])], [("x", [4])], [("z", [5])])
    with pytest.raises(BadModel, match=r"output 'z' converts to \[4\] float32; the file declares \[5\] float32"):
        from_onnx(proto)


def test_onnx_file_missing_broken_or_empty(tmp_path):
    with pytest.raises(BadModel, match="does not exist"):
        from_onnx(tmp_path / "none.onnx")
    (tmp_path / "bad.onnx").write_bytes(b"\xff" * 40)
    with pytest.raises(BadModel, match=r"bad.onnx' \(40 bytes\) cannot be read"):
        from_onnx(tmp_path / "bad.onnx")
    (tmp_path / "empty.onnx").write_bytes(b"")
    with pytest.raises(BadModel, match="0 nodes and no output"):
        from_onnx(tmp_path / "empty.onnx")


def test_onnx_invalid_graph_is_refused_in_onnx_words():
    proto = onnx_model([helper.make_node("Relu", ["nowhere"], ["z"])], [("x", [4])], [("z", [4])])
    with pytest.raises(BadModel, match="not valid"):
        from_onnx(proto)


WITHOUT_ONNX = """
import sys
sys.modules["onnx"] = None  # as if it were not installed
import torch
from tvmhet.errors import MissingPackage
from tvmhet.ir.importers import from_onnx, from_torch
print(from_torch(torch.nn.Linear(3, 2), (torch.randn(1, 3),)).input_names)
try:
    from_onnx("m.onnx")
except MissingPackage as error:
    print(error)
"""


def test_onnx_package_missing():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITHOUT_ONNX], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[0] == "('input',)"
    assert "pip install 'tvmhet[onnx]'" in done.stdout


# ---- models


def test_model_checks_its_parameters():
    model = from_torch(nn.Linear(3, 2), (torch.randn(4, 3),))
    with pytest.raises(BadModel, match="no value for"):
        Model(model.mod, {})


class Selected(nn.Module):
    """As many rows as there are positive elements."""

    def forward(self, x):
        return torch.nonzero(x > 0) * 2


def test_shapes_that_depend_on_values_are_refused_by_name():
    with pytest.raises(UnsupportedOperator, match=r"nonzero.* makes a tensor whose shape depends on values"):
        from_torch(Selected(), (torch.randn(6, 3),))


def test_a_compiled_module_is_the_one_inside():
    """In training, too, where what the compiler made cannot be traced; names are those of the module inside."""
    inside = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    compiled = torch.compile(inside)
    step = from_torch(compiled, (torch.zeros(2, 4),), loss="mse", mode="training")
    assert sorted(step.state_dict) == ["0.bias", "0.weight"]
    assert from_torch(compiled.eval(), (torch.zeros(2, 4),)).name == "Sequential"


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_torchscript_is_refused(mode):
    script = torch.jit.script(nn.Linear(4, 3))
    options = {"loss": "mse", "mode": "training"} if mode == "training" else {}
    with pytest.raises(BadInput, match=r"RecursiveScriptModule of TorchScript[\s\S]*made of"):
        from_torch(script, (torch.zeros(2, 4),), **options)
