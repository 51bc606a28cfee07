"""emit/place_tensors: side by side in one storage, the largest first; what may be a view keeps its tensor."""

import numpy as np
import pytest
import torch
import tvm
import tvm_ffi
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import tvmhet
from tests.placed import cpus
from tvmhet._passes import passes_func
from tvmhet.emit.place_tensors import PlaceTensors
from tvmhet.graph.placement import KernelPlacement
from tvmhet.ir.attrs import POOLED_ATTR
from tvmhet.ir.extract import extract
from tvmhet.ir.importers import from_torch
from tvmhet.ir.kernel_module import kernels_module
from tvmhet.ir.transform.name_operators import NameOperators


@I.ir_module
class Before:
    """A wide result, two narrow ones, a wide one: TVM gives the second narrow one the first wide storage."""

    @R.function(pure=False)
    def main(x: R.Tensor((4,), "float32")):
        s0: R.Any = R.memory.alloc_storage(R.shape([1024]), 0, R.str("global"), R.dtype("float32"))
        a: R.Tensor((256,), "float32") = R.memory.alloc_tensor(s0, 0, R.shape([256]), R.dtype("float32"), 0)
        _a = R.call_packed("f", x, a, ty_args=[R.Tuple()])
        s1: R.Any = R.memory.alloc_storage(R.shape([256]), 0, R.str("global"), R.dtype("float32"))
        b: R.Tensor((8, 8), "float32") = R.memory.alloc_tensor(s1, 0, R.shape([8, 8]), R.dtype("float32"), 0)
        _b = R.call_packed("f", a, b, ty_args=[R.Tuple()])
        c: R.Tensor((64,), "float32") = R.memory.alloc_tensor(s0, 0, R.shape([64]), R.dtype("float32"), 0)
        _c = R.call_packed("f", b, c, ty_args=[R.Tuple()])
        s2: R.Any = R.memory.alloc_storage(R.shape([1024]), 0, R.str("global"), R.dtype("float32"))
        d: R.Tensor((256,), "float32") = R.memory.alloc_tensor(s2, 0, R.shape([256]), R.dtype("float32"), 0)
        _d = R.call_packed("f", b, c, d, ty_args=[R.Tuple()])
        s3: R.Any = R.memory.alloc_storage(R.shape([1024]), 0, R.str("global"), R.dtype("float32"))
        out: R.Tensor((256,), "float32") = R.memory.alloc_tensor(s3, 0, R.shape([256]), R.dtype("float32"), 0)
        _o = R.call_packed("f", d, out, ty_args=[R.Tuple()])
        return out


@I.ir_module
class Expected:
    """The first wide result and then the second narrow one are where the last will be; two others lie side by side."""

    @R.function(pure=False)
    def main(x: R.Tensor((4,), "float32")):
        s0: R.Any = R.memory.alloc_storage(R.shape([1024]), 0, R.str("global"), R.dtype("float32"))
        a: R.Tensor((256,), "float32") = R.memory.alloc_tensor(s0, 0, R.shape([256]), R.dtype("float32"), 0)
        _a = R.call_packed("f", x, a, ty_args=[R.Tuple()])
        s1: R.Any = R.memory.alloc_storage(R.shape([1280]), 0, R.str("global"), R.dtype("float32"))
        m: R.Tensor((1280,), "uint8") = R.memory.alloc_tensor(s1, 0, R.shape([1280]), R.dtype("uint8"), 0)
        b = R.call_packed(
            "tvmhet.TensorAt", m, 1024, R.shape([8, 8]), R.dtype("float32"), ty_args=[R.Tensor((8, 8), "float32")]
        )
        _b = R.call_packed("f", a, b, ty_args=[R.Tuple()])
        c: R.Tensor((64,), "float32") = R.memory.alloc_tensor(s0, 0, R.shape([64]), R.dtype("float32"), 0)
        _c = R.call_packed("f", b, c, ty_args=[R.Tuple()])
        d: R.Tensor((256,), "float32") = R.memory.alloc_tensor(s1, 0, R.shape([256]), R.dtype("float32"), 0)
        _d = R.call_packed("f", b, c, d, ty_args=[R.Tuple()])
        out: R.Tensor((256,), "float32") = R.memory.alloc_tensor(s0, 0, R.shape([256]), R.dtype("float32"), 0)
        _o = R.call_packed("f", d, out, ty_args=[R.Tuple()])
        return out


