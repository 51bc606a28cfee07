"""Minimise a function of a few variables by steps along the axes (Kolda, Lewis, Torczon, SIAM Review 45(3), 2003)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_FIRST_STEP, _LAST_STEP = 0.4, 0.004
_WORTHWHILE = 1e-7


def minimise(loss: Callable[[Floats], float], start: Floats, low: Floats, high: Floats) -> Floats:
    """Return a point in the box [low, high] from which no step along an axis lowers `loss`. Deterministic.

    Steps begin at 0.4 and are halved when none helps, down to 0.004: scale the variables to that (logarithms do).

    >>> minimise(lambda x: abs(x[0] - 1.0) + abs(x[1] - 2.0), np.zeros(2), np.full(2, -9.0), np.full(2, 9.0)).round(1)
    array([1., 2.])
    """
    best, value, step = start.copy(), loss(start), _FIRST_STEP
    while step > _LAST_STEP:
        improved = False
        for axis in range(len(start)):
            for sign in (1.0, -1.0):
                trial = best.copy()
                trial[axis] = np.clip(trial[axis] + sign * step, low[axis], high[axis])
                trial_value = loss(trial)
                if trial_value < value - _WORTHWHILE:
                    best, value, improved = trial, trial_value, True
                    break
        step = step if improved else step / 2
    return best
