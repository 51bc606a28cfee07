"""A training step -> the numbers of its forward operators, each with the backward operators that follow it.

    joint graph ── greedy kernels, as they are emitted ──► seconds ──► forward kernels, backward seconds per operator
                └─ split with every operator by itself ──► who owns a backward operator, what is kept for it

Backward times are of real operators here, from the same sources as forward times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tvmhet.cluster.device import DeviceType
from tvmhet.cost.measured import MeasuredKernels
from tvmhet.cost.table import SOURCES, TimeTable
from tvmhet.graph.fusion import LegalKernel
from tvmhet.graph.greedy import greedy_kernels
from tvmhet.graph.library import library_kernels
from tvmhet.graph.opgraph import OpGraph
from tvmhet.ir.optimizers import AdamW, Optimizer
from tvmhet.ir.prepare import Prepared
from tvmhet.ir.training_model import TrainingModel
from tvmhet.ir.training_stages import StageParts, split_stages
from tvmhet.ir.training_step import Step, forward_prepared, read_step
from tvmhet.planning_training import TrainingGraph
from tvmhet.solve import Weight
from tvmhet.times import Candidates, time_table


def optimizer_name(optimizer: Optimizer) -> str:
    """Return what `planning_training.OPTIMIZERS` calls it."""
    if isinstance(optimizer, AdamW):
        return "adamw"
    return "momentum" if optimizer.state else "sgd"


def step_graph(
    model: TrainingModel, devices: Sequence[DeviceType], database: MeasuredKernels | None, makers: Sequence[str]
) -> tuple[Prepared, TrainingGraph]:
    """Return the forward half as a module to be planned, and its numbers."""
    step = read_step(model)
    prepared, joint = forward_prepared(step), step.prepared.graph
    assert prepared.graph is not None and joint is not None
    parts = split_stages(step, [[name] for name in step.forward])
    apart = _kept_apart(joint, step)
    backward = frozenset(step.backward)
    kernels = [k for k in greedy_kernels(apart, makers) if joint.operators[k.ops[0]].name in backward]
    table = time_table(Candidates.of(apart, kernels), devices, database)
    per_op = _by_owner(prepared.graph, joint, parts, kernels, table)
    forward_graph = _kept_apart(prepared.graph, step)
    candidates = Candidates.of(forward_graph, _forward_kernels(forward_graph, makers))
    forward = time_table(candidates, devices, database)
    backward_s = np.array([per_op[list(k.ops)].sum(axis=0) for k in candidates.kernels])
    return prepared, TrainingGraph(
        model.batch_size,
        prepared.graph,
        candidates,
        forward,
        backward_s,
        _sources(table),
        _stashes(prepared.graph, parts),
    )


def _kept_apart(graph: OpGraph, step: Step) -> OpGraph:
    """The graph with every forward tensor that a backward operator reads as a result: no kernel may swallow it."""
    made = frozenset(step.forward)
    back = frozenset(step.backward)
    read = {t for name in back for t in step.bindings.reads(name) if step.bindings.producer.get(t) in made}
    tensors = tuple(replace(t, is_output=t.is_output or t.name in read) for t in graph.tensors)
    return OpGraph(graph.operators, tensors, graph.inputs, graph.outputs)


def _forward_kernels(graph: OpGraph, makers: Sequence[str]) -> tuple[LegalKernel, ...]:
    """The kernels that are emitted, and each operator by itself, so that stages may end anywhere."""
    chosen = greedy_kernels(graph, makers)
    made = {k.ops[0]: k for k in library_kernels(graph) if len(k.ops) == 1} if "library" in makers else {}
    alone = [made.get(i, LegalKernel((i,))) for i in range(len(graph.operators))]
    return tuple(dict.fromkeys((*chosen, *alone)))


def _by_owner(
    forward: OpGraph, joint: OpGraph, parts: Sequence[StageParts], kernels: Sequence[LegalKernel], table: TimeTable
) -> np.ndarray:
    """Backward seconds per forward operator and device type; a kernel's time is spread evenly over its operators."""
    owner = {name: forward.index(part.forward[0]) for part in parts for name in part.backward}
    out = np.zeros((len(forward.operators), len(table.device_types)))
    for i, kernel in enumerate(kernels):
        for op in kernel.ops:
            out[owner[joint.operators[op].name]] += table.seconds[i] / len(kernel.ops)
    return out


def _stashes(graph: OpGraph, parts: Sequence[StageParts]) -> tuple[Weight, ...]:
    """What the backward operators of each forward operator read of the forward pass, by tensor."""
    size = {t.name: t.size_bytes for t in graph.tensors if not t.is_param}
    readers: dict[str, list[int]] = {}
    for part in parts:
        for name in part.saved:
            if name in size:
                readers.setdefault(name, []).append(graph.index(part.forward[0]))
    return tuple(Weight(tuple(sorted(set(nodes))), size[name]) for name, nodes in readers.items())


def _sources(table: TimeTable) -> str:
    """Where backward times come from, by their share of the sum over all device types."""
    runs = np.isfinite(table.seconds)
    total = float(table.seconds[runs].sum()) or 1.0
    shares = {s: float(table.seconds[runs & (table.rank == i)].sum()) / total for i, s in enumerate(SOURCES)}
    return ", ".join(f"{100 * share:.0f} % {s}" for s, share in reversed(shares.items()) if share > 0)
