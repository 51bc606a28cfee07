"""A plan with split stages as one without, which is what gets compiled: each step of each device of a team is a stage.

    stage 0 on a team of two          stages 0 .. 3, of the module that SplitTensors makes
    fc1+gelu, fc2, add+norm           0: fc1+gelu, fc2 (first device)      1: the same (second device)
                                      2: sum, add+norm (first device)      3: the same (second device)

What the devices hand over crosses as any other value does: in shared memory on one machine. The steps of a device take
turns as virtual stages do, so inputs overlap: while one waits for a sum, the device works on the next.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby

import torch
import tvm

from tvmhet.errors import BadGraph, NotSupported, PlanMismatch
from tvmhet.graph.cutting import Part, part_of
from tvmhet.graph.fusion import LegalKernel
from tvmhet.graph.library import place_kernel
from tvmhet.graph.opgraph import OpGraph
from tvmhet.graph.placement import KernelPlacement, StagePlacement
from tvmhet.graph.teams import Task, TeamTask
from tvmhet.ir.bindings import Bindings
from tvmhet.ir.extract import NotAGraph, extract
from tvmhet.ir.model import Model, from_torch_tensor, to_torch
from tvmhet.ir.prepare import Prepared
from tvmhet.ir.transform.split_by_stage import StageInterface, stage_interfaces
from tvmhet.ir.transform.split_tensors import SplitTensors, TeamStage, check_names, share_of, shares_of
from tvmhet.plans import KernelPrediction, Plan, PlannedStage

_UNKNOWN = KernelPrediction(0.0, 0.0, 0.0, "unknown")  # of what joins parts; it is in the times of the kernels


@dataclass(frozen=True, slots=True)
class Runnable:
    """A model and a plan of it that splits nothing, to be compiled as they are.

    `planned` is the stage of the given plan that each stage is of, `names` what errors call it.
    """

    prepared: Prepared
    plan: Plan
    planned: tuple[int, ...]
    names: tuple[str, ...]


def runnable(prepared: Prepared, plan: Plan) -> Runnable:
    """Return what is compiled for a plan, whose rewrites have been made in `prepared`.

    Raises NotSupported for a split that the model cannot have, PlanMismatch for a plan that was changed, BadGraph for a
    model whose operators are named as a team's.
    """
    if all(s.degree == 1 for s in plan.stages):
        indices = tuple(s.index for s in plan.stages)
        return Runnable(prepared, plan, indices, tuple(f"stage {i}" for i in indices))
    graph = prepared.operator_graph
    parts = {degree: part_of(graph, degree, joins=True) for degree in {s.degree for s in plan.stages} - {1}}
    stages = [_team_stage(graph, stage, parts.get(stage.degree)) for stage in plan.stages]
    shared = replace(prepared, model=_with_teams(prepared, stages))
    shared = replace(shared, mod=shared.model.mod)
    made = extract(shared.mod, like=graph)
    if isinstance(made, NotAGraph):
        raise BadGraph(f"the module of teams is no graph: {made.reason}", "this is a defect of SplitTensors")
    steps = [step for planned, stage in zip(plan.stages, stages, strict=True) for step in _steps(made, planned, stage)]
    bindings = Bindings(shared.mod["main"])
    interfaces = stage_interfaces(bindings, [[op for k in step.kernels for op in k.ops] for step in steps])
    placed = tuple(_placed(i, step, it) for i, (step, it) in enumerate(zip(steps, interfaces, strict=True)))
    return Runnable(
        replace(shared, graph=made),
        replace(plan, stages=placed),
        tuple(step.stage.index for step in steps),
        tuple(step.name for step in steps),
    )


@dataclass(frozen=True, slots=True)
class _Step:
    """What one device of a team runs in one step, or all of a stage that is not split."""

    stage: PlannedStage
    name: str
    kernels: tuple[KernelPlacement, ...]
    predictions: tuple[KernelPrediction, ...]
    devices: tuple[str, ...]


def _team_stage(graph: OpGraph, stage: PlannedStage, part: Part | None) -> TeamStage:
    kernels = tuple(tuple(graph.index(op) for op in k.ops) for k in stage.kernels)
    if stage.degree > 1 and part is None:
        raise NotSupported(
            f"stage {stage.index} is split over {stage.degree} devices, and nothing of the model can be cut so",
            "plan without times that are given for splits: they say so of any model",
        )
    if len(stage.placement.devices) % stage.degree or (part and any(k.maker == "concurrent" for k in stage.kernels)):
        raise PlanMismatch(
            f"stage {stage.index} is split over {stage.degree} of its {len(stage.placement.devices)} devices: "
            "they are no whole teams, or a kernel of it has branches",
            "plan this module again",
        )
    if part is not None and (
        bad := [k for k, ops in zip(stage.kernels, kernels, strict=True) if not part.can_run(ops)]
    ):
        raise PlanMismatch(
            f"kernel {bad[0].name!r} of stage {stage.index} reads sums that are still to be added up",
            "plan this module again",
        )
    return TeamStage(stage.index, graph, kernels, part)


def _with_teams(prepared: Prepared, stages: list[TeamStage]) -> Model:
    model = prepared.model
    values = {name: to_torch(value) for name, value in model.params.items()} if model.has_values else {}
    params = {
        s.name: from_torch_tensor(share_of(values[s.source.name], s))
        if model.has_values
        else from_torch_tensor(torch.empty(s.shape, dtype=to_torch(model.params[s.source.name]).dtype))
        for s in shares_of(stages, prepared.operator_graph)
    }
    check_names(Bindings(prepared.mod["main"]), stages)  # here: what a pass raises reaches the caller as a RuntimeError
    mod = tvm.transform.Sequential([SplitTensors(stages)])(prepared.mod)
    return replace(model, mod=mod, params=params)


def _steps(made: OpGraph, stage: PlannedStage, team: TeamStage) -> list[_Step]:
    """Return what each device runs, step by step."""
    if team.part is None:
        return [_Step(stage, f"stage {stage.index}", stage.kernels, stage.predictions, stage.placement.devices)]
    found = []
    for (step, rank), tasks in groupby(team.tasks, key=lambda task: (task.step, task.rank)):
        kernels = tuple((task, _kernel(made, stage, team, task)) for task in tasks)
        found.append(
            _Step(
                stage,
                f"stage {stage.index}, step {step} of device {rank} of {stage.degree}",
                tuple(kernel for _, kernel in kernels),
                tuple(stage.predictions[t.subject] if t.task is Task.RUN else _UNKNOWN for t, _ in kernels),
                stage.placement.devices[rank :: stage.degree],
            )
        )
    return found


def _kernel(made: OpGraph, stage: PlannedStage, team: TeamStage, task: TeamTask) -> KernelPlacement:
    """Return a task's kernel. Of a tuned one the schedule is of the whole, so its part is made by the rules."""
    maker = stage.kernels[task.subject].maker if task.task is Task.RUN else "tvm"
    return place_kernel(made, LegalKernel(tuple(made.index(op) for op in team.operators_of(task)), maker))


def _placed(index: int, step: _Step, interface: StageInterface) -> PlannedStage:
    return PlannedStage(
        placement=StagePlacement(index, step.kernels, step.stage.placement.device_type, step.devices),
        predictions=step.predictions,
        inputs=interface.inputs,
        weights=interface.weights,
        outputs=interface.outputs,
        compute_s=sum(p.time_s for p in step.predictions),
        transfer_s=0.0,
        load_s=0.0,
        memory_bytes=step.stage.memory_bytes,
    )
