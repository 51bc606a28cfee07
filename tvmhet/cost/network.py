"""How long devices take to exchange data: point to point, all-reduce, all-gather, reduce-scatter, all-to-all.

    seconds = (latency^q + (factor x bytes / bandwidth)^q)^(1/q)

`factor` is what the algorithm sends over each device's link for one byte of the message (Thakur, Rabenseifner, Gropp,
IJHPCA 19(1), 2005). Latency, the share of the link's bandwidth and the sharpness q of the knee are fitted per device
type, operation and number of devices to published NCCL tables (`cost_models/trained/network.yaml`). A type that is not
there gets the median of those with its kind of link.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import median
from types import MappingProxyType

import numpy as np
import yaml
from numpy.typing import NDArray

from tvmhet._data import data_path
from tvmhet.cluster.device import DeviceType
from tvmhet.cost.compass import minimise
from tvmhet.errors import BadInput, BadModel

Floats = NDArray[np.float64]

#: How often a byte of the message crosses each device's link, in units of (n - 1) / n, by operation; 0: once. The
#: message is what each device holds (all_reduce, all_to_all, send), or the whole that is gathered or scattered.
_CROSSINGS = MappingProxyType({"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "send": 0})
OPERATIONS = tuple(_CROSSINGS)


def wire_factor(operation: str, num_devices: int) -> float:
    """Return the bytes over each device's link for one byte of the message. Raises BadInput for other operations.

    >>> wire_factor("all_reduce", 8), wire_factor("send", 2)
    (1.75, 1.0)
    """
    if operation not in _CROSSINGS:
        raise BadInput(f"exchange {operation!r} is unknown", f"use one of {', '.join(OPERATIONS)}")
    crossings = _CROSSINGS[operation]
    return crossings * (num_devices - 1) / num_devices if crossings else 1.0


@dataclass(frozen=True, slots=True)
class Curve:
    """One fitted exchange: long messages reach `share` of the link's rate; `error` of the fit is its mean |log|."""

    latency_s: float
    share: float
    sharpness: float
    error: float

    def seconds(self, wire_bytes: Floats, byte_per_s: float) -> Floats:
        """Return the time to send `wire_bytes` over each device's link of `byte_per_s`."""
        sent = np.maximum(wire_bytes, 1.0) / (byte_per_s * self.share)
        top = np.maximum(sent, self.latency_s)
        low = np.minimum(sent, self.latency_s)
        result: Floats = top * np.power(1.0 + np.power(low / top, self.sharpness), 1.0 / self.sharpness)
        return result


@dataclass(frozen=True, slots=True)
class Exchange:
    """Predicted seconds of exchanges, and whether the curve was fitted on this device type."""

    seconds: Floats
    source: str  # "fitted" or "inferred"


@dataclass(frozen=True, slots=True)
class Network:
    """Curves by (device type, operation, number of devices), and the link class of each type."""

    curves: Mapping[tuple[str, str, int], Curve]
    link_of: Mapping[str, str]

    def exchange(self, operation: str, device: DeviceType, num_devices: int, size_bytes: Sequence[float]) -> Exchange:
        """Return the time of `operation` among `num_devices` devices of one node for each message size.

        Raises BadInput for an unknown operation, fewer than two devices, or a negative size.
        """
        sizes = np.asarray(size_bytes, dtype=np.float64)
        if num_devices < 2 or not (np.isfinite(sizes) & (sizes >= 0)).all():
            raise BadInput(f"{operation} among {num_devices} devices", "give 2 devices or more and sizes >= 0")
        wire = sizes * wire_factor(operation, num_devices)
        curve, source = self.curve(operation, device, num_devices)
        return Exchange(curve.seconds(wire, device.peer_byte_per_s), source)

    def curve(self, operation: str, device: DeviceType, num_devices: int) -> tuple[Curve, str]:
        """The type's own curve for the nearest number of devices, else the median over types with such a link."""
        own = [key for key in self.curves if key[0] == device.name and key[1] == operation]
        if own:
            nearest = min(own, key=lambda key: (abs(key[2] - num_devices), key[2]))
            return self.curves[nearest], "fitted"
        link = link_class(device)
        like = [key for key in self.curves if key[1] == operation and self.link_of[key[0]] == link]
        like = like or [key for key in self.curves if key[1] == operation]
        if not like:
            raise BadModel(f"network.yaml has no curve for {operation}", "retrain it with train.py")
        gap = min(abs(key[2] - num_devices) for key in like)
        near = [self.curves[key] for key in like if abs(key[2] - num_devices) == gap]
        fields = ("latency_s", "share", "sharpness", "error")
        return Curve(*(median(getattr(c, f) for c in near) for f in fields)), "inferred"

    @staticmethod
    def load(path: Path | None = None) -> Network:
        """Read fitted curves; `path` defaults to the shipped file. Raises BadModel if it is malformed."""
        return _load(path or data_path("trained/network.yaml"))


