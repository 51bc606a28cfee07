"""Fit one group of kernels: scalars per measured GPU type, one set of trees for all, intervals from held-out rows.

Held out are whole shapes (for products whole (n, k) pairs, a quarter of them) and, one at a time, whole GPU types.
The settings below were not searched over automatically, but revised by hand after a look at left-out errors, so these
are development errors; `MATRIX_UNIT_STIFFNESS` moved most (A100 from 15.0 to 11.3 %, the other types within 0.6).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import xgboost
from datasets import Floats, Sample
from numpy.typing import NDArray

from tvmhet.cluster.catalog import device_type
from tvmhet.cost.boosted import Dispatch, GroupModel, LearnedModel
from tvmhet.cost.card import Card, Interval
from tvmhet.cost.columns import MATMUL_GROUPS
from tvmhet.cost.compass import minimise
from tvmhet.cost.dram import DramShares
from tvmhet.cost.inputs import inputs
from tvmhet.cost.physics import Scalars, constants, estimate, peaks
from tvmhet.cost.roofline import SPEC_SHEET, Roofline
from tvmhet.cost.scalars import Fit, first_guess, fit_scalars, mean_error

SEED = 0
HELD_OUT = 0.25
#: Rows per GPU type: for its scalars, and for the trees.
SCALAR_ROWS, TREE_ROWS = 1500, 25_000
ROUNDS = 220
PARAMS = {
    "max_depth": 7,
    "eta": 0.07,
    "subsample": 0.7,
    "colsample_bytree": 0.7,
    "min_child_weight": 20,
    "max_bin": 128,
    "tree_method": "hist",
    "objective": "reg:squarederror",
    "nthread": 1,
    "seed": SEED,
}
#: How much each scalar resists leaving the first guess, per unit of log. On matrix units the arithmetic share is held
#: to what the fastest rows show: a product there is as often limited by the loads of its tiles, and the two trade off.
STIFFNESS = np.array([0.01, 0.02, 0.02, 0.01, 0.02, 0.02, 0.01, 0.01])
MATRIX_UNIT_STIFFNESS = np.array([0.01, 0.1, 0.02, 0.01, 0.02, 0.02, 0.05, 0.01])
_MATRIX_UNIT_GROUPS = frozenset({"matmul_tensor", "matmul_narrow", "linear_vector", "batched_vector"})
_TYPICAL = Scalars(launch_s=6e-5, compute=0.6, sustained=0.6, dram=0.8, cache=1.3, load=40.0)
#: Where the search begins for decoding: loads bound it on some types, DRAM on others; neither starts as the limit.
_DECODE = {"load": 20.0, "block": 4000.0, "dram": 0.9}
#: L2 hits of streaming kernels, bytes per SM and clock before the port's own limit. Eager calls do not show them: what
#: fits into L2 takes less than the host. Additions timed on the device do (vidur): 12 to 40 MB on A100 and H100 take
#: what 17 and 19 bytes per SM and clock take, behind a port of 64.
_STREAM_HIT_BYTE_PER_CLOCK = 24.0
_HOST_GAP = 0.6  # of an eager call's cost, what passes before the kernel starts
#: Groups whose library holds to one tile shape per GPU generation.
_ONE_TILE = frozenset({"batched_vector"})
#: What the rows of a group compute in, where it is not float32. All float32 rows were timed one eager call at a time.
FIT_DTYPE = {"matmul_tensor": "bfloat16", "matmul_narrow": "float8", "moe": "bfloat16"} | dict.fromkeys(
    ("attention_prefill", "attention_decode"), "bfloat16"
)


def held_out(sample: Sample) -> NDArray[np.bool_]:
    """Return which rows are kept from training: the same shapes whatever the device or the order of rows."""
    return _place(sample) < HELD_OUT


def folds(sample: Sample, count: int) -> NDArray[np.int64]:
    """Return the part, of `count` of equal size, that each row is in: a shape is in one part."""
    return (_place(sample) * count).astype(np.int64)


def _place(sample: Sample) -> Floats:
    """A number from 0 to 1 that only the shape of a row decides."""
    sizes = sample.table.sizes
    keys = sizes[:, -2:] if sample.table.group in MATMUL_GROUPS else sizes
    weights = np.array([2654435761, 2246822519, 3266489917, 668265263, 374761393, 40503, 2971215073] * 2, np.uint64)
    mixed = (keys.astype(np.uint64) * weights[: keys.shape[1]]).sum(axis=1, dtype=np.uint64)
    mixed = (mixed ^ (mixed >> np.uint64(15))) * np.uint64(2246822519)
    return ((mixed >> np.uint64(7)) % np.uint64(1000)).astype(np.float64) / 1000.0


def pick(rows: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return at most `count` of `rows`, chosen by the seed, in order."""
    if len(rows) <= count:
        return rows
    return np.sort(np.random.default_rng(SEED).choice(rows, count, replace=False))


