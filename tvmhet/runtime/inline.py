"""One stage on one device in this very process: no worker, no hop. What a one-device build is measured with."""

from __future__ import annotations

import time
from collections import ChainMap
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from tvmhet.errors import NotSupported
from tvmhet.runtime import vm
from tvmhet.runtime.arena import StoredParams
from tvmhet.runtime.executor import StageExecutor
from tvmhet.runtime.program import Array, PipelineProgram
from tvmhet.runtime.stalls import NoStallLimit
from tvmhet.runtime.states import States
from tvmhet.runtime.stats import StageRun
from tvmhet.runtime.tensors import array_over, empty_aligned


class InlineEngine(NoStallLimit):
    """Runs a program of one stage when it is submitted. The device's cores and instruction-set limit do not apply:

    they belong to a process, and this one is the caller's. An exception of the stage is raised as it is. Results on the
    host are the tensors that TVM made, uncopied.
    """

    capacity = 1
    shared_cores: tuple[str, ...] = ()
    over_machines = False

    def __init__(self, program: PipelineProgram) -> None:
        if len(program.stages) != 1 or len(program.stages[0].devices) != 1:
            raise NotSupported(
                f"inline=True runs one stage on one device; this program has {len(program.stages)} stages on "
                f"{len({d for s in program.stages for d in s.devices})} devices",
                "leave inline out: the stages then run in workers of their own",
            )
        self.record: list[StageRun] | None = None
        self._program = program
        self._stage = program.stages[0]
        self._executor: StageExecutor | None = None
        self._next_index = 0
        self._results: dict[int, list[Array]] = {}

    def start(self) -> None:
        """Load the stage and its parameters into this process."""
        if self._executor is not None:
            return
        self._binding = binding = self._program.bindings[self._stage.devices[0]]
        params = StoredParams.of(self._program.params, self._stage.params)
        self._executor = StageExecutor(self._stage, binding, params)
        self._on_host = binding.kind == "llvm"
        self._inputs = {name: empty_aligned(self._program.values[name]) for name in self._program.inputs}
        self._kept = (*self._inputs.values(), np.frombuffer(params.segment.memory, np.uint8))
        self._states = States(self._program)
        self._arguments = [
            tuple(vm.host_view(values[name]) for name in self._stage.inputs)
            for slot in range(self._states.layout.num_slots)
            for values in (self._inputs | self._states.views(slot),)
        ]

    def close(self) -> None:
        """Drop the stage and its parameters."""
        if self._executor is not None:
            self._states.close()
        self._executor = None
        self._results.clear()

    def has_room(self, session: int = 0) -> bool:
        """Whether an input may be submitted: always, each is run at once."""
        return True

    def wait(self, index: int | None, timeout_s: float, session: int = 0) -> None:
        """Nothing is waited for: what was submitted is done."""

    def submit(self, arrays: list[Array], session: int = 0) -> int:
        """Run one input to its end."""
        if self._executor is None:
            raise NotSupported("this runtime is closed", "call start() to load it anew")
        index = self._next_index
        self._next_index += 1
        for name, array in zip(self._program.inputs, arrays, strict=True):
            np.copyto(self._inputs[name], array)
        start_s = time.monotonic()
        tensors = self._executor.call(self._arguments[self._states.slot(session)])
        computed_s = time.monotonic()
        self._executor.check(tensors, [self._program.values[name] for name in self._stage.outputs])
        made = self._arrays(tensors)
        if self.record is not None:
            spans = (start_s, start_s, computed_s, time.monotonic())
            self.record.append(StageRun(0, self._stage.devices[0], index, *spans))
        kept = self._states.views(self._states.slot(session))
        for name in self._states.layout.made:
            np.copyto(kept[name], made[name])
        self._results[index] = self._outputs(made, kept)
        if self._program.states:
            self._states.advance(session, ChainMap(self._inputs, kept, cast("dict[str, Array]", self._program.params)))
        return index

    def states(self, session: int) -> dict[str, Array]:
        """Return copies of a session's states."""
        return self._states.read(session)

    def set_states(self, session: int, given: Mapping[str, Array] | None) -> None:
        """Replace a session's states, or begin it anew."""
        if given is None:
            self._states.reset(session)
        else:
            self._states.write(session, given)

    def _arrays(self, tensors: Sequence[Any]) -> dict[str, Array]:
        """Return the stage's results by name; copies of those on a GPU or in memory that they share."""
        made: dict[str, Array] = {}
        for name, tensor in zip(self._stage.outputs, tensors, strict=True):
            array = array_over(tensor) if self._on_host else None
            if array is None or any(np.may_share_memory(array, other) for other in (*self._kept, *made.values())):
                array = empty_aligned(self._program.values[name])
                vm.copy(tensor, vm.host_view(array))
            made[name] = array
        vm.wait_for(self._binding.kind, self._binding.ordinal)
        return made

    def _outputs(self, made: dict[str, Array], kept: Mapping[str, Array]) -> list[Array]:
        results = []
        for name in self._program.outputs:
            if name in made:
                results.append(made.pop(name))  # the first reader gets the array itself, a repeated output a copy
            else:
                results.append(np.array(kept[name] if name in kept else self._again(name, results)))
        return results

    def _again(self, name: str, results: list[Array]) -> Array:
        if name in self._stage.outputs:
            return results[self._program.outputs.index(name)]
        return self._program.params[name] if name in self._program.params else self._inputs[name]

    def is_done(self, index: int) -> bool:
        """Always: submit runs to the end."""
        return index in self._results

    def take(self, index: int) -> list[Array]:
        """Return the outputs, once."""
        return self._results.pop(index)
