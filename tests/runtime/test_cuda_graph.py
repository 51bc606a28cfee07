"""Graphs of stages, by a CUDA runtime that only notes its calls; on a GPU tests/runtime/test_gpu.py captures one."""

import threading
from contextlib import contextmanager

import numpy as np
import pytest

from tests import emulated_cuda
from tests.runtime.programs import add_scale_module, full
from tvmhet.emit.lower import lower_stage
from tvmhet.runtime import DeviceBinding, StageProgram, cuda_graph, cuda_times, executor, vm
from tvmhet.runtime.cuda_graph import CudaGraph, capture
from tvmhet.runtime.executor import StageExecutor

STREAM, GRAPH, HANDLE = 11, 22, 33
_MADE = {"cudaStreamCreateWithFlags": STREAM, "cudaStreamEndCapture": GRAPH, "cudaGraphInstantiate": HANDLE}


class NotedCuda:
    """Notes calls with their plain arguments; what makes something gives it a number; `fails` names calls that fail."""

    def __init__(self, fails=()):
        self.calls, self.fails = [], set(fails)
        self.milliseconds = 0.5  # of every pair of events

    def __getattr__(self, name):
        def call(*args):
            self.calls.append((name, *(getattr(a, "value", a) for a in args if not hasattr(a, "_obj"))))
            if name in self.fails:
                return 2
            for made in (a._obj for a in args if hasattr(a, "_obj")):
                made.value = self.milliseconds if name == "cudaEventElapsedTime" else _MADE.get(name, 1)
            return 0

        return call

    def cudaGetErrorString(self, status):
        return b"out of luck"

    def named(self, name):
        return [call for call in self.calls if call[0] == name]


@pytest.fixture
def cuda(monkeypatch):
    noted = NotedCuda()

    @contextmanager
    def on(ordinal, stream):
        noted.calls.append(("TVM on", stream.value))
        try:
            yield
        finally:
            noted.calls.append(("TVM on", 0))

    for module in (cuda_graph, cuda_times):
        monkeypatch.setattr(module, "runtime_library", lambda: noted)
    monkeypatch.setattr(cuda_graph, "_tvm_on", on)
    return noted


def run_of(cuda, results):
    """A run that is noted, and returns the next of some results or raises it."""
    left = iter(results)

    def run(*_):
        cuda.calls.append(("run",))
        result = next(left)
        if isinstance(result, Exception):
            raise result
        return result

    return run


def test_a_run_goes_before_the_captured_one_and_a_launch_goes_to_its_gpu(cuda):
    graph = CudaGraph.of(run_of(cuda, ["first", "captured"]), 3, with_torch=False)
    assert [c[0] for c in cuda.calls] == [
        "cudaSetDevice", "cudaStreamCreateWithFlags", "TVM on", "run", "cudaStreamSynchronize",
        "cudaStreamBeginCapture", "run", "cudaStreamEndCapture", "TVM on", "cudaGraphInstantiate", "cudaGraphDestroy",
        "cudaStreamDestroy",
    ]  # fmt: skip
    assert cuda.named("TVM on") == [("TVM on", STREAM), ("TVM on", 0)]
    cuda.calls.clear()
    other = threading.Thread(target=graph.launch)
    other.start()
    other.join()
    assert graph.launch() == "captured"
    assert cuda.named("cudaSetDevice") == [("cudaSetDevice", 3)] * 2
    assert cuda.named("cudaGraphLaunch") == [("cudaGraphLaunch", HANDLE, None)] * 2
    del graph
    assert cuda.named("cudaGraphExecDestroy") == [("cudaGraphExecDestroy", HANDLE)]


@pytest.mark.parametrize("results", [[ValueError("bad index")], ["first", RuntimeError("not while capturing")]])
def test_a_run_that_raises_is_not_captured_and_leaves_nothing(cuda, results):
    assert capture((run_of(cuda, results), lambda: "storages"), (), 0, with_torch=False) is None
    names = [c[0] for c in cuda.calls]
    assert names.count("cudaStreamBeginCapture") == names.count("cudaStreamEndCapture") == len(results) - 1
    assert cuda.named("TVM on")[-1] == ("TVM on", 0) and cuda.named("cudaStreamDestroy") == [
        ("cudaStreamDestroy", STREAM)
    ]


