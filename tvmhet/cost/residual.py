"""What a calibrated model still gets wrong of a shape: a Gaussian process on the log time, tied to measured kernels.

    covariance(a, b) = AMPLITUDE^2 exp(-|log sizes of a - log sizes of b| / LENGTH)     half of it for another operator

Near a measured kernel its residual is taken over, far from all of them nothing is (Rasmussen and Williams, Gaussian
Processes for Machine Learning, 2006, chapter 2; the exponential kernel, since library kernels switch abruptly).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tvmhet.cost.columns import Columns, Floats

#: Spread of the residual over shapes and of one measurement, natural log, and the distance over which it is alike (a
#: factor of e in one size is 1). Set by hand between two trials on left-out types; the error moved by under 0.3 points.
AMPLITUDE, LENGTH, NOISE = 0.25, 3.0, 0.07
_OTHER_NAME = 0.5


@dataclass(frozen=True, slots=True)
class Residual:
    """The residual at the measured kernels (`anchors`), ready to be carried to others of their group."""

    anchors: Columns
    weights: Floats  # inverse covariance times the residuals
    inverse: Floats  # inverse covariance of the anchors, noise included

    def at(self, table: Columns) -> tuple[Floats, Floats]:
        """Return the expected log ratio of true to predicted time of each kernel, and its standard deviation."""
        near = covariance(table, self.anchors)
        left = AMPLITUDE**2 - np.einsum("ij,jk,ik->i", near, self.inverse, near, optimize=True)
        return near @ self.weights, np.sqrt(np.maximum(left, 0.0))


def residual_of(table: Columns, log_ratio: Floats) -> Residual:
    """Return the residual that `log_ratio` (measured over predicted time) at the kernels of `table` implies."""
    inverse = np.asarray(np.linalg.inv(covariance(table, table) + NOISE**2 * np.eye(len(table))), dtype=np.float64)
    return Residual(table, inverse @ log_ratio, inverse)


def covariance(table: Columns, anchors: Columns) -> Floats:
    """Return the prior covariance of the residuals of two sets of kernels of one group, one column per anchor."""
    rows, points = _coordinates(table), _coordinates(anchors)
    found = np.empty((len(table), len(anchors)))
    for i, point in enumerate(points):
        distance = np.sqrt(np.square(rows - point).sum(axis=1)) / LENGTH
        found[:, i] = np.exp(-distance) * np.where(table.name == anchors.name[i], 1.0, _OTHER_NAME)
    return np.asarray(AMPLITUDE**2 * found, dtype=np.float64)


def _coordinates(table: Columns) -> NDArray[np.float64]:
    return np.log(np.maximum(table.sizes, 1.0))
