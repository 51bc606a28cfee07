"""How stages are loaded and timed on a GPU by a process that only measures them: see `tvmhet.cost.measure`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from tvmhet.errors import MissingPackage
from tvmhet.runtime.cubins import compiled_for
from tvmhet.runtime.cuda import architecture, torch_stream
from tvmhet.runtime.cuda_times import times_of, turn

Context = Callable[[], AbstractContextManager[Any]]
Times = Callable[[Callable[[], Any], int, float], "tuple[list[float], str]"]


def place(ordinal: int) -> tuple[Context, Context, Times, Context]:
    """Return what makes the contexts of loading and of calling on a GPU, what times a call there, and what its turn.

    What times takes a call, how often it is wanted, and seconds to spend. Raises MissingPackage and NotSupported where
    CUDA is not as it needs. Without torch for CUDA, generated kernels can be called all the same.
    """
    loading: Context = partial(compiled_for, architecture(ordinal))
    try:
        calling: Context = torch_stream(ordinal)
    except MissingPackage:
        calling = nullcontext
    with_torch = calling is not nullcontext

    def times(run: Callable[[], Any], repeats: int, budget_s: float) -> tuple[list[float], str]:
        return times_of(run, ordinal, with_torch, repeats, budget_s)

    return loading, calling, times, partial(turn, ordinal)
