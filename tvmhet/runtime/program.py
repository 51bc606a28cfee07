"""A compiled, placed model as the runtime sees it: values, stages, parameters, and which cores or GPU run them.

    inputs -> stage 0 -> h -> stage 1 -> outputs        values: x, h, y     stage 1 may also read x (a skip connection)

Plain data, checked once; no TVM here. Values are the tensors that cross a stage's boundary.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tvmhet.errors import BadGraph, NotSupported
from tvmhet.results import Parts, Structure

Array = NDArray[Any]
_PLAIN_DTYPE = re.compile("bool|u?int(8|16|32|64)|float(16|32|64)")


@cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy dtype of a TVM dtype name such as "float32", "bool" or "bfloat16".

    Raises NotSupported for dtypes that have no whole-byte numpy equivalent (for example "int4").
    """
    if name == "bfloat16" or name.startswith("float8_"):
        import ml_dtypes

        found = getattr(ml_dtypes, name, None)
    else:
        found = name if _PLAIN_DTYPE.fullmatch(name) else None
    if found is None:
        raise NotSupported(
            f"dtype {name!r} cannot cross a stage boundary: it has no whole-byte array type",
            "keep its producers and consumers in one stage, or cast it before the cut",
        )
    dtype: np.dtype[Any] = np.dtype(found)
    return dtype


