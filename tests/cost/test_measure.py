"""cost/measure: real kernels timed in a child process, and kernels that crash, hang, lie or take too much."""

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import tvm
from tvm.script import ir as I
from tvm.script import relax as R

from tvmhet.cost.measure import ArgSpec, KernelJob, KernelTimer, Measurement, TimerLimits, Together
from tvmhet.emit.build import compile_to
from tvmhet.errors import BadInput, MeasurementFailed

BAD_KERNELS = """
import os, signal, time
import tvm_ffi

@tvm_ffi.register_global_func("test.segfault")
def segfault(x, out):
    os.kill(os.getpid(), signal.SIGSEGV)

@tvm_ffi.register_global_func("test.sleep")
def sleep(x, out):
    time.sleep(60)

@tvm_ffi.register_global_func("test.doze")
def doze(x, out):
    time.sleep(0.01)

@tvm_ffi.register_global_func("test.raise")
def complain(x, out):
    raise ValueError("cannot do this")
"""


@I.ir_module
class Double:
    @R.function
    def main(x: R.Tensor((64, 64), "float32")):
        with R.dataflow():
            y = R.add(x, x)
            R.output(y)
        return y


@I.ir_module
class DoubleAsProduct:
    @R.function
    def main(x: R.Tensor((64, 64), "float32")):
        with R.dataflow():
            y = R.multiply(x, R.const(2.0, "float32"))
            R.output(y)
        return y


@I.ir_module
class Square:
    @R.function
    def main(x: R.Tensor((64, 64), "float32")):
        with R.dataflow():
            y = R.multiply(x, x)
            R.output(y)
        return y


@I.ir_module
class Take:
    @R.function
    def main(x: R.Tensor((1000, 8), "float32"), i: R.Tensor((64,), "int64")):
        with R.dataflow():
            y = R.take(x, i, axis=0)
            R.output(y)
        return y


@I.ir_module
class Huge:
    @R.function
    def main(x: R.Tensor((1,), "float32")):
        with R.dataflow():
            y = R.add(R.broadcast_to(x, (1 << 30,)), x)
            R.output(y)
        return y


@I.ir_module
class Matmul:
    @R.function
    def main(x: R.Tensor((256, 256), "float32"), w: R.Tensor((256, 256), "float32")):
        with R.dataflow():
            y = R.matmul(x, w)
            R.output(y)
        return y


@I.ir_module
class ThreeProducts:
    """Two of them lie in memory at once, side by side in one storage."""

    @R.function
    def main(x: R.Tensor((64, 64), "float32")):
        with R.dataflow():
            y = R.matmul(x, x)
            z = R.matmul(x, y)
            out = R.matmul(y, z)
            R.output(out)
        return out


@I.ir_module
class ProductTurned:
    @R.function
    def main(x: R.Tensor((256, 256), "float32"), w: R.Tensor((256, 256), "float32")):
        with R.dataflow():
            y = R.matmul(x, w)
            z = R.permute_dims(y)
            R.output(z)
        return z


def packed(name):
    """Return a module that calls the packed function `name` on one tensor."""
    from tvm import relax

    bb, tensor = relax.BlockBuilder(), relax.TensorType((4,), "float32")
    x = relax.Var("x", tensor)
    with bb.function("main", [x]):
        bb.emit_func_output(bb.emit(relax.call_dps_packed(name, [x], out_ty=tensor)))
    return bb.get()


