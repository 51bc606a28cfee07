"""Run a model that was placed whole: one Relax VM in this process, shapes as the caller gives them."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import relax

from tvmhet.errors import BadInput, HetError, NotSupported
from tvmhet.nested import call_arguments, flat
from tvmhet.results import Structure, structured
from tvmhet.runtime import vm
from tvmhet.runtime.arena import StoredParams
from tvmhet.runtime.cubins import compiled_for
from tvmhet.runtime.cuda import architecture
from tvmhet.runtime.program import ValueSpec
from tvmhet.runtime.stalls import NoStallLimit
from tvmhet.runtime.states import named_states
from tvmhet.runtime.stats import RunStats, Sample, StageRun, StageStats
from tvmhet.runtime.tensors import is_torch, to_numpy, to_torch


@dataclass(frozen=True, slots=True)
class WholeProgram:
    """A compiled module whose `main` takes `inputs`, then `params`, in order, on one device.

    The first of `params` are the first values of `states`, for each session; what they become are its last results.
    """

    library: Path
    inputs: tuple[str, ...]
    params: Mapping[str, Any]
    device_id: str
    kind: str
    ordinal: int = 0  # of a GPU
    structure: Structure | None = None  # None: as `main` returns
    states: tuple[str, ...] = ()
    num_sessions: int = 1


class WholeRuntime(NoStallLimit):
    """The VM of a whole program. Loaded at the first call."""

    def __init__(self, program: WholeProgram) -> None:
        self.program = program
        self._main: Any = None
        self._params: list[Any] = []
        self._states: list[list[Any]] = []  # by session
        self._lock = threading.Lock()  # a VM runs one call at a time

    def _start(self) -> None:
        kind, ordinal = self.program.kind, self.program.ordinal
        device = tvm.cpu() if kind == "llvm" else tvm.device(kind, ordinal)
        arch = architecture(ordinal) if kind == "cuda" else None
        if not device.exist:
            raise NotSupported(
                f"the plan runs on {self.program.device_id}, and this machine has no {self.program.kind} device",
                "run the bundle where there is one, or plan for a CPU device type",
            )
        with nullcontext() if arch is None else compiled_for(arch):
            machine = relax.VirtualMachine(tvm.runtime.load_module(str(self.program.library)), device)
        params = self.program.params
        if self.program.kind == "llvm" and isinstance(params, StoredParams):
            self._params = [vm.host_view(v) for v in params.values()]
        else:
            self._params = [tvm.runtime.tensor(v, device) for v in params.values()]
        num_states = len(self.program.states)
        self._first, self._params = self._params[:num_states], self._params[num_states:]
        self._states = [list(self._first) for _ in range(self.program.num_sessions)]
        self._device = device
        self._main = machine["main"]

    def __call__(self, *inputs: Any) -> Any:
        """Run one input: tensors, in tuples and lists or by name, and numbers and shapes where the model takes them.

        Raises BadInput for a wrong number of inputs or shapes that the model refuses.
        """
        return self.call(inputs, 0)

    def call(self, inputs: Sequence[Any], session: int) -> Any:
        """Run one input of a session."""
        inputs = call_arguments(inputs, self.program.inputs)
        if len(inputs) != len(self.program.inputs):
            raise BadInput(
                f"the model takes {len(self.program.inputs)} inputs, {len(inputs)} were given",
                "give one value per input",
            )
        values = [_value(i, x) for i, x in enumerate(inputs)]
        as_torch = any(is_torch(x) for x in inputs)
        try:
            with self._lock:
                if self._main is None:
                    self._start()
                args = [tvm.runtime.tensor(v, self._device) if isinstance(v, np.ndarray) else v for v in values]
                result = self._main(*args, *self._states[session], *self._params)
                if num_states := len(self.program.states):
                    self._states[session] = list(result)[-num_states:]
                    result = list(result)[:-num_states]
        except HetError:
            raise
        except Exception as error:
            raise BadInput(f"the model refused its inputs: {error}", "check their shapes and dtypes") from error
        found = _to_user(result, as_torch)
        if self.program.structure == "single" and isinstance(found, tuple):  # beside the states
            (found,) = found
        return found if self.program.structure is None else structured(iter(flat([found])), self.program.structure)

    def states(self, session: int) -> dict[str, Any]:
        """Return copies of what a session's calls have handed on, by name."""
        with self._lock:
            if self._main is None:
                self._start()
            return {n: v.numpy() for n, v in zip(self.program.states, self._states[session], strict=True)}

    def set_states(self, session: int, given: Mapping[str, Any] | None) -> None:
        """Replace states of a session by name, or all by their first values. Raises BadInput for what does not fit."""
        with self._lock:
            if self._main is None:
                self._start()
            own = self._first
            if given is not None:
                specs = {
                    n: ValueSpec.of(n, tuple(v.shape), str(v.dtype))
                    for n, v in zip(self.program.states, own, strict=True)
                }
                arrays = named_states(given, specs)
                own = [
                    tvm.runtime.tensor(arrays[n], self._device) if n in arrays else v
                    for n, v in zip(self.program.states, self._states[session], strict=True)
                ]
            self._states[session] = list(own)

    def map(
        self, inputs: Iterable[Any], max_in_flight: int | None = None, sessions: Sequence[int] = (0,)
    ) -> Iterator[Any]:
        """Run many inputs one after another; a whole model has no pipeline to fill."""
        for item, session in zip(inputs, cycle(sessions), strict=False):
            yield self.call(item if isinstance(item, tuple | list) else (item,), session)

    def benchmark(self, inputs: Sequence[Any], num_inputs: int = 20, warmup: int = 3) -> RunStats:
        """Measure repeated calls on one input; latency is also the period. States are afterwards as they were."""
        before = self.states(0)
        for _ in range(warmup):
            self(*inputs)
        runs = []
        for i in range(num_inputs):
            start = time.monotonic()
            self(*inputs)
            end = time.monotonic()
            runs.append(StageRun(0, self.program.device_id, i, start, start, end, end))
        self.set_states(0, before)
        seconds = [r.compute_s for r in runs]
        stage = StageStats(0, "whole model", (self.program.device_id,), Sample.of(seconds), Sample.of([0.0]), None)
        return RunStats(tuple(seconds), 1.0 / statistics.median(seconds), (stage,), (stage,), tuple(runs), ())

    def close(self) -> None:
        """Free the VM and the parameters."""
        self._main, self._params, self._states = None, [], []


def _value(index: int, value: Any) -> Any:
    """Return what stands for an input in the VM: an array to copy, or the number, shape or object that it is."""
    array = to_numpy(value)
    if array is not None:
        return np.asarray(array)
    if isinstance(value, tuple) and all(type(n) is int for n in value):
        return tvm.runtime.ShapeTuple(value)
    if isinstance(value, int | float | tvm.runtime.Object):
        return value
    remedy = "pass numpy arrays, torch or TVM tensors"
    raise BadInput(f"input {index} is a {type(value).__name__}, not a tensor", remedy)


def _to_user(result: Any, as_torch: bool) -> Any:
    if isinstance(result, tvm.runtime.Tensor):
        array = result.numpy()
        return to_torch(array) if as_torch else array
    if isinstance(result, tvm.runtime.ShapeTuple):
        return tuple(int(d) for d in result)
    if isinstance(result, int | float | bool | str):
        return result
    return tuple(_to_user(part, as_torch) for part in result)
