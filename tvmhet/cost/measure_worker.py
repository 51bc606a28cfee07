"""The process that runs kernels to be timed; KernelTimer starts it, pinned to its cores.

Reads one JSON object a line from the socket FD: first the set-up, then jobs; answers each with one, after a line when
it begins to wait for its turn on a GPU and one when it has it. It is expected to die when a kernel misbehaves. Limits
keep what it can do to the machine small: RLIMIT_AS, and RLIMIT_CPU, which ends a spinning kernel even when the parent
is gone. A worker for a GPU has no RLIMIT_AS: CUDA maps the memory of all GPUs.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tvmhet._functions import is_kernel_call
from tvmhet._passes import load_passes
from tvmhet._threads import share_threads

_CPU_SLACK_S = 10
_CALL_ROUNDS, _MAX_CALL_ROUNDS = 9, 201
_CALLS_S = 0.03  # short functions are run more often, until their runs take this long
_POLL_S = 1e-3


def main(fd: int) -> None:
    """Serve jobs from the socket `fd` until it closes."""
    with socket.socket(fileno=fd) as sock, sock.makefile("rw") as stream:
        setup = json.loads(stream.readline())
        for module in ("tvm", *setup["preload"]):
            importlib.import_module(module)
        load_passes()
        num_cores = len(os.sched_getaffinity(0))
        if setup["preload"] and setup["gpu"] is None and num_cores > 1:
            share_threads(num_cores)  # as where a plan with library kernels runs
        limits = setup["limits"]
        place = _place(setup["gpu"])
        place = replace(place, turn=partial(_announced, place.turn, stream))
        if setup["gpu"] is None:
            room = _mapped_bytes() + int(limits["memory_bytes"])
            resource.setrlimit(resource.RLIMIT_AS, (room, room))
        _reply(stream, {"ready": True})
        for line in stream:
            _limit_cpu(float(limits["time_limit_s"]))
            answer = _answer(json.loads(line), limits, place)
            _forget_memory()
            _reply(stream, answer)


@dataclass(frozen=True, slots=True)
class Place:
    """The device that kernels run on: TVM's, how its code is loaded, in which context functions are called.

    `times` times a call on a GPU, in its `turn`: see `tvmhet.runtime.gpu_place`.
    """

    device: Any
    loading: Callable[[], AbstractContextManager[Any]] = nullcontext
    calling: Callable[[], AbstractContextManager[Any]] = nullcontext
    times: Callable[[Callable[[], Any], int, float], tuple[list[float], str]] | None = None
    turn: Callable[[], AbstractContextManager[Any]] = nullcontext


def _place(gpu: Sequence[Any] | None) -> Place:
    """The CPU, or what `place` of a module says of a GPU, given as the module's name and the CUDA ordinal."""
    import tvm

    if gpu is None:
        return Place(tvm.cpu())
    module, ordinal = gpu
    return Place(tvm.cuda(ordinal), *importlib.import_module(module).place(ordinal))


def _reply(stream: Any, message: Mapping[str, Any]) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()


@contextmanager
def _announced(turn: Callable[[], AbstractContextManager[Any]], stream: Any) -> Iterator[None]:
    """A turn, before and in which the parent hears of it: waiting is no work of the kernel."""
    _reply(stream, {"waits": True})
    with turn():
        _reply(stream, {"waits": False})
        yield


def _mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _forget_memory() -> None:
    """Empty the runtime's memory pool, which keeps what every kernel so far has used. Nothing may be alive in it."""
    import tvm

    gc.collect()
    tvm.get_global_func("vm.builtin.memory_manager.clear")()


