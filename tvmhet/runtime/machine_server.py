"""Parts of a program on the machine that runs them, for a driver elsewhere: values in, values out.

driver ──run(part, values)──► MachineServer ──► the part's PipelineEngine ──► this machine's devices
       ◄───values, times────┘   one thread: a descriptor of an engine that can be read wakes what waits for it
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tvmhet import _tvm
from tvmhet.errors import HetError, PartLost, WorkerFailed
from tvmhet.runtime.arena import StoredParams
from tvmhet.runtime.crew import HEED_S
from tvmhet.runtime.described import bind_described, describe_devices
from tvmhet.runtime.engine import PipelineEngine
from tvmhet.runtime.program import Array, PipelineProgram, StageProgram, ValueSpec
from tvmhet.runtime.stats import StageRun

#: What must be the same on every machine.
VERSIONS = {"TVM": _tvm.TVM_VERSION}


@dataclass(frozen=True, slots=True)
class Shipment:
    """A program that leaves this machine: nothing in it refers to files, cores or GPUs of this one."""

    values: tuple[ValueSpec, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    stages: tuple[StageProgram, ...]
    params: Mapping[str, Array]
    devices: tuple[Mapping[str, Any], ...]
    files: Mapping[str, bytes]

    @classmethod
    def of(cls, program: PipelineProgram) -> Shipment:
        """Return what a machine needs to run `program`. Reads the compiled stages."""
        stages, files = [], {}
        for stage in program.stages:
            library, cubins = Path(f"{stage.index}.so"), None
            files[library.name] = stage.library.read_bytes()
            if stage.cubins is not None:
                cubins = Path(f"{stage.index}.cubins")
                files[cubins.name] = stage.cubins.read_bytes()
            stages.append(replace(stage, library=library, cubins=cubins))
        return cls(
            tuple(program.values.values()),
            program.inputs,
            program.outputs,
            tuple(stages),
            dict(program.params),
            tuple(describe_devices(program.bindings.values())),
            files,
        )

    def unpacked(self, folder: Path) -> PipelineProgram:
        """Write the compiled stages to `folder` and return the program, bound to this machine's devices."""
        for name, content in self.files.items():
            (folder / name).write_bytes(content)
        return PipelineProgram(
            values={v.name: v for v in self.values},
            inputs=self.inputs,
            outputs=self.outputs,
            stages=tuple(_in_folder(stage, folder) for stage in self.stages),
            params=StoredParams.of(self.params, self.params),  # else Ray's store would keep a copy, too
            bindings=bind_described(self.devices),
        )


def _in_folder(stage: StageProgram, folder: Path) -> StageProgram:
    return replace(stage, library=folder / stage.library, cubins=stage.cubins and folder / stage.cubins)


class MachineServer:
    """The parts that one machine runs. All methods run in one thread, in its event loop."""

    def __init__(self) -> None:
        self._parts: dict[int, _RunningPart] = {}

    async def versions(self) -> Mapping[str, str]:
        """Return what is installed here."""
        return VERSIONS

    async def clock_s(self) -> float:
        """Return this machine's monotonic clock, seconds."""
        return time.monotonic()

    async def start(
        self, part: int, shipment: Shipment, timeout_s: float, stall_limit_s: float | None
    ) -> Sequence[str]:
        """Start the devices of a part and load its stages; return the devices that share cores.

        Raises what `HetRuntime.start` does, and leaves nothing of the part running then.
        """
        with tempfile.TemporaryDirectory(prefix="tvmhet-part-") as folder:
            engine = PipelineEngine(shipment.unpacked(Path(folder)), None, timeout_s)
            engine.stall_limit_s = stall_limit_s
            engine.start()
        self._parts[part] = _RunningPart(engine)
        return engine.shared_cores

    async def limit_stalls(self, seconds: float | None) -> None:
        """Set the limit of all parts."""
        for part in self._parts.values():
            part.engine.stall_limit_s = seconds

    async def run(self, part: int, *arrays: Array) -> tuple[Any, ...]:
        """Run one input of a part; return its outputs and, last, its `StageRun`s.

        Raises WorkerFailed, and PartLost where no input can follow.
        """
        return await self._parts[part].run(arrays)

    async def close(self) -> None:
        """Stop the devices."""
        while self._parts:
            self._parts.popitem()[1].close()


class _RunningPart:
    """The engine of one part, and those that wait for its results."""

    def __init__(self, engine: PipelineEngine) -> None:
        self.engine = engine
        self._record: list[StageRun] = []
        engine.record = self._record
        self._frames = asyncio.Semaphore(engine.capacity)
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._loop = asyncio.get_running_loop()
        for fd in engine.descriptors():
            self._loop.add_reader(fd, self._hear)
        self._look()

    async def run(self, arrays: Sequence[Array]) -> tuple[Any, ...]:
        async with self._frames:
            try:
                index = self.engine.submit([np.asarray(array) for array in arrays])
                if not self.engine.is_done(index):
                    self._waiting[index] = self._loop.create_future()
                    await self._waiting[index]
                outputs = self.engine.take(index)
            except WorkerFailed as error:
                if self.engine.is_running:
                    raise
                raise lost(error) from None
            return (*outputs, self._runs(index))

    def close(self) -> None:
        for fd in self.engine.descriptors():
            self._loop.remove_reader(fd)
        self._next_look.cancel()
        self.engine.close()

    def _look(self) -> None:
        """Ask now and then, too: of workers that hang nothing can be read."""
        self._next_look = self._loop.call_later(HEED_S, self._look)
        if self._waiting:
            self._hear()

    def _hear(self) -> None:
        """Wake those whose input is done; all of them where a worker died, so that each learns of it."""
        try:
            done = [index for index in self._waiting if self.engine.is_done(index)]
        except HetError:
            done = list(self._waiting)
        for index in done:
            self._waiting.pop(index).set_result(None)

    def _runs(self, index: int) -> Sequence[StageRun]:
        runs = [run for run in self._record if run.input_index == index]
        self._record[:] = (run for run in self._record if run.input_index != index)
        return runs


def lost(error: WorkerFailed) -> PartLost:
    """Return the error of a worker that died, as the end of its part."""
    return PartLost(
        error.problem,
        error.remedy,
        device=error.device,
        stage=error.stage,
        input_index=error.input_index,
        text=error.text,
    )
