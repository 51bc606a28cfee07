"""Steps of training that were run: the loss before and after, and what a step takes beside what the plan says."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from tvmhet.cluster.units import duration
from tvmhet.report import facts
from tvmhet.report.text import indented, pairs

if TYPE_CHECKING:
    from tvmhet.plans import Plan

_HELP = "All steps take one made-up batch. tvmhet.load_trainer(...).fit(loader) trains on data."
_WARM_STEPS = 2  # of which no time is taken


def steps_view(name: str, plan: Plan | None, losses: Sequence[float], seconds: Sequence[float]) -> RenderableType:
    """Return what steps took (seconds of each) for a rich console; `plan` is None for a placement made by hand."""
    timed = list(seconds[_WARM_STEPS:]) or list(seconds)
    rows = [
        ("loss", f"{losses[0]:.4f} to {losses[-1]:.4f}"),
        ("step", f"{duration(statistics.median(timed))} measured (median of {len(timed)}){_predicted(plan, timed)}"),
    ]
    title = Text(f"{name}: {facts.counted(len(losses), 'step')} of training", style="bold")
    return Group(title, pairs(rows), indented(_HELP, "dim"))


def _predicted(plan: Plan | None, timed: Sequence[float]) -> str:
    if plan is None or plan.training is None:
        return ""
    predicted_s = plan.training.simulated_s
    return f", {duration(predicted_s)} predicted, ratio {statistics.median(timed) / predicted_s:.2f}"
