"""One part of a program on the machine that runs it, for a driver elsewhere: values in, values out.

driver ──run(values)──► PartServer ──► PipelineEngine ──► this machine's devices
       ◄──values, times──┘   one thread: a descriptor of the engine that can be read wakes what waits for it
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
from tvmhet.errors import HetError, WorkerFailed
from tvmhet.runtime.described import bind_described, describe_devices
from tvmhet.runtime.engine import PipelineEngine
from tvmhet.runtime.program import Array, PipelineProgram, StageProgram, ValueSpec
from tvmhet.runtime.stats import StageRun

#: What must be the same on every machine.
VERSIONS = {"TVM": _tvm.TVM_VERSION}


class PartLost(WorkerFailed):
    """A worker or a machine is gone, and the part that it ran with it."""


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
            named: dict[str, Path] = {}
            for what, path in (("library", stage.library), ("cubins", stage.cubins)):
                if path is not None:
                    named[what] = Path(f"{stage.index}{path.suffix}")
                    files[named[what].name] = path.read_bytes()
            stages.append(replace(stage, **named))
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
            params=self.params,
            bindings=bind_described(self.devices),
        )


def _in_folder(stage: StageProgram, folder: Path) -> StageProgram:
    return replace(stage, library=folder / stage.library, cubins=stage.cubins and folder / stage.cubins)


class PartServer:
    """The engine of one part and those that wait for its results. All methods run in one thread, in its event loop."""

    async def versions(self) -> Mapping[str, str]:
        """Return what is installed here."""
        return VERSIONS

    async def clock_s(self) -> float:
        """Return this machine's monotonic clock, seconds."""
        return time.monotonic()

    async def start(self, shipment: Shipment, timeout_s: float) -> Sequence[str]:
        """Start the devices and load the stages; return the devices that share cores.

        Raises what `HetRuntime.start` does, and leaves nothing running then.
        """
        with tempfile.TemporaryDirectory(prefix="tvmhet-part-") as folder:
            program = shipment.unpacked(Path(folder))
            self._engine = PipelineEngine(program, None, timeout_s)
            self._engine.start()
        self._engine.record = []
        self._frames = asyncio.Semaphore(self._engine.capacity)
        self._waiting: dict[int, asyncio.Future[list[Array]]] = {}
        for fd in self._engine.descriptors():
            asyncio.get_running_loop().add_reader(fd, self._hear)
        return self._engine.shared_cores

    async def run(self, *arrays: Array) -> tuple[Any, ...]:
        """Run one input; return its outputs and, last, its `StageRun`s.

        Raises WorkerFailed, and PartLost where no input can follow.
        """
        async with self._frames:
            try:
                index = self._engine.submit([np.asarray(array) for array in arrays])
                if not self._engine.is_done(index):
                    self._waiting[index] = asyncio.get_running_loop().create_future()
                    await self._waiting[index]
                outputs = self._engine.take(index)
            except WorkerFailed as error:
                if self._engine.is_running:
                    raise
                raise lost(error) from None
            return (*outputs, self._runs(index))

    async def close(self) -> None:
        """Stop the devices."""
        for fd in self._engine.descriptors():
            asyncio.get_running_loop().remove_reader(fd)
        self._engine.close()

    def _hear(self) -> None:
        """Wake those whose input is done; all of them where a worker died, so that each learns of it."""
        done = []
        try:
            done = [index for index in self._waiting if self._engine.is_done(index)]
        except HetError:
            done = list(self._waiting)
        for index in done:
            self._waiting.pop(index).set_result([])

    def _runs(self, index: int) -> Sequence[StageRun]:
        record = self._engine.record
        assert record is not None, "start() has set it"
        runs = [run for run in record if run.input_index == index]
        record[:] = (run for run in record if run.input_index != index)
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
