"""A CPU type's kernels learned from those measured on it, whatever models they came from (XGBoost).

    measured kernels, alone and inside models ──► trees on log(measured / usual) ──► kernels that were never measured

The scale comes from the data sheet and the caches (`cpu_inputs.usual_s`), the rest from the trees. A kernel is
predicted as it runs inside a model, where its weights are as cold as the model is large: after all others were read.
Kinds of kernels (maker and family) that were
hardly measured are left to the roofline. Fitting is deterministic and takes about two seconds for a thousand kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tvmhet.cluster.device import DeviceType
from tvmhet.cost.columns import Floats
from tvmhet.cost.cpu_inputs import rows, usual_s
from tvmhet.cost.model import CostModel, KernelDesc, Predictions
from tvmhet.errors import BadInput

if TYPE_CHECKING:
    import xgboost

_Kind = tuple[str, str]  # maker, family of the root
_Size = tuple[float, float]  # FLOPs, bytes moved

#: Measured kernels before anything is learned from them, and of one kind before it is predicted.
MIN_KERNELS = 100
#: Parameters of a model that is not known, bytes: more than caches hold.
A_MODEL_BYTES = float(64 << 20)
_MIN_OF_KIND = 3
_FOLDS = 4
_ROUNDS = 350
_OPTIONS: Mapping[str, Any] = MappingProxyType(
    {
        "objective": "reg:squarederror", "eta": 0.07, "max_depth": 8, "min_child_weight": 1.0, "subsample": 0.8,
        "colsample_bytree": 0.6, "lambda": 1.0, "tree_method": "hist", "nthread": 1, "seed": 0,
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class MeasuredKernel:
    """What one measured kernel computes, and its seconds inside a model of `inside_bytes` of parameters; 0: alone."""

    desc: KernelDesc
    seconds: float
    inside_bytes: float


@dataclass(frozen=True, slots=True)
class LearnedCpu:
    """Trees for one CPU type; `spread` is the 80 % interval of measured over predicted, by kind of kernel.

    `sizes` holds the least and the most arithmetic (FLOPs) and traffic (bytes) of the measured kernels of each kind,
    `measured_on` the processor, "" for this machine's own.
    """

    device: DeviceType
    trees: xgboost.Booster
    spread: Mapping[_Kind, tuple[float, float]]
    sizes: Mapping[_Kind, tuple[_Size, _Size]]
    num_kernels: int
    measured_on: str = ""

    def knows(self, desc: KernelDesc) -> bool:
        """Whether enough kernels of the same maker and family were measured."""
        return _kind(desc) in self.spread

    def interval(self, desc: KernelDesc) -> tuple[float, float]:
        """Return the factors that span the 80 % interval of kernels of this kind. KeyError for a kind not known."""
        return self.spread[_kind(desc)]

    def in_range(self, desc: KernelDesc) -> bool:
        """Whether kernels of this kind were measured that compute and move as little, and as much."""
        low, high = self.sizes.get(_kind(desc), ((1.0, 1.0), (0.0, 0.0)))
        return all(a <= b <= c for a, b, c in zip(low, _size(desc), high, strict=True))

    def predict_s(self, descs: Sequence[KernelDesc], *, inside_bytes: float = A_MODEL_BYTES) -> Floats:
        """Return seconds, one per kernel, inside a model of so many bytes of parameters; alone if it is 0.

        Every entry is finite and > 0.
        """
        if not descs:
            return np.zeros(0)
        inside = np.full(len(descs), float(inside_bytes))
        beyond = _trees_of(self.trees, rows(self.device, descs, inside))
        out: Floats = usual_s(self.device, descs, inside) * np.exp(beyond)
        return out


def learn(device: DeviceType, measured: Sequence[MeasuredKernel]) -> LearnedCpu:
    """Fit to measured kernels of a CPU type. The intervals come from predicting each quarter by the others.

    Raises BadInput for fewer than `MIN_KERNELS`.
    """
    if len(measured) < MIN_KERNELS:
        raise BadInput(
            f"{len(measured)} measured kernels of {device.name!r} to learn from",
            f"measure at least {MIN_KERNELS}: tvmhet profile a few models",
        )
    descs = [m.desc for m in measured]
    inside = np.array([m.inside_bytes for m in measured])
    seconds = np.array([m.seconds for m in measured])
    table = rows(device, descs, inside)
    target = np.log(seconds / usual_s(device, descs, inside))
    fold = _folds(descs)
    rest = np.zeros(len(measured))
    for held in range(_FOLDS):
        out = fold == held
        if out.any() and not out.all():
            rest[out] = target[out] - _trees_of(_fit(table[~out], target[~out], seconds[~out]), table[out])
    return LearnedCpu(device, _fit(table, target, seconds), _spreads(descs, rest), _sizes(descs), len(measured))


@dataclass(frozen=True, slots=True)
class LearnedFirst:
    """A CPU type's kernels by what was measured on it, those of unknown kinds by another model. Source: learned.

    They are predicted as they run inside a model of `inside_bytes` of parameters; alone if it is 0.
    """

    learned: LearnedCpu
    other: CostModel
    inside_bytes: float

    def predict(self, descs: Sequence[KernelDesc]) -> Predictions:
        """Return one prediction per kernel, in order. Raises BadInput for a dtype that the device cannot compute."""
        found = self.other.predict(descs)
        rows = [i for i, desc in enumerate(descs) if self.learned.knows(desc)]
        known = [descs[i] for i in rows]
        seconds, low, high = found.seconds.copy(), found.low.copy(), found.high.copy()
        in_range = found.in_range.copy()
        seconds[rows] = self.learned.predict_s(known, inside_bytes=self.inside_bytes)
        ends = np.array([self.learned.interval(d) for d in known]).reshape(-1, 2)
        low[rows], high[rows] = seconds[rows] * ends[:, 0], seconds[rows] * ends[:, 1]
        in_range[rows] = [self.learned.in_range(d) for d in known]
        source = np.array(found.source, dtype=object)
        source[rows] = "learned"
        return Predictions(seconds, low, high, in_range, tuple(source.tolist()))


def _fit(table: NDArray[np.float32], target: Floats, seconds: Floats) -> xgboost.Booster:
    import xgboost

    weight = np.clip((seconds / np.median(seconds)) ** 0.3, 0.3, 4.0)  # what takes long decides a model's time
    return xgboost.train(dict(_OPTIONS), xgboost.DMatrix(table, target, weight=weight, nthread=1), _ROUNDS)


def _trees_of(trees: xgboost.Booster, table: NDArray[np.float32]) -> Floats:
    import xgboost

    return np.asarray(trees.predict(xgboost.DMatrix(table, nthread=1)), dtype=np.float64)


def _folds(descs: Sequence[KernelDesc]) -> NDArray[np.int64]:
    """Deal kernels into folds; those that compute the same, alone or inside, into one."""
    place: dict[KernelDesc, int] = {}
    return np.array([place.setdefault(d, len(place)) % _FOLDS for d in descs], dtype=np.int64)


def _kind(desc: KernelDesc) -> _Kind:
    return desc.maker, desc.root.family


def _size(desc: KernelDesc) -> _Size:
    return desc.flop, desc.read_bytes + desc.write_bytes


def _sizes(descs: Sequence[KernelDesc]) -> Mapping[_Kind, tuple[tuple[float, float], tuple[float, float]]]:
    """Return (least FLOPs, least bytes) and (most FLOPs, most bytes) by kind."""
    members: dict[_Kind, list[tuple[float, float]]] = {}
    for desc in descs:
        members.setdefault(_kind(desc), []).append(_size(desc))
    found = {kind: np.array(sizes) for kind, sizes in sorted(members.items())}
    return MappingProxyType(
        {k: (tuple(v.min(axis=0).tolist()), tuple(v.max(axis=0).tolist())) for k, v in found.items()}
    )


def _spreads(descs: Sequence[KernelDesc], rest: Floats) -> Mapping[_Kind, tuple[float, float]]:
    """Return the tenth and the nine tenths of measured over predicted by kind; 1 lies between them."""
    members: dict[_Kind, list[float]] = {}
    for desc, value in zip(descs, rest.tolist(), strict=True):
        members.setdefault(_kind(desc), []).append(value)
    return MappingProxyType(
        {
            kind: (min(1.0, float(np.exp(np.quantile(v, 0.1)))), max(1.0, float(np.exp(np.quantile(v, 0.9)))))
            for kind, v in sorted(members.items())
            if len(v) >= _MIN_OF_KIND
        }
    )