def fit_device(sample: Sample, device: str) -> Scalars:
    """Return the scalars of `device` from its training rows."""
    some = sample.take(pick(np.flatnonzero(~held_out(sample)), SCALAR_ROWS))
    kind, consts, table = device_type(device), constants(), some.table
    typical = _TYPICAL if table.group in FIT_DTYPE else replace(_TYPICAL, gap=_HOST_GAP)
    if table.group == "stream":
        hits = _STREAM_HIT_BYTE_PER_CLOCK * kind.num_sms * kind.clock_hz
        typical = replace(typical, cache=hits / kind.dram_byte_per_s)
    if table.group == "attention_decode":
        typical = replace(typical, **_DECODE)
    guess = first_guess(table, some.seconds, kind, typical)
    tiles = range(-1, len(consts.tiles)) if table.group in _ONE_TILE else (-1,)
    hold = MATRIX_UNIT_STIFFNESS if table.group in _MATRIX_UNIT_GROUPS else STIFFNESS
    fits = [fit_scalars(table, some.seconds, kind, consts, replace(guess, tile=tile), hold) for tile in tiles]
    return min(fits, key=lambda s: mean_error(table, some.seconds, kind, consts, s))


def train_trees(samples: Mapping[str, Sample], fits: Mapping[str, Scalars]) -> xgboost.Booster:
    """Return trees trained on the training rows of every type in `samples`; each type weighs the same."""
    rows, targets, weights = [], [], []
    for name in sorted(samples):
        some = samples[name].take(pick(np.flatnonzero(~held_out(samples[name])), TREE_ROWS))
        device = device_type(name)
        analytic = estimate(some.table, device, fits[name], constants())
        rows.append(inputs(some.table, device, analytic))
        targets.append(np.log(some.seconds / analytic.seconds))
        weights.append(np.full(len(some), 1.0 / len(some)))
    weight = np.concatenate(weights)
    matrix = xgboost.DMatrix(
        np.concatenate(rows), np.concatenate(targets), weight=weight * len(weight) / weight.sum(), nthread=1
    )
    return xgboost.train(PARAMS, matrix, ROUNDS)


def model_of(
    group: str, booster: xgboost.Booster, fits: Mapping[str, Scalars], samples: Mapping[str, Sample]
) -> GroupModel:
    """Return a group model without intervals, for predicting held-out rows."""
    flat = Interval((), (1.0,), (1.0,))
    names = sorted({str(n) for s in samples.values() for n in np.unique(s.table.name)})
    dtypes = sorted({str(d) for s in samples.values() for d in np.unique(s.table.dtype)})
    low = np.min([s.table.sizes.min(axis=0) for s in samples.values()], axis=0)
    high = np.max([s.table.sizes.max(axis=0) for s in samples.values()], axis=0)
    sizes = tuple((float(a), float(b)) for a, b in zip(low, high, strict=True))
    card = Card(
        group, f"{group}.ubj", "", dict(fits), FIT_DTYPE.get(group, "float32"), group not in FIT_DTYPE, tuple(dtypes),
        tuple(names), sizes, flat, flat, {},
    )  # fmt: skip
    return GroupModel(card, booster, tuple(Fit(device_type(n), fits[n]) for n in sorted(fits)))


