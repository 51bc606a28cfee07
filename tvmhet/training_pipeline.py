"""The flow for training: plan a step for iterations over a global batch, and build what runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import tvm

from tvmhet.arguments import check_cluster, objective_of, price_limits
from tvmhet.candidates import MAKERS, candidate_kernels
from tvmhet.choosing import best_or_alone, slowed_types
from tvmhet.cluster.spec import ClusterSpec
from tvmhet.context import company
from tvmhet.cost.measured import MeasuredKernels
from tvmhet.errors import BadInput
from tvmhet.ir.importers import as_model
from tvmhet.ir.model import Model
from tvmhet.ir.optimizers import plan_name
from tvmhet.ir.prepare import Prepared, prepare
from tvmhet.ir.training_model import TrainingModel
from tvmhet.ir.training_step import read_step
from tvmhet.known_times import known_times
from tvmhet.planning import with_job
from tvmhet.planning_training import TrainingGoal, TrainingGraph, training_graph
from tvmhet.plans import Plan
from tvmhet.splitting import Wish, never_used, wishes_of
from tvmhet.times import Candidates
from tvmhet.training import HetTrainer, microbatches_of
from tvmhet.training_batch import microbatch_by_scaling
from tvmhet.training_build import build_training
from tvmhet.training_memory import memory_of_placement
from tvmhet.training_placement import TrainingPlacement
from tvmhet.training_solve import make_training_plan
from tvmhet.training_splits import with_team_times
from tvmhet.training_teams import on_teams
from tvmhet.training_times import BACKWARD, FORWARD, step_graph


def plan_training(
    model: Model | TrainingModel | tvm.IRModule | Sequence[Model | TrainingModel],
    *,
    cluster: ClusterSpec,
    goal: TrainingGoal,
    pin: Mapping[str, str] | None = None,
    makers: Sequence[str] = MAKERS,
    database: str | Path | None = None,
    time_limit_s: float = 30.0,
    splits: Sequence[Wish] = (),
) -> Plan:
    """Decide micro-batches, schedule, stages, replicas, splits, recomputation for training `model` on `cluster`.

    `model` is a training step of one micro-batch, whose optimiser then holds, or only its forward pass: backward times
    are then assumed, as the plan says. The first input's first dim is the samples. A list holds the same model at
    several batch sizes, among which the plan chooses. With `goal.microbatch` a training step is traced again, with so
    many samples or with as many as were best by scaled times.
    Raises Infeasible, BadBatch for a global batch that no micro-batch divides, NotSupported for a model without graph.
    """
    check_cluster(cluster)
    models = sized(list(model) if isinstance(model, Sequence) else [model], goal)
    steps = [m for m in models if isinstance(m, TrainingModel)]
    if steps:
        goal = replace(goal, optimizer=plan_name(steps[0].optimizer))
    with closing(MeasuredKernels(database)) as measured:
        key = read_step(steps[0]).prepared.key if steps else ""
        slowed = slowed_types(key, cluster, measured, (FORWARD, BACKWARD)) if steps else []
        return best_or_alone(
            cluster, slowed, lambda some: _plan(models, some, goal, pin or {}, makers, measured, time_limit_s, splits)
        )


def _plan(
    models: Sequence[object],
    cluster: ClusterSpec,
    goal: TrainingGoal,
    pin: Mapping[str, str],
    makers: Sequence[str],
    measured: MeasuredKernels,
    time_limit_s: float,
    splits: Sequence[Wish],
) -> Plan:
    """The best plan by what passes take while every CPU device of the cluster works."""
    steps = [m for m in models if isinstance(m, TrainingModel)]
    timed = partial(_timed, measured=measured, cluster=cluster, makers=makers, splits=splits)
    ready = [timed(m) for m in models]
    if goal.microbatch == "auto":
        size = microbatch_by_scaling(ready[0][1], cluster, goal, pin)
        if size != steps[0].batch_size:
            steps.append(steps[0].at_batch(size))
            ready.append(timed(steps[1]))
    allocated = partial(_allocated, steps, cluster, makers) if _runs_here(models, cluster) else None
    graphs = [replace(g, module_key=p.key) for p, g in ready]
    notes = never_used(splits, [s for g in graphs for s in g.splits])
    return make_training_plan(ready[0][0], graphs, cluster, goal, pin, time_limit_s, notes, allocated=allocated)


def _timed(
    model: object, measured: MeasuredKernels, cluster: ClusterSpec, makers: Sequence[str], splits: Sequence[Wish]
) -> tuple[Prepared, TrainingGraph]:
    prepared, graph = timed_training_graph(model, measured, cluster, makers)
    return prepared, with_team_times(graph, splits, cluster, cluster.device_types(), model)


def sized(models: list[object], goal: TrainingGoal) -> list[object]:
    """Return the models, a single step with the micro-batch of `goal`. Raises BadInput where that asks for a step."""
    if goal.microbatch is None:
        return models
    if len(models) > 1 or not isinstance(models[0], TrainingModel):
        raise BadInput(f"microbatch is {goal.microbatch!r} and the model is no single step", "give one training step")
    return [models[0].at_batch(goal.microbatch)] if isinstance(goal.microbatch, int) else models


def _runs_here(models: Sequence[object], cluster: ClusterSpec) -> bool:
    """Whether a plan for `models` is one that this package's workers run."""
    return all(isinstance(m, TrainingModel) for m in models) and all(d.is_cpu for d in cluster.device_types())


