"""Numbers that a model draws outside torch while it is traced: they would be the same in every call.

if random.random() < 0.1: return x        a layer that is left out in one step of ten   ──►   never, or always
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import nn

from tvmhet.errors import BadModel


@contextmanager
def without_draws(model: nn.Module) -> Iterator[None]:
    """Raise BadModel if Python's or numpy's own generator has moved meanwhile."""
    python, numpy = random.getstate(), _numpy_state()
    yield
    drawn = ["Python's random"] * (random.getstate() != python) + ["numpy.random"] * (_numpy_state() != numpy)
    if drawn:
        raise BadModel(
            f"{type(model).__name__} draws numbers by {' and '.join(drawn)} when it is called; "
            "they would be the same in every call",
            "draw them by torch, or outside and make them an input; of a rate that is 0 none are drawn",
        )


def _numpy_state() -> tuple[Any, ...]:
    """numpy's own generator: its key as a list, which can be compared, and where in it the next number is."""
    name, key, *place = np.random.get_state(legacy=True)
    return name, np.asarray(key).tolist(), *place
