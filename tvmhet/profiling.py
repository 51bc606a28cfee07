"""Measure the kernels that matter to a plan: those it uses, and those it would use instead, until nothing is unknown.

    estimate ─► plan for the cluster and for each device type alone ─► measure what these plans use ─► estimate again

Estimates are calibrated by what was measured, so a candidate that only looked fast is measured before it is believed.
`tvmhet.campaign` decides what to measure; here it is compiled, run and recorded.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path

from tvmhet.cluster.device import DeviceType
from tvmhet.cluster.local import ordinal_of
from tvmhet.cluster.units import duration
from tvmhet.cost.measure import ArgSpec, KernelJob, KernelTimer, Measurement, TimerLimits
from tvmhet.cost.measure_rpc import RemoteTimer
from tvmhet.cost.measured import KernelKey, MeasuredKernels
from tvmhet.cost.model import to_text
from tvmhet.cost.table import MEASURED
from tvmhet.deploy import isa_level
from tvmhet.emit.build import compile_to
from tvmhet.emit.cpu.panels import panel_columns
from tvmhet.errors import HetError, NotSupported
from tvmhet.graph.fusion import LegalKernel
from tvmhet.graph.library import place_kernel
from tvmhet.graph.opgraph import OpGraph, Tensor
from tvmhet.ir.kernel_module import kernels_module
from tvmhet.ir.prepare import Prepared
from tvmhet.ir.transform.pack_weights import panel_shape
from tvmhet.kernel_keys import inside_key
from tvmhet.plans import Plan
from tvmhet.progress import progress_bar
from tvmhet.runtime.cores import CpuDevice, assign_cores, check_host_runs, worker_environment
from tvmhet.runtime.program import DeviceBinding
from tvmhet.times import Candidates, measured_key

LIMITS = TimerLimits(repeats=12, min_total_s=0.005, budget_s=0.4, time_limit_s=30.0)
_BATCH = 8  # kernels compiled and linked into one library, and measured on one type before it is another's turn
_LIBRARY_MODULE, _GPU_PLACE = "tvmhet.emit.library", "tvmhet.runtime.gpu_place"


@dataclass(slots=True)
class ProfileReport:
    """What a profile run did. `seconds` is wall time; `measured` counts kernels by device type."""

    candidates: int = 0  # distinct
    measured: dict[str, int] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    busy: int = 0
    rounds: int = 0
    seconds: float = 0.0
    complete: bool = False  # every kernel of the best plans is measured
    proved: bool = False  # no candidate that is not would change the plan at its lowest estimate
    skipped: dict[str, int] = field(default_factory=dict)  # distinct candidates not measured, by device type
    unreachable: tuple[str, ...] = ()
    factors: dict[str, float] = field(default_factory=dict)
    together: dict[str, float] = field(default_factory=dict)  # the same while every device works
    plans_run: int = 0  # as they are, every call timed
    raced_s: tuple[float, ...] = ()  # seconds of an input of each plan run against the others, the predicted best first

    def __str__(self) -> str:
        counts = ", ".join(f"{n} on {device}" for device, n in self.measured.items()) or "none"
        lines = [
            f"measured {counts}; {self.candidates} distinct candidates, rounds: {self.rounds}, {self.seconds:.1f} s",
        ]
        if self.skipped or not self.unreachable:  # else no type of the cluster is here
            lines.append(
                "every kernel of the best plans is measured"
                if self.complete
                else "the budget ended before all were measured"
            )
        if skipped := ", ".join(f"{n} on {device}" for device, n in self.skipped.items() if n):
            why = (
                "none of them, at the lowest time it is estimated at, would make the plan 0.1 % better"
                if self.proved
                else "some of them may change the plan: a larger budget goes on"
            )
            lines.append(f"not measured: {skipped}; {why}")
        if self.busy:
            lines.append(f"{self.busy} were measured on a busy machine: their times may be too long")
        lines += [f"failed: {text}" for text in self.failed]
        if self.factors:
            inside = f"inside the model kernels take as long as alone times {_listed(self.factors)}"
            lines.append(f"{inside}; while all devices work, {_listed(self.together)}" if self.together else inside)
        if self.plans_run:
            what = "one plan was" if self.plans_run == 1 else f"{self.plans_run} plans were"
            lines.append(f"{what} run as planned, to time their kernels where they are")
        if self.raced_s:
            best = f"the fastest takes {duration(min(self.raced_s))} an input"
            first = f"the one that was predicted best {duration(self.raced_s[0])}"
            lines.append(f"{len(self.raced_s)} plans were run one against the other: {best}, {first}")
        if self.unreachable:
            lines.append(f"not on this machine, so not measured: {', '.join(self.unreachable)}")
        return "\n".join(lines)


def _listed(factors: Mapping[str, float]) -> str:
    return ", ".join(f"{factor:.2f} on {device}" for device, factor in factors.items())


def local_types(devices: Sequence[DeviceType]) -> tuple[DeviceType, ...]:
    """CPU device types that this machine's processor can run, and GPU types of which it has one."""
    found = []
    for device in devices:
        if not device.is_cpu:
            found += [device] if ordinal_of(device) is not None else []
            continue
        try:
            check_host_runs([_binding(device)])
        except NotSupported:
            continue
        found.append(device)
    return tuple(found)


