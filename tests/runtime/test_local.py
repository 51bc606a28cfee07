"""Programs on real worker processes: right answers, in order, from pinned and limited workers."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import tvm

from tests.runtime.programs import full, skip_answer, specs, two_cpus
from tvmhet.errors import BadInput, NotSupported
from tvmhet.runtime import HetRuntime, PipelineProgram, StageProgram


@pytest.fixture(scope="module")
def runtime(skip_program: PipelineProgram) -> Iterator[HetRuntime]:
    with HetRuntime(skip_program) as runtime:
        yield runtime


def check(got: object, x: float) -> None:
    assert isinstance(got, tuple)
    for a, b in zip(got, skip_answer(full(x)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_one_call(runtime: HetRuntime) -> None:
    check(runtime(full(3)), 3)


def test_outputs_are_owned_copies(runtime: HetRuntime) -> None:
    first = runtime(full(1))
    assert not np.shares_memory(first[0], first[4])
    first[3][:] = -1  # an output that is a parameter
    for _ in range(20):
        runtime(full(2))
    check(runtime(full(1)), 1)
    np.testing.assert_array_equal(first[0], skip_answer(full(1))[0])


def test_two_hundred_inputs_in_order(runtime: HetRuntime) -> None:
    results = list(runtime.map(full(i) for i in range(200)))
    assert len(results) == 200
    for i, result in enumerate(results):
        check(result, i)


def test_map_takes_tuples_and_reads_no_further_than_in_flight(runtime: HetRuntime) -> None:
    num_read = itertools.count()
    read = -1

    def inputs() -> Iterator[tuple[np.ndarray]]:
        nonlocal read
        while True:
            read = next(num_read)
            yield (full(read),)

    stream = runtime.map(inputs(), max_in_flight=3)
    for i in range(10):
        check(next(stream), i)
        assert read <= i + 3
    stream.close()
    check(runtime(full(7)), 7)


def test_call_inside_a_map_and_an_abandoned_map(runtime: HetRuntime) -> None:
    stream = runtime.map(full(i) for i in range(50))
    for i, result in zip(range(10), stream, strict=False):
        check(result, i)
        check(runtime(full(100 + i)), 100 + i)
    del stream
    check(runtime(full(5)), 5)


def test_calls_from_several_threads(runtime: HetRuntime) -> None:
    wrong: list[int] = []

    def call(start: int) -> None:
        for i in range(start, start + 20):
            if not np.array_equal(runtime(full(i))[0], skip_answer(full(i))[0]):
                wrong.append(i)

    threads = [threading.Thread(target=call, args=(100 * k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not wrong


def test_torch_and_tvm_tensors(runtime: HetRuntime) -> None:
    got = runtime(torch.from_numpy(full(4)))
    assert all(isinstance(t, torch.Tensor) for t in got)
    check(tuple(t.numpy() for t in got), 4)
    check(runtime(tvm.runtime.tensor(full(4))), 4)


def test_bad_inputs_leave_it_usable(runtime: HetRuntime) -> None:
    for bad in [(), (full(1), full(2)), (np.zeros((4, 8)),), (np.zeros((8, 4), "float32"),)]:
        with pytest.raises(BadInput):
            runtime(*bad)
    with pytest.raises(BadInput, match="'x'"):
        list(runtime.map([full(1), np.zeros(3), full(2)]))
    check(runtime(full(9)), 9)


def test_benchmark(runtime: HetRuntime, skip_program: PipelineProgram) -> None:
    stats = runtime.benchmark((full(1),), num_inputs=30, warmup=4)
    assert len(stats.latency_s) == 30 and all(t > 0 for t in stats.latency_s)
    assert stats.throughput_per_s > 0
    assert [s.name for s in stats.stages] == ["a", "b", "c", "d"]
    for alone, streamed in zip(stats.stages, stats.stages_streamed, strict=True):
        assert alone.compute.num_runs == streamed.compute.num_runs == 30
        assert 0 < alone.compute.low_s <= alone.compute.median_s <= alone.compute.high_s
        assert alone.transfer.median_s > 0 and streamed.hop is None
    assert stats.stages[0].hop is None
    busy_s = sum(s.compute.median_s + s.transfer.median_s for s in stats.stages)
    assert busy_s < stats.latency.median_s
    # A hand-over takes tens of microseconds on an idle machine; this bound only catches a sleep or a poll interval.
    assert all(s.hop is not None and 0 < s.hop.low_s < 0.01 for s in stats.stages[1:])


def test_seconds_of_one_input(runtime: HetRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone after one that does not count; in a full pipeline after as many as fill it."""
    submit, submitted = runtime._engine.submit, []
    monkeypatch.setattr(runtime._engine, "submit", lambda *given: submitted.append(1) or submit(*given))
    assert 0 < runtime.latency_s((full(1),), 10) < 10
    assert len(submitted) == 1 + 10
    submitted.clear()
    assert 0 < runtime.period_s((full(1),), 20) < 10
    assert len(submitted) == runtime._engine.capacity + 20
    check(runtime(full(9)), 9)


