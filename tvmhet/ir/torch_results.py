"""The structure of what an exported program returns, as its module returned it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import OutputKind
from torch.utils._pytree import tree_unflatten

from tvmhet.errors import BadModel
from tvmhet.results import Fixed, Parts, Structure


class _Tensor:
    """Stands where the result has a tensor."""


@dataclass(frozen=True, slots=True)
class _Value:
    """A leaf that is no tensor; classes that hold results may look at what they are given."""

    value: Any


def structure_of(program: torch.export.ExportedProgram) -> Structure:
    """Return it; complex tensors, which are pairs of real ones, count once. Raises BadModel for what cannot be kept."""
    results = zip(program.graph.output_node().args[0], program.graph_signature.output_specs, strict=True)
    returned = [r for r, spec in results if spec.kind is OutputKind.USER_OUTPUT]
    leaves = [_Tensor() if isinstance(r, fx.Node) else _Value(r) for r in returned]
    found = _part(tree_unflatten(leaves, program.call_spec.out_spec))
    if found is None:
        return "single"
    return found if isinstance(found, Parts) else Parts("tuple", ())


def _part(value: Any) -> Parts | Fixed | None:
    if isinstance(value, _Tensor):
        return None
    if isinstance(value, _Value):
        value = value.value
    if isinstance(value, bool | int | float | str | None):
        return Fixed(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return Parts("namedtuple", tuple(map(_part, value)), value._fields)
    if isinstance(value, tuple | list):
        return Parts("tuple" if isinstance(value, tuple) else "list", tuple(map(_part, value)))
    if isinstance(value, Mapping):
        if strange := [key for key in value if not isinstance(key, str | int)]:
            raise _unknown(strange[0])
        named = is_dataclass(value) or hasattr(value, "to_tuple")
        return Parts("named" if named else "dict", tuple(map(_part, value.values())), tuple(value))
    if is_dataclass(value):
        own = {f.name: getattr(value, f.name) for f in fields(value)}
        return Parts("named", tuple(map(_part, own.values())), tuple(own))
    raise _unknown(value)


def _unknown(value: Any) -> BadModel:
    return BadModel(
        f"the model's result holds a {type(value).__name__}",
        "return tensors and numbers, in tuples, lists and mappings",
    )
