"""Predict a kernel from its own time on other GPU types (the idea of Habitat, Geoffrey Yu et al., USENIX ATC 2021).

    seconds here = seconds there x (model here / model there)

What the model gets wrong of a shape, it gets wrong on both types, so the ratio is better than the prediction. Several
types are averaged by how alike they are. Kernels that were measured nowhere get the model's own prediction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tvmhet.cost.boosted import LearnedModel
from tvmhet.cost.columns import Floats, columns
from tvmhet.cost.likes import likeness
from tvmhet.cost.model import KernelDesc, Predictions
from tvmhet.errors import BadInput

#: Where measurements on other types leave the model's prediction this weight, as one more opinion.
OWN_OPINION = 0.25
#: The interval of a transferred time, as a share of the model's own (in log).
INTERVAL_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Times of kernels measured on another type, by kernel; `model` is that type's own learned model."""

    model: LearnedModel
    seconds: Mapping[KernelDesc, float]

    def __post_init__(self) -> None:
        for desc, time in self.seconds.items():
            if not (time > 0 and np.isfinite(time)):
                raise BadInput(f"{desc.root.family} on {self.model.device.name} took {time} s", "give a time above 0 s")


@dataclass(frozen=True, slots=True)
class Transfer:
    """A cost model for `here` that uses every measurement `elsewhere`; the rest is learned."""

    here: LearnedModel
    elsewhere: tuple[Elsewhere, ...]

    def predict(self, descs: Sequence[KernelDesc]) -> Predictions:
        """Return one prediction per kernel; the source is "transfer" where a measurement of it elsewhere was used."""
        own = self.here.predict(descs)
        log_own = np.log(own.seconds)
        total = np.full(len(descs), OWN_OPINION)
        logs = OWN_OPINION * log_own
        known = np.zeros(len(descs), dtype=np.bool_)
        groups = _groups(descs)
        for other in self.elsewhere:
            rows = [i for i, d in enumerate(descs) if d in other.seconds]
            if not rows:
                continue
            there = np.log(other.model.predict([descs[i] for i in rows]).seconds)
            measured = np.log([other.seconds[descs[i]] for i in rows])
            weight = np.array([_likeness(self.here, other.model, groups[i]) for i in rows])
            logs[rows] += weight * (log_own[rows] + measured - there)
            total[rows] += weight
            known[rows] = True
        seconds = np.where(known, np.exp(logs / total), own.seconds)
        power = np.where(known, INTERVAL_SHARE, 1.0)
        return Predictions(
            seconds=seconds,
            low=seconds * _shrunk(own.low / own.seconds, power),
            high=seconds * _shrunk(own.high / own.seconds, power),
            in_range=own.in_range | known,
            source=tuple("transfer" if k else s for k, s in zip(known, own.source, strict=True)),
        )


def _shrunk(factor: Floats, power: Floats) -> Floats:
    result: Floats = np.power(factor, power)
    return result


def _groups(descs: Sequence[KernelDesc]) -> dict[int, str]:
    return {int(i): group for group, table in columns(descs).items() for i in table.index}


def _likeness(here: LearnedModel, there: LearnedModel, group: str | None) -> float:
    """The weight of a measurement on another type."""
    dtype = here.groups[group].card.fit_dtype if group is not None and group in here.groups else "float32"
    return likeness(here.device, there.device, dtype)
