"""The whole flow on one screen: prepare, candidates, times, solve, check; then rewrite, compile, bind, run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, overload

import tvm

from tvmhet.campaign import Campaign, known_times
from tvmhet.candidates import MAKERS, candidate_kernels
from tvmhet.choosing import Wanted, best_plan
from tvmhet.cluster.spec import ClusterSpec
from tvmhet.context import company
from tvmhet.cost.measure_rpc import Tracker
from tvmhet.cost.measured import MeasuredKernels
from tvmhet.deploy import check_plan_fits, deploy
from tvmhet.emit.cache import StageCache, default_cache_dir
from tvmhet.errors import BadInput, EmptyCluster, NotSupported
from tvmhet.graph.opgraph import OpGraph
from tvmhet.ir.importers import as_model
from tvmhet.ir.model import Model
from tvmhet.ir.prepare import Prepared, prepare
from tvmhet.ir.training_model import TrainingModel
from tvmhet.ir.training_step import read_step
from tvmhet.module import HetModule
from tvmhet.planning import whole_plan
from tvmhet.planning_training import TrainingGoal, TrainingGraph, training_graph
from tvmhet.plans import Plan
from tvmhet.profiling import LIMITS, ProfileReport
from tvmhet.progress import progress_bar
from tvmhet.proposing import KINDS, MERGE, RECOMPUTE
from tvmhet.solve import Objective
from tvmhet.solve.ablate import SEARCHES, Search, jointly
from tvmhet.times import Candidates
from tvmhet.training import HetTrainer, microbatches_of
from tvmhet.training_batch import microbatch_by_scaling
from tvmhet.training_build import build_training
from tvmhet.training_memory import memory_of_placement
from tvmhet.training_placement import TrainingPlacement
from tvmhet.training_profile import profile_training
from tvmhet.training_solve import make_training_plan
from tvmhet.training_times import optimizer_name, step_graph
from tvmhet.tuning import Tuner, TuningReport
from tvmhet.tuning.trial import TRIAL_LIMITS

#: Ablations that leave out one kind of rewrite.
LESSER_KINDS = {"no-recompute": frozenset({MERGE}), "no-merge": frozenset({RECOMPUTE})}
ABLATIONS = (*SEARCHES, "no-library", *LESSER_KINDS)


def plan(
    model: Model | TrainingModel | tvm.IRModule | Sequence[Model | TrainingModel],
    *,
    cluster: ClusterSpec,
    objective: str = "throughput",
    pin: Mapping[str, str] | None = None,
    bind_shapes: Mapping[str, int] | None = None,
    makers: Sequence[str] = MAKERS,
    database: Path | None = None,
    time_limit_s: float = 30.0,
    seed: int = 0,
    ablate: str = "",
    mode: str = "inference",
    global_batch: int | None = None,
    **training: Any,
) -> Plan:
    """Decide kernels, stages, device types and counts for `model` on `cluster`.

    `objective` is "throughput" (the slowest stage) or "latency" (one input). `pin` maps operator names or shell
    patterns to device types. Times come from the database of measured kernels at `database` (the user's own by
    default) where they were measured, from models elsewhere; nothing is measured here, see `profile`. `ablate` runs a
    lesser search on the same times, for comparison: one of `ABLATIONS` ("fuse-first" decides the kernels before the
    placement, "place-first" after it, "no-fusion" and "no-library" leave out kernels; these three searches, and
    "no-recompute" and "no-merge" each of its kind, leave out rewrites of the operators).
    With `mode="training"` the plan is for iterations over `global_batch` samples: see `plan_training`, which takes the
    further options. Raises Infeasible with the binding constraint, BadInput for an unknown objective, maker or pin.
    """
    if not time_limit_s >= 0:
        raise BadInput(f"the time limit is {time_limit_s} s", "give 0 s or more; 0 takes the first plan found")
    if mode == "training" or isinstance(model, TrainingModel):
        if global_batch is None:
            raise BadInput("training without a global batch", "give global_batch=, the samples of one iteration")
        return plan_training(
            model,
            cluster=cluster,
            goal=TrainingGoal(global_batch, **training),
            pin=pin,
            makers=makers,
            database=database,
            time_limit_s=time_limit_s,
        )
    if mode != "inference" or global_batch is not None or training:
        given = (
            ", ".join([*(["global_batch"] if global_batch is not None else []), *sorted(training)]) or "nothing more"
        )
        raise BadInput(f"mode is {mode!r} and {given} was given", 'use mode="training" for a plan of iterations')
    _check_has_devices(cluster)
    search, makers, kinds = _ablation(ablate, makers)
    prepared = prepare(as_model(model, bind_shapes))
    goal = _objective(objective)
    if prepared.graph is None:
        return whole_plan(prepared, cluster, goal)
    with closing(MeasuredKernels(database)) as measured:
        wanted = Wanted(goal, makers, pin or {}, kinds, time_limit_s, seed, search)
        return best_plan(prepared, cluster, measured, wanted)


def plan_training(
    model: Model | TrainingModel | tvm.IRModule | Sequence[Model | TrainingModel],
    *,
    cluster: ClusterSpec,
    goal: TrainingGoal,
    pin: Mapping[str, str] | None = None,
    makers: Sequence[str] = MAKERS,
    database: Path | None = None,
    time_limit_s: float = 30.0,
) -> Plan:
    """Decide micro-batches, schedule, stages, replicas and recomputation for training `model` on `cluster`.

    `model` is a training step of one micro-batch, whose optimiser then holds, or only its forward pass: backward times
    are then assumed, as the plan says. The first input's first dim is the samples. A list holds the same model at
    several batch sizes, among which the plan chooses. With `goal.microbatch` a training step is traced again, with so
    many samples or with as many as were best by scaled times.
    Raises Infeasible, BadBatch for a global batch that no micro-batch divides, NotSupported for a model without graph.
    """
    _check_has_devices(cluster)
    models: list[object] = list(model) if isinstance(model, Sequence) else [model]
    steps = [m for m in models if isinstance(m, TrainingModel)]
    if steps:
        goal = replace(goal, optimizer=optimizer_name(steps[0].optimizer))
    if goal.microbatch is not None and (len(models) > 1 or not steps):
        raise BadInput(f"microbatch is {goal.microbatch!r} and the model is no single step", "give one training step")
    if isinstance(goal.microbatch, int):
        steps = [steps[0].at_batch(goal.microbatch)]
        models = [*steps]
    with closing(MeasuredKernels(database)) as measured:
        ready = [timed_training_graph(m, measured, cluster, makers) for m in models]
        if goal.microbatch == "auto":
            size = microbatch_by_scaling(ready[0][1], cluster, goal, pin or {})
            if size != steps[0].batch_size:
                steps.append(steps[0].at_batch(size))
                ready.append(timed_training_graph(steps[1], measured, cluster, makers))
    allocated = partial(_allocated, steps, cluster, makers) if _runs_here(models, cluster) else None
    graphs = [replace(g, module_key=p.key) for p, g in ready]
    return make_training_plan(ready[0][0], graphs, cluster, goal, pin or {}, time_limit_s, allocated=allocated)


def _runs_here(models: Sequence[object], cluster: ClusterSpec) -> bool:
    """Whether a plan for `models` is one that this package's workers run."""
    return all(isinstance(m, TrainingModel) for m in models) and all(d.is_cpu for d in cluster.device_types())


