"""The cheapest plan of a training iteration, within limits of time, price and rate.

    front of iteration time against rent ──► simulated: what a plan counts is the longer time ──► the cheapest within
                                                        └──► none: the fastest plan ──► none: the nearest limits

Answers are those of `solve_iteration`, their bound in seconds on the plan's own devices: a bound on the price is that
many seconds of its rent. A job is a number of iterations; without one it is a single iteration.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from tvmhet.solve.bounds import cheapest_cover
from tvmhet.solve.cheapest import priced
from tvmhet.solve.iteration import IterationProblem, IterationSolution, IterationStage
from tvmhet.solve.iteration_candidate import infeasible, solution_of
from tvmhet.solve.iteration_graphs import state_graphs
from tvmhet.solve.iteration_price import iteration_front
from tvmhet.solve.iteration_simulated import solve_simulated
from tvmhet.solve.iteration_tables import mode_times, modes_of
from tvmhet.solve.price_limits import PriceLimits, Trade, cheapest_trade, nearest
from tvmhet.solve.simulate_training import simulated_s
from tvmhet.solve.solution import Status

_PROVED = 1e-6  # a gap up to this is called optimal


def cheapest_iteration(
    problem: IterationProblem,
    limits: PriceLimits | None = None,
    *,
    max_steps: int = 60_000_000,
    time_limit_s: float = 30.0,
    explain: bool = True,
) -> IterationSolution:
    """Return the plan whose samples cost least, within the limits; its solver's name says that it is the cheapest.

    Infeasible limits come back as INFEASIBLE with the nearest that can be kept as `reason`.
    """
    limits = job_limits(problem, limits or PriceLimits())
    front = [solution_of(problem, p.plan, 0.0, Status.FEASIBLE, 0) for p in iteration_front(problem).plans]
    known = [_trade(problem, s, s.iteration_s) for s in front]
    best = _simulated(problem, known, limits)
    if best is None:
        fastest = solve_simulated(problem, max_steps=max_steps, time_limit_s=time_limit_s, explain=explain)
        if fastest.status is Status.INFEASIBLE:
            return fastest
        known.append(_trade(problem, fastest, fastest.iteration_s))
        best = _simulated(problem, known, limits)
    if best is None:
        return infeasible(nearest(known, limits))
    lower_s = min(iteration_bound_usd(problem) / max(best.usd_per_h, 1e-300) * 3600.0, best.plan.iteration_s)
    proved = best.plan.iteration_s - lower_s <= _PROVED * best.plan.iteration_s
    status = Status.OPTIMAL if proved else Status.FEASIBLE
    return replace(best.plan, lower_bound_s=lower_s, status=status, solver=f"cheapest of {best.plan.solver}")


def job_limits(problem: IterationProblem, limits: PriceLimits) -> PriceLimits:
    """Return the limits with the samples of whole iterations; of a single one where no job is given."""
    iterations = math.ceil((limits.samples or 1) / problem.global_batch)
    return replace(limits, samples=iterations * problem.global_batch)


def iteration_bound_usd(problem: IterationProblem) -> float:
    """Return a lower bound on the price of one iteration, in USD: passes and updates where their seconds cost least.

    A device is paid for at least as long as it is busy, and all updates come after all passes.
    """
    return min(_option_bound_usd(problem, option) for option in range(len(problem.options)))


def _option_bound_usd(problem: IterationProblem, option: int) -> float:
    graph = next((g for g in state_graphs(problem, option) if not g.truncated), None)
    if graph is None:
        return 0.0
    modes = modes_of(problem, option)
    both, _ = mode_times(problem.options[option], modes)
    usd_per_s = np.array([m.degree * problem.groups[m.group].usd_per_h / 3600.0 for m in modes])
    cost = priced(both, usd_per_s)
    passes = problem.num_microbatches(option) * float(cost[list(cheapest_cover(graph, cost))].sum())
    used = [g for g, group in enumerate(problem.groups) if group.num_devices > 0]
    update = min(problem.update_s_per_byte[g] * problem.groups[g].usd_per_h / 3600.0 for g in used)
    weights = sum(w.size_bytes for w in problem.options[option].forward.weights if w.nodes)
    return (passes + update * weights) * (1 - 1e-9)


def rent_of(problem: IterationProblem, stages: tuple[IterationStage, ...]) -> float:
    """Return what the devices of the stages cost per hour, in USD; places that stages share are paid once."""
    places = {s.placing.place: s.placing for s in stages}
    return math.fsum(p.num_replicas * p.degree * problem.groups[p.group].usd_per_h for p in places.values())


_Known = Trade[IterationSolution]


def _simulated(problem: IterationProblem, known: list[_Known], limits: PriceLimits) -> _Known | None:
    """Return the cheapest trade once simulated. Trades that were looked at then count their longer time in `known`."""
    while (best := cheapest_trade(known, limits)) is not None:
        counts_s = max(best.plan.iteration_s, simulated_s(problem, best.plan))
        if counts_s <= best.latency_s * (1 + 1e-12):
            return best
        known[known.index(best)] = _trade(problem, best.plan, counts_s)
    return None


def _trade(problem: IterationProblem, plan: IterationSolution, counts_s: float) -> _Known:
    rate = problem.global_batch / counts_s if counts_s > 0 else math.inf
    return Trade(plan, counts_s, rate, rent_of(problem, plan.stages))
