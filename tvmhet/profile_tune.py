"""What is measured and searched before planning: `profile` times the kernels that decide, `tune` finds faster ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

import tvm

from tvmhet.arguments import check_cluster, objective_of
from tvmhet.campaign import Campaign
from tvmhet.candidates import MAKERS, candidate_kernels, makers_on
from tvmhet.cluster.spec import ClusterSpec
from tvmhet.cost.measure_rpc import Tracker
from tvmhet.cost.measured import MeasuredKernels
from tvmhet.errors import BadInput, NotSupported
from tvmhet.ir.importers import as_model
from tvmhet.ir.model import Model
from tvmhet.ir.prepare import prepare
from tvmhet.ir.training_model import TrainingModel
from tvmhet.profiling import LIMITS, ProfileReport
from tvmhet.times import Candidates
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
    database: Path | None = None,
    tracker: Tracker | None = None,
    progress: bool = False,
) -> ProfileReport:
    """Measure on this machine's CPU the kernels that decide the plan, until no other can, or `budget_s` is spent.

    Results go to the database of measured kernels. Device types for which `tracker` knows a server are measured there,
    generated kernels only. Those that are neither here nor there are left to the models, and named. Of a training step
    every kernel that is emitted is measured, and the whole step once on each CPU type: see `profile_training`.
    """
    check_cluster(cluster)
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
        makers = makers_on(makers, cluster.device_types())
        candidates = Candidates.of(prepared.graph, candidate_kernels(prepared.graph, makers))
        campaign = Campaign(prepared, candidates, measured, cluster, objective_of(objective), progress, remote, makers)
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
    check_cluster(cluster)
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
        makers = makers_on(makers, cluster.device_types())
        candidates = Candidates.of(prepared.graph, candidate_kernels(prepared.graph, makers))
        campaign = Campaign(prepared, candidates, measured, cluster, objective_of(objective), progress, remote, makers)
        return Tuner(campaign, pin, seed).run(budget_s, trials)