def test_timeline_obeys_the_dataflow(runtime: HetRuntime, skip_program: PipelineProgram) -> None:
    timeline = runtime.benchmark((full(1),), num_inputs=25, warmup=3).timeline
    assert len(timeline) == 4 * 25
    assert len({run.input_index for run in timeline}) == 25
    of = {(run.stage, run.input_index): run for run in timeline}
    for run in timeline:
        assert run.start_s <= run.loaded_s <= run.computed_s <= run.end_s
        assert run.device == skip_program.stages[run.stage].device_of(run.input_index)
        for before in skip_program.predecessors(run.stage):
            assert of[before, run.input_index].end_s <= run.start_s
    for device in ("cpu0", "cpu1"):
        mine = sorted((r for r in timeline if r.device == device), key=lambda r: r.start_s)
        assert mine and all(a.end_s <= b.start_s for a, b in itertools.pairwise(mine))


def test_workers_keep_to_their_cores_and_limits(add_scale: Callable[..., Path]) -> None:
    bindings = two_cpus("x86-64-v2")
    stages = tuple(
        StageProgram(k, f"s{k}", add_scale(), (f"v{k}",), (f"v{k + 1}",), (f"cpu{k}",), ("w",)) for k in range(2)
    )
    program = PipelineProgram(
        specs("v0", "v1", "v2"), ("v0",), ("v2",), stages, {"w": full(1)}, bindings, structure="single"
    )
    with HetRuntime(program) as runtime:
        np.testing.assert_array_equal(runtime(full(1)), full(3))
        for worker in runtime._engine._fleet.workers:  # type: ignore[attr-defined,union-attr]
            process = Path(f"/proc/{worker.pid}")
            for task in (process / "task").iterdir():
                assert os.sched_getaffinity(int(task.name)) == set(worker.config.binding.cores)
            environment = (process / "environ").read_bytes().split(b"\0")
            assert {b"ONEDNN_MAX_CPU_ISA=SSE41", b"OMP_NUM_THREADS=1", b"TVM_NUM_THREADS=1"} <= set(environment)
            assert b"torch" not in (process / "maps").read_bytes()  # a worker without library kernels stays light


def test_start_after_close_begins_anew(skip_program: PipelineProgram) -> None:
    runtime = HetRuntime(skip_program, max_in_flight=1)
    check(runtime(full(1)), 1)  # the first call starts the workers
    assert [len(r) for r in runtime.map([full(1)] * 5)] == [5] * 5
    runtime.close()
    runtime.close()
    with pytest.raises(NotSupported, match="closed"):
        runtime(full(1))
    with runtime:
        check(runtime(full(2)), 2)


def test_a_program_without_stages(skip_program: PipelineProgram) -> None:
    program = PipelineProgram(specs("x"), ("x",), ("x", "w"), (), {"w": full(7)}, {})
    with HetRuntime(program) as runtime:
        for i, (x, w) in enumerate(runtime.map(full(i) for i in range(5))):
            np.testing.assert_array_equal(x, full(i))
            np.testing.assert_array_equal(w, full(7))


def test_max_in_flight_must_be_positive(skip_program: PipelineProgram) -> None:
    with pytest.raises(BadInput, match="max_in_flight is 0"):
        HetRuntime(skip_program, max_in_flight=0)
