"""A training step -> the numbers of its forward operators, each with the backward operators that follow it.

    joint graph ── greedy kernels, as they are emitted ──► seconds ──► forward kernels, backward seconds per operator
                └─ split with every operator by itself ──► who owns a backward operator, what is kept for it

Backward times are of real operators here, from the same sources as forward times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tvmhet.cluster.device import DeviceType
from tvmhet.context import kernel_factors
from tvmhet.cost.measured import MeasuredKernels
from tvmhet.cost.table import SOURCES, Entry, TimeTable
from tvmhet.graph.fusion import LegalKernel
from tvmhet.graph.greedy import greedy_kernels
from tvmhet.graph.opgraph import OpGraph
from tvmhet.ir.prepare import Prepared
from tvmhet.ir.training_model import TrainingModel
from tvmhet.ir.training_stages import StageParts, split_stages
from tvmhet.ir.training_step import Step, forward_prepared, read_step
from tvmhet.planning_training import TrainingGraph
from tvmhet.times import Candidates, time_table
from tvmhet.training_parts import repeat_ratio, update_costs

#: Parts of a step whose seconds on a device type are recorded for its context.
FORWARD, BACKWARD = "forward ", "backward "


@dataclass(frozen=True)
class StepKernels:
    """The kernels of a step as they are emitted, forward and backward, each with the graph that they are cut from."""

    step: Step
    prepared: Prepared  # the forward half
    parts: tuple[StageParts, ...]  # every forward operator by itself
    forward_graph: OpGraph
    backward_graph: OpGraph
    forward: Candidates
    backward: Candidates

    @classmethod
    def of(cls, model: TrainingModel, makers: Sequence[str]) -> StepKernels:
        """Cut the step into kernels."""
        step = read_step(model)
        prepared, joint = forward_prepared(step), step.prepared.operator_graph
        ahead, apart = _kept_apart(prepared.operator_graph, step), _kept_apart(joint, step)
        behind = frozenset(step.backward)
        kernels = [k for k in greedy_kernels(apart, makers) if joint.operators[k.ops[0]].name in behind]
        return cls(
            step,
            prepared,
            split_stages(step, [[name] for name in step.forward]),
            ahead,
            apart,
            Candidates.of(ahead, greedy_kernels(ahead, makers), trains=True),
            Candidates.of(apart, kernels, trains=True),
        )

    def times(
        self, devices: Sequence[DeviceType], database: MeasuredKernels | None, *, in_context: bool, company: str = ""
    ) -> tuple[TimeTable, TimeTable]:
        """Return the times of forward and backward kernels; `in_context` as `training_profile` saw them in the step.

        `company` names the other devices that work (`context.beside`).
        """
        halves = ((self.forward, FORWARD), (self.backward, BACKWARD))
        factors = [
            self._factors(candidates, devices, database, company, half) if in_context and database is not None else None
            for candidates, half in halves
        ]
        ahead, back = (time_table(c, devices, database, f) for (c, _), f in zip(halves, factors, strict=True))
        return ahead, back

    def operators(self, candidates: Candidates) -> list[list[str]]:
        """The names of the operators of each kernel of a half."""
        graph = self.forward_graph if candidates is self.forward else self.backward_graph
        return [[graph.operators[i].name for i in kernel.ops] for kernel in candidates.kernels]

    def _factors(
        self, candidates: Candidates, devices: Sequence[DeviceType], database: MeasuredKernels, company: str, half: str
    ) -> dict[str, NDArray[np.float64]]:
        names = self.operators(candidates)
        key = self.step.prepared.key
        found = {d.name: kernel_factors(database, key, d, names, company, half, ran=names) for d in devices}
        return {name: factors for name, factors in found.items() if factors is not None}


def step_graph(
    model: TrainingModel,
    devices: Sequence[DeviceType],
    database: MeasuredKernels | None,
    makers: Sequence[str],
    company: str = "",
) -> tuple[Prepared, TrainingGraph]:
    """Return the forward half as a module to be planned, and its numbers, for `company` as in `StepKernels.times`."""
    made = StepKernels.of(model, makers)
    graph, joint = made.prepared.operator_graph, made.step.prepared.operator_graph
    ahead, table = made.times(devices, database, in_context=True, company=company)
    per_op = _by_owner(graph, joint, made.parts, made.backward.kernels, table)
    candidates, forward = _also_alone(made.forward_graph, made.forward, ahead)
    backward_s = np.array([per_op[list(k.ops)].sum(axis=0) for k in candidates.kernels])
    per_byte_s, each_bytes = update_costs(made.step, devices, database)
    return made.prepared, TrainingGraph(
        model.batch_size,
        graph,
        candidates,
        forward,
        backward_s,
        _sources(table),
        _kept(graph, made.parts),
        per_byte_s,
        repeat_ratio(made.step, devices, database),
        each_bytes,
    )


def _kept_apart(graph: OpGraph, step: Step) -> OpGraph:
    """The graph with every forward tensor that a backward operator reads as a result: no kernel may swallow it."""
    made = frozenset(step.forward)
    back = frozenset(step.backward)
    read = {t for name in back for t in step.bindings.reads(name) if step.bindings.producer.get(t) in made}
    tensors = tuple(replace(t, is_output=t.is_output or t.name in read) for t in graph.tensors)
    return OpGraph(graph.operators, tensors, graph.inputs, graph.outputs)


def _also_alone(graph: OpGraph, chosen: Candidates, table: TimeTable) -> tuple[Candidates, TimeTable]:
    """Add each operator by itself, so that stages may end anywhere: its part of the kernel that is emitted."""
    inside = [(i, k) for i, k in enumerate(chosen.kernels) if len(k.ops) > 1]
    alone = Candidates.of(graph, [LegalKernel((o,)) for _, k in inside for o in k.ops], trains=True)
    whole = [(i, len(k.ops)) for i, k in inside for _ in k.ops]
    both = Candidates(
        chosen.kernels + alone.kernels, chosen.keys + alone.keys, chosen.descs + alone.descs, chosen.names
    )
    grown = TimeTable.empty(len(both.kernels), table.device_types)
    for name in table.device_types:
        entries = {i: table.entry(i, name) for i in range(table.num_kernels)}
        parts = {table.num_kernels + j: _part_of(entries[i], count) for j, (i, count) in enumerate(whole)}
        grown = grown.with_entries(name, entries | parts)
    return both, grown


def _part_of(entry: Entry, count: int) -> Entry:
    return replace(entry, seconds=entry.seconds / count, low=entry.low / count, high=entry.high / count)


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


def _kept(graph: OpGraph, parts: Sequence[StageParts]) -> dict[str, tuple[int, ...]]:
    """By tensor of the forward pass: the forward operators whose backward operators read it."""
    made = {t.name for t in graph.tensors if not t.is_param}
    readers: dict[str, list[int]] = {}
    for part in parts:
        for name in part.saved:
            if name in made:
                readers.setdefault(name, []).append(graph.index(part.forward[0]))
    return {name: tuple(sorted(set(nodes))) for name, nodes in readers.items()}


def _sources(table: TimeTable) -> str:
    """Where backward times come from, by their share of the sum over all device types."""
    runs = np.isfinite(table.seconds)
    total = float(table.seconds[runs].sum()) or 1.0
    shares = {s: float(table.seconds[runs & (table.rank == i)].sum()) / total for i, s in enumerate(SOURCES)}
    return ", ".join(f"{100 * share:.0f} % {s}" for s, share in reversed(shares.items()) if share > 0)
