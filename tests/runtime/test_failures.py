"""What goes wrong is named, and leaves nothing behind: no process, no descriptor, no shared memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.runtime.programs import SHAPE, full, skip_answer, specs, two_cpus
from tvmhet.errors import NotSupported, WorkerFailed
from tvmhet.runtime import DeviceBinding, HetRuntime, PipelineProgram, StageProgram, ValueSpec

CompileStage = Callable[[str, tvm.IRModule], Path]
ROOT = Path(__file__).resolve().parents[2]


def pids(runtime: HetRuntime) -> list[int]:
    return [worker.pid for worker in runtime._engine._fleet.workers]  # type: ignore[attr-defined,union-attr]


def is_running(pid: int) -> bool:
    """Whether a process is there and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(running: list[int], timeout_s: float = 10.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while any(map(is_running, running)) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert not any(map(is_running, running))


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Check that a test leaves the descriptors and /dev/shm as they were."""

    def holdings() -> tuple[int, list[str]]:
        return len(os.listdir("/proc/self/fd")), sorted(os.listdir("/dev/shm"))

    before = holdings()
    yield
    assert holdings() == before


def test_close_leaves_nothing(skip_program: PipelineProgram, nothing_left: None) -> None:
    with HetRuntime(skip_program) as runtime:
        running = pids(runtime)
        assert all(map(is_running, running))
        runtime(full(1))
    assert not any(map(is_running, running))


def _asserting_stage() -> tvm.IRModule:
    """main(x, ok) = (x + 1,), which raises unless `ok` is true."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(SHAPE, "float32"))
    ok = relax.Var("ok", relax.TensorType((), "bool"))
    with builder.function("main", [x, ok], {"relax.force_pure": True}):
        builder.emit(relax.op.assert_op(ok, format="the stage refuses its input"))
        out = builder.emit(relax.Tuple([builder.emit(relax.op.add(x, relax.const(1.0)))]))
        builder.emit_func_output(out)
    return builder.finalize()


@pytest.fixture(scope="module")
def asserting_program(compile_stage: CompileStage, add_scale: Callable[..., Path]) -> PipelineProgram:
    """x, ok -> picky -> h -> s1 -> y; picky raises unless ok."""
    library = compile_stage("asserting", _asserting_stage())
    stages = (
        StageProgram(0, "picky", library, ("x", "ok"), ("h",), ("cpu0",)),
        StageProgram(1, "s1", add_scale(2), ("h", "x"), ("y",), ("cpu1",), ("w",)),
    )
    values = specs("x", "h", "y") | {"ok": ValueSpec.of("ok", (), "bool")}
    return PipelineProgram(values, ("x", "ok"), ("y",), stages, {"w": full(0)}, two_cpus(), structure="single")


def test_a_stage_that_raises_fails_its_input_only(asserting_program: PipelineProgram, nothing_left: None) -> None:
    yes, no = np.array(True), np.array(False)
    with HetRuntime(asserting_program) as runtime:
        np.testing.assert_array_equal(runtime(full(1), yes), full(3))
        with pytest.raises(WorkerFailed, match="the stage refuses its input") as caught:
            runtime(full(1), no)
        error = caught.value
        assert (error.device, error.stage, error.input_index) == ("cpu0", "picky", 1)
        assert "'picky'" in str(error) and "'cpu0'" in str(error) and "input 1" in str(error)
        got = []
        with pytest.raises(WorkerFailed, match="input 6"):
            got.extend(runtime.map((full(i), no if i in (4, 5) else yes) for i in range(20)))
        assert len(got) < 5
        for _ in range(50):  # failures and successes cross on their two ways to the parent in every order
            with pytest.raises(WorkerFailed, match="the stage refuses its input"):
                list(runtime.map((full(i), no if i % 3 == 2 else yes) for i in range(9)))
        for i, result in enumerate(runtime.map((full(i), yes) for i in range(20))):
            np.testing.assert_array_equal(result, full(2 * i + 1))


def test_a_failure_outlasts_a_success_that_comes_after_it(
    asserting_program: PipelineProgram, add_scale: Callable[..., Path], nothing_left: None
) -> None:
    """picky fails, then its neighbour on the same device succeeds; the stage that reads both must not run."""
    picky = asserting_program.stages[0]
    stages = (
        picky,
        StageProgram(1, "good", add_scale(1), ("x",), ("g",), ("cpu0",), ("w",)),
        StageProgram(2, "join", add_scale(2), ("h", "g"), ("y",), ("cpu1",), ("w",)),
    )
    program = replace(asserting_program, stages=stages, values=dict(asserting_program.values) | specs("g"))
    with HetRuntime(program) as runtime:
        for _ in range(5):
            with pytest.raises(WorkerFailed, match="the stage refuses its input"):
                runtime(full(1), np.array(False))
        np.testing.assert_array_equal(runtime(full(1), np.array(True)), full(3))


def test_a_worker_killed_while_idle(skip_program: PipelineProgram, nothing_left: None) -> None:
    runtime = HetRuntime(skip_program).start()
    running = pids(runtime)
    os.kill(running[1], signal.SIGKILL)
    with pytest.raises(WorkerFailed, match=r"'cpu1' failed between inputs: was killed by SIGKILL") as caught:
        for i in range(100):
            runtime(full(i))
    assert caught.value.device == "cpu1" and caught.value.stage is None
    assert not any(map(is_running, running))
    with pytest.raises(WorkerFailed, match="SIGKILL"):  # it stays closed, and says why
        runtime(full(1))
    with runtime:
        np.testing.assert_array_equal(runtime(full(1))[0], skip_answer(full(1))[0])


def test_a_signal_that_wakes_another_thread_is_heeded(skip_program: PipelineProgram, nothing_left: None) -> None:
    """Python runs a handler in the main thread, which waits for a worker that does not answer."""

    class Heeded(Exception):
        pass

    def heed(*_: object) -> None:
        raise Heeded

    runtime = HetRuntime(skip_program).start()
    silent = pids(runtime)[1]
    before = signal.signal(signal.SIGUSR1, heed)
    late = threading.Timer(20.0, os.kill, (silent, signal.SIGCONT))  # so that this ends without it, too
    soon = threading.Timer(0.2, signal.raise_signal, (signal.SIGUSR1,))  # in the timer's thread
    os.kill(silent, signal.SIGSTOP)
    try:
        late.start()
        soon.start()
        with pytest.raises(Heeded):
            runtime(full(1))
        assert late.is_alive()
    finally:
        soon.join()
        late.cancel()
        signal.signal(signal.SIGUSR1, before)
        os.kill(silent, signal.SIGCONT)
        runtime.close()


def _slow_stage() -> tvm.IRModule:
    """main(x) = (x @ x @ x,) at a size that takes about a second or more."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((768, 768), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            square = builder.emit(relax.op.matmul(x, x))
            out = builder.emit_output(relax.Tuple([builder.emit(relax.op.matmul(square, x))]))
        builder.emit_func_output(out)
    return builder.finalize()


def test_a_worker_killed_in_a_stage(compile_stage: CompileStage, nothing_left: None) -> None:
    values = {name: ValueSpec.of(name, (768, 768), "float32") for name in ("x", "y")}
    stage = StageProgram(0, "slow", compile_stage("slow", _slow_stage()), ("x",), ("y",), ("cpu1",))
    program = PipelineProgram(values, ("x",), ("y",), (stage,), {}, two_cpus(), structure="single")
    runtime = HetRuntime(program, max_in_flight=2).start()
    layout = runtime._engine._fleet.layout  # type: ignore[attr-defined,union-attr]
    memory = runtime._engine._fleet.memory  # type: ignore[attr-defined,union-attr]
    (pid,) = pids(runtime)

    def kill_in_stage(busy: np.ndarray) -> None:
        while busy[1] != 0:
            time.sleep(0.001)
        os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_in_stage, args=(layout.busy(memory, 0),))
    killer.start()
    with pytest.raises(WorkerFailed, match="in stage 'slow' on input 0: was killed by SIGKILL") as caught:
        list(runtime.map([np.zeros((768, 768), "float32")] * 3))
    killer.join()
    del memory
    assert (caught.value.device, caught.value.stage, caught.value.input_index) == ("cpu1", "slow", 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"library": Path("missing.so")}, "missing.so"),
        ({"function": "no_such_function"}, "no_such_function"),
    ],
)
def test_a_stage_that_cannot_load(
    skip_program: PipelineProgram, changes: dict[str, object], message: str, nothing_left: None
) -> None:
    stages = (*skip_program.stages[:3], replace(skip_program.stages[3], **changes))  # type: ignore[arg-type]
    runtime = HetRuntime(replace(skip_program, stages=stages))
    for _ in range(2):
        with pytest.raises(WorkerFailed, match=f"(?s)'cpu1' failed while it loaded its stages.*{message}"):
            runtime(full(1))


def test_wrong_number_shape_or_dtype_of_outputs(
    skip_program: PipelineProgram, add_scale: Callable[..., Path], nothing_left: None
) -> None:
    for library, values, message in [
        (add_scale(2, 2), {}, "returned a tuple of 2, not a tuple of 1"),
        (add_scale(2, 1), {"y": ValueSpec.of("y", (8, 4), "float32")}, r"'y' is \(4, 8\) float32, not \(8, 4\)"),
        (add_scale(2, 1), {"y": ValueSpec.of("y", (4, 8), "int32")}, r"'y' is \(4, 8\) float32, not \(4, 8\) int32"),
    ]:
        stages = (*skip_program.stages[:3], replace(skip_program.stages[3], library=library))
        program = replace(skip_program, stages=stages, values=dict(skip_program.values) | values)
        with HetRuntime(program) as runtime, pytest.raises(WorkerFailed, match=message):
            runtime(full(1))


def test_a_start_that_takes_too_long(skip_program: PipelineProgram, nothing_left: None) -> None:
    with pytest.raises(WorkerFailed, match=r"workers of cpu0, cpu1 .* after 0.001 s"):
        HetRuntime(skip_program, start_timeout_s=0.001).start()


def test_a_host_without_the_instructions(
    skip_program: PipelineProgram, monkeypatch: pytest.MonkeyPatch, nothing_left: None
) -> None:
    bindings = {k: DeviceBinding(k, "llvm", "x86-64-v9", b.cores) for k, b in skip_program.bindings.items()}
    with pytest.raises(NotSupported, match="x86-64-v9"):
        HetRuntime(replace(skip_program, bindings=bindings)).start()


SCRIPT = """
import sys
from pathlib import Path
from tests.runtime.programs import full, specs, two_cpus
from tvmhet.runtime import HetRuntime, PipelineProgram, StageProgram

library = Path(sys.argv[1])
stages = tuple(StageProgram(k, f"s{k}", library, (f"v{k}",), (f"v{k + 1}",), (f"cpu{k}",), ("w",)) for k in range(2))
program = PipelineProgram(specs("v0", "v1", "v2"), ("v0",), ("v2",), stages, {"w": full(1)}, two_cpus())
runtime = HetRuntime(program).start()
runtime(full(1))
print(*(w.pid for w in runtime._engine._fleet.workers), flush=True)
"""

# The child may neither use the workers nor take them along when it exits.
FORK = """
import os
from tvmhet.errors import NotSupported
if os.fork() == 0:
    try:
        runtime(full(1))
    except NotSupported as error:
        sys.exit(7 if "forked" in str(error) else 8)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
runtime(full(1))
print("still there")
"""


def test_a_forked_child_stops_no_thread(add_scale: Callable[..., Path]) -> None:
    """A child that exits runs the finalizers it inherited; the pipes of the parent's GPU threads are open in it."""
    threads = "from tvmhet.runtime import fleet\nfleet.runs_in_thread = lambda binding: True\n"
    script = threads + SCRIPT.replace("print(", "0 and print(") + FORK
    done = subprocess.run(
        [sys.executable, "-c", script, str(add_scale())],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "still there\n"), done.stderr


@pytest.mark.parametrize("ending", ["returns", "raises", "is_killed", "forks"])
def test_workers_end_with_their_parent(ending: str, add_scale: Callable[..., Path], nothing_left: None) -> None:
    tail = {
        "returns": "",
        "raises": "raise SystemExit(3)",
        "is_killed": "import time; time.sleep(600)",
        "forks": FORK,
    }[ending]
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SCRIPT) + tail, str(add_scale())],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    with parent.stdout:
        running = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(running) == 2
        if ending == "is_killed":
            assert all(map(is_running, running))
            parent.kill()
        status = parent.wait(60)
        if ending == "forks":
            assert parent.stdout.read() == "still there\n"
    assert status == {"returns": 0, "raises": 3, "is_killed": -9, "forks": 0}[ending]
    wait_until_gone(running)
