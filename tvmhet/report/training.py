"""A training plan as text for people: the iteration with its parts, then one row per stage.

 iteration    412 ms for 1024 samples (2485 samples/s): pipeline 397 ms, exposed all-reduce and update 15 ms
 ...
stage  devices, operators, kernels    forward  backward  transfer  all-reduce  update     memory
    0  4 x a100                        6.1 ms   12.3 ms    500 us      2.1 ms  350 us    3.2 GiB
       conv1 … layer2.add             share 96  recompute             exposed 0           6 in flight
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from tvmhet.cluster.units import duration, gib
from tvmhet.report import facts
from tvmhet.report.text import indented, new_table, notes_view, pairs

if TYPE_CHECKING:
    from tvmhet.plans import Plan, TrainingFigures

_HELP = (
    "Forward, backward and transfer are of one micro-batch on one replica, all-reduce and update of one iteration; "
    "memory is the peak of one device. In flight: the micro-batches whose stash a replica holds at its peak."
)


def training_view(plan: Plan, figures: TrainingFigures) -> RenderableType:
    """Return the plan for a rich console: head lines, one row per stage, notes."""
    table = new_table("stage>", "devices, operators, kernels", "forward>", "backward>", "transfer>", "all-reduce>",
                      "update>", "memory>")  # fmt: skip
    for stage, trained in zip(plan.stages, figures.stages, strict=True):
        shared = sum(t.place == trained.place for t in figures.stages) > 1
        what = [facts.devices_text(stage) + (f" (place {trained.place})" if shared else ""), facts.span_text(stage)]
        what += facts.kernels_text(stage)
        if trained.share < figures.num_microbatches:
            what.append(f"{trained.share} of {figures.num_microbatches} micro-batches")
        table.add_row(
            str(stage.index),
            "\n".join(what),
            duration(trained.forward_s),
            duration(trained.backward_s) + ("\nrecomputes" if trained.recompute else ""),
            duration(trained.transfer_s),
            f"{duration(trained.all_reduce_s)}\n{duration(trained.exposed_s)} shown" if trained.all_reduce_s else "0",
            duration(trained.update_s),
            f"{gib(stage.memory_bytes)}\n{trained.in_flight} in flight",
        )
    head = Text(f"training plan of {plan.model}", style="bold")
    return Group(head, pairs(head_lines(plan, figures)), table, indented(_HELP, "dim"), *notes_view(plan.notes))


def head_lines(plan: Plan, figures: TrainingFigures) -> list[tuple[str, str]]:
    """Return (label, text) pairs that sum the plan up."""
    used = {d: s.placement.device_type for s in plan.stages for d in s.placement.devices}
    devices = Counter(used.values())
    rest = figures.iteration_s - figures.pipeline_s
    rate = facts.per_second(figures.global_batch / figures.iteration_s)
    lines = [
        ("iteration", f"{duration(figures.iteration_s)} for {figures.global_batch} samples ({rate} samples/s): "
                      f"pipeline {duration(figures.pipeline_s)}, all-reduce and update {duration(rest)}"),
        ("simulated", f"{duration(figures.simulated_s)}, with every pass and transfer as an event"),
        ("micro-batches", f"{figures.num_microbatches} of {figures.microbatch_size} samples"),
        ("schedule", f"{figures.schedule}, bubble {facts.percent(figures.bubble)}"),
        ("optimizer", figures.optimizer),
        ("lower bound", f"{_least(plan)} per iteration, by these times and these closed forms"),
        ("status", facts.status_text(plan)),
        ("solver", f"{plan.solver}, {plan.steps} steps"),
        ("devices", ", ".join(f"{n} x {name}" for name, n in devices.items())),
        ("forward times", facts.shares_text([p for s in plan.stages for p in s.predictions])),
        ("backward times", figures.backward_source),
    ]  # fmt: skip
    if plan.usd_per_h > 0:
        usd = plan.usd_per_h * figures.iteration_s / 3600
        lines.append(("price", f"{plan.usd_per_h:.4g} USD/h, {usd:.4g} USD per iteration"))
    return lines


def _least(plan: Plan) -> str:
    return f"{plan.lower_bound:.4g} USD" if plan.objective == "cost" else duration(plan.lower_bound)
