"""What every report says about a plan, worked out once: the head lines, the stages' columns, where times come from.

Reports take a `Plan` and never import it: the plan's own methods call them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from tvmhet.cluster.units import duration, gib

if TYPE_CHECKING:
    from tvmhet.plans import KernelPrediction, Plan, PlannedLine, PlannedStage

#: Where a time can come from, the most trusted first; what is not listed follows by name.
SOURCE_ORDER = ("tuned", "measured", "given", "transfer", "calibrated", "learned", "roofline", "unknown")
UNKNOWN = "unknown"

#: What the columns of a stage table mean.
COLUMN_HELP = (
    "Compute and transfer are of one input on one device; load is the time between two inputs that the stage keeps up "
    "with, its hand-over included and its devices taken in turn; busy is its share of the slowest stage's load."
)


def times_unknown(stage: PlannedStage) -> bool:
    """Whether nothing was predicted for the stage: a model placed whole, whose figures are 0 and mean nothing."""
    return all(p.source == UNKNOWN for p in stage.predictions)


def plan_unknown(plan: Plan) -> bool:
    """Whether any stage has no prediction, so that the plan as a whole has none either."""
    return any(times_unknown(s) for s in plan.stages)


def devices_text(stage: PlannedStage) -> str:
    """Return "2 x v100"."""
    return stage.devices_text


def span_text(stage: PlannedStage) -> str:
    """Return "first … last" operator of the stage, in execution order."""
    ops = stage.placement.ops
    return f"{ops[0]} … {ops[-1]}" if len(ops) > 1 else ops[0]


def kernels_text(stage: PlannedStage) -> tuple[str, ...]:
    """Return ("6 ops in 3 tvm kernels",) or ("6 ops in 3 kernels:", "2 library, 1 tvm")."""
    ops, by_maker = (
        counted(len(stage.placement.ops), "op"),
        sorted(Counter(k.maker for k in stage.kernels).items()),
    )
    if len(by_maker) == 1:
        return (f"{ops} in {counted(by_maker[0][1], by_maker[0][0] + ' kernel')}",)
    how = ", ".join(f"{n} {maker}" for maker, n in by_maker)
    return f"{ops} in {counted(len(stage.kernels), 'kernel')}:", how


def counted(number: int, what: str) -> str:
    """Return "1 kernel" or "3 kernels"."""
    return f"{number} {what}" + ("" if number == 1 else "s")


def source_shares(predictions: Iterable[KernelPrediction]) -> tuple[tuple[str, float], ...]:
    """Return (source, share of the predicted time), the most trusted source first. Shares add up to 1.

    Where no time is known at all, each source has the share of the kernels that name it.
    """
    guesses = list(predictions)
    total_s = sum(p.time_s for p in guesses)
    shares: dict[str, float] = {}
    for p in guesses:
        part = p.time_s / total_s if total_s > 0 else 1 / len(guesses)
        shares[p.source] = shares.get(p.source, 0.0) + part
    return tuple(sorted(shares.items(), key=lambda item: (_rank(item[0]), item[0])))


def _rank(source: str) -> int:
    return SOURCE_ORDER.index(source) if source in SOURCE_ORDER else len(SOURCE_ORDER)


def percent(share: float) -> str:
    """Return a share as "12 %"; what is more than nothing and less than half a percent is "< 1 %"."""
    return "< 1 %" if 0 < share < 0.005 else f"{share * 100:.0f} %"


def head_lines(plan: Plan) -> list[tuple[str, str]]:
    """Return (label, text) pairs that sum the plan up: objective, predictions, bound, devices, sources, price."""
    devices = Counter({s.placement.device_type: 0 for s in plan.stages})
    for name, _ in {(s.placement.device_type, d) for s in plan.stages for d in s.placement.devices}:
        devices[name] += 1
    lines = [
        ("objective", plan.objective),
        ("throughput", throughput_text(plan)),
        ("latency", latency_text(plan)),
        ("lower bound", bound_text(plan)),
        ("status", status_text(plan)),
        ("solver", f"{plan.solver}, {plan.steps} steps"),
        ("devices", ", ".join(f"{n} x {name}" for name, n in devices.items())),
        ("times from", shares_text([p for s in plan.stages for p in s.predictions])),
    ]
    if plan.lines:
        lines.append(("lines", ", ".join(line_text(x, plan.period_s) for x in plan.lines)))
    if plan.usd_per_h > 0:
        lines.append(("price", price_text(plan)))
    return lines


def line_text(line: PlannedLine, period_s: float) -> str:
    """Return what of one input crosses a line between regions, and how busy that keeps it."""
    busy = f", {percent(line.load_s / period_s)} busy" if period_s > 0 else ""
    return f"{line.name}: {gib(line.size_bytes)} in {duration(line.load_s)}{busy}"


def per_second(rate: float) -> str:
    """Return a rate with four digits, or whole where it has more: "93.4", "10438"."""
    return f"{rate:.4g}" if rate < 1e4 else f"{rate:.0f}"


def throughput_text(plan: Plan) -> str:
    """Return inputs per second and the period, or "unknown"."""
    if plan_unknown(plan) or plan.period_s <= 0:
        return UNKNOWN
    every = f"one every {duration(plan.expected_period_s)}"
    if plan.expected_period_s != plan.period_s:
        every += f" as it ran, {duration(plan.period_s)} by its kernels"
    return f"{per_second(plan.throughput_per_s)} inputs/s ({every})"


def latency_text(plan: Plan) -> str:
    """Return what one input takes alone, or "unknown"."""
    if plan_unknown(plan):
        return UNKNOWN
    text = f"{duration(plan.expected_latency_s)} for one input alone"
    if plan.expected_latency_s == plan.latency_s:
        return text
    return f"{text} as it ran, {duration(plan.latency_s)} by its kernels"


def bound_text(plan: Plan) -> str:
    """Return the lower bound of the objective and the gap to it, in words."""
    if plan_unknown(plan) or plan.objective_value <= 0:
        return UNKNOWN
    if plan.objective == "cost":
        least, has = plan.lower_bound * 1e6, plan.objective_value * 1e6
        return f"{least:.4g} USD per million inputs, by these times; the plan has {has:.4g}"
    what = "per input" if plan.objective == "throughput" else "for one input"
    return f"{duration(plan.lower_bound)} {what}, by these times; the plan has {duration(plan.objective_value)}"


def status_text(plan: Plan) -> str:
    """Return "optimal", or "feasible" with its gap: the share of its time that a better plan could save at most."""
    if plan_unknown(plan):
        return f"{plan.status}; nothing is predicted, so nothing is proved"
    if plan.status != "feasible":
        return plan.status
    verb = "cost" if plan.objective == "cost" else "take"
    return f"feasible, gap {plan.gap * 100:.2g} %: no plan can {verb} less than the lower bound"


def price_text(plan: Plan) -> str:
    """Return USD per hour, and per million inputs where the throughput is known."""
    text = f"{plan.usd_per_h:.4g} USD/h"
    if plan_unknown(plan) or plan.period_s <= 0:
        return text
    return f"{text}, {plan.usd_per_h * plan.expected_period_s / 3600 * 1e6:.4g} USD per million inputs"


def shares_text(predictions: Iterable[KernelPrediction]) -> str:
    """Return "92 % measured, 8 % roofline": where the predicted time comes from."""
    shares = source_shares(predictions)
    if [name for name, _ in shares] == [UNKNOWN]:
        return UNKNOWN
    return ", ".join(f"{percent(share)} {name}" for name, share in shares)


def stage_times(stage: PlannedStage, period_s: float) -> tuple[str, str, str, str]:
    """Return compute, transfer, load and the share of the bottleneck as text."""
    if times_unknown(stage):
        return UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN
    busy = percent(stage.load_s / period_s) if period_s > 0 else UNKNOWN
    return duration(stage.compute_s), duration(stage.transfer_s), duration(stage.load_s), busy