SQUARE, SMALL = (ArgSpec((64, 64), "float32"),), (ArgSpec((4,), "float32"),)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A function from a module to the path of its compiled library."""
    folder, made = tmp_path_factory.mktemp("kernels"), {}

    def compile_once(name, mod):
        if name not in made:
            made[name] = folder / f"{name}.so"
            tvm.compile(mod, target=tvm.target.Target("llvm")).export_library(str(made[name]))
        return made[name]

    return compile_once


@pytest.fixture(scope="module")
def timer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("preload")
    (folder / "bad_kernels.py").write_text(BAD_KERNELS)
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(folder)
    core = min(os.sched_getaffinity(0))
    with (
        patch.context(),
        KernelTimer(
            cores=(core,),
            environment={"TVM_NUM_THREADS": "1"},
            preload=("bad_kernels",),
            limits=TimerLimits(time_limit_s=3.0, budget_s=0.5, memory_bytes=1 << 30),
        ) as timer,
    ):
        yield timer


def test_times_are_real(timer, library):
    """A matmul of 2 * 256^3 FLOP takes longer than an addition, and neither takes longer than the job."""
    began = time.perf_counter()
    large = timer.measure(KernelJob(library("matmul", Matmul), (ArgSpec((256, 256), "float32"),) * 2))
    small = timer.measure(KernelJob(library("double", Double), SQUARE))
    took_s = time.perf_counter() - began
    assert (large.status, small.status) == ("ok", "ok")
    assert len(large.times_s) >= 5 and len(small.times_s) >= 20
    assert 0 < small.min_s <= small.median_s < large.min_s <= large.median_s
    assert sum(large.times_s) + sum(small.times_s) < took_s
    assert large.min_s > 2 * 256**3 / 1e12  # no single core does a TFLOP/s of float32 without matrix units


def test_the_calls_of_a_function_are_timed_one_by_one(timer, library):
    calls = timer.measure(KernelJob(library("double", Double), SQUARE, calls=True))
    assert calls.status == "ok" and len(calls.times_s) == 1
    assert 0 < sum(calls.times_s) < 1e-2


def test_where_tensors_lie_is_no_call_of_a_kernel(timer, tmp_path):
    compile_to(ThreeProducts, {"kind": "llvm"}, tmp_path / "three.so")
    calls = timer.measure(KernelJob(tmp_path / "three.so", SQUARE, calls=True))
    assert calls.status == "ok" and len(calls.times_s) == 3


def test_integer_arguments_stay_in_range(timer, library):
    args = (ArgSpec((1000, 8), "float32"), ArgSpec((64,), "int64", int_high=1000))
    assert timer.measure(KernelJob(library("take", Take), args)).status == "ok"


@pytest.mark.parametrize(
    ("name", "status", "words"),
    [
        ("test.segfault", "crash", "SIGSEGV"),
        ("test.sleep", "timeout", "time limit"),
        ("test.raise", "crash", "cannot do this"),
    ],
)
def test_a_bad_kernel_is_a_status_and_the_next_is_measured(timer, library, name, status, words):
    began = time.perf_counter()
    bad = timer.measure(KernelJob(library(name, packed(name)), SMALL))
    assert (bad.status, bad.times_s) == (status, ()) and words in bad.note
    assert time.perf_counter() - began < 20
    with pytest.raises(MeasurementFailed, match=status):
        _ = bad.median_s
    assert timer.measure(KernelJob(library("double", Double), SQUARE)).status == "ok"


def test_a_kernel_that_takes_too_much_memory(timer, library):
    result = timer.measure(KernelJob(library("huge", Huge), (ArgSpec((1,), "float32"),)))
    assert result.status == "crash" and result.note


def test_files_that_are_no_library(timer, tmp_path):
    (tmp_path / "text.so").write_text("not a library")
    assert timer.measure(KernelJob(tmp_path / "text.so", SQUARE)).status == "build_error"
    assert "does not exist" in timer.measure(KernelJob(tmp_path / "none.so", SQUARE)).note


def test_wrong_results_are_found(timer, library):
    double, square = library("double", Double), library("square", Square)
    same = library("product", DoubleAsProduct)
    assert timer.measure(KernelJob(double, SQUARE, reference=same)).status == "ok"
    wrong = timer.measure(KernelJob(square, SQUARE, reference=same))
    assert wrong.status == "wrong" and "is allowed" in wrong.note and not wrong.times_s


def test_a_waiting_kernel_is_called_busy(timer, library):
    """A kernel that does not get the core for most of its time; here it sleeps."""
    result = timer.measure(KernelJob(library("doze", packed("test.doze")), SMALL))
    assert result.status == "ok" and result.busy and "busy" in result.note
    assert result.min_s >= 0.01


def test_wrong_number_of_arguments_is_no_end(timer, library):
    assert timer.measure(KernelJob(library("double", Double), ())).status == "crash"
    assert timer.measure(KernelJob(library("double", Double), SQUARE, function="other")).status == "crash"


def test_a_worker_that_cannot_start():
    with KernelTimer(preload=("no_such_module",)) as timer, pytest.raises(MeasurementFailed, match="no_such_module"):
        timer.measure(KernelJob(Path(__file__), ()))


def test_bad_values():
    with pytest.raises(BadInput, match="negative extent"):
        ArgSpec((-1,), "float32")
    with pytest.raises(BadInput, match="int_high is 0"):
        ArgSpec((1,), "int64", int_high=0)
    with pytest.raises(BadInput, match="'fine' is unknown"):
        Measurement("fine")
    with pytest.raises(BadInput, match="budget_s is 0"):
        TimerLimits(budget_s=0)


def test_a_worker_whose_parent_is_gone_ends(library):
    timer = KernelTimer()
    assert timer.measure(KernelJob(library("double", Double), SQUARE)).status == "ok"
    timer._worker._socket.close()
    assert timer._worker._process.wait(timeout=30) == 0


def test_kernels_do_not_use_up_the_worker(library):
    """Eight kernels of about 50 MB of results each, in a worker that may map 384 MiB."""
    from tvm import relax

    sizes = range(12_500_000, 12_516_000, 2_000)
    bb = relax.BlockBuilder()
    for n in sizes:
        x = relax.Var("x", relax.TensorType((n,), "float32"))
        with bb.function(f"double{n}", [x]):
            bb.emit_func_output(bb.emit(relax.op.add(x, x)))
    path = library("sized", bb.get())
    with KernelTimer(limits=TimerLimits(repeats=1, min_total_s=0.0, memory_bytes=384 << 20)) as timer:
        for n in sizes:
            result = timer.measure(KernelJob(path, (ArgSpec((n,), "float32"),), function=f"double{n}"))
            assert result.status == "ok", result.note


def test_what_the_worker_is_given(tmp_path, monkeypatch, library):
    """Pinned to its core; the environment reaches it; instruction-set caps of this process do not."""
    (tmp_path / "report.py").write_text(
        "import json, os, pathlib\n"
        "caps = {k: os.environ.get(k) for k in ('ATEN_CPU_CAPABILITY', 'ONEDNN_MAX_CPU_ISA')}\n"
        "pathlib.Path(__file__).with_name('seen').write_text(json.dumps([sorted(os.sched_getaffinity(0)), caps]))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    core = max(os.sched_getaffinity(0))
    with KernelTimer((core,), {"ONEDNN_MAX_CPU_ISA": "AVX2"}, ("report",)) as timer:
        assert timer.measure(KernelJob(library("double", Double), SQUARE)).status == "ok"
        process = timer._worker._process
        assert process.poll() is None
    assert process.poll() is not None  # it ends with its timer
    expected = [[core], {"ATEN_CPU_CAPABILITY": None, "ONEDNN_MAX_CPU_ISA": "AVX2"}]
    assert json.loads((tmp_path / "seen").read_text()) == expected


def test_jobs_together_begin_together_and_last_as_long(timer, library, tmp_path):
    """A quick kernel and one that sleeps: both run until the time is up, and the sleep is no work of its thread."""
    both = Together(tmp_path, 2, 0.3)
    jobs = [
        KernelJob(library("square", Square), SQUARE, together=both),
        KernelJob(library("doze", packed("test.doze")), SMALL, together=both),
    ]
    patient = TimerLimits(time_limit_s=60.0)
    with (
        KernelTimer(limits=patient) as first,
        KernelTimer(preload=("bad_kernels",), limits=patient) as other,
        ThreadPoolExecutor(2) as pool,
    ):
        list(pool.map(lambda timer: timer.start(), (first, other)))
        quick, dozing = pool.map(lambda timer, job: timer.measure(job), (first, other), jobs)
    assert quick.status == dozing.status == "ok"
    assert len(quick.times_s) > len(dozing.times_s) > 0
    assert len(dozing.times_s) <= 30
    assert dozing.median_s < 0.005


def test_the_calls_of_jobs_together_are_timed_one_by_one(timer, library, tmp_path):
    """A product and a transposition in one function, alone and beside another worker: the product takes longer."""
    job = KernelJob(library("turned", ProductTurned), (ArgSpec((256, 256), "float32"),) * 2, calls=True)
    alone = timer.measure(job)
    both = replace(job, together=Together(tmp_path, 2, 0.5))
    with KernelTimer() as other, ThreadPoolExecutor(2) as pool:
        other.start()
        runs = list(pool.map(lambda timer: timer.measure(both), (timer, other)))
    for run in (alone, *runs):
        assert run.status == "ok" and len(run.times_s) == 2
        assert 0 < 2 * run.times_s[1] < run.times_s[0]


def test_a_job_whose_company_never_comes_gives_up(timer, library, tmp_path):
    run = timer.measure(KernelJob(library("square", Square), SQUARE, together=Together(tmp_path, 2, 0.1)))
    assert run.status == "timeout"
