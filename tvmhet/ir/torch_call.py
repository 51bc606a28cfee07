"""How a module is called: tensors, by position or by name, among values that stay what they are in the example."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from tvmhet.nested import named_leaves

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class CallForm:
    """The structure of one call: None where a tensor stands. `names` are the tensors', None of those by position."""

    spec: TreeSpec
    leaves: tuple[Any, ...]
    is_tensor: tuple[bool, ...]
    names: tuple[str | None, ...]

    def filled(self, tensors: Sequence[torch.Tensor]) -> Arguments:
        """Return the arguments of the call with these tensors."""
        given: Iterator[torch.Tensor] = iter(tensors)
        leaves = [next(given) if hole else leaf for leaf, hole in zip(self.leaves, self.is_tensor, strict=True)]
        args, kwargs = tree_unflatten(leaves, self.spec)
        return args, kwargs


def arguments_of(tensors: Sequence[torch.Tensor], form: CallForm | None) -> Arguments:
    """Return the arguments of a call with these tensors: as they stand in `form`, without one by position."""
    return (tuple(tensors), {}) if form is None else form.filled(tensors)


def form_of(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[CallForm, tuple[torch.Tensor, ...]]:
    """Return the form of a call with these arguments, and its tensors."""
    leaves, spec = tree_flatten((args, dict(kwargs)))
    is_tensor = tuple(isinstance(leaf, torch.Tensor) for leaf in leaves)
    tensors = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    kept = tuple(None if hole else leaf for leaf, hole in zip(leaves, is_tensor, strict=True))
    return CallForm(spec, kept, is_tensor, tuple(_names(model, args, kwargs))), tensors


def _names(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[str | None]:
    """Yield the name of each tensor: None by position, unless it stands in a mapping."""
    by_position = inspect.signature(model.forward).bind_partial(*args).arguments
    for argument, value in (*by_position.items(), *kwargs.items()):
        has_name = argument in kwargs or isinstance(value, Mapping)
        for name, leaf in named_leaves({argument: value}):
            if isinstance(leaf, torch.Tensor):
                yield name if has_name else None
