"""Launch, plus the slower of arithmetic and DRAM traffic (Williams et al., CACM 52(4), 2009).

The model of last resort: it answers for every kernel on every device type. What share of the data sheet's peaks a kind
of kernel reaches is data (`cost_models/trained/roofline.yaml`, fitted by `cost_models/train.py`), never code. With
`SPEC_SHEET` all shares are 1, which is the baseline that benchmarks print.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

import numpy as np
import yaml
from numpy.typing import NDArray

from tvmhet._data import data_path
from tvmhet.cluster.device import DeviceType
from tvmhet.cost.model import MATRIX_FAMILIES, KernelDesc, Predictions
from tvmhet.errors import BadInput, BadModel


@dataclass(frozen=True, slots=True)
class Share:
    """What a family reaches of the peaks, and the factors that span the middle 80 % of measured over predicted."""

    compute: float
    memory: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares by device kind ("cuda", "llvm") and family; `default` stands for families that are not listed."""

    shares: Mapping[tuple[str, str], Share]

    def share(self, kind: str, family: str) -> Share:
        """Return the share of `family` on devices of `kind`. Raises BadModel if the kind has no default."""
        found = self.shares.get((kind, family)) or self.shares.get((kind, "default"))
        if found is None:
            raise BadModel(
                f"no roofline efficiency for device kind {kind!r}", f"add {kind}: {{default: ...}} to roofline.yaml"
            )
        return found

    @staticmethod
    @lru_cache(maxsize=4)
    def load(path: Path | None = None) -> Efficiency:
        """Read the fitted shares; `path` defaults to the shipped file. Raises BadModel if it is malformed."""
        path = path or data_path("trained/roofline.yaml")
        try:
            tree = yaml.safe_load(path.read_text())
            shares = {
                (kind, family): Share(*(float(row[key]) for key in ("compute", "memory", "low", "high")))
                for kind, families in tree["shares"].items()
                for family, row in families.items()
            }
        except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadModel(
                f"roofline file {path.name} cannot be read: {error!r}", "retrain it with train.py"
            ) from error
        return Efficiency(MappingProxyType(shares))


SPEC_SHEET = Efficiency(MappingProxyType({(kind, "default"): Share(1.0, 1.0, 1.0, 1.0) for kind in ("cuda", "llvm")}))


def peak_flop_per_s(device: DeviceType, family: str, dtype: str) -> float:
    """Return the dense peak that serves `family` in `dtype`, FLOP/s.

    Matrix families use the rate of the dtype itself (tensor cores where it has them). Others use vector units: the
    float32 rate, or that of float64. Raises BadInput if a matrix family has a dtype that the device cannot compute.
    """
    if family in MATRIX_FAMILIES:
        key = "float8" if dtype.startswith("float8") else dtype
        rate = device.peak_flop_per_s.get(key)
        if rate is None:
            raise BadInput(
                f"device type {device.name!r} cannot compute {family} in {dtype}",
                f"use one of {', '.join(sorted(device.peak_flop_per_s))}, or another device type",
            )
        return rate
    vector = device.peak_flop_per_s.get(dtype if dtype == "float64" else "float32")
    return vector if vector is not None else max(device.peak_flop_per_s.values())


def supports(device: DeviceType, desc: KernelDesc) -> bool:
    """Whether `device` can compute every operator of `desc` in its dtype."""
    try:
        for op in desc.ops:
            peak_flop_per_s(device, op.family, op.dtype)
    except BadInput:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Roofline:
    """The roofline of one device type, scaled by what each family is known to reach."""

    device: DeviceType
    efficiency: Efficiency

    def predict(self, descs: Sequence[KernelDesc]) -> Predictions:
        """Return launch + max(compute, memory) for each kernel; `in_range` is False for generic operators."""
        roots = [desc.root for desc in descs]
        shares = [self.efficiency.share(self.device.kind, root.family) for root in roots]
        rates = [peak_flop_per_s(self.device, root.family, root.dtype) for root in roots]
        compute_s = _column(d.flop / (r * s.compute) for d, r, s in zip(descs, rates, shares, strict=True))
        byte_per_s = self.device.dram_byte_per_s
        memory_s = _column(
            (d.read_bytes + d.write_bytes) / (byte_per_s * s.memory) for d, s in zip(descs, shares, strict=True)
        )
        seconds = self.device.launch_s + np.maximum(compute_s, memory_s)
        return Predictions(
            seconds=seconds,
            low=seconds * _column(s.low for s in shares),
            high=seconds * _column(s.high for s in shares),
            in_range=np.array([all(op.family != "generic" for op in d.ops) for d in descs], dtype=np.bool_),
            source=("roofline",) * len(descs),
        )


def _column(values: Iterable[float]) -> NDArray[np.float64]:
    return np.fromiter(values, dtype=np.float64)