def _limit_cpu(time_limit_s: float) -> None:
    """Let this job use every core for its time limit, and no more."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    cores = len(os.sched_getaffinity(0))
    soft = int(used.ru_utime + used.ru_stime + time_limit_s * cores) + _CPU_SLACK_S
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _answer(job: Mapping[str, Any], limits: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """Run one job; an exception in loading is a build_error, one in running a crash."""
    try:
        machine = _load(job["library"], place)
        args = [_argument(spec, seed, place) for seed, spec in enumerate(job["args"])]
    except Exception as error:
        return _result("build_error", note=_last_line(error))
    try:
        with place.calling():
            return _timed(machine, args, job, limits, place)
    except Exception as error:
        return _result("crash", note=_last_line(error))


def _timed(
    machine: Any, args: Sequence[Any], job: Mapping[str, Any], limits: Mapping[str, Any], place: Place
) -> dict[str, Any]:
    if job["reference"] is not None and (difference := _difference(machine, job, args, place)) > job["tolerance"]:
        note = f"results differ from the reference's by {difference:.2g} of their largest value"
        return _result("wrong", note=f"{note}; {job['tolerance']:g} is allowed")
    if job["together"] is not None:
        return _time_together(machine, job, args, float(limits["time_limit_s"]))
    if job["calls"]:
        return _time_calls(machine, job["function"], args, limits)
    return _time(machine, job["function"], args, limits, place)


def _result(status: str, times_s: Sequence[float] = (), waited_share: float = 0.0, note: str = "") -> dict[str, Any]:
    return {"status": status, "times_s": list(times_s), "waited_share": waited_share, "note": note}


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"[:500]


def _load(library: str, place: Place) -> Any:
    import tvm
    from tvm import relax

    with place.loading():
        return relax.VirtualMachine(tvm.runtime.load_module(library), place.device)


def _argument(spec: Mapping[str, Any], seed: int, place: Place) -> Any:
    import tvm

    values = argument_values(tuple(spec["shape"]), spec["dtype"], spec["int_high"], seed)
    return tvm.runtime.tensor(values, place.device)


def argument_values(shape: tuple[int, ...], name: str, int_high: int, seed: int) -> Any:
    """Make the values of one argument as a numpy array; the same in every run."""
    import ml_dtypes
    import numpy as np

    rng = np.random.default_rng(seed)
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    if name == "bool":
        values = rng.integers(0, 2, shape).astype(dtype)
    elif name.startswith(("int", "uint")):
        values = rng.integers(0, int_high, shape).astype(dtype)
    else:
        values = (0.1 + 0.9 * rng.random(shape, dtype=np.float32)).astype(dtype, copy=False)
    return values


def _difference(machine: Any, job: Mapping[str, Any], args: Sequence[Any], place: Place) -> float:
    """The largest difference from the reference's results; see `largest_difference`."""
    reference = _load(job["reference"], place)
    return largest_difference(machine[job["function"]](*args), reference[job["function"]](*args))


def largest_difference(result: Any, reference: Any) -> float:
    """Return the largest difference of two results, relative to the reference's largest value; inf if shapes differ."""
    import numpy as np

    ours, theirs = _flat(result), _flat(reference)
    if [a.shape for a in ours] != [b.shape for b in theirs]:
        return float("inf")
    worst = 0.0
    for a, b in zip(ours, theirs, strict=True):
        if not np.array_equal(np.isfinite(a), np.isfinite(b)):
            return float("inf")
        a, b = np.nan_to_num(a, posinf=0, neginf=0), np.nan_to_num(b, posinf=0, neginf=0)
        if a.size:
            worst = max(worst, float(np.abs(a - b).max()) / max(float(np.abs(b).max()), 1e-30))
    return worst


def _flat(result: Any) -> list[Any]:
    """Tensors of a result as float64 arrays; tuples are opened."""
    if hasattr(result, "numpy"):
        return [result.numpy().astype("float64")]
    return [array for part in result for array in _flat(part)]


