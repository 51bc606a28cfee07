"""Ctrl-C and the time limit end `solve` with the best plan so far."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.planner.scale import random_cluster_problem
from tvmhet.solve import Kernel, Status, check, pipeline, solve, state_graphs


def interrupt_at(monkeypatch: pytest.MonkeyPatch, call: int) -> list[str]:
    """Raise KeyboardInterrupt at the `call`-th call of a C++ search; return the calls made."""
    calls: list[str] = []
    real = pipeline.passes_func

    def counted(name: str) -> Callable[..., Any]:
        calls.append(name)
        if len(calls) == call:
            raise KeyboardInterrupt
        return real(name)

    monkeypatch.setattr(pipeline, "passes_func", counted)
    return calls


@pytest.mark.parametrize("call", [1, 2, 3, 5, 8])
def test_an_interrupted_search_returns_its_best_plan(monkeypatch, call):
    problem = random_cluster_problem(60, 3, 4, 1)
    calls = interrupt_at(monkeypatch, call)
    solution = solve(problem)
    assert len(calls) == call
    assert solution.solver.endswith(", interrupted")
    check(problem, solution)
    assert solution.lower_bound <= solution.objective


def test_an_interrupt_before_any_plan_is_raised(monkeypatch):
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(state_graphs, "state_graph", stop)
    with pytest.raises(KeyboardInterrupt):
        solve(random_cluster_problem(20, 2, 2, 1))


_SIGNALLED = """
import signal, sys, threading
from benchmarks.planner.scale import random_cluster_problem
from tvmhet.solve import check, solve

problem = random_cluster_problem(400, 4, 8, 1)
timer = threading.Timer(float(sys.argv[1]), signal.raise_signal, [signal.SIGINT])
timer.start()
try:
    solution = solve(problem)
    check(problem, solution)
    timer.join()
except KeyboardInterrupt:  # before the first plan on a slow machine, after the last on a fast one
    timer.join()
print("legal")
"""


@pytest.mark.parametrize("delay_s", ["0.15", "0.3", "0.45"])
def test_a_signal_at_any_time_returns_a_legal_plan(delay_s):
    done = subprocess.run([sys.executable, "-c", _SIGNALLED, delay_s], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.strip() == "legal", done.stderr


def test_the_time_limit_returns_the_first_plan():
    problem = random_cluster_problem(60, 3, 4, 1)
    solution = solve(problem, time_limit_s=0.0)
    assert "time limit" in solution.solver
    assert solution.status is Status.FEASIBLE
    check(problem, solution)


def test_a_plan_of_thousands_of_operators_is_there_before_their_states():
    problem = random_cluster_problem(2000, 3, 4, 1)
    solution = solve(problem, time_limit_s=0.0)
    assert "nothing fused" in solution.solver
    assert len(solution.stages) == 1 and len(solution.stages[0].kernels) == problem.num_nodes
    check(problem, solution)
    fused = [k for k in problem.kernels if len(k.nodes) > 1 or k.nodes[0] > 0]  # a node without a kernel of its own
    later = solve(replace(problem, kernels=(*fused, Kernel((0, 1), problem.kernels[0].time_s))), time_limit_s=0.0)
    assert "nothing fused" not in later.solver


def test_a_better_limit_never_gives_a_worse_plan():
    problem = random_cluster_problem(60, 3, 4, 1)
    assert solve(problem).objective <= solve(problem, time_limit_s=0.0).objective