#: Streams longer than this many times L2 show what DRAM gives; fewer of them than this show nothing.
_OUTGROWN, _FEW_STREAMS = 2.0, 50


def dram_shares(streams: Mapping[tuple[str, str], tuple[Floats, Floats]]) -> DramShares:
    """Return the share of the data sheet's DRAM bandwidth that long streams reach: the slope of time over bytes.

    The intercept is what a call costs besides. A type that several sources measured gets the mean of theirs.
    """
    found: dict[str, list[float]] = {}
    for (name, _), (moved, seconds) in sorted(streams.items()):
        device = device_type(name)
        long = moved > _OUTGROWN * device.l2_bytes
        if long.sum() >= _FEW_STREAMS:
            rows = np.column_stack([moved[long], np.ones(long.sum())]) / seconds[long, None]
            per_byte_s = np.linalg.lstsq(rows, np.ones(long.sum()), rcond=None)[0][0]
            found.setdefault(name, []).append(1.0 / float(per_byte_s) / device.dram_byte_per_s)
    return DramShares({name: float(np.mean(shares)) for name, shares in sorted(found.items())})


def learned(device: str, model: GroupModel, dram: DramShares, dispatch: Dispatch = "published") -> LearnedModel:
    """Return the model of one device type with only one group; of a type that it never saw, not its memory either."""
    kind = device_type(device)
    known = dram if device in model.card.fits else dram.without({device})
    return LearnedModel(kind, {model.card.group: model}, constants(), Roofline(kind, SPEC_SHEET), dispatch, dram=known)


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Predictions of held-out rows of one device type, with what was measured and the share that is launch cost."""

    device: str
    predicted: Floats
    measured: Floats
    launch_share: Floats
    rows: NDArray[np.int64]

    @property
    def ratio(self) -> Floats:
        """Measured over predicted."""
        return self.measured / self.predicted


def errors(results: Sequence[HeldOut]) -> dict[str, dict[str, float]]:
    """Return mean and median absolute percentage error and median bias, %, by device type."""
    return {
        r.device: {
            "mean_ape": round(100 * float(np.mean(np.abs(1 / r.ratio - 1))), 1),
            "median_ape": round(100 * float(np.median(np.abs(1 / r.ratio - 1))), 1),
            "bias": round(100 * float(np.median(1 / r.ratio) - 1), 1),
        }
        for r in results
    }


def predict_rows(
    device: str, model: GroupModel, sample: Sample, rows: NDArray[np.int64], dram: DramShares,
    dispatch: Dispatch = "published",
) -> HeldOut:  # fmt: skip
    """Predict the given rows of `sample` for `device`."""
    some = sample.take(rows)
    found = learned(device, model, dram, dispatch).predict_group(some.table)
    share = found.estimate.launch_s / found.estimate.seconds
    return HeldOut(device, found.seconds, some.seconds, share, rows)


def leave_one_out(
    group: str, samples: Mapping[str, Sample], fits: Mapping[str, Scalars], shapes: str, dram: DramShares
) -> list[HeldOut]:
    """Return predictions for each device type by a model that never saw it.

    `shapes` is "held_out" (a quarter of the shapes, which no type showed either) or "all" rows of the left-out type.
    """
    results = []
    for name in sorted(samples):
        others = {n: s for n, s in samples.items() if n != name}
        known = {n: fits[n] for n in others}
        model = model_of(group, train_trees(others, known), known, others)
        chosen = np.flatnonzero(held_out(samples[name])) if shapes == "held_out" else np.arange(len(samples[name]))
        results.append(predict_rows(name, model, samples[name], chosen, dram))
    return results


#: The 0.9 quantile of Student's t by degrees of freedom, over that of the normal distribution.
_STUDENT = {1: 3.078, 2: 1.886, 3: 1.638, 4: 1.533, 5: 1.476, 6: 1.440, 7: 1.415, 8: 1.397, 9: 1.383}
_NORMAL = 1.2816


def unseen_interval(results: Sequence[HeldOut]) -> Interval:
    """Return the factors for a type that is not among `results`: those that span them, widened for being few.

    Most of a type's error is one bias of its own, and a handful of types shows a handful of biases: Student's factor
    for one more draw, t(n - 1) sqrt(1 + 1 / n) over the normal quantile, applied to the logarithm.
    """
    few = len(results)
    widening = _STUDENT.get(few - 1, _NORMAL) * np.sqrt(1 + 1 / few) / _NORMAL
    found = interval(results)
    low, high = (tuple(float(f**widening) for f in factors) for factors in (found.low, found.high))
    return Interval(found.edges, low, high)


def coverage(results: Sequence[HeldOut]) -> dict[str, float]:
    """Return the percentage of each type's rows inside the interval that the other types give."""
    found = {}
    for own in results:
        low, high = unseen_interval([r for r in results if r is not own]).factors(own.launch_share)
        found[own.device] = round(100 * float(np.mean((own.ratio >= low) & (own.ratio <= high))), 1)
    return found