def _allocated(
    steps: Sequence[TrainingModel], cluster: ClusterSpec, makers: Sequence[str], plan: Plan
) -> Mapping[str, int]:
    """Bytes that each device of `plan` will take."""
    assert plan.training is not None
    step = next(s for s in steps if s.batch_size == plan.training.microbatch_size)
    placement = TrainingPlacement.of_plan(plan)
    made = memory_of_placement(read_step(step), placement, cluster=cluster, makers=makers)
    return {device: memory.total_bytes for device, memory in made.items()}


def timed_training_graph(
    model: object, measured: MeasuredKernels, cluster: ClusterSpec, makers: Sequence[str]
) -> tuple[Prepared, TrainingGraph]:
    """Return the model ready to be planned, and its numbers on the cluster's device types."""
    if isinstance(model, TrainingModel):
        return step_graph(model, cluster.device_types(), measured, makers, company(cluster))
    prepared = prepare(as_model(model))
    if prepared.graph is None:
        raise NotSupported(f"the model has no operator graph: {prepared.whole_reason}", "bind its shapes: bind_shapes=")
    candidates = Candidates.of(prepared.graph, candidate_kernels(prepared.graph, makers))
    table = known_times(prepared, candidates, measured, cluster, in_context=True, tuned=False)
    first = prepared.graph.tensors[prepared.graph.inputs[0]]
    size = first.shape[0] if first.shape else 1
    return prepared, training_graph(size, prepared.graph, candidates, table, cluster.device_types())


