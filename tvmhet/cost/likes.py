"""How alike two GPU types are: what a measured one tells of another.

Types are alike when their SMs are of one generation, and DRAM bandwidth and arithmetic per SM and clock are similar.
"""

from __future__ import annotations

import numpy as np

from tvmhet.cluster.device import DeviceType
from tvmhet.cost.columns import Floats

#: How an SM feeds its arithmetic, by compute capability: what types of one group have in common.
_GENERATION = {
    "6": "pascal", "7.0": "volta", "7.5": "volta", "8.0": "ampere", "8.6": "ampere", "8.7": "ampere", "8.9": "ada",
    "9": "hopper", "10": "blackwell", "12": "ada", "3": "kepler", "5": "pascal",
}  # fmt: skip


def generation(device: DeviceType) -> str:
    """Return the name of the SM generation of a CUDA type; its architecture's name if the capability is not listed."""
    version = device.compute_capability or ""
    return _GENERATION.get(version) or _GENERATION.get(version.split(".")[0]) or device.architecture.lower()


def descriptor(device: DeviceType, dtype: str) -> Floats:
    """Return the log of DRAM bytes and of FLOPs per SM and clock: ratios that decide how a type behaves."""
    per_clock = device.num_sms * device.clock_hz
    return np.log([device.dram_byte_per_s / per_clock, device.peak(dtype) / per_clock])


def likeness(device: DeviceType, other: DeviceType, dtype: str) -> float:
    """Return how much `other` tells of `device`: 1 for the same figures, a tenth at most for another generation."""
    distance = float(np.sum(np.square(descriptor(device, dtype) - descriptor(other, dtype))))
    return float(np.exp(-distance / 2.0)) * (1.0 if generation(device) == generation(other) else 0.1) + 1e-6


def weighted_quantile(values: Floats, weight: Floats, q: float) -> float:
    """Return the value below which the share `q` of the weight lies, interpolated between neighbours."""
    order = np.argsort(values, kind="stable")
    cumulative = np.cumsum(weight[order]) - 0.5 * weight[order]
    return float(np.interp(q * weight.sum(), cumulative, values[order]))


def capability(device: DeviceType) -> float:
    """Return the compute capability as a number; 0 if the target does not say."""
    return float(device.compute_capability or 0.0)
