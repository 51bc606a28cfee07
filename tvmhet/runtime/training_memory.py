"""The memory that a training run shares: what crosses stages, the state twice, sums of gradients, a notice board.

    | batch and loss of micro-batch 0 | 1 | ... | values, slot 0 | slot 1 | ... | state, generation 0 | generation 1 |
    | constants | sums | board |

Micro-batch m has slot m modulo the number of slots: as many as the schedule has micro-batches on their way at once.
A step reads the state of one generation and writes the other; the parent changes over once all workers are done. So a
step that fails, however it fails, leaves the state as it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tvmhet.runtime.arena import Layout
from tvmhet.runtime.program import Array, ValueSpec
from tvmhet.runtime.training_program import Action, TrainingProgram, TrainingStage
from tvmhet.runtime.training_turns import new_row, shared_cores


@dataclass(frozen=True, slots=True)
class TrainingMemory:
    """Where everything lies in the one segment. Sums are there for stages with several replicas only."""

    batch: Layout
    num_microbatches: int
    values: Layout
    num_slots: int
    state: Layout
    constants: Layout
    sums: Layout
    board: Layout

    @classmethod
    def of(cls, program: TrainingProgram) -> TrainingMemory:
        """Lay a program out. The board: step, generation, seed, restores; scalars; norms of shares; times; turns."""
        state, constants = (
            Layout.of(ValueSpec.of(n, v.shape, v.dtype.name) for n, v in values.items())
            for values in (program.state, program.constants)
        )
        sums = Layout.of(
            ValueSpec.of(f"sum.{p}@{r}", program.state[p].shape, program.state[p].dtype.name)
            for s in program.stages
            if len(s.devices) > 1
            for r in range(len(s.devices))
            for p in s.parameters
        )
        num_shares = sum(len(s.shares) for s in program.stages)
        board = [ValueSpec.of("step", (4,), "int64"), *(ValueSpec.of(n, (), "float32") for n in program.scalars)]
        board.append(ValueSpec.of("norms", (num_shares,), "float64"))
        for device, order in program.orders.items():
            board.append(ValueSpec.of(f"times.{device}", (len(order) + 1, 4), "float64"))
            board.append(ValueSpec.of(f"updates.{device}", (len(program.updates_of(device)),), "float64"))
            board.append(ValueSpec.of(f"stash.{device}", (1,), "int64"))
            board.append(ValueSpec.of(f"memory.{device}", (1,), "int64"))
        for core in shared_cores(program.bindings):
            board.append(ValueSpec.of(f"turns.{core}", new_row(len(program.devices)).shape, "int64"))
        outer = {*program.batch, program.loss}
        batch, values = (
            Layout.of(v for n, v in program.values.items() if (n in outer) is whole) for whole in (True, False)
        )
        slots = num_slots(program)
        return cls(batch, program.num_microbatches, values, slots, state, constants, sums, Layout.of(board))

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole segment."""
        return self._base(4) + self.board.size_bytes

    def _base(self, part: int) -> int:
        sizes = (
            self.batch.size_bytes * self.num_microbatches,
            self.values.size_bytes * self.num_slots,
            2 * self.state.size_bytes,
            self.constants.size_bytes,
            self.sums.size_bytes,
        )
        return sum(sizes[: part + 1])

    def frame(self, memory: memoryview, microbatch: int) -> dict[str, Array]:
        """Return the values of one micro-batch."""
        slot = self._base(0) + microbatch % self.num_slots * self.values.size_bytes
        return self.batch.views(memory, microbatch * self.batch.size_bytes) | self.values.views(memory, slot)

    def state_of(self, memory: memoryview, generation: int) -> dict[str, Array]:
        """Return the state of generation 0 or 1."""
        return self.state.views(memory, self._base(1) + generation * self.state.size_bytes)

    def constants_of(self, memory: memoryview) -> dict[str, Array]:
        """Return the constants."""
        return self.constants.views(memory, self._base(2))

    def sums_of(self, memory: memoryview) -> dict[str, Array]:
        """Return the sums of gradients that replicas exchange."""
        return self.sums.views(memory, self._base(3))

    def board_of(self, memory: memoryview) -> dict[str, Array]:
        """Return the notice board."""
        return self.board.views(memory, self._base(4))

    def shared_bytes(self, program: TrainingProgram, device: str) -> tuple[int, int]:
        """Return the bytes of state (both generations, and constants) and of values that a device reads or writes."""
        own = [s for s in program.stages if device in s.devices]
        touched = set[str]().union(*(_touched(s, s.devices.index(device)) for s in own))
        state, constants, batch, values, sums = (
            sum(spec.size_bytes for spec in layout.specs if spec.name in touched)
            for layout in (self.state, self.constants, self.batch, self.values, self.sums)
        )
        return 2 * state + constants, self.num_microbatches * batch + self.num_slots * values + sums

    def fill(self, memory: memoryview, program: TrainingProgram) -> None:
        """Write the initial state into both generations, and the constants."""
        for generation in (0, 1):
            for name, view in self.state_of(memory, generation).items():
                np.copyto(view, program.state[name])
        for name, view in self.constants_of(memory).items():
            np.copyto(view, program.constants[name])


def _touched(stage: TrainingStage, replica: int) -> set[str]:
    """Names of what a replica reads or writes in the shared memory (and of other tensors)."""
    share = stage.shares[replica]
    functions = [stage.forward[replica], stage.backward[replica], *share.updates]
    functions += [f for f in (share.reduce, share.norm) if f is not None]
    names = {n for f in functions for n in (*f.inputs, *f.outputs)}
    return names | {f"sum.{p}@{replica}" for p in stage.parameters} | set(stage.buffers.values())


def num_slots(program: TrainingProgram) -> int:
    """Return the fewest slots such that every pass of micro-batch m ends before one of m + slots can begin.

    A pass begins after those before it in its device's order and after those that it waits for.
    """
    passes = program.sequence()
    numbers = {a: i for i, a in enumerate(passes)}
    earlier: dict[Action, int] = {}
    previous = {b: a for order in program.orders.values() for a, b in pairwise(order)}

    def before(action: Action) -> int:
        found = 0
        for a in (*program.waits_for(action), *([previous[action]] if action in previous else [])):
            found |= earlier[a] | 1 << numbers[a]
        return found

    for action in passes:
        earlier[action] = before(action)
    own = [0] * program.num_microbatches
    begin = [-1] * program.num_microbatches
    for action, number in numbers.items():
        own[action.microbatch] |= 1 << number
        begin[action.microbatch] &= earlier[action]
    for slots in range(1, program.num_microbatches):
        if all(own[m] & ~begin[m + slots] == 0 for m in range(program.num_microbatches - slots)):
            return slots
    return program.num_microbatches
