"""Why no option keeps all limits: which limit to move and how far, or which two contradict each other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from tvmhet.errors import Infeasible
from tvmhet.recommending.job import Job
from tvmhet.recommending.option import Option, best, measured, meets

_SAME = 1e-9
_NAMED = 4  # offers of a fleet that are named one by one
_UNIT = {"deadline_h": "h", "budget_usd": "USD", "throughput_per_s": "/s", "latency_ms": "ms"}


def refusal(job: Job, options: Sequence[Option], proof: str = "") -> Infeasible:
    """Return the error for limits that no option keeps: the nearest answers, one for each limit that may move.

    `proof` says how sure it is that there is no other option.
    """
    limits = job.limits()
    asked = ", ".join(f"{n}={v:g}" for n, v in limits.items())
    others, found = _nearest_of_each(job, options)
    named = [f"{'' if others else 'without the others '}{_named(job, n, o)}" for n, o in found.items()]
    pair = _contradiction(options, limits)
    why = f"{pair[0]} and {pair[1]} contradict each other on this market" if pair else ""
    if not pair:
        alone = [n for n, v in limits.items() if not any(meets(o, {n: v}) for o in options)]
        each = " and ".join(f"{n}={limits[n]:g}" for n in alone)
        why = f"{each} alone is out of reach" if len(alone) == 1 else f"{each} are each out of reach"
        why = why if alone else "the limits contradict each other"
    return Infeasible(
        f"no fleet keeps {asked}: {why}" + (f" ({proof})" if proof else ""),
        "nearest: " + "; or ".join(named),
    )


def proof_by_bounds(
    limits: Mapping[str, float], reach: Mapping[str, float], fleets: str, *, hourly: bool = False
) -> str:
    """Say whether the limits are out of reach whatever the plan. `reach`: what no plan that keeps the others goes
    beyond in each limit (inf, of a throughput 0: none keeps them); `fleets`: of which fleets."""
    for name, edge in reach.items():
        rate = name == "throughput_per_s"
        if edge == (0.0 if rate else math.inf):
            return f"proved: no plan of {fleets} keeps the limits other than {name}"
        if (limits[name] > edge * (1 + _SAME)) if rate else (limits[name] < edge * (1 - _SAME)):
            beyond = "above" if rate else "below"
            return f"proved: no plan of {fleets} is {beyond} {_at(name, edge, up=rate, hourly=hourly)}"
    known = {n: e for n, e in reach.items() if 0 < e < math.inf}
    bounds = " or ".join(_at(n, e, up=n == "throughput_per_s", hourly=hourly) for n, e in known.items())
    excluded = f"no bound excludes {bounds}" if bounds else "and there is no bound"
    return f"not proved: the fleets that were planned do not, {excluded}"


def _at(name: str, number: float, *, up: bool, hourly: bool) -> str:
    unit = "USD/h" if name == "budget_usd" and hourly else _UNIT[name]
    return f"{name}={_rounded(number, up=up)} {unit}"


def nearest(job: Job, options: Sequence[Option]) -> list[Option]:
    """Return the options that a refusal names."""
    return list(_nearest_of_each(job, options)[1].values())


def _nearest_of_each(job: Job, options: Sequence[Option]) -> tuple[bool, dict[str, Option]]:
    """By limit the option with the least move of it that makes the others possible, if there is one for any limit, else
    with the least move of it alone; and whether the others are kept."""
    limits = job.limits()
    found = {n: o for n in limits if (o := _nearest(job, options, n, limits))}
    if found:
        return True, found
    return False, {n: o for n in limits if (o := _nearest(job, options, n, {n: limits[n]}))}


def _nearest(job: Job, options: Sequence[Option], name: str, limits: dict[str, float]) -> Option | None:
    """The option with the least move of one of `limits` that makes the others possible."""
    rest = {n: v for n, v in limits.items() if n != name}
    kept = [o for o in options if meets(o, rest)]
    if not kept:
        return None
    sign = -1.0 if name == "throughput_per_s" else 1.0
    edge = min(sign * measured(name, o) for o in kept) * sign
    return best(job, kept, {**rest, name: edge})


def _named(job: Job, name: str, option: Option) -> str:
    rented = option.fleet if len(option.instances) <= _NAMED else option.short
    return f"{_at(name, measured(name, option), up=name != 'throughput_per_s', hourly=job.is_service)} with {rented}"


def _rounded(number: float, up: bool) -> str:
    """Three digits, rounded to the side on which the limit still holds."""
    text = f"{number:.3g}"
    if (float(text) < number) if up else (float(text) > number):
        text = f"{number * (1.005 if up else 0.995):.3g}"
    return f"{float(text):.10g}"


def _contradiction(options: Sequence[Option], limits: dict[str, float]) -> tuple[str, str] | None:
    """Two limits that can each be kept, but not together."""
    for a, b in itertools.combinations(limits, 2):
        each = all(any(meets(o, {n: limits[n]}) for o in options) for n in (a, b))
        if each and not any(meets(o, {a: limits[a], b: limits[b]}) for o in options):
            return f"{a}={limits[a]:g}", f"{b}={limits[b]:g}"
    return None
