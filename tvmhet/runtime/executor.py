"""Run one stage on one device: arguments from the shared frame, results back into it, and the time of each part."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from tvmhet._functions import STEADY, STORAGES
from tvmhet.runtime import vm
from tvmhet.runtime.cuda import torch_stream
from tvmhet.runtime.cuda_graph import CudaGraph, capture
from tvmhet.runtime.kept_states import GpuStates, KeptStates
from tvmhet.runtime.program import Array, DeviceBinding, StageProgram


@dataclass(frozen=True, slots=True)
class BoundFrame:
    """The tensors of one frame that a stage reads and writes, in call order, as views of the shared memory."""

    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of CLOCK_MONOTONIC, one clock for all processes of the machine."""

    start_s: float
    loaded_s: float  # inputs are on the device
    computed_s: float
    stored_s: float  # outputs are in the frame


class StageExecutor:
    """One stage loaded on one device, with its parameters in place. Not thread-safe: a device runs one stage at a time.

    On the host, arguments are the shared tensors themselves; a GPU has one staging tensor per argument. States of
    `renewed` stay here, each with the result that it becomes.
    """

    def __init__(
        self,
        stage: StageProgram,
        binding: DeviceBinding,
        params: Mapping[str, Array],
        renewed: Mapping[str, str] | None = None,
    ) -> None:
        self.stage = stage
        kept = renewed or {}
        self._states = KeptStates(stage, kept) if binding.kind == "llvm" else GpuStates(stage, kept, binding.ordinal)
        self._kind, self._ordinal = binding.kind, binding.ordinal
        self._on_stream: Callable[[], AbstractContextManager[Any]] = nullcontext
        if stage.needs_library:
            importlib.import_module("tvmhet.emit.library")
        self._function, self._steady = self._load_stage()
        self._graph: CudaGraph | None = None
        if stage.needs_library and binding.kind == "cuda":
            self._on_stream = torch_stream(binding.ordinal)
        self._params = tuple(self._place(params[name]) for name in stage.params)
        self._staging: tuple[Any, ...] = ()
        self._checked = False

    def _load_stage(self) -> tuple[Callable[..., Any], tuple[Callable[..., Any], Callable[[], Any]] | None]:
        """The stage's function, and on a GPU what a graph is captured of, if it has that."""
        place = self._kind, self._ordinal, self.stage.cubins
        if self._kind == "cuda":
            with suppress(AttributeError):
                names = (self.stage.function, STEADY, STORAGES)
                function, steady, storages = vm.load_functions(self.stage.library, names, *place)
                return function, (steady, storages)
        return vm.load_function(self.stage.library, self.stage.function, *place), None

    def _place(self, array: Array) -> Any:
        view = vm.host_view(array)
        if self._kind == "llvm":
            return view
        placed = vm.empty_on(self._kind, self._ordinal, array)
        vm.copy(view, placed)
        vm.wait_for(self._kind, self._ordinal)
        return placed

    def bind(self, frame: Mapping[str, Array]) -> BoundFrame:
        """Make the tensors of one frame, once; `run` takes them for every input that uses the frame."""
        return BoundFrame(
            tuple(vm.host_view(frame[n]) for n in self.stage.inputs),
            tuple(vm.host_view(frame[n]) for n in self.stage.outputs),
        )

    def call(self, inputs: Sequence[Any]) -> Any:
        """Call the compiled function on host tensors; return its tuple of tensors, finished, on the device."""
        return self._compute(self._load(inputs))

    def run(self, frame: BoundFrame, slot: int = 0) -> StageTimes:
        """Run the stage once, from a frame to the same frame. Raises what the function raises."""
        start_s = time.monotonic()
        arguments = self._load(self._states.begin(slot, frame.inputs, self._staging))
        loaded_s = time.monotonic()
        results = self._compute(arguments)
        computed_s = time.monotonic()
        self.check(results, frame.outputs)
        stay = self._states.results
        for i, (result, output) in enumerate(zip(results, frame.outputs, strict=True)):
            if i not in stay:
                vm.copy(result, output)
        self._states.end(slot, results, frame.inputs)
        vm.wait_for(self._kind, self._ordinal)
        return StageTimes(start_s, loaded_s, computed_s, time.monotonic())

    def store_states(self, slot: int, views: Mapping[str, Array]) -> None:
        """Copy the states that stay here to the host, as they are at a slot."""
        self._states.store(slot, views, self._staging)

    def forget_states(self, slot: int) -> None:
        """Take a session's states from the host again."""
        self._states.forget(slot)

    def _load(self, inputs: Sequence[Any]) -> Sequence[Any]:
        if self._kind == "llvm":
            return inputs
        if not self._staging:
            self._staging = tuple(vm.empty_on(self._kind, self._ordinal, source) for source in inputs)
        for source, target in zip(inputs, self._staging, strict=True):
            if source is not None:  # None: it is there
                vm.copy(source, target)
        vm.wait_for(self._kind, self._ordinal)
        return self._staging

    def _compute(self, arguments: Sequence[Any]) -> Any:
        if self._steady is not None:
            self._graph = capture(self._steady, (*arguments, *self._params), self._ordinal, self.stage.needs_library)
        if self._graph is not None:
            results = self._graph.launch()
        else:
            with self._on_stream():
                results = self._function(*arguments, *self._params)
        self._steady = None  # tried once, on inputs that the stage takes: later ones lie in the same tensors
        vm.wait_for(self._kind, self._ordinal)
        return results

    def check(self, results: Any, outputs: Sequence[Any]) -> None:
        """Compare what the function returned with the program's word, once: compiled shapes do not change.

        `outputs` are tensors, or what has their shape and dtype. Raises RuntimeError.
        """
        if self._checked:
            return
        count = len(results) if hasattr(results, "__len__") and not hasattr(results, "shape") else None
        if count != len(outputs):
            what = "one tensor" if count is None else f"a tuple of {count}"
            raise RuntimeError(f"{self.stage.function} returned {what}, not a tuple of {len(outputs)} tensors")
        for name, got, want in zip(self.stage.outputs, results, outputs, strict=True):
            if tuple(got.shape) != tuple(want.shape) or str(got.dtype) != str(want.dtype):
                raise RuntimeError(
                    f"output {name!r} is {tuple(got.shape)} {got.dtype}, not {tuple(want.shape)} {want.dtype}"
                )
        self._checked = True
