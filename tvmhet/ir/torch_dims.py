"""The user's names of dims, for the symbols that torch.export makes of them.

    dynamic_shapes=({0: Dim("n")},)        main(x: Tensor((s77, 3)))   ──►   main(x: Tensor((n, 3)))

A dim that the user left to torch (Dim.AUTO, Dim.DYNAMIC) keeps torch's symbol.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import tvm
from torch.export.graph_signature import InputKind, TensorArgument
from torch.utils._pytree import MappingKey, SequenceKey, tree_flatten_with_path
from tvm import relax

from tvmhet.ir.model import ENTRY

_BOUNDS = ("tir_var_lower_bound", "tir_var_upper_bound")  # attributes that hold sizes by symbol


def names_of_dims(
    program: torch.export.ExportedProgram,
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic_shapes: Any,
) -> dict[str, str]:
    """Return {torch's symbol: the user's name} for the dims that `dynamic_shapes` names."""
    shapes = {n.name: n.meta["val"].shape for n in program.graph.find_nodes(op="placeholder") if _is_tensor(n)}
    specs = [s.arg for s in program.graph_signature.input_specs if s.kind is InputKind.USER_INPUT]
    named: dict[str, str] = {}
    for spec, dims in zip(specs, _dims_by_input(module, args, kwargs, dynamic_shapes), strict=False):
        if not isinstance(spec, TensorArgument):
            continue
        for axis, dim in dims.items():
            free = getattr(getattr(shapes[spec.name][axis], "node", None), "expr", None)
            symbols = sorted(map(str, free.free_symbols)) if free is not None else []
            root = getattr(dim, "root", dim)  # of 2 * n + 1 the name is n
            if isinstance(root, torch.export.Dim) and len(symbols) == 1:
                named[symbols[0]] = root.__name__
    return named


def rename_dims(mod: tvm.IRModule, names: Mapping[str, str]) -> tvm.IRModule:
    """Return `mod` with the symbolic dims of `main` called by `names`, where it has them."""
    symbols = relax.analysis.defined_symbolic_vars(mod[ENTRY])
    dims = {v: tvm.ir.Var(names[str(v.name)], v.ty) for v in symbols if str(v.name) in names}
    if not dims:
        return mod
    mod = relax.transform.BindSymbolicVars(dims, ENTRY)(mod)
    main = mod[ENTRY]
    for key in _BOUNDS:
        if key in main.attrs:
            main = main.with_attr(key, {names.get(str(k), str(k)): v for k, v in main.attrs[key].items()})
    mod.update_func(mod.get_global_var(ENTRY), main)  # the pass made a module of its own
    return mod


def _is_tensor(node: torch.fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _dims_by_input(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any
) -> Iterator[Mapping[int, Any]]:
    """Yield, for each leaf of the arguments in order, the dims that are given for it, by axis."""
    if isinstance(dynamic_shapes, torch.export.ShapesCollection | torch.export.AdditionalInputs):
        dynamic_shapes = dynamic_shapes.dynamic_shapes(module, args, kwargs)
    given = {**inspect.signature(module.forward).bind_partial(*args).arguments, **kwargs}
    root: Any = dict(given) if isinstance(dynamic_shapes, Mapping) else tuple(given.values())
    for path, leaf in tree_flatten_with_path(root)[0]:
        at: Any = dynamic_shapes
        for key in path:
            at = _child(at, key)
        if not isinstance(leaf, torch.Tensor) or at is None:
            yield {}
        else:
            yield at if isinstance(at, Mapping) else dict(enumerate(at))


def _child(spec: Any, key: Any) -> Any:
    """Return what the structure of dims says of a part of the arguments; None where it says nothing."""
    if isinstance(key, MappingKey) and isinstance(spec, Mapping):
        return spec.get(key.key)
    if isinstance(key, SequenceKey) and isinstance(spec, Sequence) and key.idx < len(spec):
        return spec[key.idx]
    return None
