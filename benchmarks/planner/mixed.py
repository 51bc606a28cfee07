"""Do unlike device types together beat the best single type? The whole distribution, wins and losses.

    python -m benchmarks.planner.mixed

10 random models (see scale.py) on 6 clusters of invented types: (i) free purchase, by price per input; (ii) a fixed
mixed inventory, by period; (iii) the same inventory with memory for a fifth of the weights on each device, by period.
The best homogeneous plan may use any one type, all of its devices, and replicate. Both come from the same search.
"""

from __future__ import annotations

import math
import statistics
import sys
from dataclasses import replace

from benchmarks.planner.scale import random_cluster_problem
from tvmhet.solve import Problem, Status, solve
from tvmhet.solve.price import price_front

MODELS = range(10)  # seeds; 30 to 90 operators
CLUSTERS = ((2, 1), (2, 4), (3, 2), (4, 1), (4, 4), (6, 2))  # types, devices of each
_USD_PER_H = (0.35, 0.8, 1.2, 2.4, 3.7, 5.0)  # from slow to fast, in the order of a type's speed


def problem_of(model: int, types: int, per_type: int) -> Problem:
    """One model on one cluster; faster types cost more."""
    base = random_cluster_problem(30 + 6 * model, types, per_type, 1, seed=model)
    total = [math.fsum(k.time_s[g] for k in base.kernels) for g in range(types)]
    rank = {g: r for r, g in enumerate(sorted(range(types), key=lambda g: -total[g]))}
    return replace(base, groups=tuple(replace(d, usd_per_h=_USD_PER_H[rank[g]]) for g, d in enumerate(base.groups)))


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
    best = price_front(problem, step=0.03).cheapest_input()
    return best.usd_per_input if best else math.inf


def scarce(problem: Problem) -> Problem:
    """Memory for a fifth of the weights, and the largest single operator, on each device."""
    weights = sum(w.size_bytes for w in problem.weights)
    room = weights / 5 + 12_000_000
    return replace(problem, groups=tuple(replace(d, memory_bytes=room) for d in problem.groups))


def main() -> int:
    """Print one line per question."""
    print("| question | cases | mixed better by > 0.1 % | equal | only mixed fits | gain: median | best | worst |")
    print("|---|---|---|---|---|---|---|---|")
    for name, change, value in (
        ("(i) price, free purchase", lambda p: p, price_usd),
        ("(ii) period, fixed inventory", lambda p: p, period_s),
        ("(iii) period, scarce memory", scarce, period_s),
    ):
        gains: list[float] = []
        alone = 0
        for model in MODELS:
            for cluster in CLUSTERS:
                problem = change(problem_of(model, *cluster))
                mixed = value(problem)
                single = min(value(only(problem, g)) for g in range(len(problem.groups)))
                alone += math.isfinite(mixed) and math.isinf(single)
                if math.isfinite(single):
                    gains.append(single / mixed - 1)
        better = sum(g > 1e-3 for g in gains)
        spread = (statistics.median(gains), max(gains), min(gains)) if gains else (math.nan,) * 3
        counts = (len(gains) + alone, better, len(gains) - better, alone)
        print(f"| {name} | {' | '.join(map(str, counts))} | {' | '.join(f'{x:.1%}' for x in spread)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
