"""Does `profile` find the plan of measuring everything, and for how many measurements?

    python -m benchmarks.profiling [--models resnet50,...] [--objectives throughput,latency] [--seeds 1]

Nothing is run. A seed hides a time of every candidate kernel on one x86-64-v2 and one x86-64-v4 core: dice within the
whole interval of the first estimate, evenly in its logarithm, each kernel apart. That is harder than real kernels,
whose estimates are wrong alike in a family, so that measuring one teaches the others. What `profile` measures it is
told. `excess` is by how much the plan that rests on those is worse than that of measuring everything, both at the
hidden times ("-": better, where the search missed it among all); `proved` is what the campaign says.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import tvmhet
from tvmhet import zoo
from tvmhet.campaign import Campaign
from tvmhet.candidates import MAKERS, candidate_kernels
from tvmhet.cluster import ClusterSpec
from tvmhet.cluster.device import DeviceType
from tvmhet.cost.measure import Measurement
from tvmhet.cost.measured import MeasuredKernels
from tvmhet.ir.prepare import Prepared, prepare
from tvmhet.known_times import known_times
from tvmhet.planning import make_plan
from tvmhet.plans import Plan
from tvmhet.profiling import Profiler, ProfileReport
from tvmhet.progress import Report
from tvmhet.solve import Objective
from tvmhet.times import Candidates, measured_key, time_table

CLUSTER = ClusterSpec.from_dict({"nodes": [{"devices": {"cpu-x86-64-v2": 1, "cpu-x86-64-v4": 1}}]})
_MODELS = "resnet50,bert_base,gpt2_small,inception_v3,mobilenet_v3,convnext_t,vit_b16,dlrm,moe,t5_small"
_NO_LIMIT_S = 1e9
HEAD = """
| model | objective | seed | measured | of | share | excess | proved | rounds | CPU s |
|---|---|---|---|---|---|---|---|---|---|"""


class Oracle:
    """Times that no one sees before they are measured: the first estimate, moved by dice within its interval."""

    def __init__(self, candidates: Candidates, cluster: ClusterSpec, seed: object) -> None:
        self.candidates = candidates
        self.table = time_table(candidates, cluster.device_types(), None)
        self.seed = seed

    def seconds(self, i: int, device: str) -> float:
        """The hidden time of a candidate on a device type."""
        entry = self.table.entry(i, device)
        digest = hashlib.sha256(f"{self.seed} {self.candidates.keys[i]} {device}".encode()).digest()
        share = int.from_bytes(digest[:4], "big") / 2**32
        return math.exp(math.log(entry.low) * (1 - share) + math.log(entry.high) * share)

    def record(self, database: MeasuredKernels, device: DeviceType, wanted: Sequence[int]) -> None:
        """Write hidden times down as measured."""
        for i in wanted:
            key = measured_key(self.candidates.keys[i], self.candidates.kernels[i].maker, device)
            database.insert(key, Measurement("ok", (self.seconds(i, device.name),) * 3))


class Told(Campaign):
    """A campaign that is told the hidden times instead of running kernels."""

    def _measure_context(self, *_: object) -> None:
        """Nothing is run."""


def best(
    prepared: Prepared, candidates: Candidates, database: MeasuredKernels, cluster: ClusterSpec, objective: Objective
) -> Plan:
    """The plan by what a database knows."""
    table = known_times(prepared, candidates, database, cluster, in_context=True)
    return make_plan(prepared, candidates.kernels, table, cluster, objective, {}, 30.0, 0)


def told(prepared: Prepared, candidates: Candidates, objective: Objective, seed: int) -> str:
    """One row: what the campaign measured, and its plan against that of measuring everything."""
    oracle = Oracle(candidates, CLUSTER, seed)
    started = time.process_time()

    def measure(
        self: Profiler, device: DeviceType, wanted: Sequence[int], _: float, report: ProfileReport, __: Report
    ) -> None:
        oracle.record(self._database, device, wanted)
        report.measured[device.name] = report.measured.get(device.name, 0) + len(wanted)

    Profiler.measure = measure  # type: ignore[method-assign]
    with TemporaryDirectory() as folder:
        with closing(MeasuredKernels(Path(folder) / "chosen.db")) as database:
            report = Told(prepared, candidates, database, CLUSTER, objective).run(_NO_LIMIT_S)
            cpu_s = time.process_time() - started
            chosen = best(prepared, candidates, database, CLUSTER, objective)
        with closing(MeasuredKernels(Path(folder) / "all.db")) as database:
            distinct = {key: i for i, key in enumerate(candidates.keys)}
            for device in CLUSTER.device_types():
                oracle.record(database, device, list(distinct.values()))
            exhaustive = best(prepared, candidates, database, CLUSTER, objective)
    num, every = sum(report.measured.values()), len(distinct) * len(CLUSTER.device_types())
    excess = chosen.objective_value / exhaustive.objective_value - 1
    figures = f"{num} | {every} | {num / every:.0%} | {excess:+.2%} | {'yes' if report.proved else 'no'}"
    return f"| {objective.value} | {seed} | {figures} | {report.rounds} | {cpu_s:.0f} |"


def main() -> int:
    """Print one row per model, objective and seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=_MODELS)
    parser.add_argument("--objectives", default="throughput,latency")
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    print(HEAD, flush=True)
    for name in args.models.split(","):
        prepared = prepare(tvmhet.from_torch(*zoo.get(name)))
        assert prepared.graph is not None
        candidates = Candidates.of(prepared.graph, candidate_kernels(prepared.graph, MAKERS))
        for objective in args.objectives.split(","):
            for seed in range(args.seeds):
                print(f"| {name} {told(prepared, candidates, Objective(objective), seed)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
