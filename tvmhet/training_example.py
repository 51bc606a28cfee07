"""A made-up global batch for a training step that is run to be timed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tvmhet.runtime.program import Array, ValueSpec, numpy_dtype


def example_batch(specs: Sequence[ValueSpec]) -> list[Array]:
    """Return a made-up global batch: floats in [0.1, 1), integers 0, which is always a valid index or class."""
    rng = np.random.default_rng(0)
    made = []
    for spec in specs:
        is_float = spec.dtype.startswith(("float", "bfloat"))
        values = rng.uniform(0.1, 1.0, spec.shape) if is_float else np.zeros(spec.shape)
        made.append(np.asarray(values).astype(numpy_dtype(spec.dtype)))
    return made
