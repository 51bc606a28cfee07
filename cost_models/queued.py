"""Fit one group of kernels that were timed in a queue of them, without launches, on types of one SM generation.

What eager calls hide under the host's work shows here: short kernels. The rows are some hundreds a group, so errors are
by cross-validation, and the models answer for types of their generation only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import fitting
import numpy as np
import xgboost
from datasets import Sample
from numpy.typing import NDArray

from tvmhet.cluster.catalog import device_type
from tvmhet.cost.boosted import QUEUED_PREFIX, SAVES_ARITHMETIC, GroupModel
from tvmhet.cost.card import Card, Interval
from tvmhet.cost.dram import DramShares
from tvmhet.cost.inputs import inputs
from tvmhet.cost.likes import capability
from tvmhet.cost.physics import Scalars, constants, estimate
from tvmhet.cost.scalars import Fit, first_guess, fit_scalars

GROUPS = ("batched_vector", "linear_vector", "conv", "softmax", "norm", "attention_prefill")
FOLDS = 5
#: Few rows: shallow trees, and few rows in a leaf.
PARAMS = fitting.PARAMS | {"max_depth": 5, "min_child_weight": 3}
_TYPICAL = Scalars(launch_s=4e-6, compute=0.6, sustained=0.6, dram=0.8, cache=1.3, load=40.0)
#: What other types of the generation widen the logarithms of an interval by, which one measured type does not say. Of
#: an H100's kernels, none of them trained on, an H200's interval so widened holds 78 % of 32 products, 75 of 12
#: attentions and 99 of 139 convolutions, which are sums of several calls; as it is 72, 75 and 84.
_OTHER_TYPES = 1.5


def usual_dtype(sample: Sample) -> str:
    """Return the dtype of most rows."""
    names, counts = np.unique(sample.table.dtype, return_counts=True)
    return str(names[np.argmax(counts)])


def fit(sample: Sample, device: str) -> Scalars:
    """Return the scalars of `device`, by its rows of the usual dtype: trees tell what others take."""
    kind, consts = device_type(device), constants()
    some = sample.take(sample.table.dtype == usual_dtype(sample))
    guess = first_guess(some.table, some.seconds, kind, _TYPICAL)
    if sample.table.group in SAVES_ARITHMETIC:
        guess = replace(guess, winograd=capability(kind) < consts.winograd_below)
    return fit_scalars(some.table, some.seconds, kind, consts, guess, fitting.STIFFNESS)


def train_trees(samples: Mapping[str, Sample], fits: Mapping[str, Scalars]) -> xgboost.Booster:
    """Return trees trained on all rows of every type."""
    rows, targets = [], []
    for name, sample in sorted(samples.items()):
        analytic = estimate(sample.table, device_type(name), fits[name], constants())
        rows.append(inputs(sample.table, device_type(name), analytic))
        targets.append(np.log(sample.seconds / analytic.seconds))
    matrix = xgboost.DMatrix(np.concatenate(rows), np.concatenate(targets), nthread=1)
    return xgboost.train(PARAMS, matrix, fitting.ROUNDS)


def cross_validated(samples: Mapping[str, Sample], dram: DramShares) -> list[fitting.HeldOut]:
    """Return predictions of every row by a model, scalars included, that saw no row of its shape."""
    found: dict[str, list[fitting.HeldOut]] = {name: [] for name in samples}
    for part in range(FOLDS):
        held = {name: fitting.folds(sample, FOLDS) == part for name, sample in samples.items()}
        kept = {name: sample.take(~held[name]) for name, sample in samples.items()}
        fits = {name: fit(sample, name) for name, sample in kept.items()}
        model = _model(kept, fits, train_trees(kept, fits))
        for name, sample in samples.items():
            rows = np.flatnonzero(held[name])
            found[name].append(fitting.predict_rows(name, model, sample, rows, dram, "queued"))
    return [_joined(parts) for parts in found.values()]


def _joined(parts: list[fitting.HeldOut]) -> fitting.HeldOut:
    def all_of(values: list[NDArray[Any]]) -> NDArray[Any]:
        return np.concatenate(values)

    return fitting.HeldOut(
        parts[0].device, all_of([p.predicted for p in parts]), all_of([p.measured for p in parts]),
        all_of([p.launch_share for p in parts]), all_of([p.rows for p in parts]),
    )  # fmt: skip


def _model(samples: Mapping[str, Sample], fits: Mapping[str, Scalars], booster: xgboost.Booster) -> GroupModel:
    """A model without intervals: that of a published group, but for the dtype, and that no host took part."""
    group = next(iter(samples.values())).table.group
    made = fitting.model_of(group, booster, fits, samples)
    card = replace(
        made.card, file=f"{QUEUED_PREFIX}{group}.ubj", fit_dtype=usual_dtype(next(iter(samples.values()))),
        host_bound=False,
    )  # fmt: skip
    return GroupModel(card, booster, tuple(Fit(device_type(n), fits[n]) for n in sorted(fits)))


def train(group: str, out: Path, dram: DramShares) -> Card:
    """Train one group, write `queued_<group>.ubj` and its card to `out`, and return the card."""
    samples = datasets.load_queued(group)
    results = cross_validated(samples, dram)
    fits = {name: fit(sample, name) for name, sample in samples.items()}
    booster = train_trees(samples, fits)
    raw = bytes(booster.save_raw("ubj"))
    seen: Interval = fitting.interval(results)
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in datasets.QUEUED.values()}
    card = replace(
        _model(samples, fits, booster).card,
        sha256=hashlib.sha256(raw).hexdigest(),
        measured=seen,
        unseen=Interval(seen.edges, *(tuple(f**_OTHER_TYPES for f in factors) for factors in (seen.low, seen.high))),
        about={
            "trained_on": {"measured": files, "rows": {name: len(s) for name, s in sorted(samples.items())}},
            "seed": fitting.SEED,
            "versions": {"xgboost": xgboost.__version__, "numpy": np.__version__},
            "error_percent": {"measured_type_unseen_shape": fitting.errors(results)},
        },
    )
    (out / card.file).write_bytes(raw)
    (out / f"{QUEUED_PREFIX}{group}.yaml").write_text(card.to_yaml())
    return card
