"""A training step placed on teams (split stages) as one without, which is what gets compiled.

    stage 0 on a team of two          stages 0 .. 5, of the step that SplitTensors makes
    norm, fc1+gelu, fc2, add          0: norm (first device)        2: fc1+gelu, fc2 (first)        4: sum, add (first)
                                      1: the same (second)          3: the same (second)            5: the same

Every level of every device (`graph/training_teams.py`) is a stage with its own forward and backward pass. A device runs
all of them, one after the other, where its order has a pass of the stage. A parameter that is dealt out is one for each
device, with its own gradient, optimiser state and update.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import tvm

from tvmhet.dealt import Dealt
from tvmhet.errors import BadGraph, NotSupported
from tvmhet.graph.cutting import Cut, Part, part_of
from tvmhet.graph.kernel_key import graph_key
from tvmhet.graph.opgraph import OpGraph
from tvmhet.graph.training_teams import Halves, with_sums_late
from tvmhet.ir.bindings import Bindings, readers_of
from tvmhet.ir.extract import NotAGraph, extract
from tvmhet.ir.model import from_torch_tensor, to_torch
from tvmhet.ir.training_stages import StageParts, split_stages, with_buffers_whole
from tvmhet.ir.training_step import Step
from tvmhet.ir.transform.split_tensors import Share, SplitTensors, TeamStage, check_names, share_of, shares_of
from tvmhet.runtime.training_program import Action
from tvmhet.training_placement import TrainingPlacement


@dataclass(frozen=True, slots=True, kw_only=True)
class OnTeams(TrainingPlacement):
    """Where each level of each device runs: `levels` of the stages of `planned`, with their backward operators."""

    planned: TrainingPlacement
    levels: tuple[int, ...]  # by stage: that of the plan
    behind: tuple[tuple[str, ...], ...]
    homes: Mapping[str, int]  # the stage of each trained parameter

    def __post_init__(self) -> None:
        """Nothing to check: `planned` was."""

    def orders(self) -> dict[str, tuple[Action, ...]]:
        """Return the passes of each device in order: of each of the plan, those of its levels."""
        own: dict[tuple[str, int], list[int]] = {}
        for stage, (k, devices) in enumerate(zip(self.levels, self.devices, strict=True)):
            for device in devices:
                own.setdefault((device, k), []).append(stage)
        return {
            device: tuple(
                Action(a.backward, stage, a.microbatch)
                for a in passes
                for stage in own.get((device, a.stage), [])[:: -1 if a.backward else 1]
            )
            for device, passes in self.planned.orders().items()
        }


@dataclass(frozen=True)
class TeamStep:
    """A step and where it runs, without split stages; `dealt` says which parameters and buffers stand for which."""

    step: Step
    placement: TrainingPlacement
    dealt: Mapping[str, Dealt]


def training_part(step: Step, degree: int) -> Part | None:
    """Return what one of `degree` devices runs of both passes; None where nothing can be cut.

    Gradients and new values are cut as the parameters and buffers that they are of.
    """
    behind = frozenset(step.backward)
    return part_of(step.prepared.operator_graph, degree, joins=True, alike=_alike(step), behind=behind)


def forward_part(step: Step, graph: OpGraph, degree: int) -> Part | None:
    """Return the same of `graph`, that of the forward pass alone."""
    whole = training_part(step, degree)
    return whole and part_of(graph, degree, uncut=whole.uncut, untaken=whole.untaken)


def _alike(step: Step) -> dict[int, int]:
    """By result of the step: the parameter whose gradient it is, or the buffer whose new value."""
    number = {t.name: i for i, t in enumerate(step.prepared.operator_graph.tensors)}
    pairs = (*step.gradients.items(), *step.buffers.items())
    return {number[result]: number[weight] for weight, result in pairs}


def on_teams(step: Step, placement: TrainingPlacement) -> TeamStep:
    """Return what is compiled for a placement. Raises NotSupported for a split that the step cannot have."""
    if all(degree == 1 for degree in placement.team_sizes):
        return TeamStep(step, placement, {})
    graph = step.prepared.operator_graph
    parts = {d: training_part(step, d) for d in set(placement.team_sizes) - {1}}
    halves = split_stages(step, with_buffers_whole(step, placement.stages))
    stages = [
        _team_stage(graph, own, degree, parts.get(degree), _alike(step))
        for own, degree in zip(halves, placement.team_sizes, strict=True)
    ]
    _check_readers(graph, stages, step.model.torch_names)
    levels = [level for stage in stages for level in _levels(stage)]
    made, dealt = _split(step, stages, frozenset(call for level in levels for call in level.forward))
    placed = OnTeams(
        tuple(level.forward for level in levels),
        tuple(placement.devices[level.stage][level.rank :: level.degree] for level in levels),
        tuple(placement.recompute[level.stage] for level in levels),
        placement.schedule,
        placement.num_microbatches,
        tuple(placement.shares[level.stage] for level in levels) if placement.shares else (),
        planned=placement,
        levels=tuple(level.stage for level in levels),
        behind=tuple(level.backward for level in levels),
        homes=_homes(made, levels),
    )
    _check_buffers(made, placed)
    return TeamStep(made, placed, {name: d for name, d in dealt.items() if name in step.model.torch_names})


def _team_stage(graph: OpGraph, own: StageParts, degree: int, part: Part | None, ends: Mapping[int, int]) -> TeamStage:
    if degree > 1 and part is None:
        raise NotSupported(
            f"stage {own.index} is split over {degree} devices, and nothing of the step can be cut so",
            "plan without times that are given for splits: they say so of any model",
        )
    halves = Halves(*(tuple(graph.index(name) for name in names) for names in (own.forward, own.backward)))
    late = None if part is None else with_sums_late(graph, part, halves.ops)
    return TeamStage(own.index, graph, tuple((op,) for op in halves.ops), late, halves, ends)


def _check_readers(graph: OpGraph, stages: Sequence[TeamStage], state: Container[str]) -> None:
    """Raise NotSupported for what of the `state` is cut in one stage and read in another: its parts would differ."""
    readers: dict[int, list[Cut | None]] = {}
    for stage in stages:
        for t, cut in stage.weights().items():
            readers.setdefault(t, []).append(cut)
    for t, cuts in readers.items():
        if graph.tensors[t].name in state and len(cuts) > 1 and any(cut is not None for cut in cuts):
            raise NotSupported(
                f"parameter {graph.tensors[t].name!r} is dealt out in a split stage, and another stage reads it, too",
                "plan without splits, or pin the operators that share it to one stage",
            )


def _check_buffers(step: Step, placed: OnTeams) -> None:
    """Raise NotSupported for a buffer that is renewed, and read elsewhere: that would see it too early or too late."""
    stage_of = {call: k for k, calls in enumerate(placed.stages) for call in calls}
    readers = readers_of(step.bindings)
    for buffer, new in step.buffers.items():
        users = {stage_of[c] for c in readers.get(buffer, ()) if c in stage_of}
        maker = step.bindings.producer.get(new)
        if len(users | ({stage_of[maker]} if maker else set())) > 1:
            raise NotSupported(
                f"several passes of a split stage read or renew buffer {buffer!r}",
                "plan without splits, or pin the operators that read it to one device",
            )


def _split(step: Step, stages: Sequence[TeamStage], ahead: Container[str]) -> tuple[Step, dict[str, Dealt]]:
    """Return the step with the operators and parameters of every device, and what of it stands for what.

    `ahead` names the operators of its forward half.
    """
    graph, model = step.prepared.operator_graph, step.prepared.model
    shares = shares_of(stages, graph)
    dealt = _dealt(shares)
    bindings = Bindings(step.prepared.mod["main"])
    check_names(bindings, stages)  # here: what a pass raises reaches the caller as a RuntimeError
    mod = tvm.transform.Sequential([SplitTensors(stages, _results(step, stages))])(step.prepared.mod)
    made = extract(mod, like=graph)
    if isinstance(made, NotAGraph):
        raise BadGraph(f"the step of teams is no graph: {made.reason}", "this is a defect of SplitTensors")
    values = {name: to_torch(value) for name, value in model.params.items()}
    params = {s.name: from_torch_tensor(share_of(values[s.source.name], s)) for s in shares}
    inner = replace(model, mod=mod, params=params)
    shared = replace(
        step.model,
        step=inner,
        trained=_each(step.model.trained, dealt),
        updated=_each(step.model.updated, dealt),
        torch_names={own: torch for name, torch in step.model.torch_names.items() for own in _each([name], dealt)},
        again=None,
    )
    calls = Bindings(mod["main"])
    assert isinstance(calls.output, tuple)
    loss, *ends = map(str, calls.output)
    return Step(
        shared,
        replace(step.prepared, model=inner, mod=mod, graph=made, key=graph_key(made)),
        calls,
        tuple(c for c in calls.calls if c in ahead),
        tuple(c for c in calls.calls if c not in ahead),
        loss,
        dict(zip(shared.trained, ends[: len(shared.trained)], strict=True)),
        dict(zip(shared.updated, ends[len(shared.trained) :], strict=True)),
    ), dealt


def _results(step: Step, stages: Sequence[TeamStage]) -> list[str]:
    """Names of what the step returns: of a weight that is dealt out one for each device."""
    own = {t: list(names.values()) for stage in stages for t, names in stage.own_ends.items()}
    every = (*step.gradients.values(), *step.buffers.values())
    return [step.loss, *(name for result in every for name in own.get(result, [result]))]


def _dealt(shares: Sequence[Share]) -> dict[str, Dealt]:
    """By parameter that is cut: its parts."""
    found: dict[str, Dealt] = {}
    for name, own in groupby((s for s in shares if s.cut is not None), key=lambda s: s.source.name):
        parts = list(own)
        assert parts[0].cut is not None
        found[name] = Dealt(tuple(s.name for s in parts), parts[0].cut.axis, parts[0].cut.runs)
    return found


def _each(names: Iterable[str], dealt: Mapping[str, Dealt]) -> tuple[str, ...]:
    return tuple(own for name in names for own in (dealt[name].names if name in dealt else (name,)))


def _homes(step: Step, levels: Sequence[_Level]) -> dict[str, int]:
    """Return where each trained parameter lives: on the device that makes its gradient, the first level to read it."""
    level_of = {call: i for i, level in enumerate(levels) for call in (*level.forward, *level.backward)}
    readers, found = readers_of(step.bindings), dict[str, int]()
    for p, gradient in step.gradients.items():
        maker = level_of[step.bindings.producer[gradient]]
        read = (level_of[c] for c in readers.get(p, ()) if c in step.forward_set)
        found[p] = min((i for i in read if levels[i].is_beside(levels[maker])), default=maker)
    return found


@dataclass(frozen=True, slots=True)
class _Level:
    """What one device of a team runs between two exchanges, in both passes."""

    stage: int
    rank: int
    degree: int
    forward: tuple[str, ...]
    backward: tuple[str, ...]

    def is_beside(self, other: _Level) -> bool:
        """Whether both are the same device's, of the same stage."""
        return (self.stage, self.rank) == (other.stage, other.rank)


def _levels(stage: TeamStage) -> list[_Level]:
    if stage.part is None:
        return [_Level(stage.index, 0, 1, stage.operators(behind=False), stage.operators(behind=True))]
    found: dict[tuple[int, int], tuple[list[str], list[str]]] = {}
    for task in stage.tasks:
        found.setdefault((task.step, task.rank), ([], []))[task.behind].extend(stage.operators_of(task))
    return [
        _Level(stage.index, rank, stage.part.degree, tuple(ahead), tuple(behind))
        for (_, rank), (ahead, behind) in sorted(found.items())
    ]
