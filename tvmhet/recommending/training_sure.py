"""How sure the recommendation for a training job is: its planned fleets, timed again in each draw of the errors.

Errors are those of forward kernels (uncertainty.py); a kernel's backward pass is off by the same factor. With c the
compute seconds of a stage for one micro-batch, l its load, n the micro-batches of its busiest replica and e the drawn
factor on its compute, an iteration changes by

    sum over stages of c (e - 1)  +  change of the largest (n - 1) (l + c (e - 1))         stages of one place add up

which is exact for 1F1B and GPipe with one slowest stage. Transfers, all-reduce and update keep their figures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tvmhet.graph.opgraph import OpGraph
from tvmhet.plans import Plan, PlannedStage
from tvmhet.recommending.uncertainty import Draws, Floats, KernelBelief, spread


def stage_beliefs(plan: Plan, stage: PlannedStage, graph: OpGraph) -> list[KernelBelief]:
    """Return what is known of a planned stage's kernels; equal operators on unlike types share a key."""
    assert plan.training is not None, "a plan of an iteration"
    size = plan.training.microbatch_size
    return [
        KernelBelief(
            p.time_s,
            spread(p.time_s, p.low_s, p.high_s),
            stage.placement.device_type,
            graph.operators[graph.index(k.ops[0])].family,
            f"{k.maker} {' '.join(k.ops)} x {size}",
            p.source == "measured",
        )
        for k, p in zip(stage.kernels, stage.predictions, strict=True)
    ]


def iteration_draws(plan: Plan, beliefs: Sequence[Sequence[KernelBelief]], draws: Draws) -> Floats:
    """Return the seconds of one iteration in each draw. `beliefs` are by stage."""
    figures = plan.training
    assert figures is not None, "a plan of an iteration"
    same = np.ones(draws.num_draws)
    factors = []
    for known in beliefs:
        total = math.fsum(b.seconds for b in known)
        drawn = sum((b.seconds * np.exp(draws.errors[b.device_type, b.key]) for b in known), np.zeros(draws.num_draws))
        factors.append(drawn / total if total > 0 else same)
    change = _busy_s(plan, factors) - _busy_s(plan, [same] * len(factors))
    return np.maximum(figures.iteration_s + change, 1e-3 * figures.iteration_s)


def _busy_s(plan: Plan, factors: Sequence[Floats]) -> Floats:
    """The part of an iteration that grows with compute."""
    figures = plan.training
    assert figures is not None, "a plan of an iteration"
    fill: dict[int, Floats] = {}
    steady: dict[int, Floats] = {}
    for stage, trained, factor in zip(plan.stages, figures.stages, factors, strict=True):
        compute = (trained.forward_s + trained.backward_s) * factor
        turns = math.ceil(trained.share / len(stage.placement.devices))
        fill[trained.place] = fill.get(trained.place, 0.0) + compute
        steady[trained.place] = steady.get(trained.place, 0.0) + (turns - 1) * (compute + trained.transfer_s)
    if any(t.share < figures.num_microbatches for t in figures.stages):  # unlike replicas run beside each other
        return np.asarray(np.max([fill[p] + steady[p] for p in fill], axis=0))
    return np.asarray(np.sum(list(fill.values()), axis=0) + np.max(list(steady.values()), axis=0))
