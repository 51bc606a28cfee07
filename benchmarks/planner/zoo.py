"""Do joint plans beat other planners on real models and mixed clusters?

    python -m benchmarks.planner.zoo [MODEL ...]

Models of tvmhet.zoo on the clusters of tutorials/clusters, with the times that `tvmhet.plan` would use (measured where
this machine's database has them, else learned or roofline): ours, its lower bound, and the baselines of
baselines_general.py, which get the same times. Microseconds per input.
"""

from __future__ import annotations

import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np

import tvmhet
from benchmarks.planner.baselines_general import problem_baselines
from tvmhet import zoo
from tvmhet.candidates import MAKERS, candidate_kernels
from tvmhet.cost.measured import MeasuredKernels
from tvmhet.ir.prepare import prepare
from tvmhet.known_times import known_times
from tvmhet.planning_problem import make_problem
from tvmhet.solve import IN_SECONDS, Problem, check, solve
from tvmhet.times import Candidates

MODELS = ("resnet50", "inception_v3", "bert_base", "dlrm")
CLUSTERS = ("mixed_node", "three_kinds_of_node")
_FOLDER = Path(__file__).parents[2] / "tutorials" / "clusters"


def problems_of(model: str) -> dict[str, Problem]:
    """Return the planning problem of a zoo model on each cluster."""
    prepared = prepare(tvmhet.from_torch(*zoo.get(model)))
    assert prepared.graph is not None
    candidates = Candidates.of(prepared.graph, candidate_kernels(prepared.graph, MAKERS))
    out: dict[str, Problem] = {}
    for name in CLUSTERS:
        cluster = tvmhet.ClusterSpec.from_file(_FOLDER / f"{name}.yaml")
        with closing(MeasuredKernels(None)) as measured:
            table = known_times(prepared, candidates, measured, cluster, in_context=True)
        groups = cluster.groups()
        seconds = np.stack([table.seconds[:, table.column(g.device.name)] for g in groups], axis=1)
        out[name] = make_problem(prepared.graph, candidates.kernels, seconds, cluster, groups, {})
    return out


def main(models: list[str]) -> int:
    """Print one line per model, cluster and objective."""
    print("| model | cluster | objective | ours | bound | gap | CPU s | baselines / ours |")
    print("|---|---|---|---|---|---|---|---|")
    for model in models or MODELS:
        for cluster, problem in problems_of(model).items():
            for objective in IN_SECONDS:
                started = time.process_time()
                solution = solve(problem, objective)
                seconds = time.process_time() - started
                check(problem, solution, objective)
                others = problem_baselines(problem, objective)
                ratios = ", ".join(f"{k} {v / solution.objective:.2f}" for k, v in others.items())
                cells = (model, cluster, objective.value, f"{solution.objective * 1e6:.1f}")
                bound = (f"{solution.lower_bound * 1e6:.1f}", f"{solution.gap:.1%}", f"{seconds:.2f}")
                print("| " + " | ".join((*cells, *bound, ratios)) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
