"""Any Relax module -> `Model`: find the entry function, put its parameters after its inputs, attach the values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import tvm
from tvm import relax

from tvmhet.errors import BadInput, BadModel
from tvmhet.ir.attrs import NUM_INPUT_ATTR
from tvmhet.ir.model import ENTRY, Model, from_numpy, from_torch_tensor, to_torch
from tvmhet.ir.transform.flatten_tuple_params import FlattenTupleParams, leaf_names
from tvmhet.ir.transform.inline_functions import callees
from tvmhet.ir.transform.mark_unfusable import MarkUnfusable
from tvmhet.nested import flat


def import_relax(mod: tvm.IRModule, params: Mapping[str, Any] | None = None, entry: str | None = None) -> Model:
    """Wrap a Relax module; see `from_relax`."""
    if not isinstance(mod, tvm.IRModule):
        raise BadInput(
            f"from_relax takes a tvm.IRModule, not {type(mod).__name__}", "use from_torch or from_onnx for others"
        )
    try:
        relax.analysis.well_formed(mod)
    except Exception as error:
        raise BadModel(
            f"the Relax module is not well formed: {str(error).strip().splitlines()[-1]}", "mend it first"
        ) from error
    mod = _with_main(mod, entry)
    if params is None:
        mod, params = _detached(mod)
    leaves = leaf_names(mod[ENTRY])
    if unknown := sorted(set(params) - set(leaves)):
        remedy = "give values by parameter name"
        raise BadInput(f"'{ENTRY}' has no parameter {unknown[0]!r}; it has {list(leaves)}", remedy)
    params = {leaf: v for name, value in params.items() for leaf, v in _by_leaf(name, value, leaves[name]).items()}
    mod = tvm.transform.Sequential([FlattenTupleParams(), MarkUnfusable()])(mod)
    main = mod[ENTRY]
    weights = [p for p in main.params if str(p.name) in params]
    inputs = [p for p in main.params if str(p.name) not in params]
    values = {str(p.name): checked_value(p, params[str(p.name)]) for p in weights}
    out = mod.clone()
    func = relax.Function([*inputs, *weights], main.body, main.ret_ty, main.is_pure, main.attrs)
    out.update_func(out.get_global_var(ENTRY), func.with_attr(NUM_INPUT_ATTR, len(inputs)))
    return Model(out, values)


def _by_leaf(name: str, value: Any, leaves: Sequence[str]) -> dict[str, Any]:
    """Return the values of a parameter's tensors by their names; those of a tuple are given as it is nested."""
    if leaves == (name,):
        return {name: value}
    values = flat([value])
    if len(values) != len(leaves):
        raise BadInput(
            f"parameter {name!r} is a tuple of {len(leaves)} tensors and {len(values)} were given",
            "give all of them, in a tuple or list",
        )
    return dict(zip(leaves, values, strict=True))


def _with_main(mod: tvm.IRModule, entry: str | None) -> tvm.IRModule:
    """Return `mod` with its entry called main: the function `entry`, main, or the only public Relax function."""
    functions = {g.name_hint: f for g, f in mod.functions_items() if isinstance(f, relax.Function)}
    if entry is not None and entry not in functions:
        raise BadModel(f"the Relax module has no function {entry!r}", f"name one of {sorted(functions)}")
    if entry is None and ENTRY not in functions:
        public = [n for n, f in functions.items() if f.attrs and "global_symbol" in f.attrs]
        if len(public) != 1:
            raise BadModel(
                f"the Relax module has no function 'main' and {len(public)} public functions {sorted(public)}",
                "name the entry: from_relax(mod, entry=...)",
            )
        entry = public[0]
    if entry is None or entry == ENTRY:
        return mod
    kept = {n: f for n, f in functions.items() if n == entry or n != ENTRY}
    if callers := sorted(n for n, f in kept.items() if {entry, ENTRY} & set(callees(f))):
        raise BadModel(
            f"function {callers[0]!r} calls {entry!r} or 'main'", f"rename {entry!r} to 'main' in the module"
        )
    main = functions[entry].with_attr("global_symbol", ENTRY)
    others = {g: f for g, f in mod.functions_items() if g.name_hint not in (entry, ENTRY)}
    return tvm.IRModule({**others, tvm.ir.GlobalVar(ENTRY): main}, attrs=mod.attrs, global_infos=mod.global_infos)


def _detached(mod: tvm.IRModule) -> tuple[tvm.IRModule, dict[str, Any]]:
    """Take out the values that a front end left in the attribute `params` of main."""
    main = mod[ENTRY]
    if not main.attrs or "params" not in main.attrs or NUM_INPUT_ATTR not in main.attrs:
        return mod, {}
    values = list(main.attrs["params"])
    names = [str(p.name) for p in main.params[int(main.attrs[NUM_INPUT_ATTR]) :]]
    out = mod.clone()
    out.update_func(out.get_global_var(ENTRY), main.without_attr("params"))
    return out, dict(zip(names, values, strict=True))


def checked_value(param: relax.Var, value: Any) -> Any:
    """Return the value as a TVM tensor; raise when its shape or dtype is not the parameter's."""
    tensor = _tensor(value, str(param.name))
    view = to_torch(tensor)
    got_dtype, got_shape = str(view.dtype).removeprefix("torch."), tuple(view.shape)
    dims = param.ty.shape.values if isinstance(param.ty.shape, relax.ShapeExpr) else None
    fits = dims is None or (
        len(dims) == len(got_shape)
        and all(not hasattr(d, "value") or int(d) == g for d, g in zip(dims, got_shape, strict=True))
    )
    if not fits or got_dtype != str(param.ty.dtype):
        raise BadInput(
            f"the value of parameter {str(param.name)!r} is {got_shape} {got_dtype}; 'main' declares {param.ty}",
            "give a value of the declared shape and dtype",
        )
    return tensor


def _tensor(value: Any, name: str) -> Any:
    if isinstance(value, tvm.runtime.Tensor):
        return value
    if isinstance(value, torch.Tensor):
        return from_torch_tensor(value)
    if isinstance(value, np.ndarray):
        return from_numpy(value)
    raise BadInput(f"the value of parameter {name!r} is a {type(value).__name__}", "give a numpy, torch or TVM tensor")
