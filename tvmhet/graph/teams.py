"""What the devices of a team do for a stage that is split over them: kernels on parts of tensors, and what joins parts.

    stage on one device       fc1+gelu ─► fc2 ─► add+norm

    on a team of two          fc1+gelu ─► fc2 ══╦═► sum ─► add+norm         step 0: fc1+gelu, fc2
                                                ║                           step 1: sum, add+norm
                              fc1+gelu ─► fc2 ══╩═► sum ─► add+norm

A device runs one step after another; a step reads what other devices made in earlier ones. Every device adds up the
partial sums itself, in the same order, so that all have the same bits. What the stage hands on is whole: the first
device has it, or joins the parts of all.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from enum import Enum

from tvmhet.graph.cutting import Part
from tvmhet.graph.opgraph import OpGraph


class Task(Enum):
    """What a device of a team does: one kernel on its part; its part of a whole tensor; a sum; a whole of all parts."""

    RUN = "run"
    TAKE = "take"
    ADD = "add"
    JOIN = "join"


#: Of the tasks of one device in one step.
ORDER = (Task.TAKE, Task.ADD, Task.JOIN, Task.RUN)


@dataclass(frozen=True, slots=True)
class TeamTask:
    """One task of one device (`rank`) in one step. `subject` is a kernel of the stage for RUN, else a tensor.

    Of a training stage, steps are the levels of `graph/training_teams.py`; `behind` are those of the backward pass.
    """

    step: int
    rank: int
    task: Task
    subject: int
    behind: bool = False


def team_tasks(graph: OpGraph, part: Part, kernels: Sequence[Sequence[int]]) -> tuple[TeamTask, ...]:
    """Return the tasks of a team for a stage of `kernels`, operators in execution order: by step, then by device."""
    stage = _Stage(graph, part, kernels)
    every = range(part.degree)
    tasks = [TeamTask(stage.step[i], rank, Task.RUN, i) for i in range(len(kernels)) for rank in every]
    tasks += [TeamTask(at, rank, Task.TAKE, t) for t, at in stage.taken().items() for rank in every]
    tasks += [task for t, at in stage.after.items() for task in stage.joining(part, t, at)]
    tasks.sort(key=lambda x: (x.step, x.rank, ORDER.index(x.task), x.subject))
    made = [t for ops in kernels for op in ops for t in graph.operators[op].outputs]
    return needed_tasks(tasks, graph, kernels, [{t for t in made if stage.leaves(t)}, *(set[int]() for _ in every[1:])])


def needed_tasks(
    tasks: Sequence[TeamTask], graph: OpGraph, kernels: Sequence[Sequence[int]], results: Sequence[Set[int]]
) -> tuple[TeamTask, ...]:
    """Return the tasks without those whose results nobody reads; `results` are what each device hands on."""
    ranks = range(len(results))
    needed = [set(own) for own in results]  # tensors, by device
    kept: list[TeamTask] = []
    for task in reversed(tasks):
        own, read = needed[task.rank], ranks if task.task in (Task.ADD, Task.JOIN) else ()
        if task.task is Task.RUN:
            made = {t for op in kernels[task.subject] for t in graph.operators[op].outputs}
            if not made & own:
                continue
            own.update(t for op in kernels[task.subject] for t in graph.operators[op].inputs)
        elif task.subject not in own:
            continue
        for rank in read:
            needed[rank].add(task.subject)
        kept.append(task)
    return tuple(reversed(kept))


class StageBounds:
    """What the operators of a stage read of each other, and what they hand on."""

    def __init__(self, graph: OpGraph, inside: Set[int]) -> None:
        self._graph, self._inside = graph, frozenset(inside)

    def reads(self, tensor: int) -> bool:
        """Whether an operator of the stage reads it."""
        return bool(self._inside & set(self._graph.tensors[tensor].consumers))

    def leaves(self, tensor: int) -> bool:
        """Whether something beyond the stage reads it."""
        t = self._graph.tensors[tensor]
        return t.is_output or not self._inside.issuperset(t.consumers)

    def joining(self, part: Part, tensor: int, at: int, *, behind: bool = False) -> list[TeamTask]:
        """Return what makes a tensor whole, at a step, of which every device has a part or a part of the sum."""
        if tensor in part.cuts:
            return [TeamTask(at, 0, Task.JOIN, tensor, behind)] if self.leaves(tensor) else []
        ranks = range(part.degree if self.reads(tensor) else 1)
        return [TeamTask(at, rank, Task.ADD, tensor, behind) for rank in ranks]


class _Stage(StageBounds):
    """The kernels of a stage by step: a kernel that reads a sum runs in a later step than what makes its parts."""

    def __init__(self, graph: OpGraph, part: Part, kernels: Sequence[Sequence[int]]) -> None:
        super().__init__(graph, {op for ops in kernels for op in ops})
        self._part = part
        self.step: list[int] = []  # by kernel
        self.after: dict[int, int] = {}  # by tensor that is made in parts: the step in which all parts are there
        self._read_at: dict[int, int] = {}  # by tensor: the first step that reads it
        made_at: dict[int, int] = {}
        for ops in kernels:
            reads = dict.fromkeys(t for op in ops for t in graph.operators[op].inputs)
            at = max((made_at.get(t, 0) for t in reads), default=0)
            self.step.append(at)
            for t in reads:
                self._read_at[t] = min(at, self._read_at.get(t, at))
            for op in ops:
                for t in graph.operators[op].outputs:
                    is_sum = op in part.summed
                    made_at[t] = at + is_sum
                    if is_sum or t in part.cuts:
                        self.after[t] = at + 1

    def taken(self) -> dict[int, int]:
        """Return the cut tensors that come whole into the stage, and the first step that reads each."""
        tensors = self._graph.tensors
        return {
            t: at
            for t, at in self._read_at.items()
            if t in self._part.cuts and not tensors[t].is_param and tensors[t].producer not in self._inside
        }