def profile(
    model: Model | TrainingModel | tvm.IRModule,
    *,
    cluster: ClusterSpec,
    budget_s: float = 60.0,
    objective: str = "throughput",
    bind_shapes: Mapping[str, int] | None = None,
    makers: Sequence[str] = MAKERS,
    database: Path | None = None,
    tracker: Tracker | None = None,
    progress: bool = False,
) -> ProfileReport:
    """Measure on this machine's CPU the kernels that decide the plan, until no other can, or `budget_s` is spent.

    Results go to the database of measured kernels. Device types for which `tracker` knows a server are measured there,
    generated kernels only. Those that are neither here nor there are left to the models, and named. Of a training step
    every kernel that is emitted is measured, and the whole step once on each CPU type: see `profile_training`.
    """
    _check_has_devices(cluster)
    if isinstance(model, TrainingModel):
        if tracker is not None:
            raise NotSupported("a training step cannot be measured through a tracker", "leave the tracker out")
        with closing(MeasuredKernels(database)) as measured:
            return profile_training(
                model, cluster=cluster, budget_s=budget_s, makers=makers, database=measured, progress=progress
            )
    prepared = prepare(as_model(model, bind_shapes))
    if prepared.graph is None:
        raise BadInput(f"the model is placed whole: {prepared.whole_reason}", "there are no kernels to measure")
    if tracker is not None and "library" in makers:
        raise NotSupported(
            f"makers are {tuple(makers)}, and library kernels cannot be measured through a tracker",
            'use makers=("tvm",), on the command line --makers tvm',
        )
    remote = {} if tracker is None else tracker.timers(cluster.device_types(), LIMITS)
    with closing(MeasuredKernels(database)) as measured:
        candidates = Candidates.of(prepared.graph, candidate_kernels(prepared.graph, makers))
        campaign = Campaign(prepared, candidates, measured, cluster, _objective(objective), progress, remote, makers)
        return campaign.run(budget_s)


def tune(
    model: Model | tvm.IRModule,
    *,
    cluster: ClusterSpec,
    budget_s: float,
    trials: int | None = None,
    objective: str = "throughput",
    pin: Mapping[str, str] | None = None,
    bind_shapes: Mapping[str, int] | None = None,
    makers: Sequence[str] = MAKERS,
    database: Path | None = None,
    tracker: Tracker | None = None,
    seed: int = 0,
    progress: bool = False,
) -> TuningReport:
    """Search better schedules for the generated kernels that limit the plan, for `budget_s` seconds or `trials`.

    MetaSchedule proposes, TVM's XGBModel ranks, every trial is run: on this machine's CPU types, or on the devices that
    `tracker` knows. Later plans use a schedule where it was faster than the rules' kernel. Trials are kept beside the
    database of measured kernels; the next run goes on from them. A budget of 0 tunes nothing and says so.
    """
    _check_has_devices(cluster)
    if budget_s < 0 or (trials is not None and trials < 0):
        raise BadInput(f"the budget is {budget_s} s and {trials} trials", "give 0 or more")
    prepared = prepare(as_model(model, bind_shapes))
    if prepared.graph is None:
        raise BadInput(f"the model is placed whole: {prepared.whole_reason}", "there are no kernels to tune")
    if "tvm" not in makers:
        raise BadInput(f"makers are {tuple(makers)}: library kernels have no schedule", 'add the maker "tvm"')
    if tracker is not None and "library" in makers:
        raise NotSupported(
            f"makers are {tuple(makers)}, and library kernels cannot be measured through a tracker",
            'use makers=("tvm",), on the command line --makers tvm',
        )
    remote = {} if tracker is None else tracker.timers(cluster.device_types(), TRIAL_LIMITS)
    with closing(MeasuredKernels(database)) as measured:
        candidates = Candidates.of(prepared.graph, candidate_kernels(prepared.graph, makers))
        campaign = Campaign(prepared, candidates, measured, cluster, _objective(objective), progress, remote, makers)
        return Tuner(campaign, pin, seed).run(budget_s, trials)


