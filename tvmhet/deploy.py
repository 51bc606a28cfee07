"""Plan -> compiled stages -> a program that runs: each stage is rewritten, compiled for its type, bound to devices."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tvm

from tvmhet.cluster.device import DeviceType
from tvmhet.cluster.local import ordinals_for
from tvmhet.cluster.spec import ClusterSpec
from tvmhet.emit.build import StageSource, compile_stages
from tvmhet.emit.cache import StageCache
from tvmhet.emit.cpu.panels import panel_columns
from tvmhet.errors import PlanMismatch
from tvmhet.graph.opgraph import OpGraph
from tvmhet.graph.panels import panels_of_stage
from tvmhet.graph.placement import KernelPlacement
from tvmhet.graph.schedule import TunedSchedule
from tvmhet.ir.bindings import Bindings
from tvmhet.ir.model import Model, require_values
from tvmhet.ir.prepare import Prepared
from tvmhet.ir.rewritten import rewritten
from tvmhet.ir.stages import stage_modules
from tvmhet.ir.transform.fuse_by_plan import FuseByPlan, check_cover
from tvmhet.ir.transform.pack_weights import PackWeights, in_panels
from tvmhet.ir.transform.split_by_stage import SplitByStage, stage_interfaces
from tvmhet.plans import Plan
from tvmhet.results import Parts, Structure
from tvmhet.runtime.cores import CpuDevice, assign_cores
from tvmhet.runtime.program import DeviceBinding, PipelineProgram, StageProgram, StateProgram, ValueSpec
from tvmhet.runtime.whole import WholeProgram
from tvmhet.team_plans import Runnable, runnable

Progress = Callable[[int, int, str], None]


def check_plan_fits(plan: Plan, prepared: Prepared, cluster: ClusterSpec) -> None:
    """Raise PlanMismatch if `plan` was made for another module, or names devices that `cluster` does not have."""
    if plan.module_key != prepared.key:
        raise PlanMismatch(
            f"the plan was made for module {plan.module_key[:12]}, this module is {prepared.key[:12]}",
            "plan this module again; a change of shapes, operators or names makes another module",
        )
    types = {device: group.device.name for group in cluster.groups() for device in group.device_ids}
    used = {d: s.placement.device_type for s in plan.stages for d in s.placement.devices}
    if missing := sorted(used.keys() - types.keys()):
        raise PlanMismatch(
            f"the plan uses {len(missing)} devices that the cluster does not have, for example {missing[0]!r}",
            "plan again for this cluster",
        )
    if other := [d for d in used if types[d] != used[d]]:
        raise PlanMismatch(
            f"the plan runs {used[other[0]]!r} on device {other[0]!r}, which is {types[other[0]]!r}",
            "plan again for this cluster",
        )


def check_stages_fit(plan: Plan, bindings: Bindings) -> None:
    """Raise BadGraph unless the plan's kernels cover the module, PlanMismatch unless its stages read and leave what
    the plan says: a plan is a file, and may have been changed.
    """
    check_cover(bindings, [k for s in plan.stages for k in s.kernels])
    for stage, found in zip(
        plan.stages, stage_interfaces(bindings, [s.placement.ops for s in plan.stages]), strict=True
    ):
        for what in ("inputs", "weights", "outputs"):
            planned, real = getattr(stage, what), getattr(found, what)
            if planned != real:
                raise PlanMismatch(
                    f"stage {stage.index} of the plan has {what} {list(planned)}; the module's are {list(real)}",
                    "plan again: this plan was changed after it was made",
                )


def rewrite(prepared: Prepared, plan: Plan, panels: Mapping[str, int] | None = None) -> tuple[tvm.IRModule, ...]:
    """Return one module per stage: the planned kernels, split by stage. Raises BadGraph or PlanMismatch first.

    The plan's rewrites have been made in `prepared`; weights of `panels` come in panels of so many columns.
    """
    kernels = [k for s in plan.stages for k in s.kernels]
    stages = [[k.name for k in s.kernels] for s in plan.stages]
    check_stages_fit(plan, Bindings(prepared.mod["main"]))
    passes = [PackWeights(panels or {}), FuseByPlan(kernels), SplitByStage(stages)]
    return stage_modules(tvm.transform.Sequential(passes)(prepared.mod))


def plan_panels(graph: OpGraph, plan: Plan, cluster: ClusterSpec) -> dict[str, int]:
    """Return the columns of the panels of each weight that a plan's kernels read in panels, by name.

    All that read such a weight are generated kernels of one stage. Whether the plan fits is not checked here.
    """
    targets = {t.name: t.target for t in cluster.device_types()}
    found: dict[str, int] = {}
    for stage in plan.stages:
        found |= panel_columns(graph, panels_of_stage(graph, stage.kernels), targets[stage.placement.device_type])
    return found


def stage_sources(prepared: Prepared, plan: Plan, cluster: ClusterSpec) -> tuple[StageSource, ...]:
    """Return what is to be compiled for each stage."""
    types = {t.name: t for t in cluster.device_types()}
    panels = plan_panels(prepared.operator_graph, plan, cluster)
    return tuple(
        StageSource(
            f"stage {s.index} ({s.placement.device_type})",
            mod,
            types[s.placement.device_type].target,
            traces=stage_traces(s.kernels),
        )
        for s, mod in zip(plan.stages, rewrite(prepared, plan, panels), strict=True)
    )


def stage_traces(kernels: Sequence[KernelPlacement]) -> dict[str, str]:
    """Return the tuned schedules that the kernels of a stage carry, by the hash of their function."""
    schedules = [TunedSchedule.from_text(k.spec) for k in kernels if k.maker == "tvm" and k.spec]
    return {s.function: s.trace for s in schedules}


def deploy(
    prepared: Prepared, plan: Plan, cluster: ClusterSpec, cache: StageCache, on_progress: Progress | None = None
) -> PipelineProgram | WholeProgram:
    """Compile every stage and return the program the runtime takes.

    Raises UnsupportedOperator, PlanMismatch, and BadModel for a model without values.
    """
    require_values(prepared.model)
    if prepared.graph is None:
        return _deploy_whole(prepared, plan, cluster, cache, on_progress)
    made = _runnable(prepared, plan)
    prepared, plan = made.prepared, made.plan
    libraries = compile_stages(stage_sources(prepared, plan, cluster), cache, on_progress=on_progress)
    graph = prepared.operator_graph
    panels = plan_panels(graph, plan, cluster)
    params = {name: as_numpy(value) for name, value in prepared.params.items()}
    params |= {name: in_panels(params[name], columns) for name, columns in panels.items()}
    return PipelineProgram(
        values=_values(graph, plan),
        inputs=tuple(graph.tensors[t].name for t in graph.given),
        outputs=tuple(graph.tensors[t].name for t in graph.returned),
        stages=tuple(_stage_program(made, i, library) for i, library in enumerate(libraries)),
        params=params | {_initial_name(s.name): as_numpy(s.initial) for s in prepared.model.states},
        bindings=bind_devices(plan, cluster),
        structure=_structure(prepared.model),
        states=_states(graph, prepared.model),
        num_sessions=graph.num_sessions,
    )


def _initial_name(state: str) -> str:
    """Return the name of the parameter that a state is at first."""
    return f"{state} at first"


def _states(graph: OpGraph, model: Model) -> tuple[StateProgram, ...]:
    return tuple(
        StateProgram(s.name, graph.tensors[now].name, graph.tensors[after].name, _initial_name(s.name))
        for s, (now, after) in zip(model.states, graph.states, strict=True)
    )


def compile_plans(prepared: Prepared, plans: Sequence[Plan], cluster: ClusterSpec, cache: StageCache) -> None:
    """Compile the stages of several plans into the cache, all at once, which is faster than plan by plan.

    Raises what `deploy` does; what was compiled until then stays in the cache.
    """
    made = (_runnable(prepared, plan) for plan in plans)
    compile_stages([source for m in made for source in stage_sources(m.prepared, m.plan, cluster)], cache)


def _runnable(prepared: Prepared, plan: Plan) -> Runnable:
    """The model and the plan to compile: with the plan's rewrites, and without teams. Raises BadGraph, PlanMismatch."""
    prepared = rewritten(prepared, plan.rewrites)
    if any(s.degree > 1 for s in plan.stages):  # else `rewrite` checks
        check_stages_fit(plan, Bindings(prepared.mod["main"]))
    return runnable(prepared, plan)


