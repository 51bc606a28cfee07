"""Measure compiled kernels on this machine's CPU or GPU, in a child process that may crash or hang without harm.

    KernelTimer ──job (JSON line)──► worker: pinned to its cores, own environment, memory limit
        │                               │  load .so, make arguments once, warm up, time number=1 runs
        ◄──────all times, or a status───┘
    no answer in time: the worker is killed and the next job gets a new one

The worker lives across jobs, so `import tvm` is paid once. Caches are warm: a kernel runs on the same arguments again
and again, and data that fits into the caches is there. A kernel inside a model finds its weights colder; only its
activations are as warm as here. Arguments are uploaded once, results stay where the kernel leaves them. On a
GPU calls are timed without their launches (`tvmhet.runtime.cuda_times`).
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from tvmhet.errors import BadInput, MeasurementFailed

STATUSES = ("ok", "timeout", "crash", "build_error", "wrong")
"""What became of a measurement. build_error: the file cannot be loaded; wrong: results differ from the reference's."""

_TURNS_LIMIT_S = 600.0  # for other processes to time on the same GPU
_START_LIMIT_S = 120.0
#: A device whose median run is this much above its shortest was shared with others, or its clock was falling.
_UNSTEADY = 1.5
# Pinned before anything is imported: thread pools are sized and placed when their library loads.
_START = """
import json, os, sys
fd, cores, sys.path[:] = json.loads(sys.argv[1])
if cores:
    os.sched_setaffinity(0, cores)
from tvmhet.cost.measure_worker import main
main(fd)
"""
# Caps of this process's own libraries; a worker has those it is given and no others.
_ISA_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "ATEN_CPU_CAPABILITY")


@dataclass(frozen=True, slots=True)
class ArgSpec:
    """One tensor argument. Floats are uniform in [0.1, 1), which no operator turns into NaN or denormals.

    Integers are uniform in [0, `int_high`): an index argument needs the extent that it indexes; 1 gives zeros, which
    are valid for every index but always hit the same row. bool is 0 or 1.
    """

    shape: tuple[int, ...]
    dtype: str
    int_high: int = 1

    def __post_init__(self) -> None:
        if any(d < 0 for d in self.shape):
            raise BadInput(f"argument shape {self.shape} has a negative extent", "give extents of 0 or more")
        if self.int_high < 1:
            raise BadInput(f"int_high is {self.int_high}", "give the exclusive upper bound of the values, at least 1")


@dataclass(frozen=True, slots=True)
class Together:
    """Jobs of several workers that run at the same time: `count` of them, which name the same empty `folder`.

    Each loads and warms up, waits until all have, and then runs again and again for `seconds`.
    """

    folder: Path
    count: int
    seconds: float


@dataclass(frozen=True, slots=True)
class KernelJob:
    """A function of an exported Relax VM executable, and its arguments.

    With `calls` what is timed is not the function but each call that it makes, in order: one time per call, its median
    over the runs, all scaled so that their sum is what the function takes without a clock in it.
    `reference` names another library with the same function; if it is given, results are compared with its results
    and must agree within `tolerance` of their largest value. With `together` the function is timed while the workers
    of other jobs run theirs, by its thread's CPU time.
    """

    library: Path
    args: tuple[ArgSpec, ...]
    function: str = "main"
    reference: Path | None = None
    tolerance: float = 1e-3
    calls: bool = False
    together: Together | None = None


@dataclass(frozen=True, slots=True)
class Measurement:
    """All times of one kernel in seconds, in the order taken, or why there are none.

    `busy` says that others used the cores meanwhile (the kernel's thread waited more than a twentieth of the time);
    such times are too long by an unknown amount. `note` is for people: the error's text, or what was odd.
    """

    status: str
    times_s: tuple[float, ...] = ()
    busy: bool = False
    note: str = ""

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise BadInput(f"measurement status {self.status!r} is unknown", f"use one of {', '.join(STATUSES)}")

    @classmethod
    def of_device(cls, times_s: Sequence[float], note: str = "") -> Measurement:
        """Return the measurement of runs that a device timed: busy where they are unsteady."""
        run = cls("ok", tuple(times_s), note=note)
        if run.median_s <= _UNSTEADY * run.min_s:
            return run
        ratio = run.median_s / run.min_s
        unsteady = f"unsteady: the median of {len(run.times_s)} runs is {ratio:.1f} times the shortest"
        return cls("ok", run.times_s, busy=True, note="; ".join(filter(None, (note, unsteady))))

    @property
    def median_s(self) -> float:
        """The median time in seconds; MeasurementFailed if there is none."""
        return statistics.median(self._times())

    @property
    def min_s(self) -> float:
        """The shortest time in seconds; MeasurementFailed if there is none."""
        return min(self._times())

    def _times(self) -> tuple[float, ...]:
        if self.status != "ok" or not self.times_s:
            raise MeasurementFailed(
                f"the kernel has no time: {self.status}. {self.note}", "look at `status` before asking for a time"
            )
        return self.times_s


@dataclass(frozen=True, slots=True)
class TimerLimits:
    """How long and how often to run one kernel.

    A kernel is run `repeats` times, more if it is so short that they take less than `min_total_s` (at most ten times as
    many), fewer if they would take more than `budget_s`. `time_limit_s` bounds a whole job, loading included;
    `memory_bytes` is what a kernel may map beyond the idle worker.
    """

    repeats: int = 20
    min_total_s: float = 0.002
    budget_s: float = 2.0
    time_limit_s: float = 30.0
    memory_bytes: int = 8 << 30

    def __post_init__(self) -> None:
        for name in ("repeats", "budget_s", "time_limit_s", "memory_bytes"):
            if not getattr(self, name) > 0:
                raise BadInput(f"{name} is {getattr(self, name)}", "give a positive number")


