"""A recommendation as plain JSON values."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from tvmhet.recommending.option import Option

if TYPE_CHECKING:
    from tvmhet.recommending.recommendation import Recommendation


def option_to_dict(option: Option | None) -> dict[str, Any] | None:
    """Return what an option is, takes and costs; None for none."""
    if option is None:
        return None
    return {
        "instances": {o.key: n for o, n in option.instances},
        "devices": option.devices,
        "throughput_per_s": option.rate_per_s,
        "latency_ms": option.latency_s * 1e3,
        "usd_per_h": option.usd_per_h,
        "power_w": option.power_w,
        "hours": option.hours,
        "usd": option.usd,
        "kwh": option.kwh,
    }


def recommendation_to_dict(made: Recommendation) -> dict[str, Any]:
    """Return the choice, the front, each type's best and how sure it is."""
    sure, risk = made.confidence, made.robust.risk if made.robust else None
    job = {k: v for k, v in dataclasses.asdict(made.job).items() if v is not None}
    return {
        "model": made.model,
        "job": {**job, "goal": made.job.goal.value},
        "prices": {"date": made.market.date, "source": made.market.source},
        "best": option_to_dict(made.best),
        "homogeneous": option_to_dict(made.homogeneous),
        "one_type_is_best": made.one_type_is_best,
        "by_type": {name: option_to_dict(o) for name, o in made.by_type},
        "front": [
            {"option": option_to_dict(p.option), "homogeneous": option_to_dict(p.homogeneous)} for p in made.front
        ],
        "binding": {name: option_to_dict(o) for name, o in made.binding},
        "pipelines": [
            {
                "copies": p.copies,
                "stages": [
                    {"type": s.placement.device_type, "devices": len(s.placement.devices), "load_s": s.load_s}
                    for s in p.plan.stages
                ],
            }
            for p in made.pipelines
        ],
        "confidence": None
        if sure is None
        else {
            "probability": sure.probability,
            "keeps_limits": sure.keeps_limits,
            "regret": sure.regret,
            "regret_95": sure.regret_95,
            "low": sure.low,
            "high": sure.high,
            "rivals": [{"share": share, "option": option_to_dict(o)} for o, share in sure.rivals],
        },
        "risk": risk,
        "break_evens": [
            {
                "type": e.device_type,
                "factor": e.factor if e.option else None,
                "option": option_to_dict(e.option),
            }
            for e in made.break_evens
        ],
        "changes": [
            {"what": c.what, "option": option_to_dict(c.option), "refused": c.refused or None} for c in made.changes
        ],
        "complete": made.complete,
        "bound": made.bound,
        "notes": list(made.notes),
    }
