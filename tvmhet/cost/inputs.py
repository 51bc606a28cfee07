"""The only maker of rows for the learned models: dimensionless inputs, the same for training and for prediction.

No raw figure of a device is an input, since trees do not extrapolate: a GPU enters through ratios only (waves over its
SMs, bytes over its L2, FLOPs per byte over its balance, shares of the analytic time) and through the number of the SM
generation whose library it runs, which for an unseen GPU is that of its nearest kin. `INPUTS` names the columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tvmhet.cluster.device import DeviceType
from tvmhet.cost.columns import MATMUL_GROUPS, Columns, Floats
from tvmhet.cost.physics import Estimate, peaks

#: Names of operators that the training data tell apart; others share code 0.
NAMES = (
    "", "add", "multiply", "divide", "power", "relu", "gelu", "tanh", "silu", "causal", "rotary",
    "add_scalar", "multiply_scalar", "divide_scalar", "power_scalar", "subtract", "sigmoid", "power_law",
)  # fmt: skip
_FAMILIES = ("matmul", "linear", "conv2d", "elementwise", "softmax", "layer_norm")

#: Steps to which libraries round the sides of a product.
_PADS = (32, 64, 128, 256)

INPUTS = (
    "log_compute_share",
    "log_memory_share",
    "log_launch_share",
    "log_waves",
    "tail",
    "log_waves_square_tile",
    "tail_square_tile",
    "fill",
    "tile",
    "split",
    "log_bytes_over_l2",
    "log_intensity_over_balance",
    "log_write_over_read",
    "width_bytes",
    "family",
    "name",
    "backward",
    "aligned",
    "library",
    *(f"log_pad_{side}_{step}" for side in "mn" for step in _PADS),
    *(f"log_size_{i}" for i in range(10)),
)
_MAX_SIZES = 10
_FEW_WAVES = 32.0  # beyond this many waves the last, partial one no longer shows


def inputs(columns: Columns, device: DeviceType, estimate: Estimate) -> NDArray[np.float32]:
    """Return one row of `INPUTS` per kernel; sizes that a group has not are NaN, which trees take as missing."""
    tiny = np.finfo(np.float64).tiny
    waves = np.maximum(estimate.blocks, 1.0) / device.num_sms
    square = _square_tile_waves(columns, device)
    balance = peaks(columns, device) / device.dram_byte_per_s
    sizes = np.full((len(columns), _MAX_SIZES), np.nan)
    sizes[:, : columns.sizes.shape[1]] = np.log(np.maximum(columns.sizes, 0.5))
    parts = [
        np.log(np.maximum(estimate.compute_s / estimate.seconds, 1e-9)),
        np.log(estimate.memory_s / estimate.seconds),
        np.log(estimate.launch_s / estimate.seconds),
        np.log(waves),
        _tail(waves),
        np.log(square),
        _tail(square),
        estimate.fill,
        estimate.choice // 16,
        estimate.choice % 16,
        np.log(columns.bytes_moved / device.l2_bytes),
        np.log(np.maximum(columns.flop, 1.0) / columns.bytes_moved / balance),
        np.log(np.maximum(columns.write_bytes, 1.0) / np.maximum(columns.read_bytes, 1.0)),
        columns.width_bytes,
        _codes(columns.family, _FAMILIES),
        _codes(columns.name, NAMES),
        columns.backward.astype(np.float64),
        _alignment(columns),
        np.full(len(columns), float(estimate.library)),
        *_pads(columns),
    ]
    rows = np.column_stack([*parts, sizes])
    return np.where(np.abs(rows) < tiny, 0.0, rows).astype(np.float32)


def _pads(columns: Columns) -> list[Floats]:
    """Log of each side of a product rounded up to each step, over the side; 0 in groups without products."""
    if columns.group in MATMUL_GROUPS:
        sides = columns.sizes[:, 1], columns.sizes[:, 2]
    elif columns.group == "conv":
        n, _, _, _, oc, _, _, oh, ow, groups = columns.sizes.T
        sides = n * oh * ow, np.maximum(oc / groups, 1)
    else:
        return [np.zeros(len(columns))] * (2 * len(_PADS))
    return [np.log(np.ceil(side / step) * step / side) for side in sides for step in _PADS]


def _square_tile_waves(columns: Columns, device: DeviceType) -> Floats:
    """Waves of 128 x 128 tiles of a product; of rows in other groups."""
    if columns.group in MATMUL_GROUPS:
        b, m, n, _ = columns.sizes.T
        grid = b * np.ceil(m / 128) * np.ceil(n / 128)
    elif columns.group == "conv":
        n, _, _, _, oc, _, _, oh, ow, groups = columns.sizes.T
        grid = groups * np.ceil(n * oh * ow / 128) * np.ceil(oc / groups / 128)
    else:
        grid = columns.sizes[:, 0]
    waves: Floats = np.maximum(grid, 1.0) / device.num_sms
    return waves


def _tail(waves: Floats) -> Floats:
    """How much longer the last, partial wave makes the whole; 1 when there are many waves."""
    return np.where(waves < _FEW_WAVES, np.ceil(waves) / waves, 1.0)


def _codes(values: NDArray[np.str_], known: Sequence[str]) -> Floats:
    """Return each value's place in `known`; unknown ones get 0."""
    words, inverse = np.unique(values, return_inverse=True)
    table = np.array([known.index(str(w)) if str(w) in known else 0 for w in words], dtype=np.float64)
    codes: Floats = np.asarray(table[inverse], dtype=np.float64)
    return codes


def _alignment(columns: Columns) -> Floats:
    """The largest power of two, up to 64, that divides the innermost size: what vector loads depend on."""
    inner = {"conv": 1, "stream": 1, "softmax": 1, "norm": 1, "moe": 1}.get(columns.group, 3)
    sizes = np.minimum(columns.sizes, 2.0**53).astype(np.int64)  # beyond, a float holds no odd number
    size = sizes[:, min(inner, sizes.shape[1] - 1)]
    other = sizes[:, 1] if columns.group in MATMUL_GROUPS else size
    both = np.gcd(np.maximum(size, 1), 64) * 128 + np.gcd(np.maximum(other, 1), 64)
    return both.astype(np.float64)
