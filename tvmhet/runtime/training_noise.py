"""Inputs of random numbers, such as the masks of dropout."""

from __future__ import annotations

import numpy as np

from tvmhet.runtime.program import Array
from tvmhet.runtime.tensors import empty_aligned
from tvmhet.runtime.training_program import Noise


def draw(noise: Noise, seed: int, number: int, step: int, microbatch: int) -> Array:
    """Return one tensor of noise: the same for equal arguments, whichever device asks (Philox, Salmon et al., 2011)."""
    key, counter = np.array([seed, number], np.uint64), np.array([0, 0, step, microbatch], np.uint64)
    generator = np.random.Generator(np.random.Philox(key=key, counter=counter))
    out = empty_aligned(noise.spec)
    narrow = np.float32 if noise.spec.dtype == "float32" else np.float64
    make = generator.random if noise.kind == "uniform" else generator.standard_normal
    out[...] = make(noise.spec.shape, dtype=narrow)
    return out
