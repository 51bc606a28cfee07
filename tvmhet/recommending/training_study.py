"""A training study made: the model read, at one micro-batch size or several, and timed on a market's types."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import tvm

from tvmhet.cluster.device import DeviceType
from tvmhet.cluster.market import InstanceOffer, Market
from tvmhet.cost.measured import MeasuredKernels
from tvmhet.errors import Infeasible
from tvmhet.ir.model import Model
from tvmhet.ir.optimizers import plan_name
from tvmhet.ir.training_model import TrainingModel
from tvmhet.planning_training import TrainingGoal, TrainingGraph
from tvmhet.recommending.inferring import with_results
from tvmhet.recommending.measurements import Measured, check_known
from tvmhet.recommending.training import TrainingStudy
from tvmhet.recommending.training_fleets import cluster_of, one_of_each
from tvmhet.splitting import Wish, never_used
from tvmhet.training_batch import microbatch_by_scaling
from tvmhet.training_pipeline import sized, timed_training_graph
from tvmhet.training_splits import with_team_times


def make_training_study(
    models: Sequence[Model | TrainingModel | tvm.IRModule],
    market: Market,
    goal: TrainingGoal,
    makers: Sequence[str],
    database: str | Path | None,
    measurements: Sequence[Measured] = (),
    splits: Sequence[Wish] = (),
) -> TrainingStudy:
    """Return the study of a model (at one batch size or several) on a market, with teams of devices for `splits`.

    With `goal.microbatch` a step is traced again; "auto" traces the sizes that are best on each type's smallest offer.
    A measured forward kernel also tells about its backward pass, which changes in proportion.
    """
    asked = sized(list(models), goal)
    steps = [m for m in asked if isinstance(m, TrainingModel)]
    if steps:
        goal = dataclasses.replace(goal, optimizer=plan_name(steps[0].optimizer))
    every = one_of_each(market)
    with closing(MeasuredKernels(database)) as measured:
        ready = [timed_training_graph(m, measured, every, makers) for m in asked]
        if goal.microbatch == "auto":
            more = [steps[0].at_batch(n) for n in _best_sizes(ready[0][1], market, goal) if n != steps[0].batch_size]
            ready += [timed_training_graph(m, measured, every, makers) for m in more]
    check_known(measurements, {key for _, g in ready for key in g.candidates.keys})
    devices = market.device_types()
    timed = (dataclasses.replace(_with_results(g, devices, measurements), module_key=p.key) for p, g in ready)
    models = [*asked, *(steps[0].at_batch(g.size) for _, g in ready[len(asked) :])]
    graphs = tuple(with_team_times(g, splits, every, devices, m) for g, m in zip(timed, models, strict=True))
    unused = never_used(splits, [s for g in graphs for s in g.splits])
    return TrainingStudy(ready[0][0], graphs, goal, market, unused_splits=unused)


def _best_sizes(graph: TrainingGraph, market: Market, goal: TrainingGoal) -> list[int]:
    """The samples of a micro-batch that are best on one instance of each type, by scaled times."""
    smallest: dict[str, InstanceOffer] = {}
    for offer in sorted((o for o in market.offers if o.max_instances), key=lambda o: o.num_devices):
        smallest.setdefault(offer.device.name, offer)
    sizes = set()
    for offer in smallest.values():
        with suppress(Infeasible):
            sizes.add(microbatch_by_scaling(graph, cluster_of(market, ((offer, 1),)), goal, {}))
    return sorted(sizes)


def _with_results(
    graph: TrainingGraph, devices: Sequence[DeviceType], measurements: Sequence[Measured]
) -> TrainingGraph:
    mine = [m for m in measurements if m.key in graph.candidates.keys]
    forward = with_results(graph.forward, graph.candidates, devices, mine)
    before = graph.forward.seconds
    runs = np.isfinite(before) & (before > 0)
    ratio = np.where(runs, forward.seconds / np.where(runs, before, 1.0), 1.0)
    return dataclasses.replace(graph, forward=forward, backward=graph.backward * ratio)
