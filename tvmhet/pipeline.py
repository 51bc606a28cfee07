"""The whole flow on one screen: prepare, candidates, times, solve, check; then rewrite, compile, bind, run."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, overload

import tvm

from tvmhet.arguments import ablation_of, check_cluster, objective_of, price_limits
from tvmhet.campaign import Campaign
from tvmhet.candidates import MAKERS
from tvmhet.choosing import best_plan
from tvmhet.cluster.spec import ClusterSpec
from tvmhet.cost.measured import MeasuredKernels
from tvmhet.deploy import check_plan_fits, deploy
from tvmhet.emit.cache import StageCache, default_cache_dir
from tvmhet.errors import BadInput, NotSupported
from tvmhet.graph.opgraph import OpGraph
from tvmhet.ir.importers import as_model
from tvmhet.ir.model import Model
from tvmhet.ir.prepare import Prepared, prepare
from tvmhet.ir.training_model import TrainingModel
from tvmhet.module import HetModule
from tvmhet.planning import whole_plan, with_job
from tvmhet.planning_training import TrainingGoal
from tvmhet.plans import Plan
from tvmhet.progress import progress_bar
from tvmhet.rewriting import Wanted
from tvmhet.solve import Objective
from tvmhet.solve.ablate import virtually
from tvmhet.splitting import wishes_of
from tvmhet.training import HetTrainer
from tvmhet.training_pipeline import plan_and_build_training, plan_training
from tvmhet.training_placement import TrainingPlacement
from tvmhet.tuning import Tuner


def plan(
    model: Model | TrainingModel | tvm.IRModule | Sequence[Model | TrainingModel],
    *,
    cluster: ClusterSpec,
    objective: str = "throughput",
    pin: Mapping[str, str] | None = None,
    bind_shapes: Mapping[str, int] | None = None,
    makers: Sequence[str] = MAKERS,
    database: str | Path | None = None,
    time_limit_s: float = 30.0,
    seed: int = 0,
    ablate: str = "",
    virtual_stages: bool = False,
    mode: str = "inference",
    global_batch: int | None = None,
    deadline_s: float | None = None,
    budget_usd: float | None = None,
    throughput_per_s: float | None = None,
    samples: int | None = None,
    splits: Sequence[Any] | str | Path = (),
    **training: Any,
) -> Plan:
    """Decide kernels, stages, device types and counts for `model` on `cluster`.

    - `objective`: "throughput" (the slowest stage), "latency" (one input) or "cost" (see below).
    - `pin`: device types by operator name or shell pattern. `bind_shapes`: sizes of symbolic dims.
    - `makers` of kernels: "tvm" (generated), "library" (torch's), with "tvm" also "concurrent" (branches at a time).
    - `database`: measured kernels, the user's own by default; times that are not there are from models. Nothing is
      measured here: see `profile`.
    - `time_limit_s` of the search, and `seed` of its random moves.
    - `virtual_stages` (throughput): a device may run several stages, with stages of other devices between them.
    - `splits`: stages may be split over several devices of a machine (tensor split): degrees, such as `[2, 4]`, or
      measured times, see `tvmhet.splitting`.
    - `ablate`: a lesser search on the same times, for comparison. "fuse-first" decides the kernels before the
      placement, "place-first" after it, "no-fusion" has kernels of one operator; all three rewrite no operators.
      "no-library", "no-recompute", "no-merge" and "no-concurrent" leave out one kind of choice, "no-race" what plans
      took when `profile` ran them.

    With `mode="training"` the plan is for iterations over `global_batch` samples. `model` is a training step, or only
    its forward pass (backward times are then assumed), or a list of the same at several batch sizes. Further options:
    `optimizer` (of a forward pass; a step has its own), `microbatch` (samples, or "auto"), `schedules` ("1f1b",
    "gpipe", "interleaved", "wavelet"), `recompute`, `unlike_replicas`: see `tvmhet.planning_training.TrainingGoal`.

    With `objective="cost"` the plan is the one whose samples cost least by the prices of the cluster's device types,
    devices that it leaves idle unpaid. `throughput_per_s` is the least rate, in samples. Without `samples`,
    `deadline_s` is for one input (training: one iteration) and `budget_usd` for one hour (training: one iteration);
    with it, for a job of so many samples.

    Raises Infeasible with the binding constraint, for limits with the nearest that can be kept; BadInput for an unknown
    objective, maker or pin, or a device type without a price; BadBatch for a global batch that no micro-batch divides.
    """
    if not isinstance(time_limit_s, int | float) or not time_limit_s >= 0:
        raise BadInput(f"the time limit is {time_limit_s!r} s", "give 0 s or more; 0 takes the first plan found")
    goal = objective_of(objective)
    limits = price_limits(goal, cluster, deadline_s, budget_usd, throughput_per_s, samples)
    wishes = wishes_of(splits)
    if unknown := sorted(training.keys() - {f.name for f in fields(TrainingGoal)}):
        raise TypeError(f"plan() got an unexpected keyword argument {unknown[0]!r}")
    if mode == "training" or isinstance(model, TrainingModel):
        if global_batch is None:
            raise BadInput("training without a global batch", "give global_batch=, the samples of one iteration")
        made = plan_training(
            model,
            cluster=cluster,
            goal=TrainingGoal(global_batch, price=limits, **training),
            pin=pin,
            makers=makers,
            database=database,
            time_limit_s=time_limit_s,
            splits=wishes,
        )
        return with_job(made, limits)
    if mode != "inference":
        raise BadInput(f"mode is {mode!r}", 'use "inference" or "training"')
    if global_batch is not None or training:
        given = ", ".join([*(["global_batch"] if global_batch is not None else []), *sorted(training)])
        raise BadInput(f"mode is 'inference' and {given} was given", 'use mode="training" for a plan of iterations')
    check_cluster(cluster)
    search, makers, kinds = ablation_of(ablate, makers)
    if virtual_stages and goal is Objective.COST:
        raise NotSupported("virtual stages with the objective cost", "leave them out, or plan for throughput")
    search = virtually(search) if virtual_stages else search
    wanted = Wanted(goal, makers, pin or {}, kinds, time_limit_s, seed, search, limits, wishes)
    return _plan_or_whole(prepare(as_model(model, bind_shapes)), cluster, wanted, database)


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
    database: str | Path | None = None,
    profile_budget_s: float = 0.0,
    tune_budget_s: float = 0.0,
    inline: bool = False,
    progress: bool = False,
    deadline_s: float | None = None,
    budget_usd: float | None = None,
    throughput_per_s: float | None = None,
    samples: int | None = None,
    splits: Sequence[Any] | str | Path = (),
) -> HetModule: ...
def build(model: Any, *, cluster: ClusterSpec, **options: Any) -> HetModule | HetTrainer:
    """Plan (unless `plan` is given) and compile `model` for `cluster`; return the module, or the trainer, that runs it.

    `objective` and its limits, `pin`, `bind_shapes`, `makers`, `database` and `splits` are those of `plan`. `progress`
    shows bars.

    - `profile_budget_s` above 0 first measures kernels that are unknown, for so many seconds; `tune_budget_s` above 0
      then tunes those that limit the plan (see `tune`). Both only without `plan`.
    - `inline` runs a plan of one CPU stage in this process.

    A `TrainingModel` takes `global_batch` instead: the samples of one step, which its micro-batches must divide.

    - `max_norm` clips the norm of all gradients together; `seed` fixes what dropout drops.
    - `microbatch`: samples of a micro-batch, None for as many as the example, "auto" to let the plan decide. The step
      is then traced again, as for a plan of another size; where its loss is no mean over samples, or it has batch norm,
      the size changes what is computed.

    Raises PlanMismatch for a plan of another module or cluster, UnsupportedOperator naming what TVM cannot compile, and
    what `plan` raises.
    """
    known = inspect.signature(plan_and_build_training if isinstance(model, TrainingModel) else _build).parameters
    if unknown := sorted(options.keys() - known.keys()):
        raise TypeError(f"build() got an unexpected keyword argument {unknown[0]!r}")
    return (plan_and_build_training if isinstance(model, TrainingModel) else _build)(model, cluster=cluster, **options)


def _build(
    model: Model | tvm.IRModule,
    *,
    cluster: ClusterSpec,
    plan: Plan | None = None,
    objective: str = "throughput",
    pin: Mapping[str, str] | None = None,
    bind_shapes: Mapping[str, int] | None = None,
    makers: Sequence[str] = MAKERS,
    database: str | Path | None = None,
    profile_budget_s: float = 0.0,
    tune_budget_s: float = 0.0,
    inline: bool = False,
    progress: bool = False,
    deadline_s: float | None = None,
    budget_usd: float | None = None,
    throughput_per_s: float | None = None,
    samples: int | None = None,
    splits: Sequence[Any] | str | Path = (),
) -> HetModule:
    check_cluster(cluster)
    budgets_s = profile_budget_s, tune_budget_s
    if plan is not None and max(budgets_s) > 0:
        raise BadInput(
            f"a plan was given, and {profile_budget_s:g} s to profile and {tune_budget_s:g} s to tune",
            "leave out the plan, or profile and tune before planning",
        )
    prepared = prepare(as_model(model, bind_shapes))
    if plan is None:
        goal = objective_of(objective)
        limits = price_limits(goal, cluster, deadline_s, budget_usd, throughput_per_s, samples)
        wanted = Wanted(goal, makers, pin or {}, limits=limits, splits=wishes_of(splits))
        plan = _plan_or_whole(prepared, cluster, wanted, database, budgets_s, progress)
    if not isinstance(plan, Plan):
        raise BadInput(f"the plan is a {type(plan).__name__}", "give what tvmhet.plan returned, or Plan.load(path)")
    check_plan_fits(plan, prepared, cluster)
    with progress_bar("compile", progress) as report:
        program = deploy(prepared, plan, cluster, StageCache(default_cache_dir()), report)
    return HetModule(plan, program, inline=inline)


def extract_graph(model: Model | tvm.IRModule, *, bind_shapes: Mapping[str, int] | None = None) -> OpGraph:
    """Return the operator graph that plans are made on. Raises NotSupported where the model cannot be cut."""
    return prepare(as_model(model, bind_shapes)).operator_graph


def _plan_or_whole(
    prepared: Prepared,
    cluster: ClusterSpec,
    wanted: Wanted,
    database: str | Path | None,
    budgets_s: tuple[float, float] = (0.0, 0.0),
    progress: bool = False,
) -> Plan:
    """Plan, after measuring and tuning for `budgets_s` seconds each."""
    if prepared.graph is None:
        if wanted.splits:
            raise NotSupported(f"splits of a model that cannot be cut ({prepared.whole_reason})", "leave them out")
        return whole_plan(prepared, cluster, wanted.objective, wanted.limits)
    with closing(MeasuredKernels(database)) as measured:
        if max(budgets_s) > 0:  # of cost, the same kernels are in question as of throughput
            goal = Objective.THROUGHPUT if wanted.objective is Objective.COST else wanted.objective
            campaign = Campaign.of(prepared, cluster, measured, goal, wanted.makers, progress)
            if budgets_s[0] > 0:
                campaign.run(budgets_s[0])
            if budgets_s[1] > 0:
                Tuner(campaign, wanted.pin).run(budgets_s[1])
        return with_job(best_plan(prepared, cluster, measured, wanted), wanted.limits)
