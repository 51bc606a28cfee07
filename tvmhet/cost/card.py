"""The card of a trained model: where it comes from, what it may be used for, how wrong it is, and its file's hash.

A card is a YAML file beside the model. The model's bytes are compared with the card's sha256 before XGBoost sees them:
a file that somebody changed can crash its parser.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml
from numpy.typing import NDArray

from tvmhet.cost.inputs import INPUTS
from tvmhet.cost.physics import FITTED, Scalars
from tvmhet.errors import BadModel

if TYPE_CHECKING:
    import xgboost

SCHEMA = 1
_SCALARS = (*FITTED, "library", "tile")


@dataclass(frozen=True, slots=True)
class Interval:
    """Factors on a prediction that span the middle 80 % of held-out rows, by the share of time that is launch cost.

    `edges` are the upper ends of all bins but the last, ascending.
    """

    edges: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]

    def factors(self, launch_share: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return (low, high) factors for each prediction; low <= 1 <= high."""
        bins = np.searchsorted(np.array(self.edges), launch_share, side="left")
        low, high = np.array(self.low)[bins], np.array(self.high)[bins]
        return np.minimum(low, 1.0), np.maximum(high, 1.0)


@dataclass(frozen=True, slots=True)
class Card:
    """What is known of one trained model. `measured` and `unseen` are the intervals on types in and out of the data."""

    group: str
    file: str
    sha256: str
    fits: Mapping[str, Scalars]  # by device type
    fit_dtype: str  # the dtype of the training rows' arithmetic
    host_bound: bool  # whether the rows were timed one eager call at a time, so that the host sets the launch cost
    dtypes: tuple[str, ...]
    names: tuple[str, ...]
    size_range: tuple[tuple[float, float], ...]
    measured: Interval
    unseen: Interval
    about: Mapping[str, Any]  # sources, seed, versions, errors: for people

    def to_yaml(self) -> str:
        """Return the card as YAML text."""
        tree = {
            "schema": SCHEMA,
            "group": self.group,
            "model": self.file,
            "sha256": self.sha256,
            "inputs": list(INPUTS),
            "fit_dtype": self.fit_dtype,
            "host_bound": self.host_bound,
            "dtypes": list(self.dtypes),
            "names": list(self.names),
            "size_range": [list(r) for r in self.size_range],
            "interval": {kind: _interval_tree(getattr(self, kind)) for kind in ("measured", "unseen")},
            "fits": {n: {f: _short(getattr(s, f)) for f in _SCALARS} for n, s in sorted(self.fits.items())},
            **self.about,
        }
        return yaml.safe_dump(tree, sort_keys=False, width=120, default_flow_style=None)


def _short(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.5g}")


def _interval_tree(interval: Interval) -> dict[str, list[float]]:
    return {key: [_short(v) for v in getattr(interval, key)] for key in ("edges", "low", "high")}


def read_card(path: Path) -> Card:
    """Read a card. Raises BadModel if it is missing, malformed, or made for other inputs."""
    try:
        tree = yaml.safe_load(path.read_text())
        if tree.pop("schema") != SCHEMA or tuple(tree.pop("inputs")) != INPUTS:
            raise BadModel(f"{path.name} was made for other inputs than this version computes", "retrain with train.py")
        intervals = tree.pop("interval")
        return Card(
            group=tree.pop("group"),
            file=tree.pop("model"),
            sha256=tree.pop("sha256"),
            fits={n: _scalars(row) for n, row in tree.pop("fits").items()},
            fit_dtype=tree.pop("fit_dtype"),
            host_bound=bool(tree.pop("host_bound")),
            dtypes=tuple(tree.pop("dtypes")),
            names=tuple(tree.pop("names")),
            size_range=tuple((float(a), float(b)) for a, b in tree.pop("size_range")),
            measured=_interval(intervals["measured"]),
            unseen=_interval(intervals["unseen"]),
            about=tree,
        )
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, BadModel):
            raise
        raise BadModel(f"model card {path.name} cannot be read: {error!r}", "restore it or retrain") from error


def _scalars(row: Mapping[str, float]) -> Scalars:
    fitted: dict[str, Any] = {f: float(row[f]) for f in FITTED}
    return Scalars(**fitted, library=int(row["library"]), tile=int(row["tile"]))


def _interval(row: Mapping[str, Sequence[float]]) -> Interval:
    interval = Interval(*(tuple(float(v) for v in row[key]) for key in ("edges", "low", "high")))
    if not len(interval.low) == len(interval.high) == len(interval.edges) + 1:
        raise ValueError("interval bins do not match")
    return interval


def read_booster(path: Path, sha256: str) -> xgboost.Booster:
    """Return the trees in a file. Raises BadModel if it is missing or is not the one whose hash its card holds."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadModel(f"model file {path.name} cannot be read: {error}", "restore it or retrain") from error
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise BadModel(
            f"model file {path.name} has sha256 {found[:12]}..., its card says {sha256[:12]}...",
            "restore the shipped file, or retrain to get a card that matches",
        )
    import xgboost  # 0.4 s, so not before a model is used

    booster = xgboost.Booster({"nthread": 1})
    booster.load_model(bytearray(data))
    return booster
