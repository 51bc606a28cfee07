"""Plans and measurements as text for people: units written out, every time with its source.

resnet50
  throughput   41.2 inputs/s (one every 24.3 ms)
  ...
 stage  devices, operators, kernels      compute  transfer     load   busy    memory  times from
     0  2 x v100-sxm2-16gb               47.1 ms    500 us  24.3 ms  100 %  81.3 MiB  75 % measured
        conv1 … layer2.add                                                  9 weights 25 % roofline
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tvmhet.cluster.units import duration, gib
from tvmhet.report import facts
from tvmhet.report.benchmark import benchmark_to_text
from tvmhet.report.text import WIDTH, indented, new_table, notes_view, pairs, to_text
from tvmhet.report.training import training_view

if TYPE_CHECKING:
    from tvmhet.plans import Plan, PlannedStage

__all__ = ["benchmark_to_text", "kernels_to_text", "kernels_view", "plan_to_text", "plan_view"]

_MAX_KERNEL_OPS = 4  # operators named per kernel in the details


def plan_to_text(plan: Plan, width: int = WIDTH) -> str:
    """Return the plan as a table of at most `width` columns, without colour codes."""
    return to_text(plan_view(plan), width)


def plan_view(plan: Plan) -> RenderableType:
    """Return the plan for a rich console: head lines, one row per stage, notes."""
    if plan.training is not None:
        return training_view(plan, plan.training)
    return Group(
        Text(f"plan of {plan.model}", style="bold"),
        pairs(facts.head_lines(plan)),
        _stage_table(plan),
        *([] if facts.plan_unknown(plan) else [indented(facts.COLUMN_HELP, "dim")]),
        *notes_view(plan.notes),
    )


def _stage_table(plan: Plan) -> Table:
    table = new_table("stage>", "devices, operators, kernels", "compute>", "transfer>", "load>", "busy>", "memory>",
                      "times from")  # fmt: skip
    for stage in plan.stages:
        busiest = len(plan.stages) > 1 and stage.load_s >= plan.period_s > 0
        what = (facts.devices_text(stage), facts.span_text(stage), *facts.kernels_text(stage))
        table.add_row(
            str(stage.index),
            "\n".join(what),
            *facts.stage_times(stage, plan.period_s),
            f"{gib(stage.memory_bytes)}\n{facts.counted(len(stage.weights), 'weight')}",
            facts.shares_text(stage.predictions).replace(", ", "\n"),
            style="bold" if busiest else None,
        )
    return table


def kernels_to_text(plan: Plan, stage: int, width: int = WIDTH) -> str:
    """Return every kernel of one stage: its operators, maker, time, interval and source. Raises IndexError."""
    return to_text(kernels_view(plan.stages[stage]), width)


def kernels_view(stage: PlannedStage) -> RenderableType:
    """Return the kernels of one stage for a rich console, in execution order."""
    table = new_table("kernel", "operators", "made by", "time>", "80 % interval>", "share>", "source")
    total_s = sum(p.time_s for p in stage.predictions)
    for kernel, guess in zip(stage.kernels, stage.predictions, strict=True):
        shown = ", ".join(kernel.ops[:_MAX_KERNEL_OPS])
        more = len(kernel.ops) - _MAX_KERNEL_OPS
        known = guess.source != facts.UNKNOWN
        table.add_row(
            kernel.name,
            shown + (f", … ({more} more)" if more > 0 else ""),
            kernel.maker,
            duration(guess.time_s) if known else facts.UNKNOWN,
            f"{duration(guess.low_s)} … {duration(guess.high_s)}" if known else "",
            facts.percent(guess.time_s / total_s) if total_s > 0 else "",
            guess.source,
        )
    title = f"stage {stage.index} on {facts.devices_text(stage)}: {facts.counted(len(stage.kernels), 'kernel')}"
    return Group(Text(title, style="bold"), table)
