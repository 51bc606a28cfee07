"""A run that goes no further ends, and says where each worker was."""

from __future__ import annotations

import os
import signal
import socket
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import tvm
from tvm import relax

import tvmhet
from tests.placed import cpus
from tests.runtime.programs import full, skip_answer, two_cpus
from tests.runtime.test_failures import CompileStage, pids, wait_until_gone
from tests.runtime.test_training import build, kept, regression
from tvmhet.errors import BadInput, NotSupported, WorkerFailed
from tvmhet.runtime import HetRuntime, PipelineProgram, StageProgram, ValueSpec
from tvmhet.runtime.crew import HEED_S
from tvmhet.runtime.processes import WorkerThread
from tvmhet.runtime.stalls import DEFAULT_LIMIT_S, StallClock


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


def looks(*steps):
    """What a clock says after looks, each so many seconds after the one before."""
    now = Clock()
    clock = StallClock(now)
    said = []
    for seconds, doing in steps:
        now.now_s += seconds
        said.append(clock.look(lambda doing=doing: doing))
    return said


def test_what_stays_the_same_is_counted_from_its_second_look():
    assert looks((HEED_S, b"a"), (HEED_S, b"a"), (HEED_S, b"a")) == [0.0, HEED_S, 2 * HEED_S]
    assert looks((HEED_S, b"a"), (HEED_S, b"a"), (HEED_S, b"b"), (HEED_S, b"b")) == [0.0, HEED_S, 0.0, HEED_S]


def test_a_pause_of_this_process_is_no_stall():
    assert looks((1.0, b"a"), (3600.0, b"a"), (HEED_S, b"a")) == [0.0, 2 * HEED_S, 3 * HEED_S]


def test_it_looks_at_most_twice_in_the_longest_wait():
    now, seen = Clock(), []
    clock = StallClock(now)
    for _ in range(100):
        now.now_s += HEED_S / 10
        clock.look(lambda: seen.append(now.now_s) or b"a")
    assert 15 <= len(seen) <= 20


def test_progress_begins_anew():
    now = Clock()
    clock = StallClock(now)
    for _ in range(3):
        now.now_s += HEED_S
        clock.look(lambda: b"a")
    clock.progress()
    now.now_s += HEED_S
    assert clock.look(lambda: b"a") == HEED_S


def test_workers_that_do_not_answer(skip_program: PipelineProgram) -> None:
    """One is stopped, the other waits for it: nobody is in a stage, and the system says how the first is."""
    runtime = HetRuntime(skip_program).start()
    assert runtime.stall_limit_s == DEFAULT_LIMIT_S
    runtime.stall_limit_s = 1.0
    running = pids(runtime)
    os.kill(running[1], signal.SIGSTOP)
    errors = []

    def call():
        with pytest.raises(WorkerFailed) as caught:
            runtime(full(1))
        errors.append(caught.value)

    others = [threading.Thread(target=call) for _ in range(2)]
    for other in others:
        other.start()
    call()
    for other in others:
        other.join()
    assert len({str(e) for e in errors}) == 1  # whoever waits learns of it
    said = str(errors[0])
    assert "no stage has ended for 1 s with 3 inputs in flight: device 'cpu0' waits; device 'cpu1' waits" in said
    assert f"cpu1:\nno answer from process {running[1]} in state T" in said and "read_tokens" in said
    assert errors[0].device is None and errors[0].stage is None
    wait_until_gone(running)
    with pytest.raises(WorkerFailed, match="no stage has ended"):
        runtime(full(1))
    with runtime:
        np.testing.assert_array_equal(runtime(full(1))[0], skip_answer(full(1))[0])
        assert runtime.stall_limit_s == 1.0


