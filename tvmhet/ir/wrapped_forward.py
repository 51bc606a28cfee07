"""For a while, something done around each call of a module: what a trace does to it is seen where it is done."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn


@contextmanager
def wrapped_forward(model: nn.Module, around: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """While inside, let each call of `model` happen inside `around()`."""
    forward = model.forward
    had_own = "forward" in vars(model)

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with around():
            return forward(*args, **kwargs)

    model.forward = wrapped
    try:
        yield
    finally:
        if had_own:
            model.forward = forward
        else:
            del model.forward
