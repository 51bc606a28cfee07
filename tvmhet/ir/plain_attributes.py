"""Numbers and words that a module keeps beside its tensors: a step that is traced holds those of the import.

    self.step += 1; y = y * min(1, self.step / 1000)        a warm-up   ──►   refused: it would stand still

What a module notes once, such as the size of its input, stays the same from call to call, and is no reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from tvmhet.errors import BadModel

_Values = dict[tuple[str, str], Any]


@contextmanager
def unchanged_by_calls(model: nn.Module, call: Callable[[], Any]) -> Iterator[None]:
    """Put plain attributes back as they were; raise BadModel for one that `call` changes once more."""
    before = _values(model)
    try:
        yield
        once = _values(model)
        if _changed(before, once):
            call()
            if found := _changed(once, _values(model)):
                module, name = found[0]
                place = f"{type(model).__name__}{'.' if module else ''}{module}"
                raise BadModel(
                    f"attribute {name!r} of {place} changes in every call; a step would hold one value of it for good",
                    "make it a buffer, which steps change, or an input",
                )
    finally:
        _restore(model, before)


def _values(model: nn.Module) -> _Values:
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name != "training" and isinstance(value, bool | int | float | str | None)
    }


def _changed(before: _Values, after: _Values) -> list[tuple[str, str]]:
    """Return what is another value now; of what is not there any more nobody reads a value."""
    return [key for key, value in after.items() if key not in before or repr(before[key]) != repr(value)]


def _restore(model: nn.Module, before: _Values) -> None:
    modules = dict(model.named_modules())
    for path, name in _changed(before, _values(model)):
        if (path, name) in before:
            setattr(modules[path], name, before[path, name])
        else:
            delattr(modules[path], name)
