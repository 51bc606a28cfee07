"""The memory that a training run shares: what crosses stages, the state twice, sums of gradients, a notice board.

    | micro-batch 0: values | micro-batch 1 | ... | state, generation 0 | generation 1 | constants | sums | board |

A step reads the state of one generation and writes the other; the parent changes over once all workers are done. So a
step that fails, however it fails, leaves the state as it was.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tvmhet.runtime.arena import Layout
from tvmhet.runtime.program import Array, ValueSpec
from tvmhet.runtime.training_program import TrainingProgram


@dataclass(frozen=True, slots=True)
class TrainingMemory:
    """Where everything lies in the one segment. Sums are there for stages with several replicas only."""

    values: Layout
    num_microbatches: int
    state: Layout
    constants: Layout
    sums: Layout
    board: Layout

    @classmethod
    def of(cls, program: TrainingProgram) -> TrainingMemory:
        """Lay a program out. The board holds step, generation, seed; scalars; a norm per share; times of passes."""
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
        board = [ValueSpec.of("step", (3,), "int64"), *(ValueSpec.of(n, (), "float32") for n in program.scalars)]
        board.append(ValueSpec.of("norms", (num_shares,), "float64"))
        for device, order in program.orders.items():
            board.append(ValueSpec.of(f"times.{device}", (len(order) + 1, 2), "float64"))
            board.append(ValueSpec.of(f"stash.{device}", (1,), "int64"))
        return cls(
            Layout.of(program.values.values()), program.num_microbatches, state, constants, sums, Layout.of(board)
        )

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole segment."""
        return self._base(3) + self.board.size_bytes

    def _base(self, part: int) -> int:
        sizes = (
            self.values.size_bytes * self.num_microbatches,
            2 * self.state.size_bytes,
            self.constants.size_bytes,
            self.sums.size_bytes,
        )
        return sum(sizes[: part + 1])

    def frame(self, memory: memoryview, microbatch: int) -> dict[str, Array]:
        """Return the values of one micro-batch."""
        return self.values.views(memory, microbatch * self.values.size_bytes)

    def state_of(self, memory: memoryview, generation: int) -> dict[str, Array]:
        """Return the state of generation 0 or 1."""
        return self.state.views(memory, self._base(0) + generation * self.state.size_bytes)

    def constants_of(self, memory: memoryview) -> dict[str, Array]:
        """Return the constants."""
        return self.constants.views(memory, self._base(1))

    def sums_of(self, memory: memoryview) -> dict[str, Array]:
        """Return the sums of gradients that replicas exchange."""
        return self.sums.views(memory, self._base(2))

    def board_of(self, memory: memoryview) -> dict[str, Array]:
        """Return the notice board."""
        return self.board.views(memory, self._base(3))

    def fill(self, memory: memoryview, program: TrainingProgram) -> None:
        """Write the initial state into both generations, and the constants."""
        for generation in (0, 1):
            for name, view in self.state_of(memory, generation).items():
                np.copyto(view, program.state[name])
        for name, view in self.constants_of(memory).items():
            np.copyto(view, program.constants[name])