def _allocated(
    steps: Sequence[TrainingModel], cluster: ClusterSpec, makers: Sequence[str], plan: Plan
) -> Mapping[str, int]:
    """Bytes that each device of `plan` will take."""
    assert plan.training is not None
    step = next(s for s in steps if s.batch_size == plan.training.microbatch_size)
    placed = on_teams(read_step(step), TrainingPlacement.of_plan(plan))
    made = memory_of_placement(placed.step, placed.placement, cluster=cluster, makers=makers)
    return {device: memory.total_bytes for device, memory in made.items()}


def timed_training_graph(
    model: object, measured: MeasuredKernels, cluster: ClusterSpec, makers: Sequence[str]
) -> tuple[Prepared, TrainingGraph]:
    """Return the model ready to be planned, and its numbers on the cluster's device types."""
    if isinstance(model, TrainingModel):
        return step_graph(model, cluster.device_types(), measured, makers, company(cluster))
    prepared = prepare(as_model(model))
    graph = prepared.operator_graph
    candidates = Candidates.of(graph, candidate_kernels(graph, makers), trains=True)
    table = known_times(prepared, candidates, measured, cluster, in_context=True, tuned=False)
    first = graph.tensors[graph.inputs[0]]
    size = first.shape[0] if first.shape else 1
    return prepared, training_graph(size, graph, candidates, table, cluster.device_types())


def plan_and_build_training(
    model: TrainingModel,
    *,
    cluster: ClusterSpec,
    global_batch: int,
    mode: str = "training",
    plan: Plan | TrainingPlacement | None = None,
    pin: Mapping[str, str] | None = None,
    makers: Sequence[str] = MAKERS,
    database: str | Path | None = None,
    max_norm: float | None = None,
    seed: int = 0,
    microbatch: int | str | None = None,
    progress: bool = False,
    objective: str = "throughput",
    deadline_s: float | None = None,
    budget_usd: float | None = None,
    throughput_per_s: float | None = None,
    samples: int | None = None,
    splits: Sequence[Any] | str | Path = (),
) -> HetTrainer:
    """Plan, unless `plan` is given, and compile a training step; see `tvmhet.build`."""
    check_cluster(cluster)
    if mode != "training":
        raise BadInput(f"mode is {mode!r} and the model is a training step", 'leave it out, or use mode="training"')
    if plan is None:
        if microbatch is None:
            microbatches_of(model, global_batch)
        limits = price_limits(objective_of(objective), cluster, deadline_s, budget_usd, throughput_per_s, samples)
        goal = TrainingGoal(global_batch, microbatch=microbatch, price=limits)
        wishes = wishes_of(splits)
        plan = plan_training(
            model, cluster=cluster, goal=goal, pin=pin, makers=makers, database=database, splits=wishes
        )
        plan = with_job(plan, limits)
    return build_training(
        model,
        cluster=cluster,
        plan=plan,
        global_batch=global_batch,
        makers=makers,
        max_norm=max_norm,
        seed=seed,
        progress=progress,
    )
