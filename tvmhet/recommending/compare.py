"""Options beside each other: each type's best, the trade of time against cost, what limits, what could win instead."""

from __future__ import annotations

from collections.abc import Sequence

from tvmhet.recommending.job import Job
from tvmhet.recommending.option import Option, best, front, meets, value
from tvmhet.recommending.recommendation import TradePoint
from tvmhet.recommending.space import MARGINS

_RIVALS = 12  # sets of types that the draws compare, at each margin


def only(options: Sequence[Option], device_type: str) -> list[Option]:
    """Return the options of that type alone."""
    return [o for o in options if set(o.devices) == {device_type}]


def trades(job: Job, options: Sequence[Option]) -> list[TradePoint]:
    """Return the front within the limits, each point beside the cheapest single-type option that is as fast."""
    kept = [o for o in options if meets(o, job.limits())]
    alone = sorted((o for o in kept if o.is_homogeneous), key=lambda o: (o.cost(), o.time(), o.fleet))
    points = []
    for option in front(kept):
        as_fast = (o for o in alone if o.time() <= option.time() * (1 + 1e-9))
        points.append(TradePoint(option, next(as_fast, None)))
    return points


def binding(job: Job, options: Sequence[Option], chosen: Option) -> list[tuple[str, Option]]:
    """Return the limits without which something better would be taken; a service's throughput is its purpose."""
    out = []
    for name in job.limits():
        if name == "throughput_per_s" and job.is_service:
            continue
        free = best(job, options, {n: v for n, v in job.limits().items() if n != name})
        if free is not None and free != chosen and not meets(free, {name: job.limits()[name]}):
            out.append((name, free))
    return out


def pool_of(job: Job, options: Sequence[Option], chosen: Option) -> list[Option]:
    """Return what could win if predictions are wrong: of each set of types the best, also with room to spare."""
    by_kind: dict[frozenset[str], list[Option]] = {}
    for option in options:
        by_kind.setdefault(frozenset(option.devices), []).append(option)
    found: dict[Option, None] = {chosen: None}
    for margin in (*MARGINS, 0.9, 0.75):
        asked = {n: v * margin if n == "throughput_per_s" else v / margin for n, v in job.limits().items()}
        winners = [o for group in by_kind.values() if (o := best(job, group, asked)) is not None]
        found |= dict.fromkeys(sorted(winners, key=lambda o: (value(job, o), o.fleet))[:_RIVALS])
        if not job.limits():
            break
    return list(found)