@I.ir_module
class Pooled:
    """Where others take what is free: as many storages as are alive at once, of their sizes."""

    @R.function(pure=False)
    def main(x: R.Tensor((4,), "float32")):
        R.func_attr({"tvmhet.pooled": True})
        s0: R.Any = R.memory.alloc_storage(R.shape([1024]), 0, R.str("global"), R.dtype("float32"))
        a: R.Tensor((256,), "float32") = R.memory.alloc_tensor(s0, 0, R.shape([256]), R.dtype("float32"), 0)
        _a = R.call_packed("f", x, a, ty_args=[R.Tuple()])
        s1: R.Any = R.memory.alloc_storage(R.shape([256]), 0, R.str("global"), R.dtype("float32"))
        b: R.Tensor((8, 8), "float32") = R.memory.alloc_tensor(s1, 0, R.shape([8, 8]), R.dtype("float32"), 0)
        _b = R.call_packed("f", a, b, ty_args=[R.Tuple()])
        c: R.Tensor((64,), "float32") = R.memory.alloc_tensor(s0, 0, R.shape([64]), R.dtype("float32"), 0)
        _c = R.call_packed("f", b, c, ty_args=[R.Tuple()])
        s2: R.Any = R.memory.alloc_storage(R.shape([1024]), 0, R.str("global"), R.dtype("float32"))
        d: R.Tensor((256,), "float32") = R.memory.alloc_tensor(s2, 0, R.shape([256]), R.dtype("float32"), 0)
        _d = R.call_packed("f", b, c, d, ty_args=[R.Tuple()])
        out: R.Tensor((256,), "float32") = R.memory.alloc_tensor(s0, 0, R.shape([256]), R.dtype("float32"), 0)
        _o = R.call_packed("f", d, out, ty_args=[R.Tuple()])
        return out


def test_tensors_lie_side_by_side():
    tvm.ir.assert_structural_equal(PlaceTensors()(Before), Expected)


def test_a_pooled_function_has_a_storage_for_each_that_is_alive():
    before = tvm.IRModule({"main": Before["main"].with_attr(POOLED_ATTR, True)})
    tvm.ir.assert_structural_equal(PlaceTensors()(before), Pooled)


@pytest.mark.parametrize("mod", [Before, Expected])
def test_it_computes_the_same(mod):
    """`f` adds the first value of each operand to its place in the result, as the emitted code calls it."""

    @tvm.register_global_func("f", override=True)
    def f(*tensors):
        *operands, result = (np.from_dlpack(t) for t in tensors)
        result[...] = np.arange(result.size).reshape(result.shape) + sum(o.reshape(-1)[-1] for o in operands)

    passes_func("tvmhet.TensorAt")
    lower = tvm.transform.Sequential([relax.transform.LowerRuntimeBuiltin(), relax.transform.VMShapeLower()])
    built = tvm.compile(relax.transform.AttachGlobalSymbol()(lower(PlaceTensors()(mod))), "llvm", relax_pipeline=None)
    found = relax.VirtualMachine(built, tvm.cpu())["main"](tvm.runtime.tensor(np.full(4, 3, "float32"))).numpy()
    a = 255 + 3
    b = 63 + a
    c = 63 + b
    d = 255 + b + c
    np.testing.assert_array_equal(found, np.arange(256) + d)


def test_kernels_that_are_measured_are_pooled():
    """Servers that measure them have TVM alone, which knows no `TensorAt`."""
    mod = NameOperators()(from_torch(torch.nn.Linear(4, 4), (torch.randn(2, 4),)).mod)
    ops = tuple(op.name for op in extract(mod).operators)
    made = kernels_module(mod, [KernelPlacement(ops[-1], ops, "tvm")])
    assert made["k0"].attrs[POOLED_ATTR]


