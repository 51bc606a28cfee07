"""What the devices of a team do for a stage of a training step: the tasks of `graph/teams.py`, in both passes.

    forward, level 0       1                    2                     backward, level 2     1            0
    layer_norm        ─►   fc1+gelu ─► fc2 ══►  sum ─► add            add' ─►          fc2', fc1' ══►    sum ─► norm'

A level is a pass of its own on every device, forward and backward: what a forward pass keeps stays where the backward
pass of its level reads it. Forward sums are read in the next level, backward ones in the level before. So forward
passes, too, part where a whole tensor is read by products that make columns: its gradient is a sum (Shoeybi et al.,
"Megatron-LM", 2019, call the two places g and f). What a stage sends back in parts is joined in a level before all
others, whose forward pass is empty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tvmhet.errors import BadGraph
from tvmhet.graph.cutting import Part
from tvmhet.graph.cutting_rules import RESHAPES
from tvmhet.graph.opgraph import OpGraph
from tvmhet.graph.teams import ORDER, StageBounds, Task, TeamTask, needed_tasks

_PARAMETER, _INPUT, _MADE = "parameters", "inputs", "both, or another stage's"


@dataclass(frozen=True, slots=True)
class Halves:
    """The operators of a stage, by index: those of the forward and of the backward half, in execution order."""

    ahead: tuple[int, ...]
    behind: tuple[int, ...]

    @property
    def ops(self) -> tuple[int, ...]:
        """All of them."""
        return self.ahead + self.behind


def training_tasks(graph: OpGraph, part: Part, halves: Halves, ends: Mapping[int, int]) -> tuple[TeamTask, ...]:
    """Return the tasks of a team for a stage of a step: the forward ones by level, then the backward ones from the end.

    Every device keeps its own part of the `ends`, by result of the step the weight that it is of: gradients, new values
    of buffers; `owners` has those that are whole. A task's subject is an operator of `halves.ops`, by its place, else a
    tensor. Raises BadGraph where the two passes do not fit.
    """
    stage = _Levels(graph, part, halves, ends)
    shift = -min(stage.lowest, 0)
    every = range(part.degree)
    tasks = [
        TeamTask(at + shift, rank, Task.RUN, i, behind)
        for i, (at, behind) in enumerate(stage.levels())
        for rank in every
    ]
    tasks += [
        TeamTask(at + shift, rank, Task.TAKE, t, back) for t, (at, back) in stage.taken().items() for rank in every
    ]
    joined = ((t, at, behind) for t, (at, behind) in stage.after.items() if t not in ends)
    tasks += [task for t, at, behind in joined for task in stage.joining(part, t, at + shift, behind=behind)]
    tasks.sort(key=lambda x: (x.behind, -x.step if x.behind else x.step, x.rank, ORDER.index(x.task), x.subject))
    made = [t for op in halves.ops for t in graph.operators[op].outputs]
    owner = owners(graph, part, halves, ends)
    results = [{t for t in made if t in ends and owner.get(t, rank) == rank} for rank in every]
    results[0] |= {t for t in made if stage.leaves(t) and t not in ends}
    return needed_tasks(tasks, graph, tuple((op,) for op in halves.ops), results)


def owners(graph: OpGraph, part: Part, halves: Halves, ends: Mapping[int, int]) -> dict[int, int]:
    """Return which device makes each whole end of a stage: gradients are dealt by their bytes, largest first.

    The first device makes what the forward half does.
    """
    found, held = dict[int, int](), [0] * part.degree
    for t in (t for op in halves.ahead for t in graph.operators[op].outputs if t in ends and t not in part.cuts):
        found[t] = 0
    gradients = [t for op in halves.behind for t in graph.operators[op].outputs if t in ends and t not in part.cuts]
    for t in sorted(gradients, key=lambda t: (-graph.tensors[t].size_bytes, t)):
        found[t] = held.index(min(held))
        held[found[t]] += graph.tensors[t].size_bytes
    return found


def with_sums_late(graph: OpGraph, part: Part, ops: Sequence[int]) -> Part:
    """Return the part, partial sums of the stage `ops` added to each other first where nothing else reads them.

    Gradients that several products send back are one sum then, not one each.
    """
    inside, summed = set(ops), set(part.summed)

    def alone(tensor: int) -> bool:
        t = graph.tensors[tensor]
        return t.producer in summed and t.producer in inside and len(set(t.consumers)) == 1 and not t.is_output

    for i in ops:
        op = graph.operators[i]
        moves = op.family in RESHAPES or op.family == "permute_dims"
        if (op.family == "add" or moves) and all(map(alone, op.inputs)) and len(set(op.inputs)) == len(op.inputs):
            if any(graph.tensors[t].size_bytes != graph.tensors[op.outputs[0]].size_bytes for t in op.inputs):
                continue  # repeated along an axis
            summed -= {graph.tensors[t].producer for t in op.inputs}
            summed.add(i)
    return replace(part, summed=frozenset(summed))


class _Levels(StageBounds):
    """The level of each operator, and in which level what is made in parts is there as a whole."""

    def __init__(self, graph: OpGraph, part: Part, halves: Halves, ends: Mapping[int, int]) -> None:
        super().__init__(graph, frozenset(halves.ops))
        self._part, self._halves = part, halves
        self._level: dict[int, int] = {}  # by operator
        self._source: dict[int, str] = {}  # by tensor that the forward half makes: of what it is a function
        self._read: dict[tuple[int, bool], list[int]] = {}  # by tensor and half: the levels that read it
        self._ready: dict[int, int] = {}  # by tensor: from which level on it is there, in its half
        self.after: dict[int, tuple[int, bool]] = {}  # by tensor that is made in parts: as a whole, and in which half
        for op in halves.ahead:
            self._place_forward(op)
        self._last = max(self._level.values(), default=0)
        for op in halves.ahead:
            if op not in self._level:  # of no reader in the forward half
                self._put(op, self._last, behind=False)
        self._gradients = frozenset(t for op in halves.behind for t in graph.operators[op].outputs)
        self._least = self._floors(ends)
        for op in halves.behind:
            self._place_backward(op)

    @property
    def lowest(self) -> int:
        """The lowest level: -1 where what is sent back in parts is joined after all else."""
        leaving = [at for t, (at, _) in self.after.items() if self.leaves(t)]
        return min([*self._level.values(), *leaving], default=0)

    def levels(self) -> list[tuple[int, bool]]:
        """Return the level of each operator and whether it is of the backward half."""
        halves = ((self._halves.ahead, False), (self._halves.behind, True))
        return [(self._level[op], behind) for ops, behind in halves for op in ops]

    def taken(self) -> dict[int, tuple[int, bool]]:
        """Return the cut tensors that come whole into the stage, where each is read first, and in which half."""
        found: dict[int, tuple[int, bool]] = {}
        for (t, behind), levels in sorted(self._read.items()):
            tensor = self._graph.tensors[t]
            if t in self._part.cuts and not tensor.is_param and tensor.producer not in self._inside:
                found.setdefault(t, (max(levels) if behind else min(levels), behind))
        return found

    def _place_forward(self, op: int) -> None:
        """After what it reads. What reads parameters only, or inputs only, waits for its first reader."""
        operator = self._graph.operators[op]
        kinds = {self._source_of(t) for t in operator.inputs}
        kind = kinds.pop() if len(kinds) == 1 else _MADE
        self._source |= dict.fromkeys(operator.outputs, kind)
        if kind == _MADE:
            at = max((self._ready.get(t, 0) + self._flows_back(op, t) for t in operator.inputs), default=0)
            self._put(op, at, behind=False)

    def _source_of(self, tensor: int) -> str:
        t = self._graph.tensors[tensor]
        return self._source.get(tensor, _MADE if t.producer >= 0 else _PARAMETER if t.is_param else _INPUT)

    def _put(self, op: int, at: int, *, behind: bool) -> None:
        operator = self._graph.operators[op]
        for t in operator.inputs:
            maker = self._graph.tensors[t].producer
            if maker in self._inside and maker not in self._level:
                self._put(maker, at, behind=behind)
            self._read.setdefault((t, behind), []).append(at)
        next_ = at - 1 if behind else at + 1
        for t in operator.outputs:
            is_sum = op in self._part.summed
            self._ready[t] = next_ if is_sum else at
            if is_sum or t in self._part.cuts:
                self.after[t] = next_, behind
        self._level[op] = at

    def _flows_back(self, op: int, tensor: int) -> bool:
        """Whether an operator on parts reads a whole tensor, whose gradient is a sum then."""
        operator, cut = self._graph.operators[op], self._part.cut
        if cut.isdisjoint(operator.inputs + operator.outputs) or self._graph.tensors[tensor].is_param:
            return False
        return tensor not in cut and tensor in self._part.trained

    def _floors(self, ends: Mapping[int, int]) -> dict[int, int]:
        """The lowest level of each backward operator: what it and those after it read of the forward half is there."""
        tensors, found = self._graph.tensors, dict[int, int]()
        for op in reversed(self._halves.behind):
            operator = self._graph.operators[op]
            kept = [self._ready[t] for t in operator.inputs if t not in self._gradients and t in self._ready]
            homes = [min(self._read.get((ends[t], False), [0])) for t in operator.outputs if t in ends]
            later = [
                found[c] + (op in self._part.summed)
                for t in operator.outputs
                for c in tensors[t].consumers
                if c in found
            ]
            found[op] = max([0, *kept, *homes, *later])
        return found

    def _place_backward(self, op: int) -> None:
        """The last level whose forward pass has what it reads of that, where gradients and later readers allow it."""
        reads = self._graph.operators[op].inputs
        most = min([self._last, *(self._ready[t] for t in reads if t in self._gradients and t in self._ready)])
        if most < self._least[op]:
            raise BadGraph(
                f"operator {self._graph.operators[op].name!r} of the backward pass reads what a later one makes",
                "plan without splits",
            )
        held = [levels for t in reads if (levels := self._held(t))]
        fitting = [at for at in range(most, self._least[op] - 1, -1) if all(at in levels for levels in held)]
        self._put(op, fitting[0] if fitting else most, behind=True)

    def _held(self, tensor: int) -> list[int]:
        """The levels that hold a tensor after their forward passes; none of inputs of the model and of gradients."""
        t = self._graph.tensors[tensor]
        if tensor in self._gradients or (t.producer < 0 and not t.is_param):
            return []
        return [*([self._ready[tensor]] if tensor in self._ready else []), *self._read.get((tensor, False), [])]
