"""A module each of whose parameters and buffers has one name, however many names they have in the module it stands for.

    encoder.weight, decoder.weight (one tensor)  ──►  encoder:weight

AOTAutograd takes every name for a tensor of its own: of a tied parameter each name would have a part of its gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


class OneNameEach(nn.Module):
    """Calls `module` with its parameters and buffers, which are its own by their first names."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = [module]  # not registered: its names are not ours
        for name, parameter in module.named_parameters():
            self.register_parameter(_mangled(name), parameter)
        for name, buffer in module.named_buffers():
            self.register_buffer(_mangled(name), buffer)
        first = {id(t): n for n, t in (*self.named_parameters(), *self.named_buffers())}
        self._places = {name: first[id(tensor)] for name, tensor in _places(module)}

    def forward(self, *batch: torch.Tensor) -> Any:
        """Return what the module returns."""
        own = dict(self.named_parameters()) | dict(self.named_buffers())
        every = {name: own[mine] for name, mine in self._places.items()}
        return torch.func.functional_call(self._module[0], every, batch, tie_weights=False)


def _places(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every place that holds a tensor, once: a submodule that has several names comes under its first."""
    for prefix, part in module.named_modules():
        for named in (part.named_parameters, part.named_buffers):
            yield from named(prefix, recurse=False, remove_duplicate=False)


def with_one_name_each(module: nn.Module) -> nn.Module:
    """Return the module, or what stands for it where a tensor has several names."""
    every = sum(1 for named in (module.named_parameters, module.named_buffers) for _ in named(remove_duplicate=False))
    return module if every == len([*module.parameters(), *module.buffers()]) else OneNameEach(module)


def _mangled(name: str) -> str:
    return name.replace(".", ":")


def name_in_module(name: str) -> str:
    """Return what the module calls a tensor that is `name` here."""
    return name.replace(":", ".")