def _time(machine: Any, function: str, args: Sequence[Any], limits: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """Warm up once, then time single runs inside the runtime, without Python between the clock and the kernel."""
    if place.times is not None:
        with place.turn():
            times_s, note = place.times(partial(machine[function], *args), limits["repeats"], limits["budget_s"])
        return _result("ok", times_s, note=note)
    machine.save_function(function, "tvmhet_timed", *args)
    began = time.perf_counter()
    machine["tvmhet_timed"]()
    first_s = time.perf_counter() - began
    if 3 * first_s > limits["time_limit_s"]:  # one warm-up and one timed run would not be done in time
        return _result("ok", [first_s], note=f"one cold run only: it took {first_s:.3g} s")
    wanted = max(limits["repeats"], min(limits["min_total_s"] / first_s, 10 * limits["repeats"]))
    repeats = max(1, int(min(wanted, limits["budget_s"] / first_s)))
    evaluator = machine.time_evaluator("tvmhet_timed", place.device, number=1, repeat=repeats)
    wall_s, thread_s = time.perf_counter(), time.thread_time()
    times_s = evaluator().results
    wall_s, thread_s = time.perf_counter() - wall_s, time.thread_time() - thread_s
    return _result("ok", times_s, waited_share=max(0.0, 1.0 - thread_s / wall_s))


def _time_calls(machine: Any, function: str, args: Sequence[Any], limits: Mapping[str, Any]) -> dict[str, Any]:
    """Time every call that a function makes, by this thread's CPU time: runs are long, so others may come between."""
    run = machine[function]
    run(*args)
    plain_s: list[float] = []
    last_s = time.perf_counter() + limits["time_limit_s"] / 4  # as many runs follow, with the clock in them
    while not plain_s or (
        (len(plain_s) < _CALL_ROUNDS or (sum(plain_s) < _CALLS_S and len(plain_s) < _MAX_CALL_ROUNDS))
        and sum(plain_s) < limits["budget_s"] * _CALL_ROUNDS
        and time.perf_counter() < last_s
    ):
        start = time.thread_time()
        run(*args)
        plain_s.append(time.thread_time() - start)
    watch = _watch(machine)
    for _ in plain_s:
        watch.position = 0
        run(*args)
    return _result("ok", watch.scaled_s(statistics.median(plain_s)))


def _time_together(machine: Any, job: Mapping[str, Any], args: Sequence[Any], time_limit_s: float) -> dict[str, Any]:
    """Time runs, or each of their calls, while other workers run theirs: all begin once the last one is ready."""
    together, run = job["together"], machine[job["function"]]
    folder = Path(together["folder"])
    run(*args)
    (folder / str(os.getpid())).touch()
    give_up_s = time.monotonic() + time_limit_s / 2
    while len(os.listdir(folder)) < together["count"]:
        if time.monotonic() > give_up_s:
            return _result("timeout", note=f"not all of {together['count']} workers were ready in {time_limit_s / 2} s")
        time.sleep(_POLL_S)
    plain_s = _runs_for(together["seconds"] / (2 if job["calls"] else 1), run, args)
    if not job["calls"]:
        return _result("ok", plain_s)
    watch = _watch(machine)
    _runs_for(together["seconds"] / 2, run, args, watch)
    return _result("ok", watch.scaled_s(statistics.median(plain_s)))


def _runs_for(seconds: float, run: Any, args: Sequence[Any], watch: _Calls | None = None) -> list[float]:
    """Run again and again for some seconds of wall time; return what each took of this thread's CPU time."""
    times_s: list[float] = []
    stop_s = time.monotonic() + seconds
    while not times_s or time.monotonic() < stop_s:
        if watch is not None:
            watch.position = 0
        start_s = time.thread_time()
        run(*args)
        times_s.append(time.thread_time() - start_s)
    return times_s


def _watch(machine: Any) -> _Calls:
    watch = _Calls()
    machine.set_instrument(watch)
    return watch


class _Calls:
    """An instrument of the VM: the seconds of each kernel call by its position."""

    def __init__(self) -> None:
        self.times_s: list[list[float]] = []
        self.position = 0
        self._began = 0.0

    def scaled_s(self, whole_s: float) -> list[float]:
        """Each call's median, all scaled so that their sum is what the function takes without a clock in it."""
        calls_s = [statistics.median(times) for times in self.times_s]
        scale = whole_s / max(sum(calls_s), 1e-9)
        return [s * scale for s in calls_s]

    def __call__(self, _function: Any, name: str, before: bool, _result: Any, *_values: Any) -> int:
        if not is_kernel_call(name):
            return 0
        if before:
            self._began = time.thread_time()
            return 0
        seconds = time.thread_time() - self._began
        if self.position == len(self.times_s):
            self.times_s.append([])
        self.times_s[self.position].append(seconds)
        self.position += 1
        return 0
