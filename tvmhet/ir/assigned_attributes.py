"""Tensors that a call assigns to attributes of a module and the next call reads: states, as those changed in place.

    self.mean = 0.9 * self.mean + 0.1 * x      ──►      mean = 0.9 * self.mean + 0.1 * x; ...; self.mean.copy_(mean)

torch.export would read the value of the import in every call; it sees to buffers of the outermost module alone, and it
changes tensors that are no buffers itself. What is only noted, such as a map of attention, is nobody's state. The trace
of a training step sees buffers that are changed in place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.export.graph_signature import InputKind
from torch.utils._pytree import keystr, tree_flatten_with_path

from tvmhet.errors import BadModel
from tvmhet.ir.torch_states import place_of_tensor
from tvmhet.ir.wrapped_forward import wrapped_forward

_Key = tuple[str, str, str]  # the module's path, the attribute, and where in the attribute, "" for the tensor itself
#: Told of what was assigned, by the tensor before and the one after, if any; whether to put the one before back.
_Change = Callable[[_Key, torch.Tensor | None, torch.Tensor | None], bool]
_ABSENT = object()
_REGISTRIES = ("_parameters", "_modules")


def exported_with_states(
    model: nn.Module, export: Callable[[], torch.export.ExportedProgram], made: set[str]
) -> torch.export.ExportedProgram:
    """Return what `export` does, tensors that a call assigns and the next one reads changed in place instead.

    The names of those that a call makes, or gives another shape or dtype, are added to `made`. Raises BadModel for
    states in containers, and for those that become another shape or dtype.
    """
    with values_kept(model):
        return _exported(model, export, made)


def _exported(
    model: nn.Module, export: Callable[[], torch.export.ExportedProgram], made: set[str]
) -> torch.export.ExportedProgram:
    fits: dict[_Key, bool] = {}  # of what is assigned, whether it is of its old shape and dtype
    chosen: set[_Key] = set()

    def changed(key: _Key, was: torch.Tensor | None, now: torch.Tensor | None) -> bool:
        fit = was is not None and now is not None and was.shape == now.shape and was.dtype == now.dtype
        if not fit:
            made.add(_place(key))
        if was is None or now is None:
            return True
        if fit and not key[0] and _is_buffer(model, key):  # torch sees to those of the outermost module
            return False
        fits[key] = fit
        if key in chosen:
            was.copy_(now)
        return True

    with _watched(model, changed):
        program = export()
    if not fits:
        return program
    held, read = _constants(program)
    before = _tensors(model)
    for key in fits.keys() & before.keys():
        place = place_of_tensor(before[key])
        if (_is_buffer(model, key) or place in held) and (fits[key] or place in read):
            chosen.add(key)
    for key in sorted(chosen):
        if key[2] or not fits[key]:
            raise _refused(key, "" if key[2] else ", with another shape or dtype")
    if not chosen:
        return program
    with _watched(model, changed):
        return export()


@contextmanager
def buffers_in_place(model: nn.Module, made: set[str]) -> Iterator[None]:
    """While inside, let calls that assign a buffer change the old tensor; the first call only shows what they assign.

    Later calls read copies of such buffers, as backward operators are to have the old values. The names of tensors
    that a call makes, and of buffers that it gives another shape or dtype, are added to `made`. Raises BadModel for
    attributes that are no buffers, where a trace finds what another one left.
    """
    before = _tensors(model)
    plain: set[_Key] = set()
    assigned: set[_Key] = set()

    def changed(key: _Key, was: torch.Tensor | None, now: torch.Tensor | None) -> bool:
        is_buffer = _is_buffer(model, key)
        if was is None or now is None or (is_buffer and (was.shape != now.shape or was.dtype != now.dtype)):
            made.add(_place(key))
            return True
        if not is_buffer:
            plain.add(key)
            return False
        if key in assigned:
            was.copy_(now.detach())
        assigned.add(key)
        return True

    try:
        with _watched(model, changed, assigned):
            yield
    except Exception as error:
        if plain and "fake" in str(error).lower():
            raise _refused(min(plain), "") from error
        raise
    finally:
        for key in plain & before.keys():
            if not key[2]:
                _put(model.get_submodule(key[0]), key[1], before[key])


def _refused(key: _Key, becomes: str) -> BadModel:
    return BadModel(
        f"a call assigns {_place(key)!r}, which the next call reads{becomes}",
        "make it a buffer of one shape: register_buffer",
    )


def _place(key: _Key) -> str:
    path, name, inside = key
    return ".".join(part for part in (path, name) if part) + inside


def _constants(program: torch.export.ExportedProgram) -> tuple[set[Any], set[Any]]:
    """Where the tensors lie that are attributes of some object, and where those of them or of buffers that are read."""
    kinds = (InputKind.CONSTANT_TENSOR, InputKind.BUFFER)
    values = {**program.state_dict, **program.constants}
    nodes = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    used = {s.target for s in program.graph_signature.input_specs if s.kind in kinds and nodes[s.arg.name].users}
    places = {name: place_of_tensor(value) for name, value in values.items() if isinstance(value, torch.Tensor)}
    return {places[n] for n in program.constants.keys() & places.keys()}, {places[n] for n in used & places.keys()}


@contextmanager
def values_kept(model: nn.Module) -> Iterator[None]:
    """Give tensors that a trace changes their values back."""
    before = [(t, t._version, t.detach().clone()) for t in dict.fromkeys(_tensors(model).values())]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, version, value in before:
                if tensor._version != version:
                    tensor.copy_(value)


def _watched(model: nn.Module, changed: _Change, copied: Collection[_Key] = ()) -> AbstractContextManager[None]:
    """Tell of what calls of the model assign, as they end; they see copies of what is `copied`."""

    @contextmanager
    def watching() -> Iterator[None]:
        before, held = _tensors(model), {path: dict(vars(module)) for path, module in model.named_modules()}
        for path, name, _ in copied:
            _put(model.get_submodule(path), name, before[path, name, ""].clone())
        try:
            yield
        finally:
            after = _tensors(model)
            for key in [k for k in {**before, **after} if k[0] in held and before.get(k) is not after.get(k)]:
                was = before.get(key)
                if changed(key, was, after.get(key)) and not key[2]:
                    _put(model.get_submodule(key[0]), key[1], held[key[0]].get(key[1], _ABSENT) if was is None else was)

    return wrapped_forward(model, watching)


def _tensors(model: nn.Module) -> dict[_Key, torch.Tensor]:
    """Return the tensors that attributes of modules are or hold, buffers and plain ones."""
    found: dict[_Key, torch.Tensor] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                found[path, name, ""] = value
            elif name == "_buffers":
                found |= {(path, b, ""): t for b, t in value.items() if t is not None}
            elif isinstance(value, dict | list | tuple) and name not in _REGISTRIES:
                leaves, _ = tree_flatten_with_path(value)
                found |= {(path, name, keystr(keys)): t for keys, t in leaves if isinstance(t, torch.Tensor)}
    return found


def _is_buffer(model: nn.Module, key: _Key) -> bool:
    return key[1] in model.get_submodule(key[0])._buffers


def _put(module: nn.Module, name: str, value: Any) -> None:
    if value is not _ABSENT:
        setattr(module, name, value)
    elif name not in module._buffers:
        delattr(module, name)
    else:
        module._buffers[name] = None
