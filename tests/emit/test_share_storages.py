"""emit/share_storages: the largest tensors are given their storages first; what may be a view keeps its tensor."""

import pytest
import tvm
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from tvmhet.emit.share_storages import ShareStorages


@I.ir_module
class Before:
    """A wide result, two narrow ones, a wide one: TVM gives the second narrow one the first wide storage."""

    @R.function(pure=False)
    def main(x: R.Tensor((4,), "float32")):
        s0: R.Any = R.memory.alloc_storage(R.shape([64]), 0, R.str("global"), R.dtype("float32"))
        a: R.Tensor((16,), "float32") = R.memory.alloc_tensor(s0, 0, R.shape([16]), R.dtype("float32"), 0)
        _a = R.call_packed("f", x, a, ty_args=[R.Tuple()])
        s1: R.Any = R.memory.alloc_storage(R.shape([16]), 0, R.str("global"), R.dtype("float32"))
        b: R.Tensor((4,), "float32") = R.memory.alloc_tensor(s1, 0, R.shape([4]), R.dtype("float32"), 0)
        _b = R.call_packed("f", a, b, ty_args=[R.Tuple()])
        c: R.Tensor((4,), "float32") = R.memory.alloc_tensor(s0, 0, R.shape([4]), R.dtype("float32"), 0)
        _c = R.call_packed("f", b, c, ty_args=[R.Tuple()])
        s2: R.Any = R.memory.alloc_storage(R.shape([64]), 0, R.str("global"), R.dtype("float32"))
        d: R.Tensor((16,), "float32") = R.memory.alloc_tensor(s2, 0, R.shape([16]), R.dtype("float32"), 0)
        _d = R.call_packed("f", b, c, d, ty_args=[R.Tuple()])
        s3: R.Any = R.memory.alloc_storage(R.shape([64]), 0, R.str("global"), R.dtype("float32"))
        out: R.Tensor((16,), "float32") = R.memory.alloc_tensor(s3, 0, R.shape([16]), R.dtype("float32"), 0)
        _o = R.call_packed("f", d, out, ty_args=[R.Tuple()])
        return out


@I.ir_module
class Expected:
    """The first wide result is where the last will be, which leaves."""

    @R.function(pure=False)
    def main(x: R.Tensor((4,), "float32")):
        s0: R.Any = R.memory.alloc_storage(R.shape([64]), 0, R.str("global"), R.dtype("float32"))
        a: R.Tensor((16,), "float32") = R.memory.alloc_tensor(s0, 0, R.shape([16]), R.dtype("float32"), 0)
        _a = R.call_packed("f", x, a, ty_args=[R.Tuple()])
        s1: R.Any = R.memory.alloc_storage(R.shape([16]), 0, R.str("global"), R.dtype("float32"))
        b: R.Tensor((4,), "float32") = R.memory.alloc_tensor(s1, 0, R.shape([4]), R.dtype("float32"), 0)
        _b = R.call_packed("f", a, b, ty_args=[R.Tuple()])
        c: R.Tensor((4,), "float32") = R.memory.alloc_tensor(s0, 0, R.shape([4]), R.dtype("float32"), 0)
        _c = R.call_packed("f", b, c, ty_args=[R.Tuple()])
        s2: R.Any = R.memory.alloc_storage(R.shape([64]), 0, R.str("global"), R.dtype("float32"))
        d: R.Tensor((16,), "float32") = R.memory.alloc_tensor(s2, 0, R.shape([16]), R.dtype("float32"), 0)
        _d = R.call_packed("f", b, c, d, ty_args=[R.Tuple()])
        out: R.Tensor((16,), "float32") = R.memory.alloc_tensor(s0, 0, R.shape([16]), R.dtype("float32"), 0)
        _o = R.call_packed("f", d, out, ty_args=[R.Tuple()])
        return out


def test_the_next_large_tensor_finds_the_large_storage():
    tvm.ir.assert_structural_equal(ShareStorages()(Before), Expected)


def test_planned_once_more_it_stays():
    tvm.ir.assert_structural_equal(ShareStorages()(Expected), Expected)


def storages(mod):
    """Which tensors share: the storage of each, by name."""
    bindings = [b for block in mod["main"].body.blocks for b in block.bindings]
    named = {b.var.name: b.value for b in bindings if isinstance(b.value, tvm.ir.Call)}
    return {n: v.args[0] for n, v in named.items() if v.op == tvm.ir.Op.get("relax.memory.alloc_tensor")}


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
    found = storages(ShareStorages()(Views))
    assert len({found[name] for name in "bde"}) == 3
    assert found["z"] == found["d"]  # not that of `e`, which is returned
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
    tvm.ir.assert_structural_equal(ShareStorages()(mod), mod)