def _deploy_whole(
    prepared: Prepared, plan: Plan, cluster: ClusterSpec, cache: StageCache, on_progress: Progress | None
) -> WholeProgram:
    """Compile the module as `tvm.compile` does, for the one device that the plan chose."""
    placement = plan.stages[0].placement
    device = next(t for t in cluster.device_types() if t.name == placement.device_type)
    source = StageSource(f"the whole model ({device.name})", prepared.mod, device.target, plain=True)
    (library,) = compile_stages([source], cache, on_progress=on_progress)
    params = {_initial_name(s.name): as_numpy(s.initial) for s in prepared.model.states}
    params |= {name: as_numpy(value) for name, value in prepared.params.items()}
    (name,) = placement.devices
    ordinal = 0 if device.is_cpu else bind([(name, device)])[name].ordinal
    inputs = tuple(str(v.name) for v in prepared.model.inputs)
    states, num_sessions = tuple(s.name for s in prepared.model.states), prepared.model.num_sessions
    structure = prepared.model.structure
    return WholeProgram(library, inputs, params, name, device.kind, ordinal, structure, states, num_sessions)


def _structure(model: Model) -> Structure:
    """Return the structure that the model's front end gave, or that of what `main` returns."""
    if model.structure is not None:
        return model.structure
    if not isinstance(model.main.ret_ty, tvm.ir.TupleType):
        return "single"
    found = _parts(model.main.ret_ty)
    return found if any(found.parts) else "tuple"


