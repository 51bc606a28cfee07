"""Calibrate the cost model of a device type by a few of its own kernels: choose them, measure them, keep the times.

    choose(device, 20) ─► measure(...) here, or --list ─► elsewhere ─► --measurements ─► MeasuredOps on disk

The kernels are the library's (torch's oneDNN, cuBLAS, cuDNN): what the models predict. Each device type is a child
process: CPU types pinned to their cores and capped to their instruction set, CUDA types on a GPU of that type.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from types import TracebackType
from typing import IO, Any

from tvmhet.cluster.device import DeviceType
from tvmhet.cluster.local import ordinal_of
from tvmhet.cost.boosted import LearnedModel
from tvmhet.cost.calibrate import candidates, pick
from tvmhet.cost.calibration import MeasuredOps
from tvmhet.cost.cpu_pool import drawn
from tvmhet.cost.model import KernelDesc
from tvmhet.cost.record import record_of
from tvmhet.deploy import isa_level
from tvmhet.errors import BadInput, MeasurementFailed, NotSupported
from tvmhet.kernel_keys import cpu_model
from tvmhet.progress import Report
from tvmhet.runtime.cores import CpuDevice, assign_cores, check_host_runs, worker_environment

#: Kernels predicted to take longer are not chosen: a CPU core would spend a minute on one large product.
_LONGEST_S = {"llvm": 0.1, "cuda": 0.05}
_START_LIMIT_S, _KERNEL_LIMIT_S = 120.0, 60.0
_BUSY_SHARE = 0.05  # of the time that a kernel's process may wait before the machine counts as busy
# Pinned before anything is imported: thread pools are sized and placed when their library loads.
_START = """
import json, os, sys
cores, device, sys.path[:] = json.loads(sys.argv[1])
if cores:
    os.sched_setaffinity(0, cores)
from tvmhet.emit.library_worker import main
times = None
if device != "cpu":
    from tvmhet.runtime.cuda_times import run_times as times
main(device, times)
"""


@dataclass(frozen=True, slots=True)
class CalibrationRun:
    """What was measured, and what people should know of it."""

    measured: MeasuredOps
    failed: tuple[str, ...]
    notes: tuple[str, ...]


def choose(device: DeviceType, count: int) -> tuple[KernelDesc, ...]:
    """Return the `count` kernels whose times tell most about `device`; fewer if it can run fewer.

    On a GPU those that the fit of the learned model learns most from; on a CPU as many of each family, from short to
    long, then as models have them (`cpu_pool`): with many of them plans learn sizes, not families.
    Raises BadInput for a count below 1.
    """
    if count < 1:
        raise BadInput(f"{count} kernels to measure", "give 1 or more; 10 to 50 are useful")
    model = LearnedModel.load(device)
    pool = candidates(device)
    seconds = model.predict(pool).seconds
    pool = tuple(d for d, s in zip(pool, seconds, strict=True) if s < _LONGEST_S[device.kind])
    if not device.is_cpu:
        return tuple(pool[i] for i in pick(model, pool, count))
    spread = _spread(pool, model, count)
    return spread + tuple(d for d in drawn(2 * count) if d not in set(pool))[: count - len(spread)]


def _spread(pool: Sequence[KernelDesc], model: LearnedModel, count: int) -> tuple[KernelDesc, ...]:
    """Take families in turn; of each first the middle by predicted time, then those half-way to the ends."""
    seconds = model.predict(pool).seconds
    families: dict[str, list[int]] = {}
    for i in sorted(range(len(pool)), key=lambda i: float(seconds[i])):
        families.setdefault(pool[i].root.family, []).append(i)
    queues = [[members[j] for j in _halving(len(members))] for _, members in sorted(families.items())]
    order = [queue[turn] for turn in range(max(map(len, queues))) for queue in queues if turn < len(queue)]
    return tuple(pool[i] for i in order[:count])


def _halving(size: int) -> list[int]:
    """Return 0 … size - 1 in an order whose every beginning is spread out: the middle, the quarters, the eighths."""
    order: list[int] = []
    spans = [(0, size)]
    while spans:
        low, high = spans.pop(0)
        if low < high:
            middle = (low + high) // 2
            order.append(middle)
            spans += [(low, middle), (middle + 1, high)]
    return order


def measure(device: DeviceType, descs: Sequence[KernelDesc], tell: Report) -> CalibrationRun:
    """Measure library kernels on this machine's device of that type. Raises NotSupported if it has none."""
    times: list[tuple[KernelDesc, float]] = []
    failed: list[str] = []
    busy, odd = 0, ""
    with OpTimer.start(device) as timer:
        for done, desc in enumerate(descs):
            record = record_of(desc)
            tell(done, len(descs), desc.root.family)
            answer = timer.time(record)
            if not answer["times_s"]:
                failed.append(f"{json.dumps(record)}: {answer['note']}")
                continue
            busy += answer["waited"] > _BUSY_SHARE
            odd = odd or str(answer["note"])
            times.append((desc, median(answer["times_s"])))
    if not times:
        raise MeasurementFailed(f"no kernel could be measured on {device.name!r}: {failed[0]}", "look at its error")
    measured = MeasuredOps(device.name, tuple(d for d, _ in times), tuple(s for _, s in times), timer.measured_on)
    note = f"the machine was busy during {busy} of {len(times)} kernels: their times may be too long"
    return CalibrationRun(measured, tuple(failed), tuple(filter(None, (note if busy else "", odd))))