def test_a_tensor_beyond_its_block_is_refused():
    block = tvm.runtime.tensor(np.zeros(1024, "uint8"))
    tensor_at = passes_func("tvmhet.TensorAt")
    there = tensor_at(block, 768, tvm.runtime.ShapeTuple([8, 8]), "float32")
    assert there.shape == (8, 8) and np.from_dlpack(there).strides == (32, 4)
    assert np.from_dlpack(there).ctypes.data == np.from_dlpack(block).ctypes.data + 768
    for offset, sides in ((769, [8, 8]), (-256, [8]), (1280, [0]), (0, [257])):
        with pytest.raises(ValueError, match=f"bytes at {offset} does not lie in its block of 1024"):
            tensor_at(block, offset, tvm.runtime.ShapeTuple(sides), "float32")


def test_a_tensor_holds_its_block():
    values = np.arange(128, dtype="int32")
    there = passes_func("tvmhet.TensorAt")(tvm.runtime.tensor(values), 256, tvm.runtime.ShapeTuple([64]), "int32")
    np.testing.assert_array_equal(there.numpy(), values[64:])


def test_a_scalar_lies_in_a_block():
    values = np.arange(4, dtype="float32")
    there = passes_func("tvmhet.TensorAt")(tvm.runtime.tensor(values), 8, tvm.runtime.ShapeTuple([]), "float32")
    assert there.shape == () and there.numpy() == 2.0


class Shares(torch.nn.Module):
    """Two scalars are kept between kernels."""

    def forward(self, x):
        total, largest = (x * x).sum(), x.amax()
        return x / total - largest, torch.relu(x / largest).sum(0) * total


def test_a_model_with_scalars_inside():
    x = torch.randn(5, 7)
    model = tvmhet.from_torch(Shares(), (x,))
    with tvmhet.build(model, cluster=cpus(v3=1), makers=("tvm",), inline=True) as lib:
        for got, want in zip(lib(x), Shares()(x), strict=True):
            torch.testing.assert_close(got, want)


def places(mod):
    """Where tensors lie: the storage of each and how far from its start, by name."""
    bindings = [b for block in mod["main"].body.blocks for b in block.bindings]
    calls = {b.var: b.value for b in bindings if isinstance(b.value, tvm.ir.Call)}
    tensor, at = tvm.ir.Op.get("relax.memory.alloc_tensor"), relax.ExternFunc("tvmhet.TensorAt")
    direct = {v: (c.args[0], 0) for v, c in calls.items() if c.op == tensor}
    behind = {v: (direct[c.args[0]][0], int(c.args[1])) for v, c in calls.items() if tvm_ffi.structural_equal(c.op, at)}
    return {v.name: place for v, place in (direct | behind).items()}


@I.ir_module
class Views:
    """`b` is read last by way of what a call returned, as a part of a tuple; `d` under another name; `e` leaves.

    The other part of the tuple, `c`, is never read.
    """

    @R.function(pure=False)
    def main(x: R.Tensor((4,), "float32")):
        s0: R.Any = R.memory.alloc_storage(R.shape([16]), 0, R.str("global"), R.dtype("float32"))
        b: R.Tensor((4,), "float32") = R.memory.alloc_tensor(s0, 0, R.shape([4]), R.dtype("float32"), 0)
        view = R.call_packed("view", b, ty_args=[R.Tensor((2, 2), "float32")])
        s1: R.Any = R.memory.alloc_storage(R.shape([16]), 0, R.str("global"), R.dtype("float32"))
        c: R.Tensor((4,), "float32") = R.memory.alloc_tensor(s1, 0, R.shape([4]), R.dtype("float32"), 0)
        both = (view, c)
        s2: R.Any = R.memory.alloc_storage(R.shape([16]), 0, R.str("global"), R.dtype("float32"))
        d: R.Tensor((4,), "float32") = R.memory.alloc_tensor(s2, 0, R.shape([4]), R.dtype("float32"), 0)
        other = d
        s3: R.Any = R.memory.alloc_storage(R.shape([16]), 0, R.str("global"), R.dtype("float32"))
        e: R.Tensor((4,), "float32") = R.memory.alloc_tensor(s3, 0, R.shape([4]), R.dtype("float32"), 0)
        _1 = R.call_packed("f", x, e, ty_args=[R.Tuple()])
        last = both[0]
        _2 = R.call_packed("f", last, other, ty_args=[R.Tuple()])
        s4: R.Any = R.memory.alloc_storage(R.shape([16]), 0, R.str("global"), R.dtype("float32"))
        z: R.Tensor((4,), "float32") = R.memory.alloc_tensor(s4, 0, R.shape([4]), R.dtype("float32"), 0)
        _3 = R.call_packed("f", x, z, ty_args=[R.Tuple()])
        return e