def _endless_stage() -> tvm.IRModule:
    """main(x) = (x @ x,) at a size that takes minutes as it is compiled here."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((6144, 6144), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            out = builder.emit_output(relax.Tuple([builder.emit(relax.op.matmul(x, x))]))
        builder.emit_func_output(out)
    return builder.finalize()


def test_a_stage_that_does_not_end(compile_stage: CompileStage) -> None:
    values = {name: ValueSpec.of(name, (6144, 6144), "float32") for name in ("x", "y")}
    stage = StageProgram(0, "endless", compile_stage("endless", _endless_stage()), ("x",), ("y",), ("cpu1",))
    program = PipelineProgram(values, ("x",), ("y",), (stage,), {}, two_cpus(), structure="single")
    runtime = HetRuntime(program, max_in_flight=1).start()
    running = pids(runtime)
    runtime.stall_limit_s = 1.0
    with pytest.raises(WorkerFailed, match="device 'cpu1' is in stage 'endless' on input 0") as caught:
        runtime(np.zeros((6144, 6144), "float32"))
    error = caught.value
    assert (error.device, error.stage, error.input_index) == ("cpu1", "endless", 0)
    assert "most recent call first" in error.text and "executor.py" in error.text  # the worker's own stack
    wait_until_gone(running)


def test_a_training_step_that_does_not_end():
    trained, good = regression()
    with build(trained) as trainer:
        trainer.train_step(good)
        assert trainer.stall_limit_s == DEFAULT_LIMIT_S
        trainer.stall_limit_s = 1.0
        before = kept(trainer)
        first, second = trainer._engine._fleet.workers
        os.kill(second.pid, signal.SIGSTOP)
        with pytest.raises(WorkerFailed, match="step 2: no pass has ended for 1 s") as caught:
            trainer.train_step(good)
        said = str(caught.value)
        devices = [w.config.binding.device_id for w in (first, second)]
        assert f"device {devices[0]!r} waits before the backward pass of stage 0, micro-batch 0" in said
        assert f"device {devices[1]!r} waits before the forward pass of stage 1, micro-batch 0" in said
        assert f"no answer from process {second.pid} in state T" in said and "training_mail.py" in said
        wait_until_gone([first.pid, second.pid])
        assert all(np.array_equal(v, before[n]) for n, v in kept(trainer).items()) and trainer.steps_done == 1
        trainer.train_step(good)  # with new workers


def test_a_device_that_is_a_thread_says_where_it_is():
    begun, release = threading.Event(), threading.Event()

    def hang(config: object, control: socket.socket) -> None:
        begun.set()
        release.wait()

    worker = WorkerThread(SimpleNamespace(binding=SimpleNamespace(device_id="gpu0")), hang)
    begun.wait()
    assert "release.wait()" in worker.stack()
    release.set()
    worker.join(5.0)
    assert worker.stack() == "ended its thread"


@pytest.mark.parametrize("limit", [0, -1.0, float("nan"), float("inf"), "10", True])
def test_what_is_no_limit_is_refused(limit: object, skip_program: PipelineProgram) -> None:
    runtime = HetRuntime(skip_program)
    with pytest.raises(BadInput, match="stall_limit_s is"):
        runtime.stall_limit_s = limit  # type: ignore[assignment]
    runtime.stall_limit_s = None
    assert runtime.stall_limit_s is None


def test_what_runs_in_this_process_has_none():
    model = tvmhet.from_torch(torch.nn.Linear(4, 4).eval(), (torch.randn(2, 4),))
    lib = tvmhet.build(model, cluster=cpus(v3=1), inline=True)
    assert lib.stall_limit_s is None
    with pytest.raises(NotSupported, match="stall_limit_s is 5, and the model runs in this process"):
        lib.stall_limit_s = 5
    lib.stall_limit_s = None
    lib.close()


def test_a_built_model_hands_its_limit_on():
    model = tvmhet.from_torch(torch.nn.Linear(4, 4).eval(), (torch.randn(2, 4),))
    with tvmhet.build(model, cluster=cpus(v3=1)) as lib:
        lib.stall_limit_s = 7
        assert lib._runtime._engine.stall_limit_s == 7