@pytest.mark.parametrize("call", ["cudaStreamBeginCapture", "cudaStreamEndCapture", "cudaGraphInstantiate"])
def test_what_cuda_refuses_is_not_captured_and_leaves_nothing(cuda, call):
    cuda.fails.add(call)
    with pytest.raises(RuntimeError, match="CUDA: out of luck"):
        CudaGraph.of(lambda: None, 0, with_torch=False)
    assert cuda.named("cudaStreamDestroy") and not cuda.named("cudaGraphExecDestroy")


def test_a_stage_takes_its_storages_with_its_arguments(cuda):
    taken = []
    graph = capture((lambda *args: taken.append(args), lambda: "storages"), ("x", "w"), 0, with_torch=False)
    assert graph is not None and taken == [("x", "w", "storages")] * 2


def test_short_runs_are_timed_many_at_a_time(cuda):
    cuda.milliseconds = 0.01  # of a launch of one: 30 of them make 0.3 ms
    counted = []

    def run():
        counted.append(1)

    times, note = cuda_times.run_times(run, 0, False, repeats=4, budget_s=60)
    assert (times, note) == ([pytest.approx(0.01e-3 / 30)] * 4, "")
    assert len(counted) == 1 + (1 + 1) + (1 + 30)  # alone; a graph of one; a graph of thirty


def test_what_cannot_be_captured_is_timed_with_its_launches_and_said(cuda):
    cuda.fails.add("cudaStreamBeginCapture")
    times, note = cuda_times.run_times(lambda: None, 0, False, repeats=3, budget_s=60)
    assert times == [pytest.approx(0.5e-3)] * 3 and "launches are counted" in note and "out of luck" in note


@pytest.fixture
def stage(tmp_path):
    """An emulated stage y = x + w, loaded."""
    emulated_cuda.install()
    library = tmp_path / "cuda.so"
    lower_stage(add_scale_module(1, 1, "float32"), emulated_cuda.A100)[0].export_library(str(library))
    program = StageProgram(0, "a", library, ("x",), ("y",), ("gpu0",), ("w",))
    return StageExecutor(program, DeviceBinding("gpu0", "cuda", ordinal=0), {"w": full(1)})


class Relaunched:
    """Stands for a graph of an emulated stage: each launch runs it again."""

    def __init__(self, functions, arguments):
        self.steady, self.arguments, self.kept, self.launches = functions[0], arguments, functions[1](), 0

    def launch(self):
        self.launches += 1
        return self.steady(*self.arguments, self.kept)


def host(tensor):
    out = np.zeros(tuple(tensor.shape), str(tensor.dtype))
    vm.copy(tensor, vm.host_view(out))
    return out


def test_a_stage_is_captured_once_and_launched_from_then_on(stage, monkeypatch):
    made = []

    def captured(functions, arguments, ordinal, with_torch):
        made.append(Relaunched(functions, arguments))
        return made[-1]

    monkeypatch.setattr(executor, "capture", captured)
    monkeypatch.setattr(stage, "_function", None)  # `main` is not called
    for i in range(3):
        np.testing.assert_array_equal(host(stage.call((vm.host_view(full(i)),))[0]), full(i + 1))
    assert [g.launches for g in made] == [3]


def test_a_first_input_that_fails_does_not_keep_the_next_from_being_captured(stage, monkeypatch):
    tried = []

    def captured(functions, arguments, ordinal, with_torch):
        tried.append(1)
        return None if len(tried) == 1 else Relaunched(functions, arguments)

    def fails(*_):
        raise RuntimeError("bad index")

    monkeypatch.setattr(executor, "capture", captured)
    monkeypatch.setattr(stage, "_function", fails)
    with pytest.raises(RuntimeError, match="bad index"):
        stage.call((vm.host_view(full(0)),))
    for i in range(2):
        np.testing.assert_array_equal(host(stage.call((vm.host_view(full(i)),))[0]), full(i + 1))
    assert len(tried) == 2


def test_a_stage_that_cannot_be_captured_runs_kernel_by_kernel(stage, monkeypatch):
    tried = []
    monkeypatch.setattr(executor, "capture", lambda *_: tried.append(1))
    for i in range(3):
        np.testing.assert_array_equal(host(stage.call((vm.host_view(full(i)),))[0]), full(i + 1))
    assert len(tried) == 1