def test_what_may_be_a_view_keeps_its_tensor():
    found = places(PlaceTensors()(Views))
    assert len({found[name] for name in "bde"}) == 3
    assert found["z"] in (found["b"], found["d"])  # not that of `e`, which is returned
    assert found["c"] == found["e"]


@I.ir_module
class Branches:
    """Two equal results of which either may be read last."""

    @R.function(pure=False)
    def main(x: R.Tensor((4,), "float32"), which: R.Tensor((), "bool")):
        s0: R.Any = R.memory.alloc_storage(R.shape([16]), 0, R.str("global"), R.dtype("float32"))
        a: R.Tensor((4,), "float32") = R.memory.alloc_tensor(s0, 0, R.shape([4]), R.dtype("float32"), 0)
        s1: R.Any = R.memory.alloc_storage(R.shape([16]), 0, R.str("global"), R.dtype("float32"))
        b: R.Tensor((4,), "float32") = R.memory.alloc_tensor(s1, 0, R.shape([4]), R.dtype("float32"), 0)
        if which:
            y = R.call_packed("g", a, ty_args=[R.Tensor((4,), "float32")])
        else:
            y = R.call_packed("g", b, ty_args=[R.Tensor((4,), "float32")])
        return y


@I.ir_module
class AnySize:
    @R.function(pure=False)
    def main(x: R.Tensor(("n",), "float32")):
        n = T.int64()
        s0: R.Any = R.memory.alloc_storage(R.shape([n * 4]), 0, R.str("global"), R.dtype("float32"))
        a: R.Tensor((n,), "float32") = R.memory.alloc_tensor(s0, 0, R.shape([n]), R.dtype("float32"), 0)
        _a = R.call_packed("f", x, a, ty_args=[R.Tuple()])
        s1: R.Any = R.memory.alloc_storage(R.shape([n * 4]), 0, R.str("global"), R.dtype("float32"))
        b: R.Tensor((n,), "float32") = R.memory.alloc_tensor(s1, 0, R.shape([n]), R.dtype("float32"), 0)
        _b = R.call_packed("f", x, b, ty_args=[R.Tuple()])
        return x


@I.ir_module
class TwoPlaces:
    @R.function(pure=False)
    def main(x: R.Tensor((4,), "float32")):
        s0: R.Any = R.memory.alloc_storage(R.shape([16]), 0, R.str("global"), R.dtype("float32"))
        a: R.Tensor((4,), "float32") = R.memory.alloc_tensor(s0, 0, R.shape([4]), R.dtype("float32"), 0)
        _a = R.call_packed("f", x, a, ty_args=[R.Tuple()])
        s1: R.Any = R.memory.alloc_storage(R.shape([16]), 1, R.str("global"), R.dtype("float32"))
        b: R.Tensor((4,), "float32") = R.memory.alloc_tensor(s1, 0, R.shape([4]), R.dtype("float32"), 1)
        _b = R.call_packed("f", x, b, ty_args=[R.Tuple()])
        return x


@I.ir_module
class Nothing:
    @R.function
    def main(x: R.Tensor((4,), "float32")):
        return x


@pytest.mark.parametrize("mod", [Branches, AnySize, TwoPlaces, Nothing], ids=lambda mod: mod.__name__)
def test_what_cannot_be_planned_stays_as_tvm_planned_it(mod):
    tvm.ir.assert_structural_equal(PlaceTensors()(mod), mod)