def cpu_device(device: DeviceType, device_id: str) -> CpuDevice:
    """Return what a device of a CPU type wants of this machine's processor."""
    return CpuDevice(device_id, device.num_sms, isa_level(device.target))


def _binding(device: DeviceType) -> DeviceBinding:
    return assign_cores([cpu_device(device, device.name)])[device.name]


class Profiler:
    """Measures candidates of one model: on this machine's types, each in its own worker, and on `remote` ones."""

    def __init__(
        self,
        prepared: Prepared,
        candidates: Candidates,
        database: MeasuredKernels,
        remote: Mapping[str, RemoteTimer] | None = None,
    ) -> None:
        self._prepared = prepared
        self._graph = prepared.operator_graph
        self._candidates = candidates
        self._database = database
        self._timers: dict[str, KernelTimer | RemoteTimer] = dict(remote or {})
        self._starting: dict[str, Future[None]] = {}
        self._starters = ThreadPoolExecutor()

    def on(self, prepared: Prepared, candidates: Candidates) -> Profiler:
        """Return a profiler of other kernels that measures with the workers of this one, which closes them."""
        other = copy(self)
        other._prepared, other._graph, other._candidates = prepared, prepared.operator_graph, candidates
        return other

    def __enter__(self) -> Profiler:
        return self

    def __exit__(self, *_: object) -> None:
        self._starters.shutdown()
        for timer in self._timers.values():
            timer.close()

    def measure(
        self,
        types: Mapping[str, DeviceType],
        wanted: Mapping[str, Sequence[int]],
        deadline_s: float,
        report: ProfileReport,
        progress: bool,
    ) -> None:
        """Measure candidates by device type until `deadline_s` (monotonic clock); count them in `report`.

        Types take turns, a batch each, so that a deadline leaves none of them unknown. All their workers start while
        the first batch is compiled.
        """
        self._start([types[name] for name, indices in wanted.items() if indices])
        done, total = 0, sum(map(len, wanted.values()))
        with progress_bar("measure", progress) as tell:
            for name, batch in _in_turn(wanted):
                if time.monotonic() > deadline_s:
                    return
                for i in self._measure_batch(types[name], batch, report):
                    done += 1
                    tell(done, total, f"{self._name(i)} on {name}")

    def _measure_batch(self, device: DeviceType, batch: Sequence[int], report: ProfileReport) -> Iterator[int]:
        with tempfile.TemporaryDirectory(prefix="tvmhet-") as folder:
            for i, library, function in self._compile(device, batch, Path(folder)):
                self._keep(device, i, self._run(device, i, library, function), report)
                yield i

    def _keep(self, device: DeviceType, i: int, run: Measurement, report: ProfileReport) -> None:
        key = measured_key(self._candidates.keys[i], self._candidates.kernels[i].maker, device)
        self._database.insert(key, run)
        self._describe(key, i)
        report.measured[device.name] = report.measured.get(device.name, 0) + 1
        report.busy += run.busy
        if run.status != "ok":
            report.failed.append(f"{self._name(i)} on {device.name}: {run.status} {run.note}".strip())

    def time(self, device: DeviceType, job: KernelJob) -> Measurement:
        """Run any job on the worker that stands for a device type."""
        return self._timer(device).measure(job)

    def keep_inside(self, device: DeviceType, wanted: Sequence[int], times_s: Sequence[float]) -> None:
        """Record what candidates took inside the model, each key once by its median."""
        times: dict[int, list[float]] = {}
        first: dict[str, int] = {}
        for i, seconds in zip(wanted, times_s, strict=True):
            times.setdefault(first.setdefault(self._candidates.keys[i], i), []).append(seconds)
        for i, seconds_s in times.items():
            key = measured_key(self._candidates.keys[i], self._candidates.kernels[i].maker, device)
            self._database.insert(inside_key(key, self._candidates.model_bytes), Measurement("ok", tuple(seconds_s)))
            self._describe(key, i)

    def _describe(self, key: KernelKey, i: int) -> None:
        """Let models of other kernels learn from a kernel; branches at the same time teach nothing of one kernel."""
        if not self._candidates.kernels[i].branches:
            self._database.describe(key.kernel_hash, to_text(self._candidates.descs[i]))

    def _name(self, i: int) -> str:
        return "+".join(self._graph.operators[o].name for o in self._candidates.kernels[i].ops)

    def _compile(self, device: DeviceType, batch: Sequence[int], folder: Path) -> list[tuple[int, Path | str, str]]:
        """Compile a batch as one library; if that fails, each kernel alone, so that one cannot spoil the others.

        Return, per kernel, its candidate index, the library or what TVM said, and the function's name.
        """
        together = self._compile_together(device, batch, folder / "batch.so")
        if isinstance(together, Path):
            return [(i, together, f"k{j}") for j, i in enumerate(batch)]
        return [(i, self._compile_together(device, [i], folder / f"{i}.so"), "k0") for i in batch]

    def _compile_together(self, device: DeviceType, batch: Sequence[int], library: Path) -> Path | str:
        kernels = [place_kernel(self._graph, self._candidates.kernels[i]) for i in batch]
        try:
            module = kernels_module(self._prepared.mod, kernels, self._panels(device))
            compile_to(module, device.target, library)
        except HetError:
            raise
        except Exception as error:  # whatever TVM raises becomes a row with its status
            return f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error).strip() else ''}"[:300]
        return library

    def _run(self, device: DeviceType, i: int, library: Path | str, function: str) -> Measurement:
        if isinstance(library, str):
            return Measurement("build_error", note=library)
        args = kernel_args(self._graph, self._candidates.kernels[i], self._panels(device))
        return self._timer(device).measure(KernelJob(library, args, function))

    def _panels(self, device: DeviceType) -> Mapping[str, int]:
        return panel_columns(self._graph, self._candidates.panels, device.target)

    def _start(self, devices: Iterable[DeviceType]) -> None:
        """Start the workers of types that have none yet, all at once, without waiting for them."""
        for name, timer in local_timers([d for d in devices if d.name not in self._timers]).items():
            self._timers[name] = timer
            self._starting[name] = self._starters.submit(timer.start)

    def _timer(self, device: DeviceType) -> KernelTimer | RemoteTimer:
        self._start([device])
        while self._starting:  # a worker that starts takes time from one that measures
            self._starting.popitem()[1].result()
        return self._timers[device.name]


