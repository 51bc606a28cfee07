"""graph/fusion on imported models: the groups that FuseOps makes of the module are among the legal kernels."""

import pytest
import tvm
from tvm import relax

from tvmhet import zoo
from tvmhet.graph.fusion import fuse_ops_groups, legal_kernels
from tvmhet.ir.extract import extract
from tvmhet.ir.importers import from_torch
from tvmhet.ir.transform.name_operators import NameOperators

SMALL = {
    "resnet50": {"image": 32, "blocks": (1, 2), "base_width": 8, "num_classes": 10},
    "bert_base": {"length": 16, "layers": 2, "dim": 32, "heads": 4, "vocab": 50, "max_len": 16},
}


@relax.expr_functor.mutator
class TagKernels(relax.expr_functor.PyExprMutator):
    """Give each call_tir its own PrimFunc that carries the name of the bound variable: FuseOps merges equal groups."""

    def __init__(self, mod):
        super().__init__(mod)
        self.mod = mod

    def visit_var_binding_(self, binding):
        call = binding.value
        if isinstance(call, relax.Call) and call.op == tvm.ir.Op.get("relax.call_tir"):
            func = self.mod[call.args[0]].with_attr("tvmhet.op", binding.var.name)
            gvar = self.builder_.add_func(func, "tagged")
            call = relax.Call(call.op, [gvar, *call.args[1:]], call.attrs, call.ty_args)
            binding = relax.VarBinding(binding.var, call)
        super().visit_var_binding_(binding)


def groups_of_fuse_ops(mod):
    """Return FuseOps' groups of two operators or more, as sets of names."""
    with tvm.target.Target("llvm"):
        mod = relax.transform.AnnotateTIROpPattern()(relax.transform.LegalizeOps()(mod))
    tagger = TagKernels(mod)
    main = tagger.visit_expr(mod["main"])
    tagger.builder_.update_func(mod.get_global_var("main"), main)
    fused = relax.transform.FuseOps()(tagger.builder_.get())
    groups = set()
    for _, func in fused.functions_items():
        if isinstance(func, relax.Function) and func.attrs and "Primitive" in func.attrs:
            calls = [b.value for block in func.body.blocks for b in block.bindings]
            calls = [c for c in calls if isinstance(c, relax.Call)]
            groups.add(frozenset(str(fused[c.args[0]].attrs["tvmhet.op"]) for c in calls))
    return {g for g in groups if len(g) > 1}


@pytest.mark.parametrize("name", SMALL)
def test_fuse_ops_choice_is_among_ours(name):
    mod = NameOperators()(from_torch(*zoo.get(name, **SMALL[name])).mod)
    graph = extract(mod)
    theirs = groups_of_fuse_ops(mod)
    names = [op.name for op in graph.operators]
    assert len(theirs) > 8
    assert {frozenset(names[o] for o in k.ops) for k in fuse_ops_groups(graph) if len(k.ops) > 1} == theirs
    assert theirs <= {frozenset(names[o] for o in k.ops) for k in legal_kernels(graph)}
