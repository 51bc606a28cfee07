"""A training step and its placement -> compiled functions and a program that runs.

    stages of forward operators ─► parts ─► forward, backward, reduce, norm, update ─► kernels ─► libraries

Kernels of a stage's functions are chosen greedily (`graph.greedy`): what a forward pass saves for the backward pass
cannot stay inside a kernel, so the kernels that suit inference do not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import tvm
from tvm import relax

from tvmhet.cluster.device import DeviceType
from tvmhet.cluster.spec import ClusterSpec
from tvmhet.deploy import as_numpy, bind
from tvmhet.emit.build import StageSource, compile_stages
from tvmhet.emit.cache import StageCache
from tvmhet.errors import BadInput
from tvmhet.graph.fusion import LegalKernel
from tvmhet.graph.greedy import greedy_kernels
from tvmhet.graph.library import place_kernel
from tvmhet.graph.opgraph import OpGraph
from tvmhet.ir.attrs import POOLED_ATTR
from tvmhet.ir.bindings import flatten
from tvmhet.ir.extract import NotAGraph, extract
from tvmhet.ir.stages import standalone
from tvmhet.ir.training_functions import (
    StageFunction,
    backward_function,
    forward_function,
    norm_function,
    reduce_function,
)
from tvmhet.ir.training_stages import StageParts, split_stages, with_buffers_whole
from tvmhet.ir.training_step import Step
from tvmhet.ir.training_update import scalar_names, update_function
from tvmhet.ir.transform.fuse_by_plan import FuseByPlan
from tvmhet.ir.transform.name_operators import NameOperators
from tvmhet.runtime.program import Array, ValueSpec
from tvmhet.runtime.training_program import RELEASE_FUNCTION, Function, Noise, Share, TrainingProgram, TrainingStage
from tvmhet.training_placement import TrainingPlacement
from tvmhet.training_teams import OnTeams

Progress = Callable[[int, int, str], None]
_UPDATES = 8  # parts of a stage's update, about: `update_chunks`


def deploy_training(
    step: Step,
    placement: TrainingPlacement,
    cluster: ClusterSpec,
    cache: StageCache,
    *,
    makers: Sequence[str],
    max_norm: float | None = None,
    on_progress: Progress | None = None,
) -> TrainingProgram:
    """Compile every function and return the program. Raises UnsupportedOperator, BadInput, NotSupported."""
    parts, made = stage_functions(step, placement, max_norm)
    compiled = _compile(made, placement, cluster, cache, makers, on_progress)
    return program_of(step, parts, compiled, placement, cluster, max_norm)


def stage_functions(
    step: Step, placement: TrainingPlacement, max_norm: float | None
) -> tuple[tuple[StageParts, ...], list[dict[str, StageFunction]]]:
    """Return the parts of each stage and its functions by name."""
    if isinstance(placement, OnTeams):
        parts = split_stages(step, placement.stages, placement.behind, placement.homes)
    else:
        parts = split_stages(step, with_buffers_whole(step, placement.stages))
    return parts, [_functions(step, p, placement, k, max_norm) for k, p in enumerate(parts)]


def program_of(
    step: Step,
    parts: Sequence[StageParts],
    functions: Sequence[Mapping[str, Function]],
    placement: TrainingPlacement,
    cluster: ClusterSpec,
    max_norm: float | None,
) -> TrainingProgram:
    """Join the functions of every stage, by their names in `stage_functions`, to a program."""
    return TrainingProgram(
        values=_values(step, parts),
        batch=step.batch,
        noise=_noise(step),
        loss=step.loss,
        stages=tuple(_stage(step, parts, k, placement, functions[k]) for k in range(len(parts))),
        state=_state(step, parts),
        constants=_constants(step),
        scalars=scalar_names(step.model.optimizer),
        orders=placement.orders(),
        bindings=bind(devices_of(placement, cluster)),
        num_microbatches=placement.num_microbatches,
        memory_bytes={d: g.memory_bytes for g in cluster.groups() for d in g.device_ids},
        max_norm=max_norm,
    )


def _functions(
    step: Step, parts: StageParts, placement: TrainingPlacement, k: int, max_norm: float | None
) -> dict[str, StageFunction]:
    """Return the functions of a stage by name: each replica's, whose number follows the name."""
    recompute = placement.recompute[k]
    forward = forward_function(step, parts, recompute=recompute)
    backward = backward_function(step, parts, recompute=recompute)
    replicas = len(placement.devices[k])
    found = {f"{n}{r}": f for r in range(replicas) for n, f in (("forward", forward), ("backward", backward))}
    for r, own in enumerate(shares(step, parts, replicas)):
        if own and replicas > 1:
            found[f"reduce{r}"] = reduce_function(step, own, replicas)
        if own and max_norm is not None:
            found[f"norm{r}"] = norm_function(step, own)
        for c, chunk in enumerate(update_chunks(step, own)):
            found[f"update{r}.{c}"] = update_function(step, chunk, step.model.optimizer)
    return found


