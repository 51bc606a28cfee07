"""Give each device of a team its own operators, on its part of the tensors (`graph/cutting.py`, `graph/teams.py`).

Before, a stage for a team of two:            After:
    h = R.matmul(x, w1)    w1: (k, n)             h_rank0 = R.matmul(x, w1_rank0)        w1_rank0: (k, n / 2)
    y = R.matmul(h, w2)    w2: (n, k)             y_rank0 = R.matmul(h_rank0, w2_rank0)  w2_rank0: (n / 2, k)
    z = R.add(y, x)                               h_rank1 = R.matmul(x, w1_rank1)
                                                  y_rank1 = R.matmul(h_rank1, w2_rank1)
                                                  y_sum_rank0 = R.add(y_rank0, y_rank1)
                                                  z_rank0 = R.add(y_sum_rank0, x)

(names are `h_stage0_rank0`; the second device adds up too if it works on). What is computed is the same, up to the
order of sums. The result is an ordinary module, whose operators a placement may put anywhere; operators of other stages
are untouched. A parameter that is cut becomes one for each device, `share_of` the whole one. Runs after NameOperators
and a plan's rewrites, before PackWeights.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from itertools import accumulate, pairwise
from typing import Any

import torch
import tvm
from tvm import relax

from tvmhet.errors import BadGraph
from tvmhet.graph.cutting import Cut, Part
from tvmhet.graph.opgraph import Operator, OpGraph, Tensor
from tvmhet.graph.teams import Task, TeamTask, team_tasks
from tvmhet.graph.training_teams import Halves, owners, training_tasks
from tvmhet.ir.bindings import Bindings, Emitter, Ref, rebuild_main
from tvmhet.ir.host_eval import scalar
from tvmhet.ir.rewrite import shape_of


@dataclass(frozen=True)
class TeamStage:
    """A stage as SplitTensors makes it: kernels, operators by index in execution order, and what each device has.

    Without a `part` it runs on one device, as it is. Of a training step, `halves` are the operators, each a kernel;
    of its results that are keys of `ends` every device returns its own part.
    """

    index: int
    graph: OpGraph
    kernels: tuple[tuple[int, ...], ...]
    part: Part | None
    halves: Halves | None = None
    ends: Mapping[int, int] = field(default_factory=dict)

    @cached_property
    def tasks(self) -> tuple[TeamTask, ...]:
        """What the devices do, in order; nothing without a part."""
        if self.part is None:
            return ()
        if self.halves is not None:
            return training_tasks(self.graph, self.part, self.halves, self.ends)
        return team_tasks(self.graph, self.part, self.kernels)

    @cached_property
    def own_ends(self) -> dict[str, dict[int, str]]:
        """By end: by device, of all or of the one that makes it whole, the name of what it has."""
        if self.part is None or self.halves is None:
            return {}
        found, owner = dict[str, dict[int, str]](), owners(self.graph, self.part, self.halves, self.ends)
        for t in (t for op in self.halves.ops for t in self.graph.operators[op].outputs if t in self.ends):
            name, ranks = self.graph.tensors[t].name, [owner[t]] if t in owner else range(self.part.degree)
            found[name] = {r: self.named(name, r) for r in ranks}
        return found

    def operators(self, *, behind: bool) -> tuple[str, ...]:
        """Return the names of the operators of a stage without a part, those of the backward half or all others."""
        if self.halves is None:
            ops = tuple(i for ops in self.kernels for i in ops if not behind)
        else:
            ops = self.halves.behind if behind else self.halves.ahead
        return tuple(self.graph.operators[i].name for i in ops)

    def named(self, name: str, rank: int) -> str:
        """Return the name of a device's own operator, tensor or parameter."""
        operator, dot, field = name.partition(".")
        return f"{operator}_stage{self.index}_rank{rank}{dot}{field}"

    def operators_of(self, task: TeamTask) -> tuple[str, ...]:
        """Return the names of the operators that do a task, in order."""
        assert self.part is not None
        if task.task is Task.RUN:
            ops = self.kernels[task.subject]
            return tuple(self.named(self.graph.operators[i].name, task.rank) for i in ops)
        name, degree = self.graph.tensors[task.subject].name.replace(".", "_field"), self.part.degree
        runs = 1 if task.task is Task.ADD else len(self.part.cuts[task.subject].runs)
        if task.task is Task.ADD:
            steps = [f"sum{i}" for i in range(degree - 2)] + ["sum"]
        elif task.task is Task.TAKE:
            steps = [f"part{i}" for i in range(runs)] * (runs > 1) + ["part"]
        else:
            steps = [f"piece{i}" for i in range(runs * degree)] * (runs > 1) + ["whole"]
        return tuple(self.named(f"{name}_{step}", task.rank) for step in steps)

    def weights(self) -> dict[int, Cut | None]:
        """Return the parameters that the stage reads, and how those are cut that are."""
        tensors, cuts = self.graph.tensors, {} if self.part is None else self.part.cuts
        read = (t for ops in self.kernels for i in ops for t in self.graph.operators[i].inputs)
        return {t: cuts.get(t) for t in read if tensors[t].is_param}


