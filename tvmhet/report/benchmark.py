"""Predicted beside measured, per stage and from end to end, with the ratio. What makes a figure doubtful is said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from tvmhet.cluster.local import machine_of
from tvmhet.cluster.units import duration
from tvmhet.errors import PlanMismatch
from tvmhet.report import facts
from tvmhet.report.text import WIDTH, indented, new_table, notes_view, to_text

if TYPE_CHECKING:
    from tvmhet.plans import Plan
    from tvmhet.runtime.stats import RunStats, Sample, StageStats


_HELP = (
    "Ratio is measured over predicted; stage times are medians with one input at a time, apart from the full pipeline, "
    "where other stages work too; hand-over is from the end of the stage before to the start of this one."
)

_MAX_GUESSED = 0.1  # share of the predicted time that may come from models before the reader is told


def benchmark_to_text(plan: Plan, stats: RunStats, width: int = WIDTH) -> str:
    """Return what `stats` measured beside what `plan` predicted. Raises PlanMismatch if the stages differ."""
    return to_text(benchmark_view(plan, stats), width)


def benchmark_view(plan: Plan, stats: RunStats) -> RenderableType:
    """Return the comparison for a rich console. Raises PlanMismatch if the stages differ."""
    _check_same_stages(plan, stats)
    num = len(stats.latency_s)
    return Group(
        Text(f"{plan.model}: predicted and measured, {num} inputs alone, then {num} in a full pipeline", style="bold"),
        _end_to_end(plan, stats),
        _stages(plan, stats),
        indented(_HELP, "dim"),
        *notes_view(warnings(plan, stats), "yellow"),
        *notes_view(plan.notes),
    )


def warnings(plan: Plan, stats: RunStats) -> list[str]:
    """Return what makes the comparison doubtful, one sentence each; empty if nothing does."""
    found = []
    if stats.shared_cores:
        names = ", ".join(sorted(set(stats.shared_cores)))
        found.append(
            f"on shared cores: {names}; these devices slow each other down, "
            "and the throughput is not what devices of their own would give"
        )
    machines = sorted({machine_of(device) for s in plan.stages for device in s.placement.devices})
    if len(machines) > 1 and not stats.over_machines:
        found.append(
            f"the plan is for {len(machines)} machines ({', '.join(machines)}); all of it ran on this one, "
            "so nothing crossed a network"
        )
    shares = dict(facts.source_shares(p for s in plan.stages for p in s.predictions))
    guessed = 1.0 - shares.get("measured", 0.0)
    if guessed > _MAX_GUESSED and not facts.plan_unknown(plan):
        mend = "profile the model to measure it"
        if any(stage.degree > 1 for stage in plan.stages):
            mend = "profile measures whole kernels, from which those of a split stage follow"
        found.append(f"{facts.percent(guessed)} of the predicted time is an estimate; {mend}")
    return found


def _end_to_end(plan: Plan, stats: RunStats) -> RenderableType:
    table = new_table("end to end", "predicted>", "measured>", "quartiles>", "ratio>")
    known = not facts.plan_unknown(plan)
    table.add_row(
        "latency",
        duration(plan.expected_latency_s) if known else facts.UNKNOWN,
        duration(stats.latency.median_s),
        _quartiles(stats.latency),
        _ratio(stats.latency.median_s, plan.expected_latency_s if known else 0.0),
    )
    known = known and plan.period_s > 0
    table.add_row(
        "throughput",
        f"{facts.per_second(plan.throughput_per_s)} /s" if known else facts.UNKNOWN,
        f"{facts.per_second(stats.throughput_per_s)} /s",
        "",
        _ratio(stats.throughput_per_s, plan.throughput_per_s if known else 0.0),
    )
    return table


def _stages(plan: Plan, stats: RunStats) -> RenderableType:
    table = new_table("stage>", "devices", "compute\npredicted>", "\nmeasured>", "\nratio>", "full\npipeline>",
                      "transfer\npredicted>", "\nmeasured>", "hand-\nover>")  # fmt: skip
    streamed = {s.stage: s for s in stats.stages_streamed}
    for stage, alone in zip(plan.stages, stats.stages, strict=True):
        known = not facts.times_unknown(stage)
        full: StageStats | None = streamed.get(stage.index)
        table.add_row(
            str(stage.index),
            facts.devices_text(stage),
            duration(stage.compute_s) if known else facts.UNKNOWN,
            duration(alone.compute.median_s),
            _ratio(alone.compute.median_s, stage.compute_s if known else 0.0),
            duration(full.compute.median_s) if full else "",
            duration(stage.transfer_s) if known else facts.UNKNOWN,
            duration(alone.transfer.median_s),
            duration(alone.hop.median_s) if alone.hop else "",
        )
    return table


def _quartiles(sample: Sample) -> str:
    return f"{duration(sample.low_s)} … {duration(sample.high_s)}"


def _ratio(measured: float, predicted: float) -> str:
    return f"{measured / predicted:.2f}" if predicted > 0 else ""


def _check_same_stages(plan: Plan, stats: RunStats) -> None:
    planned: Sequence[int] = [s.index for s in plan.stages]
    measured = [s.stage for s in stats.stages]
    if planned != measured:
        raise PlanMismatch(
            f"the plan has stages {planned}, the measurement has stages {measured}",
            "compare a measurement with the plan of the module that was run",
        )
