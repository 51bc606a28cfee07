"""Which part of a program each machine runs: stages that follow one another there are one part.

    rack-1:  stage 0 ─► stage 1 ─┐                  ┌─► stage 3         part 0: stages 0 and 1     part 1: stage 2
    rack-2:                      └────► stage 2 ────┘                   part 2: stage 3

A part starts once all that it reads is there, and what it makes leaves together. A stage therefore joins a part only
if nobody else waits for what that part has made so far; the steps of a team, whose devices are
of one machine, are one stage here. Plain data: nothing here knows how values travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tvmhet.cluster.local import machine_of
from tvmhet.runtime.program import PipelineProgram


@dataclass(frozen=True, slots=True)
class Part:
    """Stages that run one after another on one machine: for input i that is `machines[i % len(machines)]`.

    `reads` are values made outside, `makes` those that another part reads or the program returns.
    """

    machines: tuple[str, ...]
    stages: tuple[int, ...]
    reads: tuple[str, ...]
    makes: tuple[str, ...]

    def machine_of(self, input_index: int) -> str:
        """Return the machine that runs this part for one input."""
        return self.machines[input_index % len(self.machines)]


def parts_of(program: PipelineProgram) -> tuple[Part, ...]:
    """Return the parts of a program, each after those that it reads."""
    steps: dict[int, list[int]] = {}  # by stage of the plan
    for step in program.stages:
        steps.setdefault(program.planned(step.index), []).append(step.index)
    turns = {i: _turns([machine_of(d) for d in program.stages[own[0]].devices]) for i, own in steps.items()}
    reads = {i: {program.planned(p) for s in own for p in program.predecessors(s)} - {i} for i, own in steps.items()}
    readers = {i: {j for j in steps if i in reads[j]} for i in steps}
    groups: list[list[int]] = []
    group_of: dict[int, int] = {}
    for stage in steps:
        before = {group_of[p] for p in reads[stage]}
        home = len(groups)
        for g in sorted(before):
            read = {group_of[p] for s in groups[g] for p in reads[s]}
            waited_for = {s for t in groups[g] for s in readers[t]} - {stage, *groups[g]}
            if turns[groups[g][0]] == turns[stage] and before <= read | {g} and not waited_for:
                home = g
        if home == len(groups):
            groups.append([])
        groups[home].append(stage)
        group_of[stage] = home
    return tuple(_part(program, turns[group[0]], [s for i in group for s in steps[i]]) for group in groups)


def part_program(program: PipelineProgram, part: Part, machine: str) -> PipelineProgram:
    """Return what `machine` runs of a part, as a program of its own: its inputs are `part.reads`, its outputs `makes`.

    Of replicated stages it has the devices that stand there. Successive inputs of the part that come to this machine
    take them in turn, as they do in the whole program.
    """
    stages = tuple(
        replace(program.stages[s], index=i, devices=_standing(program.stages[s].devices, machine))
        for i, s in enumerate(part.stages)
    )
    inside = {*part.reads, *(v for s in stages for v in s.outputs)}
    return PipelineProgram(
        values={name: spec for name, spec in program.values.items() if name in inside},
        inputs=part.reads,
        outputs=part.makes,
        stages=stages,
        params={name: program.params[name] for name in dict.fromkeys(n for s in stages for n in s.params)},
        bindings={d: program.bindings[d] for d in dict.fromkeys(d for s in stages for d in s.devices)},
    )


def _part(program: PipelineProgram, machines: tuple[str, ...], group: Sequence[int]) -> Part:
    made = [v for s in group for v in program.stages[s].outputs]
    read = dict.fromkeys(v for s in group for v in program.stages[s].inputs if v not in made)
    others = {v for s in program.stages if s.index not in group for v in s.inputs}
    left = tuple(v for v in made if v in others or v in program.outputs)
    return Part(machines, tuple(group), tuple(read), left)


def _turns(machines: Sequence[str]) -> tuple[str, ...]:
    """Return the shortest sequence that repeats to `machines`: a stage of 2 replicas on one machine has one turn."""
    for period in range(1, len(machines)):
        if len(machines) % period == 0 and all(m == machines[i % period] for i, m in enumerate(machines)):
            return tuple(machines[:period])
    return tuple(machines)


def _standing(devices: Sequence[str], machine: str) -> tuple[str, ...]:
    return tuple(d for d in devices if machine_of(d) == machine)
