"""What a run took: every stage's times on one clock, and their medians with spread."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tvmhet.runtime.program import PipelineProgram


@dataclass(frozen=True, slots=True)
class StageRun:
    """One stage serving one input on one device. Seconds of CLOCK_MONOTONIC, comparable between processes."""

    stage: int
    device: str
    input_index: int
    start_s: float
    loaded_s: float
    computed_s: float
    end_s: float

    @property
    def compute_s(self) -> float:
        """Seconds in the compiled function."""
        return self.computed_s - self.loaded_s

    @property
    def transfer_s(self) -> float:
        """Seconds moving inputs to the device and outputs to shared memory."""
        return (self.loaded_s - self.start_s) + (self.end_s - self.computed_s)


@dataclass(frozen=True, slots=True)
class Sample:
    """Repeated measurements of one quantity, seconds: the median and the quartiles around it."""

    median_s: float
    low_s: float
    high_s: float
    num_runs: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Sample:
        """Return median and quartiles. A single measurement is its own spread."""
        if len(seconds) == 1:
            return cls(seconds[0], seconds[0], seconds[0], 1)
        low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(median, low, high, len(seconds))


@dataclass(frozen=True, slots=True)
class StageStats:
    """One stage's measured times. `hop` is from the end of the last stage before it to its own start: the cost of

    handing over. It is None for stages that read program inputs only, and in a full pipeline, where it is waiting.
    """

    stage: int
    name: str
    devices: tuple[str, ...]
    compute: Sample
    transfer: Sample
    hop: Sample | None


@dataclass(frozen=True, slots=True)
class RunStats:
    """A benchmark. `latency_s` has one entry per input, run alone; the throughput is of a full pipeline.

    `stages` were measured with one input at a time, `stages_streamed` in the full pipeline, where devices that share
    cores or memory bandwidth slow each other down. `timeline` is of the full pipeline. `shared_cores` names devices
    whose cores another device uses too. `over_machines` says that each machine of the plan was one.
    """

    latency_s: tuple[float, ...]
    throughput_per_s: float
    stages: tuple[StageStats, ...]
    stages_streamed: tuple[StageStats, ...]
    timeline: tuple[StageRun, ...]
    shared_cores: tuple[str, ...]
    over_machines: bool = False

    @property
    def latency(self) -> Sample:
        """Median and quartiles of the latency."""
        return Sample.of(self.latency_s)


def stage_stats(program: PipelineProgram, runs: Iterable[StageRun], with_hops: bool) -> tuple[StageStats, ...]:
    """Return the statistics of each stage that has runs, in stage order."""
    of_stage: dict[int, list[StageRun]] = {}
    end_s: dict[tuple[int, int], float] = {}
    for run in runs:
        of_stage.setdefault(run.stage, []).append(run)
        end_s[run.stage, run.input_index] = run.end_s
    return tuple(_one_stage(program, stage, of_stage[stage], end_s, with_hops) for stage in sorted(of_stage))


def _one_stage(
    program: PipelineProgram,
    stage: int,
    runs: Sequence[StageRun],
    end_s: Mapping[tuple[int, int], float],
    with_hops: bool,
) -> StageStats:
    before = program.predecessors(stage)
    hops = [
        run.start_s - max(end_s[p, run.input_index] for p in before)
        for run in runs
        if with_hops and before and all((p, run.input_index) in end_s for p in before)
    ]
    return StageStats(
        stage,
        program.stages[stage].name,
        program.stages[stage].devices,
        Sample.of([run.compute_s for run in runs]),
        Sample.of([run.transfer_s for run in runs]),
        Sample.of(hops) if hops else None,
    )