def local_timers(devices: Sequence[DeviceType], limits: TimerLimits = LIMITS) -> dict[str, KernelTimer]:
    """Return a timer for each type, by name; CPU types are on different cores as far as there are any.

    Raises NotSupported for a GPU type of which this machine has none.
    """
    bindings = assign_cores([cpu_device(d, d.name) for d in devices if d.is_cpu])
    return {d.name: timer_of(bindings[d.name], limits) if d.is_cpu else _gpu_timer(d, limits) for d in devices}


def local_timer(device: DeviceType, limits: TimerLimits = LIMITS) -> KernelTimer:
    """Return a timer that stands for a type on this machine: its cores and instruction set, or its GPU.

    Raises NotSupported for a GPU type of which it has none.
    """
    return local_timers([device], limits)[device.name]


def _gpu_timer(device: DeviceType, limits: TimerLimits) -> KernelTimer:
    ordinal = ordinal_of(device)
    if ordinal is None:
        raise NotSupported(
            f"this machine has no {device.name!r}", "profile on a machine that has, or through a tracker"
        )
    return KernelTimer(preload=(_LIBRARY_MODULE,), limits=limits, gpu=(_GPU_PLACE, ordinal))


def timer_of(binding: DeviceBinding, limits: TimerLimits = LIMITS) -> KernelTimer:
    """Return a timer on certain cores."""
    return KernelTimer(
        cores=binding.cores, environment=worker_environment(binding, {}), preload=(_LIBRARY_MODULE,), limits=limits
    )