def update_chunks(step: Step, parameters: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Cut the parameters into runs of an eighth of their bytes or one parameter: new values of one are held at once."""
    sizes = {t.name: t.size_bytes for t in _graph(step).tensors}
    most = sum(sizes[p] for p in parameters) / _UPDATES
    chunks: list[list[str]] = []
    held = 0
    for p in parameters:
        if not chunks or held + sizes[p] > most:
            chunks.append([])
            held = 0
        chunks[-1].append(p)
        held += sizes[p]
    return tuple(map(tuple, chunks))


def shares(step: Step, parts: StageParts, replicas: int) -> tuple[tuple[str, ...], ...]:
    """Deal a stage's parameters to its replicas, largest first to the one with the fewest bytes so far."""
    sizes = {t.name: t.size_bytes for t in _graph(step).tensors}
    own: list[list[str]] = [[] for _ in range(replicas)]
    held = [0] * replicas
    for parameter, _ in sorted(parts.gradients, key=lambda g: (-sizes[g[0]], g[0])):
        r = held.index(min(held))
        own[r].append(parameter)
        held[r] += sizes[parameter]
    return tuple(map(tuple, own))


def _graph(step: Step) -> Any:
    return step.prepared.graph


def plan_kernels(function: StageFunction, makers: Sequence[str]) -> tuple[tvm.IRModule, bool]:
    """Return the function's module cut into kernels, and whether any of them is the library's.

    Its memory is one pool's, with the functions that are called before and after it.
    """
    mod, graph, kernels = cut_kernels(function, makers)
    fused = fused_kernels(mod, graph, kernels)
    fused["main"] = fused["main"].with_attr(POOLED_ATTR, True)
    return _with_release(fused), any(k.maker == "library" for k in kernels)


def fused_kernels(mod: tvm.IRModule, graph: OpGraph | None, kernels: Sequence[LegalKernel]) -> tvm.IRModule:
    """Return what `cut_kernels` gave as a module with a function for each kernel of several operators."""
    if graph is None:
        return mod
    fused = tvm.transform.Sequential([FuseByPlan([place_kernel(graph, k) for k in kernels])])(mod)
    return standalone(fused, fused["main"])


def _with_release(mod: tvm.IRModule) -> tvm.IRModule:
    builder = relax.BlockBuilder()
    with builder.function(RELEASE_FUNCTION, []):
        builder.emit_func_output(relax.Tuple([]))
    out = mod.clone()
    out[RELEASE_FUNCTION] = builder.get()[RELEASE_FUNCTION]
    return out


def cut_kernels(
    function: StageFunction, makers: Sequence[str]
) -> tuple[tvm.IRModule, OpGraph | None, tuple[LegalKernel, ...]]:
    """Return the function with its operators named, their graph (None: it has none), and its kernels in order."""
    mod = tvm.transform.Sequential([NameOperators()])(function.module)
    if not any(isinstance(b.value, relax.Call) for block in mod["main"].body.blocks for b in block.bindings):
        return mod, None, ()
    graph = extract(mod)
    assert not isinstance(graph, NotAGraph), graph
    return mod, graph, greedy_kernels(graph, makers)


def function_sources(
    made: Sequence[Mapping[str, StageFunction]],
    placement: TrainingPlacement,
    cluster: ClusterSpec,
    makers: Sequence[str],
) -> dict[tuple[int, str], tuple[StageSource, bool]]:
    """Return, by stage and name, what is to be compiled of each function, and whether it calls the library.

    Raises BadInput for a device that the cluster does not have.
    """
    types = {device: group.device for group in cluster.groups() for device in group.device_ids}
    if missing := [d for devices in placement.devices for d in devices if d not in types]:
        raise BadInput(f"the cluster has no device {missing[0]!r}", f"its devices are {', '.join(sorted(types)[:8])}")
    found = {}
    for k, functions in enumerate(made):
        cut = {key: plan_kernels(f, makers) for key, f in {id(f): f for f in functions.values()}.items()}
        for name, function in functions.items():
            device = types[placement.devices[k][replica_of(name)]]
            mod, needs_library = cut[id(function)]
            found[k, name] = StageSource(f"{name} of stage {k} ({device.name})", mod, device.target), needs_library
    return found


def _compile(
    made: Sequence[Mapping[str, StageFunction]],
    placement: TrainingPlacement,
    cluster: ClusterSpec,
    cache: StageCache,
    makers: Sequence[str],
    on_progress: Progress | None,
) -> list[dict[str, Function]]:
    found = function_sources(made, placement, cluster, makers)
    paths = compile_stages([source for source, _ in found.values()], cache, on_progress=on_progress)
    out: list[dict[str, Function]] = [{} for _ in made]
    for ((k, name), (_, needs_library)), path in zip(found.items(), paths, strict=True):
        function = made[k][name]
        out[k][name] = Function(Path(path), function.inputs, function.outputs, needs_library)
    return out


def replica_of(function: str) -> int:
    """The replica whose function this is, by its name."""
    return int(function.partition(".")[0].lstrip("abcdefghijklmnopqrstuvwxyz"))


def _stage(
    step: Step, parts: Sequence[StageParts], k: int, placement: TrainingPlacement, functions: Mapping[str, Function]
) -> TrainingStage:
    own = parts[k]
    forward_maker = {t: p.index for p in parts for c in p.forward for t in flatten(step.bindings.results[c])}
    backward_maker = {t: p.index for p in parts for c in p.backward for t in flatten(step.bindings.results[c])}
    replicas = len(placement.devices[k])
    return TrainingStage(
        index=k,
        devices=placement.devices[k],
        microbatches=placement.microbatches(k),
        forward=tuple(functions[f"forward{r}"] for r in range(replicas)),
        backward=tuple(functions[f"backward{r}"] for r in range(replicas)),
        shares=tuple(
            Share(
                p,
                functions.get(f"reduce{r}"),
                functions.get(f"norm{r}"),
                tuple(f for name, f in functions.items() if name.startswith(f"update{r}.")),
            )
            for r, p in enumerate(shares(step, own, replicas))
        ),
        parameters=tuple(p for p, _ in own.gradients),
        buffers={tensor: buffer for buffer, tensor in own.buffers},
        after_forward=tuple(sorted({forward_maker[t] for t in own.reads if t in forward_maker} - {k})),
        after_backward=tuple(sorted({backward_maker[t] for t in own.received})),
        planned=placement.levels[k] if isinstance(placement, OnTeams) else k,
    )


def _values(step: Step, parts: Sequence[StageParts]) -> dict[str, ValueSpec]:
    crossing = dict.fromkeys((*step.batch, *(t for p in parts for t in (*p.outputs, *p.sent))))
    tensors = {t.name: t for t in _graph(step).tensors}
    return {name: ValueSpec.of(name, tensors[name].shape, tensors[name].dtype) for name in crossing}


def _noise(step: Step) -> tuple[Noise, ...]:
    tensors = {t.name: t for t in _graph(step).tensors}
    return tuple(
        Noise(
            ValueSpec.of(name, tensors[name].shape, tensors[name].dtype),
            cast(Literal["uniform", "normal"], kind),
        )
        for name, kind in zip(step.noise, step.model.noise, strict=True)
    )


def _state(step: Step, parts: Sequence[StageParts]) -> dict[str, Array]:
    """Initial parameters and buffers, and zeros for the optimiser's tensors."""
    state = {name: as_numpy(step.model.params[name]) for name in step.model.torch_names}
    for p in parts:
        for parameter, _ in p.gradients:
            for kept in step.model.optimizer.state:
                state[f"{parameter}.{kept}"] = np.zeros_like(state[parameter])
    return state


def _constants(step: Step) -> dict[str, Array]:
    return {n: as_numpy(v) for n, v in step.model.params.items() if n not in step.model.torch_names}


def devices_of(placement: TrainingPlacement, cluster: ClusterSpec) -> list[tuple[str, DeviceType]]:
    """The devices of a placement with their types, each once, in order."""
    types = {device: group.device for group in cluster.groups() for device in group.device_ids}
    return [(d, types[d]) for d in dict.fromkeys(d for devices in placement.devices for d in devices)]
