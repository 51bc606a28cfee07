"""What a placement of a training step takes and holds, by the planner's numbers and its simulator, whoever made it.

So a plan by hand, or by another planner, is priced as ours are: in seconds of each pass and bytes of each device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from tvmhet.cluster.groups import Group
from tvmhet.cluster.spec import ClusterSpec
from tvmhet.context import company_of
from tvmhet.cost.measured import MeasuredKernels
from tvmhet.deploy import bind
from tvmhet.errors import BadInput
from tvmhet.ir.optimizers import plan_name
from tvmhet.ir.training_model import TrainingModel
from tvmhet.planning_training import TrainingGoal, TrainingGraph, make_training_problem
from tvmhet.solve import IterationSolution, Status, TrainingTimeline, simulate_training
from tvmhet.solve.iteration import StagePlacing
from tvmhet.solve.iteration_value import evaluate_iteration
from tvmhet.solve.simulate_training import Processors
from tvmhet.splitting import Wish
from tvmhet.training_deploy import devices_of
from tvmhet.training_parts import handover_s
from tvmhet.training_placement import TrainingPlacement
from tvmhet.training_splits import with_team_times
from tvmhet.training_times import step_graph


@dataclass(frozen=True, slots=True)
class PredictedStep:
    """Seconds of one iteration by the simulator, its events, and the planner's figures of each stage."""

    timeline: TrainingTimeline
    solution: IterationSolution
    sources: str  # where backward times come from

    @property
    def iteration_s(self) -> float:
        """Seconds of one iteration."""
        return self.timeline.iteration_s

    @property
    def memory_bytes(self) -> tuple[int, ...]:
        """Peak bytes of one device of each stage; a device of several stages has the sum at each."""
        return tuple(s.memory_bytes for s in self.solution.stages)


def predict_training(
    model: TrainingModel,
    placement: TrainingPlacement,
    *,
    cluster: ClusterSpec,
    makers: Sequence[str] = ("tvm", "library"),
    database: str | Path | None = None,
) -> PredictedStep:
    """Simulate one iteration of `placement`. Nothing is compiled or run.

    CPU devices that share cores of this machine, because it has fewer than the placement asks for, take turns on them.
    Raises BadInput for a placement whose devices the cluster does not have.
    """
    groups = cluster.groups()
    company = company_of(cluster, {d for devices in placement.devices for d in devices})
    with closing(MeasuredKernels(database)) as measured:
        _, graph = step_graph(model, cluster.device_types(), measured, makers, company)
        wishes = [Wish(degree) for degree in sorted(set(placement.team_sizes) - {1})]
        graph = with_team_times(graph, wishes, cluster, cluster.device_types(), model)
        between_s = {d.name: handover_s(measured, d, company) for d in cluster.device_types()}
    goal = TrainingGoal(graph.size * placement.num_microbatches, optimizer=plan_name(model.optimizer))
    problem = make_training_problem([graph], cluster, groups, {}, goal)
    placings = _placings(placement, graph, groups)
    value = evaluate_iteration(problem, 0, placings, placement.schedule)
    solution = IterationSolution(
        value.stages,
        0,
        placement.num_microbatches,
        placement.schedule,
        value.pipeline_s,
        value.iteration_s,
        value.bubble,
        0.0,
        Status.FEASIBLE,
        0,
        "given",
    )
    timeline = simulate_training(problem, solution, processors=_shared(placement, placings, cluster, between_s))
    return PredictedStep(timeline, solution, graph.backward_source)


def _placings(placement: TrainingPlacement, graph: TrainingGraph, groups: Sequence[Group]) -> tuple[StagePlacing, ...]:
    group_of = {device: i for i, g in enumerate(groups) for device in g.device_ids}
    index = {op.name: i for i, op in enumerate(graph.graph.operators)}
    kernels = [_cover(graph, frozenset(index[n] for n in names)) for names in placement.stages]
    teams = _teams(placement)
    places = list(dict.fromkeys(devices for _, devices, _ in teams))
    out = []
    for k, devices, share in teams:
        degree, again = placement.team_sizes[k], placement.recompute[k]
        if missing := [d for d in devices if d not in group_of]:
            raise BadInput(f"the cluster has no device {missing[0]!r}", f"it has {', '.join(sorted(group_of)[:8])}")
        if len({group_of[d] for d in devices}) > 1:
            raise BadInput(f"replicas of stage {k} are on unlike device types and have no shares", "give each a share")
        group, place = group_of[devices[0]], places.index(devices)
        out.append(StagePlacing(kernels[k], group, len(devices) // degree, place, again, degree, share))
    return tuple(out)


def _teams(placement: TrainingPlacement) -> list[tuple[int, tuple[str, ...], int]]:
    """(stage, devices, share) of replicas that are alike: each by itself where they have shares."""
    out: list[tuple[int, tuple[str, ...], int]] = []
    for k, devices in enumerate(placement.devices):
        own = placement.shares[k] if placement.shares else ()
        out += [(k, team, n) for team, n in zip(placement.teams(k), own, strict=True)] if own else [(k, devices, 0)]
    return out


def _cover(graph: TrainingGraph, nodes: frozenset[int]) -> tuple[int, ...]:
    """The kernels of a stage: emitted ones that lie inside it, single operators where it cuts one."""
    left, chosen = set(nodes), []
    for i, kernel in enumerate(graph.candidates.kernels):  # the emitted ones come first
        if left.issuperset(kernel.ops):
            chosen.append(i)
            left -= set(kernel.ops)
    return tuple(sorted(chosen, key=lambda i: graph.candidates.kernels[i].ops))


def _shared(
    placement: TrainingPlacement,
    placings: Sequence[StagePlacing],
    cluster: ClusterSpec,
    between_s: Mapping[str, float],
) -> Mapping[tuple[int, int], Processors]:
    """(place, replica) -> its cores, for devices whose cores others hold too; `between_s` by device type."""
    devices = dict(devices_of(placement, cluster))
    bindings = bind(list(devices.items()))
    return {
        (p.place, r): Processors(
            tuple(sorted({core for d in own[at : at + p.degree] for core in bindings[d].cores})),
            between_s[devices[own[at]].name],
        )
        for p, (_, own, _) in zip(placings, _teams(placement), strict=True)
        for r, at in enumerate(range(0, len(own), p.degree))
        if any(d in bindings and bindings[d].shared_cores for d in own[at : at + p.degree])
    }
