"""A training model and a plan -> a trainer: check that they fit, compile, bind."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real

from tvmhet.cluster.spec import ClusterSpec
from tvmhet.emit.cache import StageCache, default_cache_dir
from tvmhet.errors import BadBatch, BadInput, PlanMismatch
from tvmhet.ir.training_model import TrainingModel
from tvmhet.ir.training_step import Step, forward_prepared, read_step
from tvmhet.plans import Plan
from tvmhet.progress import progress_bar
from tvmhet.training import HetTrainer, microbatches_of
from tvmhet.training_deploy import deploy_training
from tvmhet.training_interface import TrainingInterface
from tvmhet.training_placement import TrainingPlacement
from tvmhet.training_teams import on_teams


def build_training(
    model: TrainingModel,
    *,
    cluster: ClusterSpec,
    plan: Plan | TrainingPlacement,
    global_batch: int,
    makers: Sequence[str] = ("tvm", "library"),
    max_norm: float | None = None,
    seed: int = 0,
    progress: bool = False,
) -> HetTrainer:
    """Compile a training step as planned, or as placed by hand, and return what runs it.

    The step is traced again where the plan has micro-batches of another size.
    `max_norm` clips the norm of all gradients together, as torch's clip_grad_norm_; `seed` fixes dropout. Raises
    BadBatch unless micro-batches divide the global batch, PlanMismatch for a plan of another model or batch,
    UnsupportedOperator naming what TVM cannot compile.
    """
    number = not isinstance(max_norm, bool) and isinstance(max_norm, Real)
    if max_norm is not None and not (number and 0.0 < max_norm < math.inf):
        raise BadInput(f"max_norm is {max_norm!r}", "give a positive number, or None to clip nothing")
    if type(seed) is not int or not 0 <= seed < 2**63:
        raise BadInput(f"seed is {seed!r}", "give a whole number of at least 0 and below 2**63")
    model = model_of(plan, model)
    count = microbatches_of(model, global_batch)
    step = read_step(model)
    placement = placement_of(plan, step)
    if placement.num_microbatches != count:
        raise BadBatch(
            f"the plan has {placement.num_microbatches} micro-batches; {global_batch} samples in micro-batches of "
            f"{model.batch_size} are {count}",
            "plan for this global batch",
        )
    made = on_teams(step, placement)
    with progress_bar("compile", progress) as report:
        program = deploy_training(
            made.step,
            made.placement,
            cluster,
            StageCache(default_cache_dir()),
            makers=makers,
            max_norm=max_norm,
            on_progress=report,
        )
    return HetTrainer(TrainingInterface.of(model, made.dealt), program, plan if isinstance(plan, Plan) else None, seed)


def model_of(plan: Plan | TrainingPlacement, model: TrainingModel) -> TrainingModel:
    """Return the model at the micro-batch size of a plan."""
    if isinstance(plan, Plan) and plan.training is not None:
        return model.at_batch(plan.training.microbatch_size)
    return model


def placement_of(plan: Plan | TrainingPlacement, step: Step) -> TrainingPlacement:
    """Return where a plan of `step` places it. Raises PlanMismatch for a plan of another model."""
    if isinstance(plan, TrainingPlacement):
        return plan
    key = forward_prepared(step).key
    if plan.module_key != key:
        raise PlanMismatch(
            f"the plan was made for module {plan.module_key[:12]}, the forward half of this step is {key[:12]}",
            "plan this training model again",
        )
    return TrainingPlacement.of_plan(plan)
