"""How sure the recommendation for a training job is: its planned fleets, timed again in each draw of the errors.

Errors are those of forward kernels (uncertainty.py); a kernel's backward pass is off by the same factor. With c the
compute seconds of a stage for one micro-batch, l its load, n the micro-batches of its busiest replica and e the drawn
factor on its compute, an iteration changes by

    sum over stages of c (e - 1)  +  change of the largest (n - 1) (l + c (e - 1))         stages of one place add up

which is exact for 1F1B and GPipe with one slowest stage. Transfers, all-reduce and update keep their figures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from tvmhet.graph.opgraph import OpGraph
from tvmhet.planning_training import TrainingGraph
from tvmhet.plans import Plan, PlannedStage
from tvmhet.recommending.uncertainty import Draws, Floats, KernelBelief, spread

#: (samples of a micro-batch, maker, names of operators) -> kernel key
KernelKeys = Mapping[tuple[int, str, tuple[str, ...]], str]


def kernel_keys(graphs: Sequence[TrainingGraph]) -> KernelKeys:
    """Return the key of each candidate kernel: (samples of a micro-batch, maker, names of its operators) -> key."""
    return {
        (g.size, k.maker, tuple(g.candidates.names[o] for o in k.ops)): key
        for g in graphs
        for k, key in zip(g.candidates.kernels, g.candidates.keys, strict=True)
    }


def stage_beliefs(plan: Plan, stage: PlannedStage, graph: OpGraph, keys: KernelKeys) -> list[KernelBelief]:
    """Return what is known of a planned stage's kernels; equal kernels share a key."""
    assert plan.training is not None, "a plan of an iteration"
    size = plan.training.microbatch_size
    return [
        KernelBelief(
            p.time_s,
            spread(p.time_s, p.low_s, p.high_s),
            stage.placement.device_type,
            graph.operators[graph.index(k.ops[0])].family,
            keys[size, k.maker, tuple(k.ops)],
            p.source,
        )
        for k, p in zip(stage.kernels, stage.predictions, strict=True)
    ]


def iteration_draws(plan: Plan, beliefs: Sequence[Sequence[KernelBelief]], draws: Draws) -> Floats:
    """Return the seconds of one iteration in each draw. `beliefs` are by stage."""
    figures = plan.training
    assert figures is not None, "a plan of an iteration"
    factors = [compute_factor(known, draws) for known in beliefs]
    change = _busy_s(plan, factors) - _busy_s(plan, [np.ones(draws.num_draws)] * len(factors))
    return np.maximum(figures.iteration_s + change, 1e-3 * figures.iteration_s)


def compute_factor(known: Sequence[KernelBelief], draws: Draws) -> Floats:
    """Return the drawn seconds of these kernels together, over those that are predicted."""
    total = math.fsum(b.seconds for b in known)
    drawn = sum((b.seconds * np.exp(draws.errors[b.device_type, b.key]) for b in known), np.zeros(draws.num_draws))
    return np.asarray(drawn / total) if total > 0 else np.ones(draws.num_draws)


def _busy_s(plan: Plan, factors: Sequence[Floats]) -> Floats:
    """The part of an iteration that grows with compute."""
    figures = plan.training
    assert figures is not None, "a plan of an iteration"
    fill = np.zeros(())
    steady: dict[int, Floats] = {}  # by place
    for team in plan.teams():
        ways = [(figures.stages[i].forward_s + figures.stages[i].backward_s) * factors[i] for i in team]
        shortest = np.min(ways, axis=0)  # of unlike replicas, which run beside each other
        fill = fill + shortest
        for i, way in zip(team, ways, strict=True):
            trained = figures.stages[i]
            turns = math.ceil(trained.share / len(plan.stages[i].placement.devices))
            more = (turns - 1) * (way + trained.transfer_s) + way - shortest
            steady[trained.place] = steady.get(trained.place, 0.0) + more
    return np.asarray(fill + np.max(list(steady.values()), axis=0))