def _parts(returned: Any) -> Parts:
    return Parts("tuple", tuple(_parts(t) if isinstance(t, tvm.ir.TupleType) else None for t in returned.fields))


def _stage_program(made: Runnable, index: int, library: Path) -> StageProgram:
    stage = made.plan.stages[index]
    return StageProgram(
        index=index,
        name=made.names[index],
        library=library,
        inputs=stage.inputs,
        params=stage.weights,
        outputs=stage.outputs,
        devices=stage.placement.devices,
        needs_library=any(k.maker == "library" for k in stage.kernels),
        planned=made.planned[index],
    )


def _values(graph: OpGraph, plan: Plan) -> Mapping[str, ValueSpec]:
    """Specs of everything that crosses a stage boundary, and of the model's inputs and outputs."""
    crossing = {name for s in plan.stages for name in (*s.inputs, *s.outputs)}
    crossing |= {graph.tensors[t].name for t in (*graph.inputs, *graph.outputs)}
    return {t.name: ValueSpec.of(t.name, t.shape, t.dtype) for t in graph.tensors if t.name in crossing}


def as_numpy(value: Any) -> np.ndarray:
    """Return a parameter's value as numpy, sharing memory where the dtype allows."""
    if isinstance(value, np.ndarray):
        return value
    try:
        return np.from_dlpack(value)
    except (BufferError, RuntimeError, TypeError, ValueError):  # bfloat16 and the like have no numpy exchange
        copied: np.ndarray = value.numpy()
        return copied


def bind_devices(plan: Plan, cluster: ClusterSpec) -> Mapping[str, DeviceBinding]:
    """Tie each device that the plan uses to cores or a GPU of this machine."""
    kinds = {t.name: t for t in cluster.device_types()}
    return bind([(d, kinds[s.placement.device_type]) for s in plan.stages for d in s.placement.devices])


def bind(used: Sequence[tuple[str, DeviceType]]) -> dict[str, DeviceBinding]:
    """Tie devices, by id and type, to cores or a GPU of this machine."""
    cpus = [CpuDevice(d, t.num_sms, isa_level(t.target)) for d, t in used if t.is_cpu]
    bindings = dict(assign_cores(cpus)) if cpus else {}
    ordinals = ordinals_for([d for d, t in used if not t.is_cpu])
    return bindings | {d: DeviceBinding(d, "cuda", ordinal=ordinal) for d, ordinal in ordinals.items()}


def isa_level(target: Mapping[str, Any]) -> str | None:
    """The x86-64 level that a target's mcpu names, None for any other."""
    mcpu = str(target.get("mcpu", ""))
    return mcpu if re.fullmatch(r"x86-64-v[234]", mcpu) else None
