"""A recommendation as text for people.

resnet50: rent 2 x g6.xlarge (1 x l4)
  goal         least price, with throughput_per_s >= 300
  ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tvmhet.cluster.units import duration
from tvmhet.recommending.job import Goal, Job
from tvmhet.recommending.option import Option, value
from tvmhet.report.text import WIDTH, new_table, notes_view, pairs, to_text

if TYPE_CHECKING:
    from tvmhet.recommending.measuring import Campaign
    from tvmhet.recommending.recommendation import Recommendation

_ROWS = 12  # of the front that are shown
_SHOWN = 0.005  # share of draws that a rival wins
_LEAST_GAIN = 1e-4  # of one measurement that is written as a number
_GOAL = {Goal.TIME: "shortest time", Goal.PRICE: "least price", Goal.ENERGY: "least energy"}
_LIMIT = {
    "deadline_h": "done within {:g} h",
    "budget_usd": "at most {:g} USD",
    "throughput_per_s": "at least {:g} inputs/s",
    "latency_ms": "each within {:g} ms",
}


def recommendation_to_text(made: Recommendation) -> str:
    """Return the recommendation as a table of at most `WIDTH` columns, without colour codes."""
    return to_text(recommendation_view(made), WIDTH)


def recommendation_view(made: Recommendation) -> RenderableType:
    """Return the recommendation for a rich console."""
    return Group(
        Text(f"{made.model}: {'rent' if made.best.usd_per_h else 'use'} {made.best.fleet}", style="bold"),
        pairs(_head(made)),
        _front(made),
        _types(made),
        *([_what_if(made)] if made.changes else []),
        *notes_view(made.notes),
    )


def _head(made: Recommendation) -> list[tuple[str, str]]:
    job, best = made.job, made.best
    limits = [_limit(n, v, job) for n, v in job.limits().items()]
    careful = f" that {made.robust.risk:.4g} of draws stay below" if made.robust else ""
    lines = [
        ("goal", ", ".join([_GOAL[job.goal] + careful, *limits]) + _amount(job)),
        ("does", figures(best, job)),
        ("runs", "; ".join(_pipelines(made)) or "-"),
        ("one type", _against_one_type(made)),
        *[("limited by", f"{_limit(n, job.limits()[n], job)}: without it {_short(job, o)}") for n, o in made.binding],
    ]
    if made.bound is not None:
        lines.append(("at best", _against_bound(made, made.bound)))
    if made.confidence is not None:
        lines += _how_sure(made)
    if made.market.date or made.market.source:
        lines.append(("prices of", ", ".join(t for t in (made.market.date, made.market.source) if t)))
    return lines


def _amount(job: Job) -> str:
    batch = f", {job.global_batch:,} per iteration" if job.global_batch else ""
    return f" for {job.samples:,} samples{batch}" if job.samples else ""


def _limit(name: str, number: float, job: Job) -> str:
    hourly = "/h" if name == "budget_usd" and job.is_service else ""
    return _LIMIT[name].format(number) + hourly


def amount(number: float) -> str:
    """Return four digits, or all of a large number's.

    >>> amount(12345.6), amount(1.23456)
    ('12,346', '1.235')
    """
    return f"{number:,.0f}" if number >= 1000 else f"{number:.4g}"


def figures(option: Option, job: Job) -> str:
    """Return what an option does and costs in one line."""
    what, one = ("inputs", "latency") if job.global_batch is None else ("samples", "iteration")
    parts = [f"{amount(option.rate_per_s)} {what}/s", f"{one} {duration(option.latency_s)}"]
    if option.hours is not None and option.usd is not None and option.kwh is not None:
        parts += [f"done in {amount(option.hours)} h", f"{amount(option.usd)} USD", f"{amount(option.kwh)} kWh"]
    parts += [f"{amount(option.usd_per_h)} USD/h", f"{amount(option.power_w)} W"]
    return ", ".join(parts)


def _short(job: Job, option: Option) -> str:
    return f"{option.short}, {value_text(job, value(job, option))}"


def value_text(job: Job, number: float) -> str:
    """Return a value of the job's goal with its unit."""
    if job.goal is Goal.TIME:
        return f"{amount(1 / number)} inputs/s" if _is_rate(job) else f"{amount(number)} h"
    name = "USD" if job.goal is Goal.PRICE else "kWh"
    if job.samples:
        return f"{amount(number)} {name}"
    if job.goal is Goal.PRICE:
        per_million = number / 3600 * 1e6
        return f"{amount(number)} USD/h" if job.throughput_per_s else f"{amount(per_million)} USD per million inputs"
    return f"{amount(number)} W" if job.throughput_per_s else f"{amount(number)} J per input"


def _is_rate(job: Job) -> bool:
    """Whether a value of the goal is shown as a rate, which is the more the less the value is."""
    return job.goal is Goal.TIME and not job.samples


def _pipelines(made: Recommendation) -> list[str]:
    out = []
    for pipeline in made.pipelines:
        plan = pipeline.plan
        stages = " -> ".join(s.devices_text for s in plan.stages)
        slowest = max(plan.stages, key=lambda s: s.load_s)
        what = "transfers" if slowest.transfer_s > slowest.compute_s else "compute"
        where = f"stage {slowest.index}, " if len(plan.stages) > 1 else ""
        out.append(f"{pipeline.copies} x ({stages}), {amount(1 / plan.period_s)}/s each, bottleneck: {where}{what}")
    return out


