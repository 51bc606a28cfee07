"""PrimFuncs that FuseTIR cannot join, or must not, are opaque; the model around them is fused and placed."""

import numpy as np
import pytest
import tvm
from tvm import relax, te
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import tvmhet
from tests.placed import cpus
from tvmhet.graph.opgraph import PatternKind
from tvmhet.ir.transform.mark_unfusable import MarkUnfusable

X = np.linspace(-1, 1, 64, dtype="float32").reshape(8, 8)


@I.ir_module
class ByHand:
    @T.prim_func(s_tir=True)
    def turned(a: T.Buffer((8, 8), "float32"), b: T.Buffer((8, 8), "float32")):
        for i, j in T.grid(8, 8):
            with T.sblock("b"):
                vi, vj = T.axis.remap("SS", [i, j])
                b[vi, vj] = a[vj, vi] * T.float32(2)

    @R.function
    def main(x: R.Tensor((8, 8), "float32")) -> R.Tensor((8, 8), "float32"):
        cls = ByHand
        with R.dataflow():
            a = R.nn.relu(x)
            b = R.call_tir(cls.turned, (a,), out_ty=R.Tensor((8, 8), "float32"))
            c = R.add(b, x)
            d = R.exp(c)
            R.output(d)
        return d


def made(size):
    """A module of one PrimFunc over `size` elements, an element-wise one."""
    a = te.placeholder((size,), "float32")
    func = te.create_prim_func([a, te.compute((size,), lambda i: a[i] + 1.0)])
    return tvm.IRModule({"k": func.with_attr("global_symbol", "k")})


def test_short_sizes_and_schedules_of_others_are_marked():
    short, long = made(8), made(tvm.tirx.IntImm("int64", 8))
    assert int(MarkUnfusable()(short)["k"].attrs["op_pattern"]) == PatternKind.OPAQUE
    assert MarkUnfusable()(long).same_as(long)
    scheduled = tvm.IRModule({"k": long["k"].with_attr("tirx.is_scheduled", True)})
    assert int(MarkUnfusable()(scheduled)["k"].attrs["op_pattern"]) == PatternKind.OPAQUE
    assert "op_pattern" not in short["k"].attrs


def test_what_somebody_said_stays():
    said = tvm.IRModule({"k": made(8)["k"].with_attr("op_pattern", int(PatternKind.ELEM_WISE))})
    assert MarkUnfusable()(said).same_as(said)


@pytest.mark.parametrize("makers", [("tvm",), ("tvm", "library")])
def test_a_module_with_a_function_by_hand_is_fused_around_it(tmp_path, monkeypatch, makers):
    monkeypatch.setenv("TVMHET_CACHE_DIR", str(tmp_path))
    with tvmhet.build(ByHand, cluster=cpus(v2=1), makers=makers) as lib:
        (stage,) = lib.plan.stages
        names = [sorted(k.ops) for k in stage.kernels]
        assert ["add", "exp"] in names and ["turned"] in names
        np.testing.assert_allclose(lib(X), np.exp(np.maximum(X, 0).T * 2 + X), rtol=1e-6)


def test_placed_whole_it_is_compiled_too(tmp_path, monkeypatch):
    monkeypatch.setenv("TVMHET_CACHE_DIR", str(tmp_path))
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((8, 8), "float32"))
    c = relax.Var("c", relax.TensorType((), "bool"))
    turned = builder.add_func(ByHand["turned"], "turned")
    with builder.function("main", [x, c]):
        a = builder.emit(relax.op.nn.relu(x))
        b = builder.emit(relax.call_tir(turned, [a], x.ty))
        y = builder.emit(relax.op.add(b, x))
        builder.emit(relax.op.assert_op(c, format="no"))
        builder.emit_func_output(y)
    mod = builder.finalize()
    main = mod["main"]
    mod["main"] = relax.Function(main.params, main.body, main.ret_ty, False, main.attrs)
    with tvmhet.build(mod, cluster=cpus(v2=1)) as lib:
        assert lib.plan.whole_reason
        np.testing.assert_allclose(lib(X, np.array(True)), np.maximum(X, 0).T * 2 + X, rtol=1e-6)