@dataclass(frozen=True, slots=True)
class ValueSpec:
    """One tensor that enters, leaves or crosses stages. `dtype` is TVM's name; `size_bytes` counts it once."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int

    def __post_init__(self) -> None:
        expected = math.prod(self.shape) * numpy_dtype(self.dtype).itemsize
        if self.size_bytes != expected:
            raise BadGraph(
                f"value {self.name!r} of {self.shape} {self.dtype} is said to take {self.size_bytes} bytes, "
                f"but takes {expected}",
                "make the spec with ValueSpec.of, which counts the bytes",
            )

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], dtype: str) -> ValueSpec:
        """Return the spec with its bytes counted."""
        return cls(name, tuple(shape), dtype, math.prod(shape) * numpy_dtype(dtype).itemsize)


@dataclass(frozen=True, slots=True)
class DeviceBinding:
    """A device of the plan tied to hardware: host cores limited to an instruction set, or a CUDA ordinal.

    `isa` is "x86-64-v2", "x86-64-v3", "x86-64-v4" or None (no limit). The device of the plan has `num_cores`; `cores`
    may be fewer where this host has fewer. `shared_cores` tells that another device of the program holds one of the
    same physical cores, so that its measured times are not its own.
    """

    device_id: str
    kind: Literal["llvm", "cuda"]
    isa: str | None = None
    cores: tuple[int, ...] = ()
    ordinal: int = 0
    shared_cores: bool = False
    num_cores: int = 1

    def __post_init__(self) -> None:
        if self.kind not in ("llvm", "cuda"):
            raise NotSupported(
                f"device {self.device_id!r} has kind {self.kind!r}; the local runtime runs llvm and cuda",
                "compile the stage for an llvm or cuda target",
            )


@dataclass(frozen=True, slots=True)
class StageProgram:
    """One compiled stage: a Relax VM executable whose `function` takes `inputs` then `params`, returns a tuple.

    Input i runs on `devices[i % len(devices)]`, of a program with states those of session i. `needs_library` asks the
    worker to register tvmhet's library kernels.
    `cubins` is a file of machine code for the CUDA source in the library (`cubins.py`), used where the device suits.
    `planned` is the stage of the plan that it is part of, -1 for the one of its own index.
    """

    index: int
    name: str
    library: Path
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    devices: tuple[str, ...]
    params: tuple[str, ...] = ()
    function: str = "main"
    needs_library: bool = False
    cubins: Path | None = None
    planned: int = -1

    def device_of(self, turn: int) -> str:
        """Return the device that runs this stage for an input of this number or, with states, of this session."""
        return self.devices[turn % len(self.devices)]


@dataclass(frozen=True, slots=True)
class StateProgram:
    """A tensor that one call hands on to the next, by the user's `name`: stages read `value`, `renewed` comes after it.

    `initial` names the parameter that it is at first.
    """

    name: str
    value: str
    renewed: str
    initial: str


@dataclass(frozen=True, slots=True)
class PipelineProgram:
    """A whole placed model. `outputs` may repeat and may name a program input or a parameter directly.

    Each of `num_sessions` sessions has `states` of its own, and calls that follow one another.

    `structure` says how a call returns the outputs: one alone, in a tuple, or as the model has them. Raises BadGraph
    when the parts contradict each other.
    """

    values: Mapping[str, ValueSpec]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    stages: tuple[StageProgram, ...]
    params: Mapping[str, Array]
    bindings: Mapping[str, DeviceBinding]
    structure: Structure = "tuple"
    states: tuple[StateProgram, ...] = ()
    num_sessions: int = 1
    _producers: Mapping[str, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for attr in ("values", "params", "bindings"):
            if isinstance(given := getattr(self, attr), dict):  # any other mapping is taken to be immutable
                object.__setattr__(self, attr, MappingProxyType(dict(given)))
        object.__setattr__(self, "_producers", MappingProxyType(_producers_of(self)))
        _check(self)

    def planned(self, stage: int) -> int:
        """Return the stage of the plan that `stage` is part of: a team of devices runs one in several."""
        planned = self.stages[stage].planned
        return stage if planned < 0 else planned

    def producer(self, value: str) -> int | None:
        """Return the index of the stage that makes `value`; None for a program input or a state."""
        return self._producers.get(value)

    def predecessors(self, stage: int) -> tuple[int, ...]:
        """Return the indices of the stages whose outputs `stage` reads, ascending."""
        made = (self._producers.get(value) for value in self.stages[stage].inputs)
        return tuple(sorted({s for s in made if s is not None}))

    def successors(self, stage: int) -> tuple[int, ...]:
        """Return the indices of the stages that read an output of `stage`, ascending."""
        return tuple(s.index for s in self.stages if stage in self.predecessors(s.index))


def _producers_of(program: PipelineProgram) -> dict[str, int]:
    producers: dict[str, int] = {}
    for stage in program.stages:
        for value in stage.outputs:
            if value in producers or value in program.inputs:
                raise BadGraph(f"value {value!r} is made twice, the second time by stage {stage.name!r}", "rename one")
            producers[value] = stage.index
    return producers


def _check(program: PipelineProgram) -> None:
    if program.structure == "single" and len(program.outputs) != 1:
        raise BadGraph(
            f"a program with structure 'single' has one output, not {len(program.outputs)}", "use structure 'tuple'"
        )
    if isinstance(program.structure, Parts) and program.structure.num_tensors != len(program.outputs):
        raise BadGraph(
            f"a program of {len(program.outputs)} outputs returns {program.structure.num_tensors} tensors",
            "give each output one place",
        )
    if len(set(program.inputs)) != len(program.inputs):
        raise BadGraph(f"an input name repeats in {program.inputs}", "give every input its own name")
    if both := [v for v in (*program.inputs, *program._producers) if v in program.params]:
        raise BadGraph(f"{both[0]!r} names a parameter and also a program input or a stage's output", "rename one")
    for state in program.states:
        if state.value in (*program.inputs, *program._producers):
            raise BadGraph(f"state {state.name!r} is {state.value!r}, which an input or a stage makes", "rename one")
        if state.initial not in program.params:
            raise BadGraph(f"state {state.name!r} has no first value {state.initial!r}", "add it to the parameters")
    known = {*program.inputs, *(s.value for s in program.states)}
    for position, stage in enumerate(program.stages):
        if stage.index != position:
            raise BadGraph(
                f"stage {stage.name!r} stands at {position} but has index {stage.index}", "number stages from 0"
            )
        for what, names, pool in (
            ("input", stage.inputs, known),
            ("parameter", stage.params, program.params.keys()),
            ("device", stage.devices, program.bindings.keys()),
        ):
            if missing := [n for n in names if n not in pool]:
                raise BadGraph(
                    f"stage {stage.name!r} uses {what} {missing[0]!r}, which nothing before it provides",
                    f"known: {', '.join(sorted(pool)[:8]) or 'none'}",
                )
        if not stage.devices:
            raise BadGraph(f"stage {stage.name!r} has no device", "give it at least one")
        known.update(stage.outputs)
    if missing := [v for v in sorted(known) if v not in program.values]:
        raise BadGraph(f"value {missing[0]!r} has no ValueSpec", "add its shape and dtype to values")
    if missing := [s.renewed for s in program.states if s.renewed not in known and s.renewed not in program.params]:
        raise BadGraph(f"a state becomes {missing[0]!r}, which nothing provides", "name a value of the program")
    if missing := [v for v in program.outputs if v not in known and v not in program.params]:
        raise BadGraph(f"output {missing[0]!r} is neither a program input, a parameter nor made by a stage", "drop it")
