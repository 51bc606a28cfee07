"""The answer: the best option, what one type alone would do, the whole trade of time against cost, and why."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tvmhet.cluster.market import Market
from tvmhet.cluster.spec import ClusterSpec
from tvmhet.plans import Plan
from tvmhet.recommending.job import Job
from tvmhet.recommending.option import Option, best, value
from tvmhet.recommending.uncertainty import Confidence, Robust
from tvmhet.recommending.what_if import BreakEven, Change
from tvmhet.report.files import write_text
from tvmhet.solve.units import Unit


@dataclass(frozen=True, slots=True)
class TradePoint:
    """One option of the front of time against cost, and the cheapest of one type that is as fast (None: none is)."""

    option: Option
    homogeneous: Option | None


@dataclass(frozen=True, slots=True)
class Pipeline:
    """`copies` equal pipelines of the best option: the plan of one, and the cluster it is a plan for."""

    copies: int
    plan: Plan
    cluster: ClusterSpec


@dataclass(frozen=True, slots=True)
class Recommendation:
    """What to rent for `job`, and why.

    `homogeneous` is the best option of a single device type under the same limits; `by_type` has each type's best.
    `binding` are the limits without which a better option would be taken, with that option. `complete`: every fleet of
    the market was looked at; else the search was bounded, as `notes` say. Options refer to `units` by index.
    `bound` is a value of the goal that no fleet goes below, where one is known (training jobs).
    `robust` made the choice where it was by risk. `break_evens` and `changes` are filled where asked for.
    """

    model: str
    job: Job
    market: Market
    best: Option
    homogeneous: Option | None
    by_type: tuple[tuple[str, Option | None], ...]
    front: tuple[TradePoint, ...]
    binding: tuple[tuple[str, Option], ...]
    pipelines: tuple[Pipeline, ...]
    confidence: Confidence | None
    complete: bool
    units: tuple[Unit, ...]
    options: tuple[Option, ...]
    notes: tuple[str, ...] = ()
    bound: float | None = None
    robust: Robust | None = None
    break_evens: tuple[BreakEven, ...] = ()
    changes: tuple[Change, ...] = ()

    @property
    def gain(self) -> float:
        """How much better than the best single type, by the job's goal: 0.1 is a tenth less; inf if no type can."""
        if self.homogeneous is None:
            return float("inf")
        best, alone = value(self.job, self.best), value(self.job, self.homogeneous)
        return 0.0 if alone == best else alone / best - 1.0 if best > 0 else float("inf")

    def winner(self, change: Callable[[Option], Option]) -> Option | None:
        """Return what would be taken, by risk too, if every option were changed so; None if none keeps the limits."""
        if self.robust is not None:
            return self.robust.best(change)
        return best(self.job, [change(o) for o in self.options])

    @property
    def one_type_is_best(self) -> bool:
        """Whether mixing types gains nothing here."""
        return self.best.is_homogeneous

    def to_json(self) -> str:
        """Return the choice, the front, each type's best and how sure it is as JSON; plans are saved by themselves."""
        from tvmhet.recommending.records import recommendation_to_dict

        return json.dumps(recommendation_to_dict(self), indent=1, sort_keys=True)

    def save(self, folder: Path) -> None:
        """Write recommendation.json and, for each pipeline, its plan and cluster file, for `tvmhet build --plan`."""
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "recommendation.json", self.to_json() + "\n")
        for i, pipeline in enumerate(self.pipelines):
            pipeline.plan.save(folder / f"plan-{i}.json")
            write_text(folder / f"cluster-{i}.yaml", pipeline.cluster.to_yaml())

    def __str__(self) -> str:
        from tvmhet.recommending.text import recommendation_to_text

        return recommendation_to_text(self)
