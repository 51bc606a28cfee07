"""Does deciding fusion and placement together beat deciding one after the other?

    python -m benchmarks.cooptimise [--models resnet50,...] [--clusters FILE,...] [--searches ...] [--profile SECONDS]

Every model of the zoo on three clusters, for throughput and for latency: the joint search and the lesser ones
(`tvmhet plan --ablate`), all on one table of times. A ratio is the lesser plan's predicted time over the joint one's;
above 1 the joint search is better. `--profile` first measures kernels of the CPU types that are here.

One table shows where the best kernels of one device type are not those of another: per pair of types, how many
operators lie in kernels that the other does not choose, and for the largest difference the kernels with times.

The last one counts kernels on one device against TVM's FuseOps (`benchmarks.kernel_counts`).
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import tvmhet
from benchmarks.kernel_counts import COUNTS_HEAD, print_counts
from tvmhet import zoo
from tvmhet.arguments import ABLATIONS
from tvmhet.ir.model import Model
from tvmhet.plans import Plan
from tvmhet.solve import IN_SECONDS, Objective

CLUSTERS = ("two_cpus", "mixed_node", "three_kinds_of_node")
_FOLDER = Path(__file__).parent.parent / "tutorials" / "clusters"
_EQUAL, _CLEAR = 1e-3, 0.03


@dataclass(frozen=True, slots=True)
class Case:
    """One model on one cluster for one objective: seconds by search ("": joint), the joint plan's bound."""

    model: str
    cluster: str
    objective: str
    seconds: dict[str, float]
    bound_s: float

    def ratio(self, search: str) -> float:
        """The lesser plan's time over the joint one's."""
        return self.seconds[search] / self.seconds[""]


def run_case(
    model: Model, name: str, cluster: str, spec: tvmhet.ClusterSpec, objective: str, searches: Sequence[str]
) -> Case:
    """Plan one case with the joint search and every one of `searches`."""
    plans = {a: tvmhet.plan(model, cluster=spec, objective=objective, ablate=a) for a in ("", *searches)}
    seconds = {a: p.objective_value for a, p in plans.items()}
    return Case(name, cluster, objective, seconds, plans[""].lower_bound)


def print_case(case: Case) -> None:
    """One line of the first table."""
    ratios = " | ".join(f"{case.ratio(a):.3f}" for a in case.seconds if a)
    gap = 1 - case.bound_s / case.seconds[""]
    first = f"| {case.model} | {case.cluster} | {case.objective} | {case.seconds[''] * 1e3:.3f}"
    print(f"{first} | {gap:.0%} | {ratios} |", flush=True)


def print_spread(cases: list[Case]) -> None:
    """How often, and by how much, each lesser search loses."""
    print(
        "\n| search | cases | joint better by 3 % | better | equal | worse | geometric mean | median | most | least |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for search in (a for a in cases[0].seconds if a):
        ratios = [c.ratio(search) for c in cases]
        clear, better = sum(r >= 1 + _CLEAR for r in ratios), sum(r > 1 + _EQUAL for r in ratios)
        worse = sum(r < 1 - _EQUAL for r in ratios)
        mean = math.exp(statistics.fmean(math.log(r) for r in ratios))
        counts = f"{len(ratios)} | {clear} | {better} | {len(ratios) - better - worse} | {worse}"
        print(
            f"| {search} | {counts} | {mean:.3f} | {statistics.median(ratios):.3f} | {max(ratios):.3f} "
            f"| {min(ratios):.3f} |"
        )


def alone(model: Model, spec: tvmhet.ClusterSpec, device: str) -> Plan:
    """The best kernels of one device: the plan of the whole model on it, for latency."""
    one = spec.with_counts({t: int(t == device) for t in spec.counts()})
    return tvmhet.plan(model, cluster=one, objective=Objective.LATENCY.value)


def kernels_of(plan: Plan) -> dict[frozenset[str], tuple[str, float]]:
    """Maker and seconds of each kernel, by the operators in it."""
    placed = [(k, p) for s in plan.stages for k, p in zip(s.placement.kernels, s.predictions, strict=True)]
    return {frozenset(k.ops): (k.maker, p.time_s) for k, p in placed}


def print_unlike(model: Model, name: str, cluster: str, spec: tvmhet.ClusterSpec) -> None:
    """For each pair of types: the operators whose best kernels differ, and the first such kernels with their times."""
    plans = {d.name: alone(model, spec, d.name) for d in spec.device_types()}
    best = {d: kernels_of(p) for d, p in plans.items() if len(p.stages) == 1}
    for a, b in combinations(best, 2):
        unlike = sorted((k for k in best[a] if k not in best[b]), key=lambda k: (-len(k), sorted(k)))
        num_ops = sum(len(k) for k in unlike)
        share = num_ops / max(1, sum(len(k) for k in best[a]))
        print(f"| {name} | {cluster} | {a}, {b} | {num_ops} ({share:.0%}) | {_example(unlike, best[a], best[b])} |")


def _example(
    unlike: list[frozenset[str]],
    here: dict[frozenset[str], tuple[str, float]],
    there: dict[frozenset[str], tuple[str, float]],
) -> str:
    if not unlike:
        return ""
    first = unlike[0]
    others = [k for k in there if k & first]
    return f"{_listed(here, [first])} / {_listed(there, others)}"


def _listed(kernels: dict[frozenset[str], tuple[str, float]], which: list[frozenset[str]]) -> str:
    """Kernels in words: [operators] maker microseconds."""
    return " + ".join(f"[{' '.join(sorted(k))}] {kernels[k][0]} {kernels[k][1] * 1e6:.1f} us" for k in which)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(sorted(zoo.MODELS)))
    parser.add_argument("--clusters", default=",".join(CLUSTERS), help="names in tutorials/clusters, or files")
    parser.add_argument(
        "--searches",
        default=",".join(a for a in ABLATIONS if a != "no-race"),
        help="the lesser searches to compare with",
    )
    parser.add_argument("--profile", type=float, default=0.0, metavar="SECONDS", help="per model and cluster")
    return parser.parse_args()


def read_cluster(name: str) -> tvmhet.ClusterSpec:
    """A cluster file by its path, or by its name in tutorials/clusters."""
    known = _FOLDER / f"{name}.yaml"
    return tvmhet.ClusterSpec.from_file(known if known.exists() else Path(name))


def main() -> int:
    """Print the cases as they come, then the spread and the differences between types."""
    given = arguments()
    specs = {Path(name).stem: read_cluster(name) for name in given.clusters.split(",")}
    models = {n: tvmhet.from_torch(*zoo.get(n)) for n in given.models.split(",")}
    searches = given.searches.split(",")
    print("| model | cluster | objective | joint ms | gap |", " | ".join(searches), "|")
    print("|---|---|---|---|---|" + "---|" * len(searches))
    cases: list[Case] = []
    for name, model in models.items():
        for cluster, spec in specs.items():
            if given.profile and any(d.is_cpu for d in spec.device_types()):
                tvmhet.profile(model, cluster=spec, budget_s=given.profile)
            for objective in IN_SECONDS:
                cases.append(run_case(model, name, cluster, spec, objective.value, searches))
                print_case(cases[-1])
    print_spread(cases)
    print("\n| model | cluster | types | operators in other kernels | the largest, here / there |")
    print("|---|---|---|---|---|")
    for name, model in models.items():
        for cluster, spec in specs.items():
            print_unlike(model, name, cluster, spec)
    print(COUNTS_HEAD)
    for name, model in models.items():
        for cluster, spec in specs.items():
            print_counts(model, name, cluster, spec)
    return 0


if __name__ == "__main__":
    sys.exit(main())
