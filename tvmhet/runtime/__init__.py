"""Run placed programs: workers, shared memory, and what a run took."""

from tvmhet.runtime.cores import CpuDevice, assign_cores, check_host_runs, host_cores
from tvmhet.runtime.local import HetRuntime
from tvmhet.runtime.program import DeviceBinding, PipelineProgram, StageProgram, ValueSpec
from tvmhet.runtime.stats import RunStats, Sample, StageRun, StageStats

__all__ = [
    "CpuDevice",
    "DeviceBinding",
    "HetRuntime",
    "PipelineProgram",
    "RunStats",
    "Sample",
    "StageProgram",
    "StageRun",
    "StageStats",
    "ValueSpec",
    "assign_cores",
    "check_host_runs",
    "host_cores",
]