@dataclass(slots=True)
class KernelTimer:
    """Times kernels in one worker process that stands for one CPU device type, or for a GPU. A context manager.

    `gpu` is for a GPU: a module, and its CUDA ordinal. `place(ordinal)` of the module returns in which contexts stages
    are loaded and called, and how calls are timed. `cores` are the logical CPUs to pin to (none: all); `environment`
    (thread counts and instruction-set caps, read once when libraries load) is added to this process's own, whose
    instruction-set caps are not inherited; `preload` names modules to import in the worker first, such as one that
    registers library kernels.
    """

    cores: tuple[int, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    preload: tuple[str, ...] = ()
    limits: TimerLimits = field(default_factory=TimerLimits)
    gpu: tuple[str, int] | None = None
    _worker: _Worker | None = field(default=None, init=False, repr=False)

    def measure(self, job: KernelJob) -> Measurement:
        """Run one job. Whatever the kernel does, this returns; MeasurementFailed only if no worker can be started."""
        if not job.library.is_file():
            return Measurement("build_error", note=f"{job.library} does not exist")
        self.start()
        assert self._worker is not None
        answer, problem = self._worker.ask(_encode(job), self.limits.time_limit_s)
        if answer is None:
            text = self._worker.end(grace_s=0.5 if problem == "crash" else 0.0)
            self._worker = None
            return Measurement(problem, note=text)
        if self.gpu is not None and answer["status"] == "ok" and answer["times_s"]:
            return Measurement.of_device([float(t) for t in answer["times_s"]], str(answer["note"]))
        return _decode(answer, len(self.cores) or os.cpu_count() or 1)

    def start(self) -> None:
        """Start the worker unless it is there. `measure` does so by itself; MeasurementFailed if it cannot."""
        if self._worker is None:
            self._worker = _Worker(self.cores, self.environment, self.preload, self.limits, self.gpu)

    def close(self) -> None:
        """End the worker. A later `measure` starts a new one."""
        if self._worker is not None:
            self._worker.end()
            self._worker = None

    def __enter__(self) -> KernelTimer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _encode(job: KernelJob) -> dict[str, Any]:
    message = asdict(job)
    message["library"] = str(job.library.resolve())
    message["reference"] = None if job.reference is None else str(job.reference.resolve())
    if job.together is not None:
        message["together"]["folder"] = str(job.together.folder.resolve())
    return message


def _decode(answer: Mapping[str, Any], num_cores: int) -> Measurement:
    notes = [str(answer["note"])] if answer["note"] else []
    waited = float(answer["waited_share"])
    busy = waited > 0.05
    if busy:
        load = os.getloadavg()[0]
        notes.append(
            f"the machine was busy: the kernel waited {waited:.0%} of the time (load {load:.1f}, {num_cores} cores)"
        )
    return Measurement(str(answer["status"]), tuple(map(float, answer["times_s"])), busy, "; ".join(notes))


class _Worker:
    """The child process and the socket to it."""

    def __init__(
        self,
        cores: Sequence[int],
        environment: Mapping[str, str],
        preload: Sequence[str],
        limits: TimerLimits,
        gpu: tuple[str, int] | None,
    ) -> None:
        self._socket, theirs = socket.socketpair()
        self._buffer = b""
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed by end)
        inherited = {k: v for k, v in os.environ.items() if k not in _ISA_VARIABLES}
        path = [p or os.getcwd() for p in sys.path]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, json.dumps([theirs.fileno(), list(cores), path])],
                env={**inherited, "TVM_BIND_THREADS": "0", **environment},
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
            )
        setup = {"preload": list(preload), "limits": asdict(limits), "gpu": gpu}
        ready, problem = self.ask(setup, _START_LIMIT_S)
        if ready is None or not ready.get("ready"):
            raise MeasurementFailed(
                f"the measuring process did not start ({problem}): {self.end(grace_s=0.5)}",
                "check cores, environment and preload; the process needs tvm and about 1 GiB of memory",
            )

    def ask(self, message: Mapping[str, Any], limit_s: float) -> tuple[dict[str, Any] | None, str]:
        """Return the answer, or None and "timeout" or "crash". The limit begins anew when a turn on a GPU does."""
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
            answer, problem = self._next(limit_s)
            while answer is not None and "waits" in answer:
                answer, problem = self._next(_TURNS_LIMIT_S if answer["waits"] else limit_s)
        except OSError:
            return None, "crash"
        return answer, problem

    def _next(self, limit_s: float) -> tuple[dict[str, Any] | None, str]:
        """Return the next line of the worker, or None and "timeout" or "crash"."""
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._socket], [], [], left)[0]:
                return None, "timeout"
            if not (data := self._socket.recv(1 << 16)):
                return None, "crash"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer, ""

    def end(self, grace_s: float = 0.0) -> str:
        """Kill the process unless it ends by itself within `grace_s`; return how it ended and its last words."""
        try:
            code = self._process.wait(timeout=grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            code = 0
        self._socket.close()
        with self._errors as errors:
            errors.seek(0)
            words = errors.read().decode(errors="replace").strip().splitlines()[-3:]
        how = signal.Signals(-code).name if code < 0 else (f"exit {code}" if code else "killed at the time limit")
        return "; ".join([how, *words])