@lru_cache(maxsize=4)
def _load(path: Path) -> Network:
    try:
        tree = yaml.safe_load(path.read_text())
        curves = {
            (device, operation, int(count)): Curve(*(float(v) for v in values))
            for device, operations in tree["curves"].items()
            for operation, counts in operations.items()
            for count, values in counts.items()
        }
        return Network(MappingProxyType(curves), MappingProxyType(dict(tree["links"])))
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadModel(f"network file {path.name} cannot be read: {error!r}", "restore it or retrain") from error


def link_class(device: DeviceType) -> str:
    """Return "nvlink" for types joined by a built-in fabric, else "pcie"."""
    return "nvlink" if device.nvlink_byte_per_s and not device.nvlink_is_bridge else "pcie"


def fit(operation: str, num_devices: int, byte_per_s: float, size_bytes: Floats, seconds: Floats) -> Curve:
    """Return the curve nearest to measured exchanges (mean absolute log ratio). `byte_per_s`: the link's rate.

    Raises BadInput for fewer than three measurements or times that are not above 0 s.
    """
    if len(seconds) < 3 or not (np.isfinite(seconds) & (seconds > 0)).all():
        raise BadInput(f"{len(seconds)} measurements of {operation}", "give three or more, each above 0 s")
    wire = size_bytes * wire_factor(operation, num_devices)

    def loss(logs: Floats) -> float:
        latency_s, share, sharpness = np.exp(logs)
        predicted = Curve(latency_s, share, sharpness, 0.0).seconds(wire, byte_per_s)
        return float(np.mean(np.abs(np.log(predicted / seconds))))

    share = float(np.clip(np.max(wire / seconds) / byte_per_s, 1e-3, 1.5))
    start = np.log([float(np.min(seconds)), share, 1.0])
    found = minimise(loss, start, np.log([1e-7, 1e-4, 0.3]), np.log([1e-2, 2.0, 8.0]))
    latency_s, share, sharpness = (float(v) for v in np.exp(found))
    return Curve(latency_s, share, sharpness, loss(found))


_NCCL_LINE = re.compile(r"^\s*(\d+)\s+\d+\s+\w+\s+\S+\s+(?:-?\d+\s+)?([\d.]+)\s+[\d.]+\s+[\d.]+")


def read_nccl_tests(text: str) -> tuple[Floats, Floats]:
    """Return (bytes, seconds) of the out-of-place columns of an nccl-tests report, such as all_reduce_perf prints.

    Raises BadInput if the text holds no result line.
    """
    rows = [(float(m[1]), float(m[2]) * 1e-6) for line in text.splitlines() if (m := _NCCL_LINE.match(line))]
    if not rows:
        raise BadInput("the text holds no nccl-tests result", "give the output of all_reduce_perf or its siblings")
    sizes, seconds = np.array(rows).T
    return sizes, seconds