def kernel_args(graph: OpGraph, kernel: LegalKernel, panels: Mapping[str, int]) -> tuple[ArgSpec, ...]:
    """Return the argument specs of a kernel: its live-ins in order of first use, indices within what they index.

    `panels` are the columns of the weights' panels, which the library does not read.
    """
    inside = set(kernel.ops)
    columns = {} if kernel.maker == "library" else panels
    reads = dict.fromkeys(t for i in kernel.ops for t in graph.operators[i].inputs)
    live_in = [t for t in reads if graph.tensors[t].producer not in inside]
    return tuple(
        ArgSpec(_shape(graph.tensors[t], columns), graph.tensors[t].dtype, int_high(graph, kernel.ops, t))
        for t in live_in
    )


def _shape(tensor: Tensor, columns: Mapping[str, int]) -> tuple[int, ...]:
    return panel_shape(tensor.shape, columns[tensor.name]) if tensor.name in columns else tensor.shape


def int_high(graph: OpGraph, ops: Iterable[int], tensor: int) -> int:
    """Return the extent that an integer tensor indexes in a `take` among `ops`; 1, always valid, for any other use."""
    for i in ops:
        op = graph.operators[i]
        if op.family == "take" and len(op.inputs) == 2 and op.inputs[1] == tensor:
            table = graph.tensors[op.inputs[0]]
            axis = op.attrs.get("axis")
            return max(1, table.shape[axis if isinstance(axis, int) else 0])
    return 1


def _in_turn(wanted: Mapping[str, Sequence[int]]) -> Iterator[tuple[str, Sequence[int]]]:
    for start in range(0, max(map(len, wanted.values()), default=0), _BATCH):
        yield from ((name, batch) for name, indices in wanted.items() if (batch := indices[start : start + _BATCH]))


def unmeasured(
    plans: Sequence[Plan], candidates: Candidates, devices: Mapping[str, DeviceType]
) -> dict[str, list[int]]:
    """Return, per device type, the candidates that some plan uses there on the word of a model, each key once.

    Those that are thought to take longest come first.
    """
    wanted: dict[str, dict[str, tuple[float, int]]] = {name: {} for name in devices}
    for plan in plans:
        for stage in plan.stages:
            if stage.placement.device_type not in devices:
                continue
            for i, prediction in zip(candidates.indices(stage.kernels), stage.predictions, strict=True):
                if prediction.source not in MEASURED:
                    wanted[stage.placement.device_type].setdefault(candidates.keys[i], (-prediction.time_s, i))
    return {name: [i for _, i in sorted(found.values())] for name, found in wanted.items()}
