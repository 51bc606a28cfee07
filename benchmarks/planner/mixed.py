"""Do unlike device types together beat the best single type? The whole distribution, wins and losses.

    python -m benchmarks.planner.mixed [MODEL ...]

Models of tvmhet.zoo on the clusters and prices of mixed.yaml, with learned times: (i) free purchase of up to 4 devices
of each type, by price per input; (ii) all devices of the cluster, by period; (iii) the same with memory for a fifth of
the weights on each device, by period. The best homogeneous plan may use any one type, all of its devices, and
replicate. Both come from the same search.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import yaml

import tvmhet
from tvmhet import zoo
from tvmhet.candidates import MAKERS, candidate_kernels
from tvmhet.ir.prepare import prepare
from tvmhet.planning_problem import make_problem
from tvmhet.solve import Problem, Status, solve
from tvmhet.solve.evaluate import stage_memory_bytes
from tvmhet.solve.price import price_front
from tvmhet.times import Candidates, time_table

MODELS = tuple(m for m in zoo.MODELS if m != "lstm")  # its 2,293 operators take as long as all others together
_MOST_BOUGHT = 4
_FRONT_STEP = 0.1  # relative distance of periods on the price front


def problems_of(model: str) -> Iterator[tuple[str, Problem]]:
    """The planning problem of a zoo model on each cluster, with prices."""
    tree = yaml.safe_load(Path(__file__).with_name("mixed.yaml").read_text())
    prepared = prepare(tvmhet.from_torch(*zoo.get(model)))
    assert prepared.graph is not None
    candidates = Candidates.of(prepared.graph, candidate_kernels(prepared.graph, MAKERS))
    for name, values in tree["clusters"].items():
        cluster = tvmhet.ClusterSpec.from_dict(values)
        groups = cluster.groups()
        table = time_table(candidates, cluster.device_types(), None)
        seconds = np.stack([table.seconds[:, table.column(g.device.name)] for g in groups], axis=1)
        problem = make_problem(prepared.graph, candidates.kernels, seconds, cluster, groups, {})
        priced = tuple(
            replace(d, usd_per_h=tree["prices"][g.device.name]) for d, g in zip(problem.groups, groups, strict=True)
        )
        yield name, replace(problem, groups=priced)


def only(problem: Problem, group: int) -> Problem:
    """The same cluster with the devices of one group."""
    groups = tuple(d if g == group else replace(d, num_devices=0) for g, d in enumerate(problem.groups))
    return replace(problem, groups=groups)


def period_s(problem: Problem) -> float:
    """Seconds between results of the best plan; inf if there is none."""
    solution = solve(problem)
    return math.inf if solution.status is Status.INFEASIBLE else solution.objective


def price_usd(problem: Problem) -> float:
    """The least price of one input; inf if there is no plan."""
    best = price_front(problem, step=_FRONT_STEP).cheapest_input()
    return best.usd_per_input if best else math.inf


def shop(problem: Problem) -> Problem:
    """At most a few devices of each type: more of them only repeat a pipeline at the same price per input."""
    few = tuple(replace(d, num_devices=min(d.num_devices, _MOST_BOUGHT)) for d in problem.groups)
    return replace(problem, groups=few)


def scarce(problem: Problem) -> Problem:
    """Memory for a fifth of the weights, and the largest single kernel, on each device."""
    weights = sum(w.size_bytes for w in problem.weights)
    room = weights / 5 + max(stage_memory_bytes(problem, (i,)) for i in range(len(problem.kernels)))
    return replace(problem, groups=tuple(replace(d, memory_bytes=min(d.memory_bytes, room)) for d in problem.groups))


QUESTIONS: tuple[tuple[str, Callable[[Problem], Problem], Callable[[Problem], float]], ...] = (
    ("(i) price, free purchase", shop, price_usd),
    ("(ii) period, all devices", lambda p: p, period_s),
    ("(iii) period, scarce memory", scarce, period_s),
)


def main(models: list[str]) -> int:
    """Print every case, then one line per question."""
    gains: dict[str, list[float]] = {name: [] for name, _, _ in QUESTIONS}
    print("| model | cluster | " + " | ".join(gains) + " |")
    print("|---|---|" + "---|" * len(gains))
    for model in models or MODELS:
        for cluster, problem in problems_of(model):
            cells = []
            for name, change, value in QUESTIONS:
                mixed = value(change(problem))
                single = min(value(change(only(problem, g))) for g in range(len(problem.groups)))
                gain = single / mixed - 1 if math.isfinite(mixed) else math.nan
                gains[name].append(gain)
                cells.append(
                    "fits nowhere" if math.isnan(gain) else "only mixed fits" if gain == math.inf else f"{gain:.1%}"
                )
            print(f"| {model} | {cluster} | " + " | ".join(cells) + " |", flush=True)
    print(
        "\n| question | cases | mixed better by > 0.1 % | one type is best | only mixed fits | median | most | least |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name, all_gains in gains.items():
        finite = [g for g in all_gains if math.isfinite(g)]
        better = sum(g > 1e-3 for g in finite)
        counts = (sum(not math.isnan(g) for g in all_gains), better, len(finite) - better, all_gains.count(math.inf))
        spread = (statistics.median(finite), max(finite), min(finite)) if finite else (math.nan,) * 3
        print(f"| {name} | {' | '.join(map(str, counts))} | {' | '.join(f'{x:.1%}' for x in spread)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