@dataclass(frozen=True, slots=True)
class Share:
    """A parameter of the module that SplitTensors makes: `source` as it is, or what one device of a team has of it."""

    name: str
    source: Tensor
    cut: Cut | None = None
    rank: int = 0
    degree: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter."""
        shape = list(self.source.shape)
        if self.cut is not None:
            shape[self.cut.axis] //= self.degree
        return tuple(shape)


def shares_of(stages: Sequence[TeamStage], graph: OpGraph) -> tuple[Share, ...]:
    """Return the parameters of the module that is made for `stages`: in the order of those that they come from."""
    found: dict[int, list[Share]] = {}
    for stage in stages:
        for t, cut in stage.weights().items():
            source, own = graph.tensors[t], found.setdefault(t, [])
            if stage.part is not None and cut is not None:
                degree = stage.part.degree
                own += [Share(stage.named(source.name, r), source, cut, r, degree) for r in range(degree)]
            elif not any(share.cut is None for share in own):
                own.append(Share(source.name, source))
    for t in graph.outputs:  # a model may return a parameter
        if graph.tensors[t].is_param and not any(share.cut is None for share in found.get(t, [])):
            found.setdefault(t, []).append(Share(graph.tensors[t].name, graph.tensors[t]))
    if any(stage.halves is not None for stage in stages):  # the state of a training step is there, read or not
        unread = (t for t, tensor in enumerate(graph.tensors) if tensor.is_param and t not in found)
        found |= {t: [Share(graph.tensors[t].name, graph.tensors[t])] for t in unread}
    return tuple(share for t in sorted(found) for share in found[t])


def share_of(value: torch.Tensor, share: Share) -> torch.Tensor:
    """Return a device's share of a parameter's value: a view of it where that is one run of elements."""
    if share.cut is None:
        return value
    parts = [value.narrow(share.cut.axis, a, b - a) for a, b in share.cut.share(share.rank, share.degree)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, share.cut.axis)


@tvm.transform.module_pass(opt_level=0, name="tvmhet.SplitTensors")
class SplitTensors:
    """Make the stages of teams in `main`. Raises BadGraph for an operator that is not what its part was made of.

    `results` name what a training step returns, by tensors or by their parts where they are dealt out.
    """

    def __init__(self, stages: Sequence[TeamStage], results: Sequence[str] = ()) -> None:
        self.stages, self.results = tuple(stages), tuple(results)

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        bindings = Bindings(mod["main"])
        check_names(bindings, self.stages)

        def emit(emitter: Emitter, env: dict[str, relax.Expr]) -> None:
            teams = {s.index: _Team(s, s.part, bindings, emitter, env) for s in self.stages if s.part is not None}
            for stage, behind in [(s, False) for s in self.stages] + [(s, True) for s in reversed(self.stages)]:
                if stage.index in teams:
                    env |= teams[stage.index].emit(behind=behind)
                    continue
                for name in stage.operators(behind=behind):
                    env |= emitter.emit(bindings.rebuild(name, env), bindings.results[name], name)

        return rebuild_main(mod, bindings, emit, _parameters(bindings, self.stages), self.results or None)


def _parameters(bindings: Bindings, stages: Sequence[TeamStage]) -> list[relax.Var]:
    main = bindings.func
    inputs = [relax.Var(p.name, p.ty) for p in main.params[: bindings.num_input]]
    shares = shares_of(stages, stages[0].graph)
    return [*inputs, *(relax.Var(s.name, relax.TensorType(s.shape, s.source.dtype)) for s in shares)]


def check_names(bindings: Bindings, stages: Sequence[TeamStage]) -> None:
    """Raise BadGraph if an operator that is made has the name of one that is there."""
    known = {*bindings.calls, *bindings.types}
    for stage in stages:
        made = (name for task in stage.tasks for name in stage.operators_of(task))
        if taken := [name for name in made if name in known]:
            raise BadGraph(f"the model has an operator {taken[0]!r}, as one of a team would be called", "rename it")


class _Team:
    """Emits one stage of a team, task by task."""

    def __init__(
        self, stage: TeamStage, part: Part, bindings: Bindings, emitter: Emitter, env: dict[str, relax.Expr]
    ) -> None:
        self._stage, self._part, self._bindings = stage, part, bindings
        self._own: list[dict[str, relax.Expr]] = [{} for _ in range(part.degree)]  # values of each device, by tensor
        self._partial: list[dict[str, relax.Expr]] = [{} for _ in range(part.degree)]
        for rank, own in enumerate(self._own):
            cut = [stage.graph.tensors[t].name for t, cut in stage.weights().items() if cut is not None]
            own |= {name: env[stage.named(name, rank)] for name in cut}
        self._read = [ChainMap(own, env) for own in self._own]
        self._whole: dict[str, relax.Expr] = {}
        self._emitter = replace(emitter, used=self._of_all(emitter.used), returned=frozenset(self._returned(emitter)))

    def _of_all(self, names: frozenset[str]) -> frozenset[str]:
        return frozenset(self._stage.named(n, r) for n in names for r in range(self._part.degree))

    def _returned(self, emitter: Emitter) -> list[str]:
        """The names of the values that stand for results of the model."""
        ends = {t.subject: self._stage.operators_of(t)[-1] for t in self._stage.tasks if _is_end(t)}
        tensors, own = self._stage.graph.tensors, self._stage.own_ends
        made = (t for ops in self._stage.kernels for i in ops for t in self._stage.graph.operators[i].outputs)
        names = {t: tensors[t].name for t in made if tensors[t].name in emitter.returned}
        whole = [ends.get(t) or self._stage.named(name, 0) for t, name in names.items() if name not in own]
        return whole + [name for names in own.values() for name in names.values()]

    def emit(self, *, behind: bool) -> dict[str, relax.Expr]:
        """Emit the tasks of one half, of inference all; return the values of tensors that are whole, by name.

        And what is each device's own of the stage's ends.
        """
        for task in (t for t in self._stage.tasks if t.behind == behind):
            made = self._stage.operators_of(task)
            if task.task is Task.RUN:
                for op, name in zip(self._stage.kernels[task.subject], made, strict=True):
                    self._run(op, name, task.rank)
                continue
            tensor = self._stage.graph.tensors[task.subject].name
            make = {Task.TAKE: self._take, Task.ADD: self._add, Task.JOIN: self._join}[task.task]
            into = self._whole if task.task is Task.JOIN else self._own[task.rank]
            into[tensor] = make(task, tensor, made)
        own = (t for ops in self._stage.kernels for i in ops for t in self._part.graph.operators[i].outputs)
        names = [self._part.graph.tensors[t].name for t in own if t not in self._part.cuts]
        whole = {name: self._own[0][name] for name in names if name in self._own[0]} | self._whole
        ends = self._stage.own_ends.items()
        return whole | {name: self._own[r][t] for t, names in ends for r, name in names.items() if t in self._own[r]}

    def _run(self, op: int, name: str, rank: int) -> None:
        operator = self._part.graph.operators[op]
        call = on_part(self._bindings.rebuild(operator.name, self._read[rank]), operator, self._stage.graph, self._part)
        ref = _renamed(self._bindings.results[operator.name], lambda t: self._stage.named(t, rank))
        made = self._emitter.emit(call, ref, name)
        tensors = self._part.graph.tensors
        into = self._partial[rank] if op in self._part.summed else self._own[rank]
        for t in operator.outputs:
            if (value := made.get(self._stage.named(tensors[t].name, rank))) is None:
                continue  # a field that nothing reads
            if shape_of(value) != tensors[t].shape:
                raise BadGraph(
                    f"operator {operator.name!r} on one device of {self._part.degree} makes {shape_of(value)}, "
                    f"its part is {tensors[t].shape}",
                    "this is a defect of the split; plan without splits",
                )
            into[tensors[t].name] = value

    def _take(self, task: TeamTask, tensor: str, names: Sequence[str]) -> relax.Expr:
        cut = self._part.cuts[task.subject]
        whole = self._read[task.rank][tensor]
        return self._concat([(whole, span) for span in cut.share(task.rank, self._part.degree)], cut.axis, names)

    def _join(self, task: TeamTask, tensor: str, names: Sequence[str]) -> relax.Expr:
        """Of each run, the pieces of all devices side by side."""
        cut = self._part.cuts[task.subject]
        values = [own[tensor] for own in self._own]
        if len(cut.runs) == 1:
            return self._bind(relax.op.concat(values, axis=cut.axis), names[-1])
        sizes = [run // self._part.degree for run in cut.runs]
        spans = list(pairwise(accumulate(sizes, initial=0)))
        return self._concat([(value, span) for span in spans for value in values], cut.axis, names)

    def _add(self, task: TeamTask, tensor: str, names: Sequence[str]) -> relax.Expr:
        left = iter(names)
        return reduce(
            lambda a, b: self._bind(relax.op.add(a, b), next(left)), [partial[tensor] for partial in self._partial]
        )

    def _concat(
        self, pieces: Sequence[tuple[relax.Expr, tuple[int, int]]], axis: int, names: Sequence[str]
    ) -> relax.Expr:
        """Slices of tensors along an axis, side by side."""
        made = [
            self._bind(relax.op.strided_slice(value, axes=[axis % len(value.ty.shape)], begin=[a], end=[b]), name)
            for (value, (a, b)), name in zip(pieces, names, strict=False)
        ]
        return made[0] if len(made) == 1 else self._bind(relax.op.concat(made, axis=axis), names[-1])

    def _bind(self, call: relax.Expr, name: str) -> relax.Expr:
        return self._emitter.emit(call, name, name)[name]


def _is_end(task: TeamTask) -> bool:
    return task.rank == 0 and task.task in (Task.ADD, Task.JOIN)


def _renamed(ref: Ref, name: Any) -> Ref:
    return name(ref) if isinstance(ref, str) else tuple(_renamed(field, name) for field in ref)


def on_part(call: relax.Call, operator: Operator, graph: OpGraph, part: Part) -> relax.Call:
    """Return the call of an operator of `part.graph`, over operands that are parts.

    Shapes that it is given become those of its part, pieces of columns that are dealt out the device's own.
    """
    shape = part.graph.tensors[operator.outputs[0]].shape
    cut = part.cuts.get(operator.inputs[0]) if operator.inputs else None
    if operator.family == "reshape":
        return relax.op.reshape(call.args[0], shape)
    if operator.family == "full":
        return relax.op.full(shape, call.args[1], graph.tensors[operator.outputs[0]].dtype)
    if operator.family == "broadcast_to":
        return relax.op.broadcast_to(call.args[0], shape)
    if operator.family == "split" and cut is not None and int(call.attrs.axis) % len(shape) == len(shape) + cut.axis:
        ends = list(accumulate(part.graph.tensors[t].shape[cut.axis] for t in operator.outputs))
        return relax.op.split(call.args[0], ends[:-1], axis=len(shape) + cut.axis)
    if operator.family == "strided_slice" and cut is not None and cut.axis in _sliced(call, len(shape)):
        return _slice_of_part(call, graph.tensors[operator.inputs[0]], cut, part.degree)
    return relax.Call(call.op, call.args, call.attrs, call.ty_args)


def _numbers(arg: relax.Expr) -> list[int]:
    return [int(number) for v in arg.fields if (number := scalar(v)) is not None]


def _sliced(call: relax.Call, rank: int) -> list[int]:
    """The axes of a slice, from the right."""
    return [axis % rank - rank for axis in _numbers(call.args[1])]


def _slice_of_part(call: relax.Call, source: Tensor, cut: Cut, degree: int) -> relax.Call:
    """The same slice of a part: of the axis that is cut all, or pieces that each device has its share of."""
    rank = len(source.shape)
    axes = _sliced(call, rank)
    begin, end = (_numbers(arg) for arg in call.args[2:4])
    at, size = axes.index(cut.axis), source.shape[cut.axis]
    for ends in (begin, end):
        ends[at] = min(max(ends[at] + size if ends[at] < 0 else ends[at], 0), size) // degree
    strides = _numbers(call.args[4]) if len(call.args) > 4 else None
    return relax.op.strided_slice(call.args[0], [a + rank for a in axes], begin, end, strides)
