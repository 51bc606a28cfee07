"""The share of its DRAM bandwidth that a GPU type gives to kernels which only stream (`trained/dram.yaml`).

    measured type ──► its own share       another type ──► median of its likes': same kind of DRAM, similar SMs

It belongs to the memory and not to the kernel: HBM, GDDR, and GDDR that keeps its check bits beside the data differ by
up to a fifth. What a group of kernels reaches is fitted as a multiple of it, so that a type whose memory is known, or
of a known kind, needs no measurement of that group.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

import numpy as np
import yaml

from tvmhet._data import data_path
from tvmhet.cluster.catalog import device_type
from tvmhet.cluster.device import DeviceType
from tvmhet.cost.likes import likeness, weighted_quantile
from tvmhet.errors import BadModel

#: Stacked memory has buses of 1,024 bits a stack; no GDDR card has more than 512.
_STACKED_BITS = 1024
#: What a type with another kind of DRAM tells of one, and the power of likeness: few types were measured.
_OTHER_KIND, _FEW_LIKENESS = 0.05, 0.4


@dataclass(frozen=True, slots=True)
class DramShares:
    """Measured shares by device type. An empty table gives 1 for every type."""

    known: Mapping[str, float] = field(default_factory=dict)

    def of(self, device: DeviceType) -> float:
        """Return the share of `device`: measured, else that of its likes."""
        if device.name in self.known or not self.known:
            return self.known.get(device.name, 1.0)
        others = [device_type(name) for name in self.known]
        weight = [
            likeness(device, o, "float32") ** _FEW_LIKENESS * (1.0 if kind(o) == kind(device) else _OTHER_KIND)
            for o in others
        ]
        return float(np.exp(weighted_quantile(np.log(list(self.known.values())), np.array(weight), 0.5)))

    def without(self, names: Collection[str]) -> DramShares:
        """Return the table without some types, as for predicting them."""
        return DramShares(MappingProxyType({n: s for n, s in self.known.items() if n not in names}))

    @staticmethod
    @lru_cache(maxsize=4)
    def load(path: Path | None = None) -> DramShares:
        """Read the shipped table. Raises BadModel if it is missing or malformed."""
        path = path or data_path("trained/dram.yaml")
        try:
            shares = {str(name): float(share) for name, share in yaml.safe_load(path.read_text())["shares"].items()}
        except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadModel(f"{path.name} cannot be read: {error!r}", "restore the shipped file or retrain") from error
        if not all(0 < s <= 1.2 for s in shares.values()):
            raise BadModel(f"{path.name} holds a share outside (0, 1.2]", "restore the shipped file or retrain")
        return DramShares(MappingProxyType(shares))


def kind(device: DeviceType) -> str:
    """Return "stacked" (HBM), "inline-ecc" or "plain"."""
    if (device.memory_bus_bits or 0) >= _STACKED_BITS:
        return "stacked"
    return "inline-ecc" if device.inline_ecc else "plain"
