"""A module of which a call returns something else after another call: a trace of one call is another model.

    if self.scale is None:                  torch scales all inputs as the first,
        self.scale = x.abs().max()          a trace each by its own maximum             ──►   refused
    return x / self.scale

Meant are attributes that are no states (`assigned_attributes.py`): tensors that a call makes, or that get another
shape, numbers, and lists. A table that the first call makes, whatever it is given, and what is only noted are no
reason. Which of these it is, is found by calls; a module whose trace leaves its attributes as they were is not called.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from tvmhet.errors import BadModel
from tvmhet.ir.assigned_attributes import values_kept
from tvmhet.ir.wrapped_forward import wrapped_forward

_Call = tuple[tuple[Any, ...], dict[str, Any]]
_Key = tuple[str, str]  # the module's path and the attribute
_OF_TORCH = frozenset(vars(nn.Module()))
_ABSENT = object()


def attributes_put_back(model: nn.Module, changed: set[str]) -> AbstractContextManager[None]:
    """Let calls leave the model's attributes as they were; add the names of those that were others to `changed`."""

    @contextmanager
    def putting_back() -> Iterator[None]:
        before = _Attributes(model)
        try:
            yield
        finally:
            changed.update(".".join(filter(None, key)) for key in before.changed())
            before.put_back()

    return wrapped_forward(model, putting_back)


def require_calls_alike(model: nn.Module, call: _Call, left: Collection[str]) -> None:
    """Raise BadModel if a call with inputs like those of `call` returns something else after another one.

    `left` names what a call changes; without any the model is not called.
    """
    if not left:
        return
    first, second = (tree_map(partial(_varied, is_first=is_first), call) for is_first in (True, False))
    alone, after = _last_of(model, [second]), _last_of(model, [first, second])
    if alone is None or after is None:  # the module does not take such values
        alone, after = _last_of(model, [call]), _last_of(model, [call, call])
    if alone is None or (after is not None and _are_alike(alone, after)):
        return
    some = ", ".join(repr(name) for name in sorted(left)[:3])
    raise BadModel(
        f"what a call of {type(model).__name__} returns depends on attributes that earlier calls changed: {some}",
        "call the module before the import if the first call sets them for good; make a tensor that calls change "
        "a buffer",
    )


def _last_of(model: nn.Module, calls: list[_Call]) -> list[Any] | None:
    """Return what the last of these calls returns, states being at first what they are; None where one raises."""
    before = _Attributes(model)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            for args, kwargs in copy.deepcopy(calls):  # a call may change its inputs
                with values_kept(model):
                    torch.manual_seed(0)
                    result = copy.deepcopy(model(*args, **kwargs))
                before.put_back(states_only=True)
        except Exception:  # of the user's module
            return None
        finally:
            before.put_back()
    leaves: list[Any] = tree_leaves(result)
    return leaves


def _varied(value: Any, is_first: bool) -> Any:
    """Values of the same kind, for the first call backwards; fractions are others, within 0 and 1 if they were."""
    if not isinstance(value, torch.Tensor):
        return value
    turned = value.flatten().flip(0).reshape(value.shape) if is_first else value
    return turned / 2 + (0.25 if is_first else 0.125) if value.is_floating_point() or value.is_complex() else turned


def _are_alike(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(_is_alike(x, y) for x, y in zip(a, b, strict=True))


def _is_alike(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return type(a) is type(b) and (not isinstance(a, bool | int | float | str) or repr(a) == repr(b))
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return bool(torch.equal(a, b))
    return bool(torch.allclose(a, b, rtol=1e-4, atol=1e-6, equal_nan=True))


class _Attributes:
    """What the attributes of all modules are, submodules too, and what their lists, dicts and sets hold."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self._held = self._now()
        self._contents = {k: copy.copy(v) for k, v in self._held.items() if type(v) in (list, dict, set)}

    def _now(self) -> dict[_Key, Any]:
        found: dict[_Key, Any] = {}
        for path, module in self._modules.items():
            found |= {(path, n): v for n, v in vars(module).items() if n not in _OF_TORCH}
            found |= {(path, n): v for n, v in (*module._buffers.items(), *module._modules.items())}
        return found

    def changed(self) -> list[_Key]:
        """Return what is another object now, is gone, or holds others."""
        now = self._now()
        other = {k for k in {**self._held, **now} if not _is_same(self._held.get(k, _ABSENT), now.get(k, _ABSENT))}
        return sorted(other | {k for k, v in self._contents.items() if not _holds_same(v, self._held[k])})

    def put_back(self, *, states_only: bool = False) -> None:
        """Make attributes what they were; with `states_only` only tensors that became others of their shape."""
        now = self._now()
        for path, name in self.changed():
            was = self._held.get((path, name), _ABSENT)
            if not states_only or _is_like(was, now.get((path, name))):
                self._put(path, name, was)
        if not states_only:
            for key, held in self._contents.items():
                _refill(self._held[key], held)

    def _put(self, path: str, name: str, was: Any) -> None:
        module = self._modules[path]
        if name in module._buffers and (was is None or isinstance(was, torch.Tensor)):
            module._buffers[name] = was
        elif was is _ABSENT:
            delattr(module, name)
        else:
            setattr(module, name, was)


def _is_same(a: Any, b: Any) -> bool:
    """Whether it is the same object, or a number or word of the same value."""
    return a is b or (type(a) is type(b) and isinstance(a, bool | int | float | str) and repr(a) == repr(b))


def _is_like(a: Any, b: Any) -> bool:
    """Whether both are tensors of one shape and dtype."""
    return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and (a.shape, a.dtype) == (b.shape, b.dtype)


def _holds_same(a: Any, b: Any) -> bool:
    if len(a) != len(b):
        return False
    if isinstance(a, set):
        return bool(a == b)
    pairs = (
        zip(a.items(), b.items(), strict=True) if isinstance(a, dict) else zip(enumerate(a), enumerate(b), strict=True)
    )
    return all(_is_same(j, k) and _is_same(v, w) for (j, v), (k, w) in pairs)


def _refill(container: Any, held: Any) -> None:
    if not _holds_same(container, held):
        container.clear()
        container.extend(held) if isinstance(container, list) else container.update(held)