@overload
def build(
    model: TrainingModel,
    *,
    cluster: ClusterSpec,
    mode: Literal["training"] = "training",
    global_batch: int,
    plan: Plan | TrainingPlacement | None = None,
    pin: Mapping[str, str] | None = None,
    makers: Sequence[str] = MAKERS,
    database: Path | None = None,
    max_norm: float | None = None,
    seed: int = 0,
    microbatch: int | str | None = None,
    progress: bool = False,
) -> HetTrainer: ...
@overload
def build(
    model: Model | tvm.IRModule,
    *,
    cluster: ClusterSpec,
    plan: Plan | None = None,
    objective: str = "throughput",
    pin: Mapping[str, str] | None = None,
    bind_shapes: Mapping[str, int] | None = None,
    makers: Sequence[str] = MAKERS,
    database: Path | None = None,
    profile_budget_s: float = 0.0,
    tune_budget_s: float = 0.0,
    inline: bool = False,
    progress: bool = False,
) -> HetModule: ...
def build(model: Any, *, cluster: ClusterSpec, **options: Any) -> HetModule | HetTrainer:
    """Plan (unless `plan` is given) and compile `model` for `cluster`; return the module, or the trainer, that runs it.

    `profile_budget_s` > 0 measures unknown kernels first, `tune_budget_s` > 0 then tunes those that limit the plan (see
    `tune`). `inline` runs a plan of one CPU stage in this process. A
    `TrainingModel` takes `global_batch` instead: the samples of one step, which its micro-batches must divide; with
    `max_norm` the norm of all gradients is clipped, and `seed` fixes what dropout drops. `microbatch` is how many
    samples a micro-batch has: None for as many as the example, "auto" to let the plan decide; the step is then traced
    again, as for a plan of another size. Of a loss that is no mean over samples, or batch norm, the size is part.
    Raises PlanMismatch for a plan of another module or cluster, UnsupportedOperator naming what TVM cannot compile.
    """
    return (_build_training if isinstance(model, TrainingModel) else _build)(model, cluster=cluster, **options)


def _build_training(
    model: TrainingModel,
    *,
    cluster: ClusterSpec,
    global_batch: int,
    mode: str = "training",
    plan: Plan | TrainingPlacement | None = None,
    pin: Mapping[str, str] | None = None,
    makers: Sequence[str] = MAKERS,
    database: Path | None = None,
    max_norm: float | None = None,
    seed: int = 0,
    microbatch: int | str | None = None,
    progress: bool = False,
) -> HetTrainer:
    _check_has_devices(cluster)
    if mode != "training":
        raise BadInput(f"mode is {mode!r} and the model is a training step", 'leave it out, or use mode="training"')
    if plan is None:
        if microbatch is None:
            microbatches_of(model, global_batch)
        goal = TrainingGoal(global_batch, microbatch=microbatch)
        plan = plan_training(model, cluster=cluster, goal=goal, pin=pin, makers=makers, database=database)
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


