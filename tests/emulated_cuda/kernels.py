"""Compare scheduled CUDA kernels, emulated, with their unscheduled functions compiled for the CPU."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tvm
import tvm_ffi

from tests import emulated_cuda
from tests.emulated_cuda import A100, assert_nothing_beside, backwards, on_device
from tvmhet._tvm import PrimFunc, structural_hash
from tvmhet.emit.c_names import NameInC
from tvmhet.emit.lower import kernel_passes, lower_stage, make_target
from tvmhet.emit.one_thread_each import launches_threads
from tvmhet.emit.schedule import ScheduleReport, schedule_kernels
from tvmhet.runtime import vm
from tvmhet.runtime.program import numpy_dtype

_HOST = tvm.target.Target({"kind": "llvm"})


def prim_funcs(mod: tvm.IRModule, target: tvm.target.Target) -> dict[str, PrimFunc]:
    """Return the kernels of a stage module before they are scheduled, by name."""
    with target:
        mod = tvm.transform.Sequential([*kernel_passes(), NameInC()])(mod)
    return {g.name_hint: f for g, f in mod.functions_items() if isinstance(f, PrimFunc)}


def check_stage(mod: tvm.IRModule, description: Mapping[str, Any] = A100, rtol: float = 1e-5) -> ScheduleReport:
    """Assert that every kernel of a stage computes what it says; return which rules made them.

    Kernels that bind threads themselves have no unscheduled form, and are left out.
    """
    return check_stages([mod], description, rtol)


def check_stages(mods: Sequence[tvm.IRModule], description: Mapping[str, Any], rtol: float) -> ScheduleReport:
    """As `check_stage`, for several; equal kernels once."""
    emulated_cuda.install()
    target, report = make_target(description), ScheduleReport()
    funcs: dict[int, PrimFunc] = {}
    for mod in mods:
        for func in prim_funcs(mod, target).values():
            if not launches_threads(func.body):
                funcs.setdefault(structural_hash(func.without_attr("global_symbol")), func)
    check_kernels({f"kernel{i}": f for i, f in enumerate(funcs.values())}, target, report, rtol)
    return report


def check_kernels(funcs: Mapping[str, PrimFunc], target: Any, report: ScheduleReport, rtol: float) -> None:
    """Assert that each function, scheduled for a GPU, computes what it does unscheduled."""
    named = {name: f.with_attr("global_symbol", name) for name, f in funcs.items()}
    scheduled = schedule_kernels(tvm.IRModule(named), target, report)
    assert not report.unscheduled, report.unscheduled
    on_gpu, on_cpu = _library(scheduled, target), _library(tvm.IRModule(named), _HOST)
    for name, func in named.items():
        _check(name, func, on_gpu[name], on_cpu[name], rtol)


def _library(mod: tvm.IRModule, target: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernels.so"
        tvm.compile(mod, target=target).export_library(str(path))
        return tvm_ffi.load_module(str(path))


def _check(name: str, func: PrimFunc, on_gpu: Any, on_cpu: Any, rtol: float) -> None:
    generator = np.random.default_rng(0)
    given = [_values(generator, p) for p in func.params]
    want = [_aligned(a) for a in given]
    on_cpu(*(vm.host_view(a) for a in want))
    written = [i for i, (a, b) in enumerate(zip(given, want, strict=True)) if a.tobytes() != b.tobytes()]
    found = []
    for order in ("forwards", "backwards"):
        made = [on_device(_poison(a) if i in written else a) for i, a in enumerate(given)]
        if order == "forwards":
            on_gpu(*(tensor for tensor, _ in made))
        else:
            with backwards():
                on_gpu(*(tensor for tensor, _ in made))
        for (_, held), expected in zip(made, want, strict=True):
            assert_nothing_beside(held)
            _assert_close(f"{name}, {order}", held, expected, rtol)
        found.append([held.copy() for _, held in made])
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b, err_msg=f"{name} depends on the order of threads")


def _assert_close(what: str, got: np.ndarray, want: np.ndarray, rtol: float) -> None:
    if want.dtype.kind in "iub":
        np.testing.assert_array_equal(got, want, err_msg=what)
        return
    got, want = got.astype(np.float64), want.astype(np.float64)
    scale = np.abs(want[np.isfinite(want)]).max(initial=0.0)
    np.testing.assert_allclose(got, want, rtol=rtol, atol=rtol * scale, err_msg=what)


def _values(generator: np.random.Generator, param: Any) -> np.ndarray:
    shape, dtype = tuple(int(e) for e in param.ty.shape), numpy_dtype(str(param.ty.dtype))
    if dtype.kind in "iu":
        return generator.integers(0, 3, shape).astype(dtype)
    if dtype.kind == "b":
        return generator.integers(0, 2, shape).astype(dtype)
    return generator.uniform(0.1, 1.0, shape).astype(dtype)


def _poison(array: np.ndarray) -> np.ndarray:
    return np.frombuffer(b"\xff" * array.nbytes, array.dtype).reshape(array.shape)


def _aligned(array: np.ndarray) -> np.ndarray:
    raw = np.empty(array.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    copy = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def check_whole(mod: tvm.IRModule, inputs: Sequence[np.ndarray], rtol: float = 1e-5) -> ScheduleReport:
    """Assert that a stage's function gives on the emulated device what it gives on the CPU."""
    emulated_cuda.install()
    with backwards():
        compare_with_cpu(mod, inputs, A100, lambda a: on_device(a)[0], rtol)
    return compare_with_cpu(mod, inputs, A100, lambda a: on_device(a)[0], rtol)


def compare_with_cpu(
    mod: tvm.IRModule,
    inputs: Sequence[np.ndarray],
    description: Mapping[str, Any],
    place: Callable[[np.ndarray], Any],
    rtol: float,
) -> ScheduleReport:
    """Assert that a stage gives on CUDA device 0 what it gives on the CPU. `place` puts an array on that device."""
    made, report, held = {}, ScheduleReport(), [_aligned(a) for a in inputs]
    with tempfile.TemporaryDirectory() as folder:
        for kind, target, given in (("llvm", {"kind": "llvm"}, vm.host_view), ("cuda", description, place)):
            executable, report = lower_stage(mod, target)
            path = Path(folder) / f"{kind}.so"
            executable.export_library(str(path))
            results = vm.load_function(path, "main", kind, 0)(*(given(a) for a in held))
            made[kind] = [_on_host(r) for r in results]
    for got, want in zip(made["cuda"], made["llvm"], strict=True):
        _assert_close("the stage's function", got, want, rtol)
    return report


def _on_host(tensor: Any) -> np.ndarray:
    held = _aligned(np.empty(tuple(tensor.shape), numpy_dtype(str(tensor.dtype))))
    vm.copy(tensor, vm.host_view(held))
    return held