def _against_one_type(made: Recommendation) -> str:
    if made.one_type_is_best:
        return "one type is best here"
    if made.homogeneous is None:
        return "no single type keeps the limits"
    name = next(iter(made.homogeneous.devices))
    if not made.gain:
        return f"as good with {name} alone: {_short(made.job, made.homogeneous)}"
    return f"{made.gain:.1%} more with {name} alone: {_short(made.job, made.homogeneous)}"


def _against_bound(made: Recommendation, bound: float) -> str:
    """What the bound says: a fleet may be better than the recommended one by so much at most."""
    own = value(made.job, made.best)
    if own <= bound * (1 + 1e-6):
        return "no fleet compared is better"
    return f"no fleet compared can be below {value_text(made.job, bound)}, {1 - bound / own:.0%} less"


def _how_sure(made: Recommendation) -> list[tuple[str, str]]:
    sure = made.confidence
    assert sure is not None
    text = f"{sure.probability:.0%} that it is right (keeps the limits, nothing else more than 5 % better)"
    if made.job.limits():
        text += f", {sure.keeps_limits:.0%} that it keeps the limits"
    ends = (sure.high, sure.low) if _is_rate(made.job) else (sure.low, sure.high)
    lines = [
        ("sure", text),
        ("in 80 %", " to ".join(value_text(made.job, v) for v in ends)),
        ("regret", f"{sure.regret:.1%} on average, below {sure.regret_95:.1%} in 95 % of draws"),
    ]
    lines += [("else", f"{share:.0%}: {option.short}") for option, share in sure.rivals if share >= _SHOWN]
    return lines


def _front(made: Recommendation) -> Table:
    job = made.job
    time, cost = ("hours>", "USD>") if job.samples else ("inputs/s>", "USD/h>")
    table = new_table("rent", time, cost, "kWh>" if job.samples else "W>", "cheapest single type as fast", cost)
    points = made.front
    if len(points) > _ROWS:
        at = {round(i * (len(points) - 1) / (_ROWS - 1)) for i in range(_ROWS)}
        points = tuple(p for i, p in enumerate(points) if i in at or p.option == made.best)
    for point in points:
        o, alone = point.option, point.homogeneous
        same = alone is not None and (alone.devices, alone.cost()) == (o.devices, o.cost())
        table.add_row(
            o.short,
            amount(o.hours if o.hours is not None else o.rate_per_s),
            amount(o.cost()),
            amount(o.kwh if o.kwh is not None else o.power_w),
            "the same" if same else "none" if alone is None else alone.short,
            "" if same or alone is None else amount(alone.cost()),
            style="bold" if o == made.best else None,
        )
    return table


def _types(made: Recommendation) -> Table:
    table = new_table("each type alone", "rent", "value>")
    for name, option in made.by_type:
        if option is None:
            table.add_row(name, "cannot keep the limits", "")
        else:
            table.add_row(name, option.short, value_text(made.job, value(made.job, option)))
    return table


def _what_if(made: Recommendation) -> Table:
    table = new_table("what if", "then rent", "value>")
    for even in made.break_evens:
        mine = even.device_type in made.best.devices
        if even.option is None:
            table.add_row(f"{even.device_type} at any price up to 10 times" if mine else f"{even.device_type} cheaper",
                          "the same", "")  # fmt: skip
            continue
        table.add_row(
            f"{even.device_type} at {even.factor:.2f} times its price",
            even.option.short,
            value_text(made.job, value(made.job, even.option)),
        )
    for change in made.changes:
        if change.option is None:
            table.add_row(change.what, change.refused, "")
        else:
            same = change.option.devices == made.best.devices
            table.add_row(change.what, "the same" if same else change.option.short, value_text(made.job, change.value))
    return table


def measuring_view(campaign: Campaign, called: Callable[[str], Sequence[str]]) -> RenderableType:
    """Return what to measure, in order, for a rich console. `called`: a key's operators."""
    table = new_table("", "device type", "kernel", "expected gain>", "USD>", "together>")
    total = 0.0
    for i, choice in enumerate(campaign.choices, 1):
        ops = called(choice.key)
        total += choice.usd
        more = f" + {len(ops) - 1} more" if len(ops) > 1 else ""
        gain = f"{choice.gain:.2%}" if choice.gain >= _LEAST_GAIN else f"below {_LEAST_GAIN:.2%}"
        table.add_row(str(i), choice.device_type, ops[0] + more, gain, f"{choice.usd:.4f}", f"{total:.4f}")
    count = f"{len(campaign.choices)} measurement{'s' if len(campaign.choices) != 1 else ''}"
    head = f"{count} for {campaign.usd:.4f} USD; then: {campaign.reason}"
    all_ = f"knowing every time is expected to make the choice {campaign.gain_of_all:.2%} better"
    if not campaign.choices:
        return Group(Text(head, style="bold"), Text(all_))
    after = f"{all_}, after these {campaign.gain_left:.2%}; a row's gain is that of its result alone"
    return Group(Text(head, style="bold"), Text(after), table)
