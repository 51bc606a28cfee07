"""What is measured and searched before planning: `profile` times the kernels that decide, `tune` finds faster ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import tvm

from tvmhet.arguments import check_cluster, objective_of
from tvmhet.campaign import Campaign
from tvmhet.candidates import MAKERS
from tvmhet.cluster.spec import ClusterSpec
from tvmhet.cost.measure import TimerLimits
from tvmhet.cost.measure_rpc import Tracker
from tvmhet.cost.measured import MeasuredKernels
from tvmhet.errors import BadInput, NotSupported
from tvmhet.ir.importers import as_model
from tvmhet.ir.model import Model
from tvmhet.ir.prepare import prepare
from tvmhet.ir.training_model import TrainingModel
from tvmhet.plans import Plan
from tvmhet.profiling import LIMITS, ProfileReport
from tvmhet.solve import Objective
from tvmhet.training_placement import TrainingPlacement
from tvmhet.training_profile import profile_training
from tvmhet.tuning import Tuner, TuningReport
from tvmhet.tuning.trial import TRIAL_LIMITS


def profile(
    model: Model | TrainingModel | tvm.IRModule,
    *,
    cluster: ClusterSpec,
    budget_s: float = 60.0,
    objective: str = "throughput",
    bind_shapes: Mapping[str, int] | None = None,
    makers: Sequence[str] = MAKERS,
    database: str | Path | None = None,
    tracker: Tracker | None = None,
    plan: Plan | TrainingPlacement | None = None,
    progress: bool = False,
) -> ProfileReport:
    """Measure on this machine the kernels that decide the plan, until no other can, or `budget_s` is spent.

    Results go to `database`, the user's own by default. Device types for which `tracker` knows a server are measured
    there, generated kernels only. Those that are neither here nor there are left to the models, and named. Of a
    training step every kernel that is emitted is measured, and the whole step once on each CPU type: see
    `profile_training`. `objective`, `bind_shapes` and `makers` are those of the plan that is meant; `budget_s` is wall
    time in seconds, looked at between kernels. Where `cluster` is one machine of types that are here, 45 % of it are
    kept to run plans: as they are, with their kernels timed, then one against the other.

    Raises BadInput for a negative budget, for a model that is placed whole and for a `plan` of a model for inference
    (its best plans are run without being asked for), NotSupported for a training step or library kernels through a
    tracker, MeasurementFailed for a tracker that cannot be reached, and for a `plan` what `build` raises.
    """
    check_cluster(cluster)
    _check_budget(budget_s)
    if isinstance(model, TrainingModel):
        if tracker is not None:
            raise NotSupported("a training step cannot be measured through a tracker", "leave the tracker out")
        with closing(MeasuredKernels(database)) as measured:
            return profile_training(
                model,
                cluster=cluster,
                budget_s=budget_s,
                makers=makers,
                database=measured,
                plan=plan,
                progress=progress,
            )
    if plan is not None:
        raise BadInput("plan= is given for a model for inference", "leave it out: profile runs the best plans itself")
    goal = objective_of(objective)
    with _campaign(model, cluster, goal, bind_shapes, makers, database, tracker, LIMITS, progress) as campaign:
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
    database: str | Path | None = None,
    tracker: Tracker | None = None,
    seed: int = 0,
    progress: bool = False,
) -> TuningReport:
    """Search better schedules for the generated kernels that limit the plan, for `budget_s` seconds or `trials`.

    MetaSchedule proposes, TVM's XGBModel ranks, every trial is run: on this machine's CPU types, or on the devices that
    `tracker` knows. Later plans use a schedule where it was faster than the rules' kernel. Trials are kept beside the
    database of measured kernels; the next run goes on from them. A budget of 0 tunes nothing and says so.
    `objective`, `pin`, `bind_shapes` and `makers` (with "tvm") are those of the plan that is meant.

    Raises BadInput for a negative budget, a model that is placed whole, and makers without "tvm"; NotSupported for
    library kernels through a tracker, MeasurementFailed for a tracker that cannot be reached.
    """
    check_cluster(cluster)
    _check_budget(budget_s)
    if trials is not None and trials < 0:
        raise BadInput(f"the budget is {trials} trials", "give 0 or more, or None for as many as the time allows")
    if "tvm" not in makers:
        raise BadInput(f"makers are {tuple(makers)}: library kernels have no schedule", 'add the maker "tvm"')
    goal = objective_of(objective)
    with _campaign(model, cluster, goal, bind_shapes, makers, database, tracker, TRIAL_LIMITS, progress) as campaign:
        return Tuner(campaign, pin, seed).run(budget_s, trials)


def _check_budget(budget_s: float) -> None:
    if not budget_s >= 0:
        raise BadInput(f"the budget is {budget_s} s", "give 0 or more seconds")


@contextmanager
def _campaign(
    model: Model | tvm.IRModule,
    cluster: ClusterSpec,
    objective: Objective,
    bind_shapes: Mapping[str, int] | None,
    makers: Sequence[str],
    database: str | Path | None,
    tracker: Tracker | None,
    limits: TimerLimits,
    progress: bool,
) -> Iterator[Campaign]:
    """The campaign over a model's kernels, here and where `tracker` knows a server; its database is then closed."""
    prepared = prepare(as_model(model, bind_shapes))
    if prepared.graph is None:
        raise BadInput(
            f"the model is placed whole ({prepared.whole_reason}): it has no kernels to measure or to tune",
            "bind its shapes: bind_shapes=",
        )
    if tracker is not None and "library" in makers:
        raise NotSupported(
            f"makers are {tuple(makers)}, and library kernels cannot be measured through a tracker",
            'use makers=("tvm",), on the command line --makers tvm',
        )
    remote = {} if tracker is None else tracker.timers(cluster.device_types(), limits)
    with closing(MeasuredKernels(database)) as measured:
        yield Campaign.of(prepared, cluster, measured, objective, makers, progress, remote)
