"""What a whole model takes on one device: every kernel with its time, interval and source, and their sum.

Reads a plan for that device alone. The sum's interval adds up the ends of all kernels' intervals: it holds if all err
in one direction, and is wide if they do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from tvmhet.cluster.units import duration, gib
from tvmhet.errors import NotSupported
from tvmhet.report import facts
from tvmhet.report.table import kernels_view
from tvmhet.report.text import indented, pairs

if TYPE_CHECKING:
    from tvmhet.plans import Plan


def prediction_view(plan: Plan) -> RenderableType:
    """Return the table for a rich console. Raises NotSupported for a model that was placed whole."""
    _check_known(plan)
    (stage,) = plan.stages
    times = stage.predictions
    total, low, high = (sum(getattr(p, name) for p in times) for name in ("time_s", "low_s", "high_s"))
    lines = [
        ("kernels", f"{duration(total)} ({duration(low)} … {duration(high)} if all err alike)"),
        ("one input", f"{duration(plan.latency_s)}, with the call and the copies of inputs and results"),
        ("memory", gib(stage.memory_bytes)),
        ("times from", facts.shares_text(times)),
    ]
    title = Text(f"{plan.model} on {stage.placement.device_type}", style="bold")
    return Group(title, pairs(lines), kernels_view(stage), *(indented(f"note: {note}") for note in plan.notes))


def prediction_json(plan: Plan) -> dict[str, Any]:
    """Return the same as plain data, times in seconds. Raises NotSupported for a model that was placed whole."""
    _check_known(plan)
    (stage,) = plan.stages
    kernels = [
        {
            "ops": list(kernel.ops),
            "maker": kernel.maker,
            "seconds": guess.time_s,
            "low": guess.low_s,
            "high": guess.high_s,
            "source": guess.source,
        }
        for kernel, guess in zip(stage.kernels, stage.predictions, strict=True)
    ]
    return {
        "model": plan.model,
        "device": stage.placement.device_type,
        "seconds": sum(p.time_s for p in stage.predictions),
        "low": sum(p.low_s for p in stage.predictions),
        "high": sum(p.high_s for p in stage.predictions),
        "latency_s": plan.latency_s,
        "memory_bytes": stage.memory_bytes,
        "kernels": kernels,
    }


def _check_known(plan: Plan) -> None:
    if facts.plan_unknown(plan):
        raise NotSupported(
            f"model {plan.model!r} has no kernels that could be priced: {plan.whole_reason}",
            "bind its shapes (--bind n=128) or give them (--inputs)",
        )
