"""Imported module -> the one form that later layers read: a single dataflow block of `var = op(args)` bindings.

    import ──► mends (bool cumsum, batch norm, identities) ──► canonical bindings ──► parameter arithmetic done once

A plain list of passes. A module that cannot be cut is returned as it came, with the reason in `Model.whole_reason`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import tvm
from tvm import relax

from tvmhet.errors import BadInput, BadModel
from tvmhet.ir.model import ENTRY, Model
from tvmhet.ir.transform.cast_bool_cumsum import CastBoolCumsum
from tvmhet.ir.transform.clip_to_min_max import ClipToMinMax
from tvmhet.ir.transform.crop_windows import CropWindows
from tvmhet.ir.transform.fill_empty_reductions import FillEmptyReductions
from tvmhet.ir.transform.fill_from_shape import FillFromShape
from tvmhet.ir.transform.fold_batch_norm import FoldBatchNorm
from tvmhet.ir.transform.fold_parameters import fold_parameters
from tvmhet.ir.transform.forget_devices import ForgetDevices
from tvmhet.ir.transform.inline_functions import InlineFunctions
from tvmhet.ir.transform.lift_constants import lift_constants
from tvmhet.ir.transform.read_static_shapes import ReadStaticShapes
from tvmhet.ir.transform.remove_identities import RemoveIdentities
from tvmhet.ir.transform.slice_early import SliceEarly
from tvmhet.ir.whole import whole_reason

#: The passes on the module alone, in order.
PASSES = (
    relax.transform.Normalize(),
    relax.transform.ConvertToDataflow(min_size=1),
    relax.transform.CanonicalizeBindings(),
    ForgetDevices(),
    CastBoolCumsum(),
    ClipToMinMax(),
    FillFromShape(),
    ReadStaticShapes(),
    FillEmptyReductions(),
    FoldBatchNorm(),
    relax.transform.DecomposeOpsForInference(),
    RemoveIdentities(),
    relax.transform.EliminateCommonSubexpr(),
    relax.transform.CanonicalizeBindings(),
    relax.transform.DeadCodeElimination(),
    SliceEarly(),
    CropWindows(),
    relax.transform.DeadCodeElimination(),
)


def normalize(model: Model, *, bind_shapes: Mapping[str, int] | None = None) -> Model:
    """Return the model in normal form, or as it came with `whole_reason` set.

    `bind_shapes` gives symbolic dims their values by name. Raises BadInput for a name that the module does not have.
    """
    if bind_shapes:
        model = replace(model, mod=_bind_shapes(model.mod, bind_shapes))
    inlined = tvm.transform.Sequential([InlineFunctions()])(model.mod)
    if reason := whole_reason(inlined):
        return replace(model, whole_reason=reason)
    mod = tvm.transform.Sequential(PASSES)(inlined)
    return fold_parameters(lift_constants(replace(model, mod=mod, whole_reason=None)))


def _bind_shapes(mod: tvm.IRModule, bind_shapes: Mapping[str, int]) -> tvm.IRModule:
    known = sorted({str(v.name) for v in relax.analysis.defined_symbolic_vars(mod[ENTRY])})
    for name, value in bind_shapes.items():
        if name not in known:
            if not known:
                raise BadInput(f"bind_shapes names {name!r}; the model has no symbolic dim", "leave it out")
            raise BadInput(
                f"bind_shapes names {name!r}; the model's symbolic dims are {known}",
                f"use one of these names{_where_they_stand(mod)}",
            )
        if value < 1:
            raise BadInput(f"bind_shapes gives {name!r} = {value}", "give a size of at least 1")
    try:
        return relax.transform.BindSymbolicVars(dict(bind_shapes), ENTRY)(mod)
    except Exception as error:
        raise BadModel(
            f"binding {dict(bind_shapes)} contradicts the model: {error}", "give sizes the model takes"
        ) from error


def _where_they_stand(mod: tvm.IRModule) -> str:
    """Say of each symbolic dim one input that has it: "; s77 is dim 0 of 'x'"."""
    found: dict[str, str] = {}
    for param in mod[ENTRY].params:
        shape = getattr(param.ty, "shape", None)
        for axis, dim in enumerate(shape.values if isinstance(shape, relax.ShapeExpr) else ()):
            if isinstance(dim, tvm.ir.Var):
                found.setdefault(str(dim.name), f"; {dim.name} is dim {axis} of {param.name!r}")
    return "".join(found.values())
