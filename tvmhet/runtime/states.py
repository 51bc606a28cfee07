"""Where the states of a program lie between calls: shared memory, each session's twice.

    slot 2s:      | cache | count |  ◄── what a call of session s reads         a call that fails leaves it so
    slot 2s + 1:  | cache | count |  ◄── what it makes; once it has ended well, the next call reads this one

So a stage reads and writes them as it does values of a frame, wherever it runs. What no stage makes alone (an input
that is kept, a tensor that two states become) is copied when the call has ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tvmhet.errors import BadInput
from tvmhet.runtime.arena import Layout, Segment
from tvmhet.runtime.program import Array, PipelineProgram, ValueSpec
from tvmhet.runtime.tensors import check_input


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Where the states lie in a slot, and by which value a stage makes each that one makes alone."""

    values: Layout
    made: Mapping[str, str]  # by the value that is made: the state's own
    num_slots: int

    @classmethod
    def of(cls, program: PipelineProgram) -> StateLayout:
        """Lay out the states of a program."""
        made: dict[str, str] = {}
        for state in program.states:
            if program.producer(state.renewed) is not None:
                made.setdefault(state.renewed, state.value)
        layout = Layout.of(program.values[s.value] for s in program.states)
        return cls(layout, made, 2 * program.num_sessions)

    @property
    def size_bytes(self) -> int:
        """Bytes of all slots; 0 without states."""
        return self.num_slots * self.values.size_bytes if self.values.specs else 0

    def views(self, memory: memoryview, slot: int) -> dict[str, Array]:
        """Return what stages read and make in a call that begins at `slot`, by value."""
        now, after = (self.values.views(memory, s * self.values.size_bytes) for s in (slot, slot ^ 1))
        return {**now, **{value: after[own] for value, own in self.made.items()}}


def kept_by_stages(program: PipelineProgram) -> dict[int, dict[str, str]]:
    """Return by stage the states that stay in its device's memory, each with the value that it becomes.

    One stage alone reads such a state and makes what it becomes, which nobody else needs. Where the stage has several
    devices, each has its own sessions.
    """
    found: dict[int, dict[str, str]] = {}
    becomes = [s.renewed for s in program.states]
    for state in program.states:
        home = program.producer(state.renewed)
        readers = {s.index for s in program.stages if {state.value, state.renewed} & {*s.inputs}}
        elsewhere = {state.value, state.renewed} & {*program.outputs} or state.value in becomes
        if home is not None and readers <= {home} and not elsewhere and becomes.count(state.renewed) == 1:
            found.setdefault(home, {})[state.value] = state.renewed
    return found


def frame_specs(program: PipelineProgram) -> tuple[ValueSpec, ...]:
    """Return the values that lie in frames: all but states, what they become, and parameters."""
    layout = StateLayout.of(program)
    elsewhere = {*layout.made, *(s.value for s in program.states), *program.params}
    return tuple(program.values[name] for name in sorted(program.values) if name not in elsewhere)


class States:
    """The states of a program's sessions, in a segment of their own, and the slot that each session is at."""

    def __init__(self, program: PipelineProgram) -> None:
        self._program = program
        self.layout = StateLayout.of(program)
        self.segment = Segment.create("tvmhet-states", max(1, self.layout.size_bytes))
        self._at = [2 * session for session in range(program.num_sessions)]
        self._slots = [self.layout.views(self.segment.memory, slot) for slot in range(self.layout.num_slots)]
        first = {s.name: program.params[s.initial] for s in program.states}
        for session in range(program.num_sessions):  # new memory is zero, and takes none until it is written
            self.write(session, {name: value for name, value in first.items() if value.any()})

    def slot(self, session: int) -> int:
        """Return where a session's next call begins."""
        return self._at[session]

    def views(self, slot: int) -> dict[str, Array]:
        """Return what a call that begins at `slot` reads and makes, by value."""
        return self._slots[slot]

    def advance(self, session: int, values: Mapping[str, Array]) -> None:
        """After a call that ended well: its states are those of the next. `values` are all of the call, by name."""
        slot = self._at[session]
        after = self._slots[slot ^ 1]
        for state in self._program.states:
            if self.layout.made.get(state.renewed) != state.value:
                np.copyto(after[state.value], values[state.renewed])
        self._at[session] = slot ^ 1

    def read(self, session: int) -> dict[str, Array]:
        """Return copies of a session's states by the user's names."""
        now = self._slots[self._at[session]]
        return {s.name: np.array(now[s.value]) for s in self._program.states}

    def write(self, session: int, given: Mapping[str, Array]) -> None:
        """Replace states by the user's names."""
        now = self._slots[self._at[session]]
        for state in self._program.states:
            if state.name in given:
                np.copyto(now[state.value], given[state.name])

    def reset(self, session: int) -> None:
        """Give a session the first values."""
        params = self._program.params
        self.write(session, {s.name: params[s.initial] for s in self._program.states})

    def close(self) -> None:
        """Give the memory back."""
        self.segment.close()


def specs_of(program: PipelineProgram) -> dict[str, ValueSpec]:
    """Return shape and dtype of each state, by the user's name."""
    return {s.name: replace(program.values[s.value], name=s.name) for s in program.states}


def named_states(given: Mapping[str, Any], specs: Mapping[str, ValueSpec]) -> dict[str, Array]:
    """Return states that a user gives by name as arrays. Raises BadInput for what is no state, or does not fit."""
    if strange := [name for name in given if name not in specs]:
        known = ", ".join(list(specs)[:6]) or "none"
        raise BadInput(f"{strange[0]!r} is no state of the model", f"it has {len(specs)}: {known}")
    return {name: check_input(value, specs[name]) for name, value in given.items()}
