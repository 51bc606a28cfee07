"""Run a compiled stage on this machine's CPUs, for `tvmhet.context`: alone, and those of all devices at once.

alone       every call is timed in the run: what kernels take one after another
together    one worker per device, each pinned to its own cores; all run until the time is up
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from tvmhet.cluster.device import DeviceType
from tvmhet.cost.measure import ArgSpec, KernelJob, Measurement, Together
from tvmhet.plans import PlannedStage
from tvmhet.profiling import cpu_device, timer_of
from tvmhet.runtime.cores import assign_cores
from tvmhet.runtime.program import PipelineProgram

_RUNS = 6  # of the slowest device, while all run
_MIN_S, _MAX_S = 1.0, 8.0
_MAX_DEVICES = 8  # each holds the weights and the values between kernels


@dataclass(frozen=True, slots=True)
class CompiledStage:
    """A stage of a plan and the type of its devices, compiled: of a plan of one device, the whole model."""

    device: DeviceType
    stage: PlannedStage
    program: PipelineProgram

    @property
    def job(self) -> KernelJob:
        """The run that times every call in it."""
        stage = self.program.stages[self.stage.index]
        values = [self.program.values[name] for name in stage.inputs]
        args = [ArgSpec(v.shape, v.dtype) for v in values]
        args += [ArgSpec(tuple(v.shape), v.dtype.name) for v in (self.program.params[name] for name in stage.params)]
        return KernelJob(stage.library, tuple(args), stage.function, calls=True)


def run_together(
    models: Sequence[CompiledStage], alone_s: Sequence[float], *, calls: bool = False
) -> list[Measurement] | None:
    """Time every stage, one per device, while the others run; `alone_s` is about what each takes alone.

    With `calls` each call of a stage is timed, not the whole of it.

    None where this machine has not a core for each of their cores, and of more than eight devices.
    """
    names = [f"{model.device.name}:{i}" for i, model in enumerate(models)]
    bindings = assign_cores([cpu_device(m.device, name) for m, name in zip(models, names, strict=True)])
    if not 1 < len(models) <= _MAX_DEVICES or any(b.shared_cores for b in bindings.values()):
        return None
    seconds = min(max(_RUNS * max(alone_s), _MIN_S), _MAX_S)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tvmhet-")))
        timers = [stack.enter_context(timer_of(bindings[name])) for name in names]
        pool = stack.enter_context(ThreadPoolExecutor(len(models)))
        list(pool.map(lambda timer: timer.start(), timers))
        together = Together(folder, len(models), seconds)
        jobs = [replace(model.job, calls=calls, together=together) for model in models]
        return list(pool.map(lambda timer, job: timer.measure(job), timers, jobs))


def by_type(models: Sequence[CompiledStage], runs: Sequence[Measurement]) -> dict[str, tuple[float, ...]]:
    """Return the median of each device's runs, by device type."""
    found: dict[str, tuple[float, ...]] = {}
    for model, run in zip(models, runs, strict=True):
        found[model.device.name] = (*found.get(model.device.name, ()), median(run.times_s))
    return found