@dataclass(slots=True)
class OpTimer:
    """A child process that times operators of torch on one device; a context manager."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    measured_on: str = ""
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    _errors: IO[bytes] | None = field(default=None, repr=False)
    _buffer: bytes = field(default=b"", repr=False)

    @staticmethod
    def start(device: DeviceType) -> OpTimer:
        """Return the timer of this machine's device of that type. Raises NotSupported if it has none."""
        path = [p or os.getcwd() for p in sys.path]
        if device.is_cpu:
            binding = assign_cores([CpuDevice(device.name, device.num_sms, isa_level(device.target))])[device.name]
            check_host_runs([binding])
            argument = json.dumps([list(binding.cores), "cpu", path])
            environment = worker_environment(binding, dict(os.environ))
            return OpTimer((sys.executable, "-c", _START, argument), environment, cpu_model())
        ordinal = ordinal_of(device)
        if ordinal is None:
            raise NotSupported(
                f"this machine has no {device.name!r}",
                "write the kernels with --list FILE, time them where one is, and read that: --measurements FILE",
            )
        argument = json.dumps([[], f"cuda:{ordinal}", path])
        return OpTimer((sys.executable, "-c", _START, argument), dict(os.environ))

    def time(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Return {"times_s", "waited", "note"} of one operator; no times if it failed, hung or crashed."""
        if self._process is None:
            self._launch()
        answer = self._ask(record, _KERNEL_LIMIT_S)
        if answer is None:
            words = self.close()
            return {"times_s": [], "waited": 0.0, "note": f"the process ended or hung: {words}"}
        return answer

    def _launch(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed by close)
        self._process = subprocess.Popen(
            self.command,
            env=dict(self.environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        ready = self._ask(None, _START_LIMIT_S)
        if ready is None:
            raise MeasurementFailed(f"the measuring process did not start: {self.close()}", "it needs torch")
        self.measured_on = ready["ready"] or self.measured_on

    def _ask(self, record: Mapping[str, Any] | None, limit_s: float) -> dict[str, Any] | None:
        """Send a record, if there is one, and return the next answer; None if there is none in time."""
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        try:
            if record is not None:
                self._process.stdin.write(json.dumps(record).encode() + b"\n")
                self._process.stdin.flush()
            while b"\n" not in self._buffer:
                if not select.select([self._process.stdout], [], [], limit_s)[0]:
                    return None
                if not (data := os.read(self._process.stdout.fileno(), 1 << 16)):
                    return None
                self._buffer += data
        except OSError:
            return None
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> str:
        """End the process and return its last words."""
        if self._process is None or self._errors is None:
            return ""
        self._process.kill()
        self._process.communicate()
        with self._errors as errors:
            errors.seek(0)
            words = errors.read().decode(errors="replace").strip().splitlines()[-2:]
        self._process, self._buffer = None, b""
        return "; ".join(words)

    def __enter__(self) -> OpTimer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
