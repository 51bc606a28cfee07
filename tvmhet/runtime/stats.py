"""What a run took: every stage's times on one clock, and their medians with spread."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

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

    `stages`, those of the plan, were measured with one input at a time, `stages_streamed` in the full pipeline, where
    devices that share cores or memory bandwidth slow each other down. `timeline` is of the full pipeline, step by step
    where a team of devices runs a stage. `shared_cores` names devices
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
    """Return the statistics of each stage of the plan that has `planned_runs`, in stage order."""
    of_stage: dict[int, list[StageRun]] = {}
    end_s: dict[tuple[int, int], float] = {}
    for run in runs:
        of_stage.setdefault(run.stage, []).append(run)
        end_s[run.stage, run.input_index] = run.end_s
    return tuple(_one_stage(program, stage, of_stage[stage], end_s, with_hops) for stage in sorted(of_stage))


def planned_runs(program: PipelineProgram, runs: Iterable[StageRun], alone: bool) -> list[StageRun]:
    """Return runs of the plan's stages: of a stage that a team of devices ran in steps, one for each input.

    `alone` says that one input was run at a time: a team's run is then from its first step's start to its last one's
    end. Else steps of other inputs lie between, and it is what the busiest of its devices worked.
    """
    together: dict[tuple[int, int], list[StageRun]] = {}
    for run in runs:
        together.setdefault((program.planned(run.stage), run.input_index), []).append(run)
    return [_of_team(stage, steps, alone) for (stage, _), steps in together.items()]


def _of_team(stage: int, steps: Sequence[StageRun], alone: bool) -> StageRun:
    if len(steps) == 1:
        return replace(steps[0], stage=stage)
    first, last = min(steps, key=lambda run: run.start_s), max(steps, key=lambda run: run.end_s)
    own: dict[str, list[StageRun]] = {}
    for run in steps:
        own.setdefault(run.device, []).append(run)
    busiest = max(own, key=lambda device: sum(run.end_s - run.start_s for run in own[device]))
    if alone:
        loaded_s, computed_s, end_s = first.loaded_s, last.computed_s, last.end_s
    else:
        loaded_s = first.start_s
        computed_s = loaded_s + sum(run.compute_s for run in own[busiest])
        end_s = computed_s + sum(run.transfer_s for run in own[busiest])
    return StageRun(stage, busiest, first.input_index, first.start_s, loaded_s, computed_s, end_s)


def _one_stage(
    program: PipelineProgram,
    stage: int,
    runs: Sequence[StageRun],
    end_s: Mapping[tuple[int, int], float],
    with_hops: bool,
) -> StageStats:
    steps = [s for s in program.stages if program.planned(s.index) == stage]
    before = {program.planned(p) for s in steps for p in program.predecessors(s.index)} - {stage}
    hops = [
        run.start_s - max(end_s[p, run.input_index] for p in before)
        for run in runs
        if with_hops and before and all((p, run.input_index) in end_s for p in before)
    ]
    return StageStats(
        stage,
        steps[0].name if len(steps) == 1 else f"stage {stage}",
        tuple(dict.fromkeys(device for s in steps for device in s.devices)),
        Sample.of([run.compute_s for run in runs]),
        Sample.of([run.transfer_s for run in runs]),
        Sample.of(hops) if hops else None,
    )
