"""Any DAG of stages on any devices gives what its formulas say, for every input and in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.runtime.programs import full, specs
from tvmhet.runtime import DeviceBinding, HetRuntime, PipelineProgram, StageProgram, assign_cores, fleet
from tvmhet.runtime.cores import CpuDevice

DEVICES = ("cpu0", "cpu1", "cpu2")


@dataclass(frozen=True)
class Drawn:
    """A program by numbers: per stage, which values it reads (by position), how many it makes, and its replicas."""

    reads: tuple[tuple[int, ...], ...]
    num_made: tuple[int, ...]
    devices: tuple[tuple[str, ...], ...]
    num_inputs: int
    outputs: tuple[int, ...]


@st.composite
def drawn_programs(draw: st.DrawFn) -> Drawn:
    num_inputs = draw(st.integers(1, 2))
    num_values = num_inputs
    reads, made, devices = [], [], []
    for _ in range(draw(st.integers(1, 6))):
        reads.append(tuple(draw(st.lists(st.integers(0, num_values - 1), min_size=1, max_size=3))))
        made.append(draw(st.integers(1, 2)))
        devices.append(tuple(draw(st.lists(st.sampled_from(DEVICES), min_size=1, max_size=3))))
        num_values += made[-1]
    outputs = draw(st.lists(st.integers(0, num_values - 1), min_size=1, max_size=3))
    return Drawn(tuple(reads), tuple(made), tuple(devices), num_inputs, tuple(outputs))


def program_of(drawn: Drawn, add_scale: Callable[..., Path], bindings: dict[str, DeviceBinding]) -> PipelineProgram:
    names = [f"v{k}" for k in range(drawn.num_inputs + sum(drawn.num_made))]
    stages, cursor = [], drawn.num_inputs
    for index, (reads, num_made, devices) in enumerate(zip(drawn.reads, drawn.num_made, drawn.devices, strict=True)):
        made = tuple(names[cursor : cursor + num_made])
        cursor += num_made
        library = add_scale(len(reads), num_made)
        inputs = tuple(names[r] for r in reads)
        stages.append(StageProgram(index, f"s{index}", library, inputs, made, devices, (f"w{index}",)))
    params = {f"w{k}": full(k + 1) for k in range(len(stages))}
    outputs = tuple(names[o] for o in drawn.outputs)
    return PipelineProgram(specs(*names), tuple(names[: drawn.num_inputs]), outputs, tuple(stages), params, bindings)


def expected(drawn: Drawn, inputs: list[float]) -> list[float]:
    values = list(inputs)
    for index, (reads, num_made) in enumerate(zip(drawn.reads, drawn.num_made, strict=True)):
        total = sum(values[r] for r in reads) + index + 1
        values += [total * (k + 1) for k in range(num_made)]
    return [values[o] for o in drawn.outputs]


def check(drawn: Drawn, program: PipelineProgram, max_in_flight: int, num_inputs: int) -> None:
    inputs = [[float(i + k) for k in range(drawn.num_inputs)] for i in range(num_inputs)]
    with HetRuntime(program, max_in_flight=max_in_flight) as runtime:
        results = list(runtime.map(tuple(full(x) for x in one) for one in inputs))
    assert len(results) == num_inputs
    for one, result in zip(inputs, results, strict=True):
        for value, array in zip(expected(drawn, one), result, strict=True):
            np.testing.assert_array_equal(array, full(value))


@given(drawn_programs(), st.integers(1, 5))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_dag_in_threads(
    add_scale: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, drawn: Drawn, max_in_flight: int
) -> None:
    """Threads, as GPUs have, run the workers' very loop and start in a millisecond."""
    monkeypatch.setattr(fleet, "runs_in_thread", lambda binding: True)
    bindings = {d: DeviceBinding(d, "llvm") for d in DEVICES}
    check(drawn, program_of(drawn, add_scale, bindings), max_in_flight, 25)


@given(drawn_programs())
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_dag_in_processes(add_scale: Callable[..., Path], drawn: Drawn) -> None:
    bindings = assign_cores([CpuDevice(d) for d in DEVICES])
    check(drawn, program_of(drawn, add_scale, bindings), 5, 200)
