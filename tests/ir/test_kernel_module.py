"""kernels_module: one function per kernel, made as FuseByPlan makes it, with the live-ins as parameters."""

import json

import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from tvmhet._tvm import structural_equal
from tvmhet.graph.placement import KernelPlacement
from tvmhet.ir.kernel_module import kernels_module
from tvmhet.ir.transform.fuse_by_plan import FuseByPlan


@I.ir_module
class Model:
    @R.function
    def main(x: R.Tensor((4, 6), "float32"), w: R.Tensor((6, 6), "float32"), b: R.Tensor((6,), "float32")):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            mm = R.matmul(x, w)
            biased = R.add(mm, b)
            act = R.nn.relu(biased)
            soft = R.nn.softmax(act)
            parts = R.split(soft, 2, axis=1)
            left = parts[0]
            right = parts[1]
            out = R.add(left, right)
            R.output(out, act)
        return (out, act)


FUSED = KernelPlacement("act", ("mm", "biased", "act"), "tvm")
LIBRARY = KernelPlacement(
    "biased",
    ("mm", "biased"),
    "library",
    json.dumps([["matmul", {}, ["i0", "i1"]], ["bias", {}, ["o0", "i2"]]]),
)
SOFT, PARTS = KernelPlacement("soft", ("soft",), "tvm"), KernelPlacement("parts", ("parts",), "tvm")


def test_kernels_may_overlap_and_are_numbered_in_order():
    mod = kernels_module(Model, (FUSED, SOFT, LIBRARY, PARTS))
    relax.analysis.well_formed(mod)
    relax_functions = {g.name_hint: f for g, f in mod.functions_items() if isinstance(f, relax.Function)}
    assert {n for n in relax_functions if n.startswith("k")} == {"k0", "k1", "k2", "k3"}
    assert [p.name for p in relax_functions["k0"].params] == ["x", "w", "b"]
    assert [p.name for p in relax_functions["k3"].params] == ["soft"]


def test_every_kernel_returns_a_tuple_of_its_live_outs():
    mod = kernels_module(Model, (FUSED, SOFT, LIBRARY, PARTS))
    fields = {n: mod[n].ret_ty.fields for n in ("k0", "k1", "k2", "k3")}
    assert {n: len(f) for n, f in fields.items()} == {"k0": 1, "k1": 1, "k2": 1, "k3": 2}
    assert [int(d) for d in fields["k3"][1].shape.values] == [4, 3]


def test_a_kernel_is_the_function_that_a_stage_will_hold():
    alone = kernels_module(Model, (FUSED,))
    rest = [KernelPlacement(n, (n,), "tvm") for n in ("soft", "parts", "out")]
    planned = FuseByPlan([FUSED, *rest])(Model)
    assert structural_equal(alone["fused_matmul_add_relu"], planned["fused_matmul_add_relu"])


def test_a_library_kernel_is_one_packed_call():
    func = kernels_module(Model, (LIBRARY,))["k0"]
    calls = [b.value for block in func.body.blocks for b in block.bindings if isinstance(b.value, relax.Call)]
    assert [str(c.op.name) for c in calls] == ["relax.call_dps_packed"]
    assert str(calls[0].args[0].global_symbol) == "tvmhet.library"
    assert [p.name for p in func.params] == ["x", "w", "b"]


def test_the_model_is_unchanged():
    before = tvm.ir.save_json(Model)
    kernels_module(Model, (FUSED, SOFT))
    assert tvm.ir.save_json(Model) == before