def interval(results: Sequence[HeldOut]) -> Interval:
    """Return the factors that span the middle 80 % of measured over predicted, each device type weighing the same."""
    share = np.concatenate([r.launch_share for r in results])
    ratio = np.concatenate([r.ratio for r in results])
    weight = np.concatenate([np.full(len(r.ratio), 1.0 / len(r.ratio)) for r in results])
    edges = tuple(float(e) for e in np.unique(np.round(np.quantile(share, [1 / 3, 2 / 3]), 4)))
    bins = np.searchsorted(np.array(edges), share, side="left")
    low, high = [], []
    for b in range(len(edges) + 1):
        inside = bins == b
        chosen = inside if inside.any() else np.ones_like(inside)
        low.append(_quantile(ratio[chosen], weight[chosen], 0.1))
        high.append(_quantile(ratio[chosen], weight[chosen], 0.9))
    return Interval(edges, tuple(low), tuple(high))


def _quantile(values: Floats, weight: Floats, q: float) -> float:
    order = np.argsort(values, kind="stable")
    cumulative = np.cumsum(weight[order]) / weight.sum()
    return float(values[order][min(np.searchsorted(cumulative, q), len(values) - 1)])


def roofline_share(samples: Mapping[str, Sample], family: str) -> dict[str, float]:
    """Return the shares of both peaks that bring the plain roofline closest, and the spread that is left.

    Rows that mostly wait for their launch say nothing of shares and are left out (measured under 3 times it).
    """
    work, moved, launch, seconds = [], [], [], []
    for name, sample in samples.items():
        device, table = device_type(name), sample.table
        floor = float(np.quantile(sample.seconds, 0.01))
        some = (table.family == family) & (sample.seconds > 3 * floor)
        work.append((table.flop / peaks(table, device))[some])
        moved.append((table.bytes_moved / device.dram_byte_per_s)[some])
        launch.append(np.full(int(some.sum()), floor))
        seconds.append(sample.seconds[some])
    arithmetic, traffic, fixed, target = (np.concatenate(a) for a in (work, moved, launch, seconds))

    def log_ratio(logs: Floats) -> Floats:
        predicted = fixed + np.maximum(arithmetic / np.exp(logs[0]), traffic / np.exp(logs[1]))
        return np.log(target / predicted)

    low, high = np.log([0.02, 0.1]), np.log([1.0, 1.2])
    found = minimise(lambda x: float(np.mean(np.abs(log_ratio(x)))), np.log([0.6, 0.8]), low, high)
    left = np.exp(np.quantile(log_ratio(found), [0.1, 0.9]))
    shares = [float(v) for v in np.exp(found)]
    return dict(zip(("compute", "memory", "low", "high"), (*shares, min(left[0], 1.0), max(left[1], 1.0)), strict=True))
