"""The learned model: gradient-boosted trees on the log ratio of measured to analytic time (XGBoost).

    descriptions ──► columns ──► physics (scalars of the device) ──► inputs ──► trees ──► seconds, interval

Physics carries the scale, trees the shape. A GPU that was never measured is predicted from its data sheet: its
scalars are those of its likes (`scalars.infer`), and the trees' inputs are dimensionless.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from tvmhet._data import data_path
from tvmhet.cluster.catalog import device_type
from tvmhet.cluster.device import DeviceType
from tvmhet.cost.card import Card, Interval, read_booster, read_card
from tvmhet.cost.columns import ATTENTION_GROUPS, GROUPS, Columns, Floats, columns
from tvmhet.cost.dram import DramShares
from tvmhet.cost.generated import library_start_s, start_s
from tvmhet.cost.inputs import inputs
from tvmhet.cost.likes import capability, generation
from tvmhet.cost.model import KernelDesc, Predictions
from tvmhet.cost.physics import Constants, Estimate, Scalars, constants, estimate, peaks, unaligned
from tvmhet.cost.residual import Residual
from tvmhet.cost.roofline import Efficiency, Roofline
from tvmhet.cost.scalars import Fit, infer

if TYPE_CHECKING:
    import xgboost

#: The trees may change the analytic time by at most this factor, up or down (natural log).
MAX_CORRECTION = 1.5

#: Groups whose kernels may compute less than their descriptions count (Winograd's convolution).
SAVES_ARITHMETIC = frozenset({"conv"})

#: What kernels of a group take at their start beyond others, queued: those that reduce rows do so in steps. An H100's
#: layer norm of 128 rows takes 4.7 us with the copy of its result; without this, vidur's norms on H100 and A100 were
#: estimated 31 and 34 % too short.
_MORE_START_S: Mapping[str, float] = MappingProxyType({"norm": 1e-6})

#: The normal distribution's upper tenth begins this many standard deviations above its mean.
TENTH = 1.2816

Dispatch = Literal["published", "queued"]

#: Of the files of models whose rows were timed in a queue, without launches.
QUEUED_PREFIX = "queued_"


@dataclass(frozen=True, slots=True)
class GroupModel:
    """Trees for one group of kernels, with their card and the measured types' device facts."""

    card: Card
    booster: xgboost.Booster
    fits: tuple[Fit, ...]

    def correction(self, rows: NDArray[np.float32]) -> Floats:
        """Return the log ratio that the trees put on the analytic time."""
        import xgboost  # 0.4 s, so not before a model is used

        matrix = xgboost.DMatrix(rows, nthread=1)
        raw: Floats = self.booster.predict(matrix).astype(np.float64)
        return np.clip(raw, -MAX_CORRECTION, MAX_CORRECTION)


@dataclass(frozen=True, slots=True)
class GroupPrediction:
    """Predictions of one group's kernels: seconds as the data were measured, and the parts they come from."""

    seconds: Floats
    correction: Floats
    estimate: Estimate
    spread: Floats  # standard deviation of the residual that calibration left, natural log; 0 without one


@dataclass(frozen=True, slots=True)
class Calibration:
    """What measurements on the device itself say of one group.

    Its scalars, the factors of its 80 % interval at a measured kernel, and what is left near the measured kernels.
    """

    scalars: Scalars
    low: float
    high: float
    residual: Residual | None = None


