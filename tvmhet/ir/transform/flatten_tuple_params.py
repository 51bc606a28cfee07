"""Make each tensor of a tuple that `main` takes a parameter of its own.

Before:  main(x, weights: (A, (B,)))      After:  main(x, weights_0: A, weights_1_0: B):
                                                      weights = (weights_0, (weights_1_0,))

So BundleModelParams writes a model's weights. The tuple is only a name afterwards, which CanonicalizeBindings removes,
and a stage can be given just the tensors that it reads.
"""

from __future__ import annotations

from collections.abc import Iterator

import tvm
from tvm import relax

from tvmhet.ir.bindings import leaf_types
from tvmhet.ir.model import ENTRY


@tvm.transform.module_pass(opt_level=0, name="tvmhet.FlattenTupleParams")
class FlattenTupleParams:
    """Replace the tuples among the parameters of `main` by their tensors."""

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        main = mod[ENTRY]
        if not any(isinstance(p.ty, relax.TupleType) for p in main.params):
            return mod
        names = leaf_names(main)
        params: list[relax.Var] = []
        tuples: list[relax.Binding] = []
        for param in main.params:
            if not isinstance(param.ty, relax.TupleType):
                params.append(param)
                continue
            leaves = [relax.Var(n, ty) for n, ty in zip(names[str(param.name)], leaf_types(param.ty), strict=True)]
            params += leaves
            tuples.append(relax.VarBinding(param, _tuple_of(param.ty, iter(leaves))))
        body = relax.SeqExpr([relax.BindingBlock(tuples), *main.body.blocks], main.body.body)
        out = mod.clone()
        func = relax.Function(params, body, main.ret_ty, main.is_pure, main.attrs)
        out.update_func(out.get_global_var(ENTRY), func)
        return relax.transform.Normalize()(out)


def leaf_names(main: relax.Function) -> dict[str, tuple[str, ...]]:
    """Return the names that the tensors of each parameter will have: "t" of a tensor, "t_0", "t_1_0" of a tuple."""
    taken = {str(p.name) for p in main.params}
    found: dict[str, tuple[str, ...]] = {}
    for param in main.params:
        if isinstance(param.ty, relax.TupleType):
            found[str(param.name)] = names = tuple(_unused(n, taken) for n in _paths(str(param.name), param.ty))
            taken |= set(names)
        else:
            found[str(param.name)] = (str(param.name),)
    return found


def _paths(name: str, ty: object) -> list[str]:
    if isinstance(ty, relax.TupleType):
        return [path for i, field in enumerate(ty.fields) for path in _paths(f"{name}_{i}", field)]
    return [name]


def _unused(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    return name


def _tuple_of(ty: object, leaves: Iterator[relax.Var]) -> relax.Expr:
    """Return a value of type `ty` over the next of `leaves`."""
    return relax.Tuple([_tuple_of(t, leaves) for t in ty.fields]) if isinstance(ty, relax.TupleType) else next(leaves)