def _build(
    model: Model | tvm.IRModule,
    *,
    cluster: ClusterSpec,
    plan: Plan | None = None,
    objective: str = "throughput",
    pin: Mapping[str, str] | None = None,
    bind_shapes: Mapping[str, int] | None = None,
    makers: Sequence[str] = MAKERS,
    database: Path | None = None,
    profile_budget_s: float = 0.0,
    tune_budget_s: float = 0.0,
    inline: bool = False,
    progress: bool = False,
) -> HetModule:
    _check_has_devices(cluster)
    budgets_s = profile_budget_s, tune_budget_s
    if plan is not None and max(budgets_s) > 0:
        raise BadInput(
            f"a plan was given, and {profile_budget_s:g} s to profile and {tune_budget_s:g} s to tune",
            "leave out the plan, or profile and tune before planning",
        )
    prepared = prepare(as_model(model, bind_shapes))
    if plan is None:
        plan = _plan_or_whole(prepared, cluster, _objective(objective), pin, makers, database, budgets_s, progress)
    if not isinstance(plan, Plan):
        raise BadInput(f"the plan is a {type(plan).__name__}", "give what tvmhet.plan returned, or Plan.load(path)")
    check_plan_fits(plan, prepared, cluster)
    with progress_bar("compile", progress) as report:
        program = deploy(prepared, plan, cluster, StageCache(default_cache_dir()), report)
    return HetModule(plan, program, inline=inline)


def extract_graph(model: Model | tvm.IRModule, *, bind_shapes: Mapping[str, int] | None = None) -> OpGraph:
    """Return the operator graph that plans are made on. Raises NotSupported where the model cannot be cut."""
    prepared = prepare(as_model(model, bind_shapes))
    if prepared.graph is None:
        raise NotSupported(f"the model has no operator graph: {prepared.whole_reason}", "bind its shapes: bind_shapes=")
    return prepared.graph


def _plan_or_whole(
    prepared: Prepared,
    cluster: ClusterSpec,
    objective: Objective,
    pin: Mapping[str, str] | None,
    makers: Sequence[str],
    database: Path | None,
    budgets_s: tuple[float, float],
    progress: bool,
) -> Plan:
    """Plan, after measuring and tuning for `budgets_s` seconds each."""
    if prepared.graph is None:
        return whole_plan(prepared, cluster, objective)
    with closing(MeasuredKernels(database)) as measured:
        if max(budgets_s) > 0:
            candidates = Candidates.of(prepared.graph, candidate_kernels(prepared.graph, makers))
            campaign = Campaign(prepared, candidates, measured, cluster, objective, progress, makers=makers)
            if budgets_s[0] > 0:
                campaign.run(budgets_s[0])
            if budgets_s[1] > 0:
                Tuner(campaign, pin).run(budgets_s[1])
        return best_plan(prepared, cluster, measured, Wanted(objective, makers, pin or {}))


def _check_has_devices(cluster: object) -> None:
    if not isinstance(cluster, ClusterSpec):
        raise BadInput(
            f"the cluster is a {type(cluster).__name__}",
            "make it with ClusterSpec.from_file(path), ClusterSpec.from_local() or ClusterSpec.of({'a100': 2})",
        )
    if not cluster.groups():
        raise EmptyCluster(
            "the cluster has no device to run on" + (", only a market" if cluster.market else ""),
            "list nodes with devices and a count of at least 1",
        )


def _objective(name: str) -> Objective:
    known = [o.value for o in Objective]
    if name not in known:
        raise BadInput(f"objective {name!r} is unknown", f"use one of {', '.join(known)}")
    return Objective(name)


def _ablation(name: str, makers: Sequence[str]) -> tuple[Search, Sequence[str], frozenset[str]]:
    """Return the search that an ablation asks for ("": the joint one), and the makers and rewrites that it leaves."""
    if name and name not in ABLATIONS:
        raise BadInput(f"ablation {name!r} is unknown", f"use one of {', '.join(ABLATIONS)}")
    if name in SEARCHES:
        return SEARCHES[name], makers, frozenset()
    if name != "no-library":
        return jointly, makers, LESSER_KINDS.get(name, KINDS)
    if "tvm" not in makers:
        raise BadInput(f"no-library leaves none of the makers {tuple(makers)!r}", 'use makers=("tvm", "library")')
    return jointly, ("tvm",), KINDS
