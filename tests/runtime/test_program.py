"""A program that contradicts itself is refused when it is made, with the name of what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.runtime.programs import full, specs, two_cpus
from tvmhet.errors import BadGraph, NotSupported
from tvmhet.results import Parts
from tvmhet.runtime import DeviceBinding, PipelineProgram, StageProgram, ValueSpec
from tvmhet.runtime.fleet import max_num_frames, needs_source, num_tokens, sinks
from tvmhet.runtime.messages import MAX_TOKENS_IN_PIPE
from tvmhet.runtime.program import numpy_dtype


@pytest.mark.parametrize(
    ("name", "size_bytes"),
    [("float32", 4), ("float16", 2), ("bfloat16", 2), ("int64", 8), ("bool", 1), ("float8_e4m3fn", 1)],
)
def test_value_spec_counts_bytes(name: str, size_bytes: int) -> None:
    assert ValueSpec.of("x", (3, 5), name).size_bytes == 15 * size_bytes
    assert ValueSpec.of("scalar", (), name).size_bytes == size_bytes
    assert ValueSpec.of("none", (0, 5), name).size_bytes == 0
    assert numpy_dtype(name).name == name


def test_value_spec_refuses_a_wrong_size_and_an_unknown_dtype() -> None:
    with pytest.raises(BadGraph, match=r"'x'.*61 bytes.*takes 60"):
        ValueSpec("x", (3, 5), "float32", 61)
    for dtype in ("int4", "float8_nonsense", "float4_e2m1fn"):
        with pytest.raises(NotSupported, match=dtype):
            ValueSpec("x", (3,), dtype, 3)


def test_binding_refuses_other_kinds() -> None:
    with pytest.raises(NotSupported, match="'rocm'"):
        DeviceBinding("gpu", "rocm")  # type: ignore[arg-type]


@pytest.fixture
def chain() -> PipelineProgram:
    """x -> s0 -> h -> s1 -> y, and z = s2(x); no library is ever loaded."""
    stages = (
        StageProgram(0, "s0", Path("a.so"), ("x",), ("h",), ("cpu0",), ("w",)),
        StageProgram(1, "s1", Path("a.so"), ("h",), ("y",), ("cpu1", "cpu0")),
        StageProgram(2, "s2", Path("a.so"), ("x", "h"), ("z",), ("cpu0",)),
    )
    return PipelineProgram(specs("x", "h", "y", "z"), ("x",), ("y", "z"), stages, {"w": full(1)}, two_cpus())


def test_dataflow(chain: PipelineProgram) -> None:
    assert [chain.producer(v) for v in "xhyz"] == [None, 0, 1, 2]
    assert [chain.predecessors(s) for s in range(3)] == [(), (0,), (0,)]
    assert [chain.successors(s) for s in range(3)] == [(1, 2), (), ()]
    assert [needs_source(chain, s) for s in range(3)] == [True, False, True]
    assert [num_tokens(chain, s) for s in range(3)] == [1, 1, 2]
    assert sinks(chain) == (1, 2)
    assert [chain.stages[1].device_of(i) for i in range(3)] == ["cpu1", "cpu0", "cpu1"]


def test_frames_never_fill_a_pipe(chain: PipelineProgram) -> None:
    tokens_per_input = sum(num_tokens(chain, s.index) for s in chain.stages)
    assert max_num_frames(chain) * tokens_per_input <= MAX_TOKENS_IN_PIPE


Change = Callable[[PipelineProgram], PipelineProgram]


def _stages(program: PipelineProgram, index: int, **changes: object) -> tuple[StageProgram, ...]:
    return tuple(replace(s, **changes) if s.index == index else s for s in program.stages)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: replace(p, structure="single"), "one output, not 2"),
        (
            lambda p: replace(p, structure=Parts("tuple", (None, Parts("list", (None, None))))),
            "of 2 outputs returns 3 tensors",
        ),
        (lambda p: replace(p, params={"w": full(1), "h": full(1)}), "'h' names a parameter and also"),
        (lambda p: replace(p, inputs=("x", "x")), "input name repeats"),
        (lambda p: replace(p, outputs=("nothing",)), "output 'nothing'"),
        (lambda p: replace(p, stages=p.stages[::-1]), "has index 2"),
        (lambda p: replace(p, stages=_stages(p, 0, inputs=("y",))), "stage 's0' uses input 'y'"),
        (lambda p: replace(p, stages=_stages(p, 0, params=("v",))), "parameter 'v'"),
        (lambda p: replace(p, stages=_stages(p, 1, devices=("gpu",))), "device 'gpu'"),
        (lambda p: replace(p, stages=_stages(p, 1, devices=())), "'s1' has no device"),
        (lambda p: replace(p, stages=_stages(p, 1, outputs=("h",))), "'h' is made twice"),
        (lambda p: replace(p, stages=_stages(p, 1, outputs=("q",)), outputs=("z",)), "'q' has no ValueSpec"),
    ],
)
def test_contradictions_are_refused(chain: PipelineProgram, change: Change, message: str) -> None:
    with pytest.raises(BadGraph, match=message):
        change(chain)
