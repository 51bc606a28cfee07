"""What a module asks of its own constants while it is traced: `torch.arange(1, x.dim()).tolist()`, `if self.is_ready:`.

torch.export traces with tensors that have no values, and gives up where Python asks for one, even where it does not
depend on the inputs. In this mode what is computed from constants and buffers alone is computed, beside the trace; and
what such a mask chooses, `x[:, mask]`, is chosen by its places, so that shapes are known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

_SMALL_ELEMENTS = 1 << 16  # of a value that is always kept
_LARGE_BYTES = 1 << 28  # of all larger ones together: masks of long texts
_T = torch.Tensor
_R = TypeVar("_R")
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_QUESTIONS = (_T.item, _T.tolist, _T.__bool__, _T.__int__, _T.__float__, _T.__index__)
_MAKERS = (torch.tensor, torch.as_tensor, torch.arange, torch.linspace, torch.full, torch.zeros, torch.ones, torch.eye)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_SIZED = (torch.arange, torch.linspace, torch.zeros, torch.ones, torch.empty, torch.eye)  # by numbers
_RESIZED = (  # their first argument, by numbers
    _T.new_zeros, _T.new_ones, _T.new_empty, _T.view, _T.reshape, _T.expand, _T.repeat, _T.narrow, torch.narrow,
)  # fmt: skip
#: Of their first argument these take the shape and the dtype alone.
_LIKE = (torch.zeros_like, torch.ones_like, torch.full_like, _T.new_zeros, _T.new_ones, _T.new_full)
_PLACES = (torch.nonzero, _T.nonzero, torch.argwhere, _T.argwhere)  # what they return has a size that values decide
_CHOSEN = (torch.masked_select, _T.masked_select)
_NO_VALUE = (  # in names of functions: what they return is not known
    "rand", "bernoulli", "multinomial", "normal", "dropout", "exponential", "uniform", "poisson", "cauchy", "geometric",
    "rrelu", "gumbel", "empty", "set_", "resize",
)  # fmt: skip
_NO_CHANGE = ("__invert__", "__index__", "__int__", "__iter__")


#: Raised where a trace is asked for values, or for sizes that they decide.
ASKED = (GuardOnDataDependentSymNode, DataDependentOutputException, DynamicOutputShapeException)


def with_known_values(module: torch.nn.Module, trace: Callable[[], _R], asked: set[str] | None = None) -> _R:
    """Return what `trace` does; once more in this mode where it asks for values. Raises what the first trace did.

    The names of buffers whose values were asked for, which the trace so has for good, are added to `asked`.
    """
    try:
        return trace()
    except ASKED as error:
        try:
            with KnownValues(module) as mode:
                result = trace()
            if asked is not None:
                asked |= mode.asked
            return result
        except Exception:
            raise error from None


class _Value(NamedTuple):
    """What a traced tensor is, and the buffers of the module that this was computed from."""

    tensor: torch.Tensor
    buffers: frozenset[str]


class KnownValues(TorchFunctionMode):
    """Answers what is asked of values that do not depend on the inputs; all else goes on as it would."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self._module = module
        small = {n: b for n, b in module.named_buffers() if b.numel() <= _SMALL_ELEMENTS}
        self._buffers = {n: b.detach().clone() for n, b in small.items()}  # what the trace changes, changes these
        self._known: dict[int, tuple[torch.Tensor, _Value]] = {}  # by id: what is traced, kept alive, and its value
        self._room_bytes = _LARGE_BYTES
        self.asked: set[str] = set()  # the buffers that values were asked of

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _T.__getitem__:
            args = (args[0], self._by_places(args[1]))
        elif func in _SIZED:
            args, kwargs = tree_map(self._number, (args, kwargs))
        elif func in _RESIZED:
            args, kwargs = (*args[:1], *tree_map(self._number, args[1:])), tree_map(self._number, kwargs)
        elif func in _CHOSEN and (found := self._chosen(*args, **kwargs)) is not None:
            return found
        leaves = tree_leaves((args, kwargs))
        tensors = _tensors(leaves)
        known = {id(t): v for t in tensors if (v := self._value(t)) is not None}
        if func in _LIKE and args and all(type(n) is int for n in args[0].shape):
            known[id(args[0])] = _any_like(args[0])
        values = {i: v.tensor for i, v in known.items()}
        buffers = frozenset[str]().union(*(v.buffers for v in known.values()))
        is_known = all(id(t) in known for t in tensors) and not any(isinstance(x, _SYMBOLIC) for x in leaves)
        if is_known and (func in _QUESTIONS or func in _PLACES or (func is torch.where and len(leaves) == 1)):
            self.asked |= buffers
        if func in _QUESTIONS and is_known:
            return self._computed(func, args, kwargs, values)
        if is_known and (func in _PLACES or (func is torch.where and len(leaves) == 1)):
            return self._constants(self._computed(func, args, kwargs, values))
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        changes = _changes(func) or kwargs.get("out") is not None or bool(kwargs.get("inplace"))
        is_known = is_known and not any(part in name for part in _NO_VALUE)
        if changes and not is_known:
            self._forget([*args[:1], kwargs.get("out")])
        elif is_known and (tensors or func in _MAKERS) and (changes or self._takes_room(result)):
            self._keep(result, self._computed(func, args, kwargs, values), buffers)
        return result

    def _forget(self, changed: Any) -> None:
        """Know no more of what lies in memory that a function has changed; of nothing if that is open."""
        memory = {_memory(t) for t in _tensors(changed)}
        if not memory or None in memory:
            self._known.clear()
            self._buffers.clear()
            return
        self._known = {i: (t, v) for i, (t, v) in self._known.items() if _memory(t) not in memory}
        for n, b in self._module.named_buffers():
            if _memory(b) in memory:
                self._buffers.pop(n, None)

    def _by_places(self, index: Any) -> Any:
        """Return an index with the places that its masks choose for those of them that are known."""
        parts = index if isinstance(index, tuple) else (index,)
        found: list[Any] = []
        for part in parts:
            if isinstance(part, slice) and _tensors([part.start, part.stop, part.step]):
                part = slice(*(self._number(end) for end in (part.start, part.stop, part.step)))
            is_mask = isinstance(part, torch.Tensor) and part.dtype == torch.bool and part.dim() > 0
            value = self._asked_value(part) if is_mask else None
            found += [part] if value is None else self._places(value)
        return tuple(found) if any(a is not b for a, b in zip(found, parts, strict=False)) else index

    def _number(self, leaf: Any) -> Any:
        """Return the number that a tensor of one integer is known to be; anything else as it is."""
        if not isinstance(leaf, torch.Tensor) or leaf.dim() or leaf.dtype not in _INTEGERS:
            return leaf
        value = self._asked_value(leaf)
        if value is None:
            return leaf
        with _disable_current_modes():
            return int(value)

    def _chosen(self, input: torch.Tensor, mask: torch.Tensor, **_: Any) -> torch.Tensor | None:
        """Return what a mask chooses, in order; None if it is not known."""
        value = self._asked_value(mask) if mask.dim() else None
        if value is None:
            return None
        shape = torch.broadcast_shapes(input.shape, mask.shape)
        places = self._places(value, shape[len(shape) - value.dim() :])
        return input.expand(shape)[(..., *places)].reshape(-1)

    def _places(self, mask: torch.Tensor, shape: Any = None) -> Any:
        """Return, for each dim of a mask expanded to `shape`, the places that it chooses."""
        with _disable_current_modes():
            found = mask.expand(mask.shape if shape is None else shape).nonzero(as_tuple=True)
        return self._constants(found)

    def _constants(self, values: Any) -> Any:
        """Return values as tensors of the trace, and know them."""

        def constant(value: torch.Tensor) -> torch.Tensor:
            with _disable_current_modes():
                numbers = value.tolist()
            made = torch.tensor(numbers, dtype=value.dtype).reshape(value.shape)
            self._keep(made, value)
            return made

        return tree_map(constant, values)

    def _value(self, tensor: torch.Tensor) -> _Value | None:
        if id(tensor) in self._known:
            return self._known[id(tensor)][1]
        name = next((n for n, b in self._module.named_buffers() if b is tensor), None)
        return None if name is None or name not in self._buffers else _Value(self._buffers[name], frozenset([name]))

    def _asked_value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the value of a tensor for good, if it is known."""
        value = self._value(tensor)
        if value is None:
            return None
        self.asked |= value.buffers
        return value.tensor

    def _takes_room(self, result: Any) -> bool:
        """Take the room that keeping a result needs; return whether there was enough."""
        large_bytes = sum(t.numel() * t.itemsize for t in _tensors(result) if t.numel() > _SMALL_ELEMENTS)
        if large_bytes > self._room_bytes:
            return False
        self._room_bytes -= large_bytes
        return True

    def _keep(self, result: Any, computed: Any, buffers: frozenset[str] = frozenset()) -> None:
        traced, values = _tensors(result), _tensors(computed)
        for t, value in zip(traced, values, strict=False):  # none where it would be large, or nothing is returned
            self._known[id(t)] = t, _Value(value, buffers)

    @staticmethod
    def _computed(func: Any, args: Any, kwargs: Any, values: dict[int, Any]) -> Any:
        real_args, real_kwargs = tree_map(lambda leaf: values.get(id(leaf), leaf), (args, kwargs))
        with _disable_current_modes(), torch.no_grad():
            return func(*real_args, **real_kwargs)


def _memory(tensor: torch.Tensor) -> int | None:
    """Return what is the same of tensors that share memory, traced ones, too; None of a kind that does not tell."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except RuntimeError:  # sparse ones: a NotImplementedError is one
        return None


def _any_like(tensor: torch.Tensor) -> _Value:
    """Return some value of a tensor's shape and dtype that takes no memory."""
    with _disable_current_modes():
        return _Value(torch.zeros((), dtype=tensor.dtype).expand(tensor.shape), frozenset())


def _tensors(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def _changes(func: Any) -> bool:
    """Whether a function changes the values of its first argument."""
    name = getattr(func, "__name__", "")
    if name == "__set__":  # of an attribute of a tensor
        return getattr(func.__self__, "__name__", "") not in ("requires_grad", "grad")
    if name == "__setitem__":
        return True
    in_place = name.endswith("_") and not name.endswith("__")
    return (in_place and name != "requires_grad_") or (name.startswith("__i") and name not in _NO_CHANGE)
