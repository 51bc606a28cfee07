"""Generated kernels on torch's threads: the same results and errors, and no threads of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import tvm
from tvm import relax
from tvm.script import tirx as T

from tvmhet.cost.measure import ArgSpec, KernelJob, KernelTimer
from tvmhet.runtime import DeviceBinding, host_cores
from tvmhet.runtime.cores import worker_environment

pytestmark = pytest.mark.skipif(len(host_cores()) < 2, reason="this process may use one core; threads need two")


@T.prim_func
def _double(x: T.Buffer((64, 1024), "float32"), limit: T.Buffer((1,), "float32"), y: T.Buffer((64, 1024), "float32")):
    for i in T.parallel(64):
        assert x[i, 0] < limit[0], "too large"
        for j in range(1024):
            y[i, j] = x[i, j] * T.float32(2)


@T.prim_func
def _turned(x: T.Buffer((64, 1024), "float32"), y: T.Buffer((64, 1024), "float32"), z: T.Buffer((64, 1024), "float32")):
    """The second loop reads what another thread wrote in the first."""
    with T.attr(0, "pragma_parallel_launch_point", 1):
        with T.attr(0, "pragma_parallel_barrier_when_finish", 1):
            for i in T.parallel(64):
                for j in range(1024):
                    y[i, j] = x[i, j] * T.float32(2)
        for i in T.parallel(64):
            for j in range(1024):
                z[i, j] = y[63 - i, j] + T.float32(1)


@T.prim_func
def _negated(x: T.Buffer((64, 1024), "float32"), y: T.Buffer((64, 1024), "float32")):
    T.func_attr({"tirx.noalias": True})
    for i in T.parallel(64):
        for j in range(1024):
            y[i, j] = -x[i, j]


COUNTING = """
import os, torch, tvm_ffi

seen = []

@tvm_ffi.register_global_func("test.before")
def before(x, out):
    torch.ones(4096, 4096).relu_()
    seen.append(len(os.listdir("/proc/self/task")))

@tvm_ffi.register_global_func("test.after")
def after(x, out):
    raise ValueError(f"started {len(os.listdir('/proc/self/task')) - seen[-1]}")
"""

_BEGIN = """
import os
import numpy as np, torch, tvm
from tvmhet._passes import passes_func
from tvmhet._threads import share_threads

def tensor(array):
    return tvm.runtime.tensor(np.asarray(array, "float32"))

def threads():
    return len(os.listdir("/proc/self/task"))

torch.ones(4096, 4096).relu_()  # torch's threads are there
x, y = np.arange(64 * 1024).reshape(64, 1024), tensor(np.zeros((64, 1024)))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels, compiled."""
    path = tmp_path_factory.mktemp("threads") / "kernels.so"
    functions = {"double": _double, "turned": _turned}
    module = tvm.IRModule({name: f.with_attr("global_symbol", name) for name, f in functions.items()})
    tvm.compile(module, target="llvm").export_library(str(path))
    return path


def _run(code: str, library: Path) -> str:
    load = f'\ndef kernel(name="double"):\n    return tvm.runtime.load_module("{library}")[name]\n'
    command = [sys.executable, "-c", _BEGIN + load + textwrap.dedent(code)]
    environment = worker_environment(DeviceBinding("a", "llvm", cores=(0, 1)), os.environ)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("shared", [True, False])
def test_parallel_loops_start_no_threads(shared: bool, library: Path) -> None:
    """Without sharing TVM starts its own: the count tells the two apart."""
    code = f"""
    if {shared}:
        share_threads(2)
    function, before = kernel(), threads()
    for _ in range(100):
        function(tensor(x), tensor([1e9]), y)
    assert (y.numpy() == x * 2).all()
    print(threads() - before)
    """
    assert (int(_run(code, library)) == 0) is shared


@pytest.mark.parametrize("limit", [64 * 1024 - 1024, 0])
def test_errors_of_shares_reach_the_caller(limit: int, library: Path) -> None:
    """Of the last step alone, in another thread than the caller's (TVM's own pool loses it), and of all steps.

    Afterwards the kernel runs.
    """
    code = f"""
    share_threads(2)
    function = kernel()
    for _ in range(20):
        try:
            function(tensor(x), tensor([{limit}]), y)
        except RuntimeError as error:
            print(str(error).splitlines()[-1])
    function(tensor(x), tensor([1e9]), y)
    assert (y.numpy() == x * 2).all()
    """
    lines = _run(code, library).splitlines()
    assert len(lines) == 20 and all("too large" in line for line in lines), lines


def test_threads_wait_for_each_other_where_a_kernel_says_so(library: Path) -> None:
    code = """
    share_threads(2)
    function, z = kernel("turned"), tensor(np.zeros((64, 1024)))
    for k in range(300):
        function(tensor(x + k), y, z)
        assert (z.numpy() == 2 * (x[::-1] + k) + 1).all(), k
    """
    _run(code, library)


def test_a_worker_with_library_kernels_has_one_team(library: Path) -> None:
    """The worker of a plan, from its own entry on."""
    code = """
    import socket
    from types import SimpleNamespace
    from tvmhet.runtime import DeviceBinding
    from tvmhet.runtime.messages import send_object
    from tvmhet.runtime.worker import main

    def run(config, control):
        function, before = kernel(), threads()
        function(tensor(x), tensor([1e9]), y)
        print(threads() - before, flush=True)

    parent, child = socket.socketpair()
    cores = tuple(sorted(os.sched_getaffinity(0)))[:2]
    send_object(parent, SimpleNamespace(binding=DeviceBinding("a", "llvm", cores=cores), needs_library=True))
    main(child.detach(), run)
    """
    assert _run(code, library) == "0\n"


def test_a_timer_of_both_makers_has_one_team(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are timed as they run: the second function tells how many threads the loop between them has started."""
    (tmp_path / "counting.py").write_text(COUNTING)
    monkeypatch.syspath_prepend(tmp_path)
    tensor = relax.TensorType((64, 1024), "float32")
    builder, x = relax.BlockBuilder(), relax.Var("x", tensor)
    loop = builder.add_func(_negated.with_attr("global_symbol", "loop"), "loop")
    with builder.function("main", [x]):
        begun = builder.emit(relax.call_dps_packed("test.before", [x], out_ty=tensor))
        looped = builder.emit(relax.call_tir(loop, [begun], tensor))
        builder.emit_func_output(builder.emit(relax.call_dps_packed("test.after", [looped], out_ty=tensor)))
    tvm.compile(builder.get(), target="llvm").export_library(str(tmp_path / "loop.so"))
    binding = DeviceBinding("a", "llvm", cores=tuple(cpus[0] for cpus in host_cores()[:2]))
    job = KernelJob(tmp_path / "loop.so", (ArgSpec((64, 1024), "float32"),))
    with KernelTimer(binding.cores, worker_environment(binding, {}), ("counting",)) as timer:
        assert "started 0" in timer.measure(job).note


def test_without_openmp_tvms_threads_stay(library: Path) -> None:
    code = """
    use = passes_func("tvmhet.UseOpenMpThreads")
    assert not use("libm.so.6", 2)
    function, before = kernel(), threads()
    function(tensor(x), tensor([1e9]), y)
    assert (y.numpy() == x * 2).all()
    print(threads() - before, share_threads(2))
    try:
        use("/no/such/library.so", 2)
    except RuntimeError as error:
        print(str(error))
    """
    assert _run(code, library).splitlines() == ["1 True", "/no/such/library.so is not loaded"]