@dataclass(frozen=True, slots=True)
class LearnedModel:
    """Run time of kernels on one GPU type. CPU types and generic operators get the roofline.

    `dispatch` says what the fixed cost of a kernel is: "published", as the training data were measured (float32
    groups: one eager torch call at a time, tens of microseconds; others: launched back to back), or "queued": the
    device's own launch cost, which is what a compiled module pays. `maker` is ignored: times are the library's.

    `queued` are models of kernels that were timed in a queue, on types of this one's SM generation: where there is one,
    it says what a queued kernel takes, and of an eager call all but what the host does.
    """

    device: DeviceType
    groups: Mapping[str, GroupModel]
    consts: Constants
    fallback: Roofline
    dispatch: Dispatch = "published"
    calibrated: Mapping[str, Calibration] = field(default_factory=dict)
    dram: DramShares = field(default_factory=DramShares)
    queued: Mapping[str, GroupModel] = field(default_factory=dict)

    @staticmethod
    def load(device: DeviceType, dispatch: Dispatch = "published", folder: Path | None = None) -> LearnedModel:
        """Read the trained models from `folder` (default: the shipped ones). Raises BadModel if one is corrupt."""
        folder = folder or data_path("trained")
        groups = {} if device.is_cpu else load_groups(folder)
        queued = {} if device.is_cpu else _of_generation(load_groups(folder, QUEUED_PREFIX), device)
        roofline = Roofline(device, Efficiency.load())
        if dispatch == "queued":
            groups = {**groups, **queued}
        return LearnedModel(device, groups, constants(), roofline, dispatch, dram=DramShares.load(), queued=queued)

    def scalars(self, group: str) -> Scalars:
        """Return what the device reaches in `group`: calibrated, fitted or inferred, the first that is known."""
        if group in self.calibrated:
            return self._of_today(self.calibrated[group].scalars)
        model = self.groups[group]
        dense = group not in ATTENTION_GROUPS
        card = model.card
        found = infer(self.device, model.fits, card.fit_dtype, card.host_bound, power_bound=dense, dram=self.dram)
        return self._of_today(found)

    def _of_today(self, scalars: Scalars) -> Scalars:
        """What a compiled module runs is today's library, which the published data are older than."""
        saves = self.dispatch == "published" or capability(self.device) < self.consts.winograd_below
        return replace(scalars, winograd=saves)

    def predict_group(self, table: Columns) -> GroupPrediction:
        """Return the prediction of kernels of one learned group, as the training data were measured."""
        model = self.groups[table.group]
        if self._is_called(model.card) and table.group in self.queued and table.group not in self.calibrated:
            return self._called(table)
        analytic = estimate(table, self.device, self.scalars(table.group), self.consts)
        correction = model.correction(inputs(table, self.device, analytic))
        own = self.calibrated.get(table.group)
        spread = np.zeros(len(table))
        if own is not None and own.residual is not None:
            near, spread = own.residual.at(table)
            correction = correction + near
        if (
            table.group not in SAVES_ARITHMETIC
        ):  # nothing is faster than the data sheet, whatever the likes were seen to do
            at_peak_s = table.flop / peaks(table, self.device)
            correction = np.maximum(correction, np.log(np.maximum(at_peak_s, 1e-12) / analytic.busy_s))
        return GroupPrediction(analytic.seconds * np.exp(correction), correction, analytic, spread)

    def _is_called(self, card: Card) -> bool:
        """Whether eager calls are asked for of a type that showed none; today's convolutions tell nothing of theirs."""
        foreign = card.host_bound and self.device.name not in card.fits
        return self.dispatch == "published" and foreign and card.group not in SAVES_ARITHMETIC

    def _called(self, table: Columns) -> GroupPrediction:
        """An eager call of a kernel that is known queued: the host works on beside it, as on other types."""
        alone = replace(self, dispatch="queued", groups=self.queued)
        found, own, host = alone.predict_group(table), alone.scalars(table.group), self.scalars(table.group)
        busy = np.maximum(found.seconds - own.gap * own.launch_s, found.estimate.busy_s * np.exp(-MAX_CORRECTION))
        seconds = np.maximum(host.launch_s, host.gap * host.launch_s + busy)
        return replace(
            found, seconds=seconds, estimate=replace(found.estimate, launch_s=host.launch_s, seconds=seconds)
        )

    def predict(self, descs: Sequence[KernelDesc]) -> Predictions:
        """Return one prediction per kernel. Raises BadInput for a dtype that the device cannot compute."""
        tables = {g: t for g, t in columns(descs).items() if g in self.groups}
        covered = np.zeros(len(descs), dtype=np.bool_)
        for table in tables.values():
            covered[table.index] = True
        seconds, low, high = np.empty(len(descs)), np.empty(len(descs)), np.empty(len(descs))
        in_range, source = np.zeros(len(descs), dtype=np.bool_), np.full(len(descs), "roofline", dtype=object)
        rest = np.flatnonzero(~covered)
        if len(rest):
            other = self.fallback.predict([descs[int(i)] for i in rest])
            on_gpu = self.dispatch == "queued" and not self.device.is_cpu
            more_s = library_start_s(self.device, [descs[i].root for i in rest.tolist()]) if on_gpu else 0.0
            seconds[rest], low[rest], high[rest] = (t + more_s for t in (other.seconds, other.low, other.high))
            in_range[rest] = other.in_range
        for group, table in tables.items():
            where = table.index
            seconds[where], low[where], high[where] = self._with_interval(table)
            in_range[where] = self._in_range(table)
            source[where] = "calibrated" if group in self.calibrated else "learned"
        return Predictions(seconds, low, high, in_range, tuple(str(s) for s in source))

    def _with_interval(self, table: Columns) -> tuple[Floats, Floats, Floats]:
        """Return (seconds, low, high) of one group under this model's dispatch."""
        found = self.predict_group(table)
        share = found.estimate.launch_s / found.estimate.seconds
        if table.group in self.calibrated:
            own = self.calibrated[table.group]
            factor_low = np.exp(-np.hypot(np.log(own.low), TENTH * found.spread))
            factor_high = np.exp(np.hypot(np.log(own.high), TENTH * found.spread))
        else:
            factor_low, factor_high = self._interval(table.group).factors(share)
        seconds = found.seconds if self.dispatch == "published" else self._queued(table, found, share)
        return seconds, seconds * factor_low, seconds * factor_high

    def _queued(self, table: Columns, found: GroupPrediction, launch_share: Floats) -> Floats:
        """Replace the data's fixed cost by the device's. The correction counts as far as the kernel was busy."""
        if table.group in self.queued:
            return found.seconds
        busy = found.estimate.busy_s * np.exp(found.correction * (1 - launch_share))
        more_s = start_s(self.device, table.family, table.window) + _MORE_START_S.get(table.group, 0.0)
        return self.device.launch_s + more_s + busy

    def _interval(self, group: str) -> Interval:
        card = self.groups[group].card
        return card.measured if self.device.name in card.fits else card.unseen

    def _in_range(self, table: Columns) -> NDArray[np.bool_]:
        """Whether dtype, name and every size lie in what the group's model was trained on."""
        card = self.groups[table.group].card
        low, high = np.array(card.size_range).T
        wide = table.sizes[:, : len(low)]
        inside = ((wide >= low) & (wide <= high)).all(axis=1)
        known = np.isin(table.dtype, card.dtypes) & np.isin(table.name, card.names)
        trained: NDArray[np.bool_] = inside & known & ~table.backward & ~unaligned(table)
        return trained

    def with_calibration(self, found: Mapping[str, Calibration]) -> LearnedModel:
        """Return this model with the given groups calibrated."""
        return replace(self, calibrated=MappingProxyType({**self.calibrated, **found}))


def _of_generation(groups: Mapping[str, GroupModel], device: DeviceType) -> Mapping[str, GroupModel]:
    """The models of which a type of the device's SM generation was measured."""
    here = generation(device)
    return {name: model for name, model in groups.items() if any(generation(f.device) == here for f in model.fits)}


@lru_cache(maxsize=8)
def load_groups(folder: Path, prefix: str = "") -> Mapping[str, GroupModel]:
    """Read every card and its trees in `folder`, and join the measured types' device facts. Raises BadModel."""
    found = {}
    for group in GROUPS:
        path = folder / f"{prefix}{group}.yaml"
        if not path.exists():
            continue
        card = read_card(path)
        fits = tuple(Fit(device_type(name), card.fits[name]) for name in sorted(card.fits))
        found[group] = GroupModel(card, read_booster(folder / card.file, card.sha256), fits)
    return MappingProxyType(found)
