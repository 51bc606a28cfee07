"""What a module asks of its own constants while it is traced: `torch.arange(1, x.dim()).tolist()`, `if self.is_ready:`.

torch.export traces with tensors that have no values, and gives up where Python asks for one, even where it does not
depend on the inputs. In this mode what is computed from constants and buffers alone is computed, beside the trace.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

_MOST_ELEMENTS = 4096  # of a value that is kept
_T = torch.Tensor
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_QUESTIONS = (_T.item, _T.tolist, _T.__bool__, _T.__int__, _T.__float__, _T.__index__)
_MAKERS = (torch.tensor, torch.as_tensor, torch.arange, torch.linspace, torch.full, torch.zeros, torch.ones, torch.eye)
_NO_VALUE = (  # in names of functions: what they return is not known
    "rand", "bernoulli", "multinomial", "normal", "dropout", "exponential", "uniform", "poisson", "cauchy", "geometric",
    "rrelu", "gumbel", "empty", "set_",
)  # fmt: skip
_NO_CHANGE = ("__invert__", "__index__", "__int__", "__iter__")


class KnownValues(TorchFunctionMode):
    """Answers what is asked of values that do not depend on the inputs; all else goes on as it would."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self._module = module
        small = {n: b for n, b in module.named_buffers() if b.numel() <= _MOST_ELEMENTS}
        self._buffers = {n: b.detach().clone() for n, b in small.items()}  # what the trace changes, changes these
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id: what is traced, kept alive, its value

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        tensors = _tensors(leaves)
        values = {id(t): self._value(t) for t in tensors}
        is_known = all(v is not None for v in values.values()) and not any(isinstance(x, _SYMBOLIC) for x in leaves)
        if func in _QUESTIONS and is_known:
            return self._computed(func, args, kwargs, values)
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        changes = _changes(name) or kwargs.get("out") is not None
        is_known = is_known and not any(part in name for part in _NO_VALUE)
        if changes and not is_known:
            self._known.clear()  # it may have changed a part of any of them
            self._buffers.clear()
        elif is_known and (tensors or func in _MAKERS):
            self._keep(result, self._computed(func, args, kwargs, values) if changes or _is_small(result) else None)
        return result

    def _value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if id(tensor) in self._known:
            return self._known[id(tensor)][1]
        named = next((n for n, b in self._module.named_buffers() if b is tensor), None)
        return None if named is None else self._buffers.get(named)

    def _keep(self, result: Any, computed: Any) -> None:
        traced, values = _tensors(result), _tensors(computed)
        for t, value in zip(traced, values, strict=False):  # none where it would be large, or nothing is returned
            self._known[id(t)] = t, value

    @staticmethod
    def _computed(func: Any, args: Any, kwargs: Any, values: dict[int, Any]) -> Any:
        real_args, real_kwargs = tree_map(lambda leaf: values.get(id(leaf), leaf), (args, kwargs))
        with _disable_current_modes(), torch.no_grad():
            return func(*real_args, **real_kwargs)


def _tensors(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def _is_small(result: Any) -> bool:
    return all(t.numel() <= _MOST_ELEMENTS for t in _tensors(result))


def _changes(name: str) -> bool:
    """Whether a function of this name changes its first argument."""
    if name in ("__setitem__", "__set__"):
        return True
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or (name.startswith("__i") and name not in _NO_CHANGE)
