"""Other planners for the latency of one input when a host calls accelerators, with the same times and memory.

- one device: everything on the host, or in one call if it fits.
- greedy by memory: a topological order, one accelerator after the other filled to its memory, the rest on the host.
- equal split: the order cut into pieces of equal work, one per accelerator.
- HEFT, ETF, SCT: list schedules (tvmhet/solve/list_schedule.py, favourites.py), kept to placements whose calls do not
  wait for themselves.
- local search: random intervals of the order in calls, then their ends moved while that helps.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import numpy as np

from tvmhet.solve.contract import Blocks, contract
from tvmhet.solve.favourites import sct
from tvmhet.solve.list_schedule import Slot, Tasks, etf, heft
from tvmhet.solve.loads import LoadProblem
from tvmhet.solve.offload import call_latency
from tvmhet.solve.orders import order_by

Evaluator = Callable[[Sequence[int] | None], float]  # home of each block: 0 the host, d accelerator d


def latency_baselines(problem: LoadProblem) -> dict[str, float]:
    """Return each baseline's makespan; inf where it finds no legal placement."""
    blocks = contract(problem, contiguous=True)
    order = order_by(blocks.preds, lambda v: v)
    count = max(1, problem.types[0].num_devices)
    tasks = call_tasks(problem, blocks)
    value = _evaluator(problem, blocks)
    return {
        "one device": min(value([d] * blocks.count) for d in (0, 1)),
        "greedy by memory": value(_filled(problem, blocks, order, count)),
        "equal split": value(_shared(blocks, order, count)),
        "HEFT": value(heft(tasks)),
        "ETF": value(etf(tasks)),
        "SCT": value(sct(tasks)),
        "local search": _local_search(value, order, count),
    }


def call_tasks(problem: LoadProblem, blocks: Blocks) -> Tasks:
    """Blocks as tasks on slots: the host is slot 0, then the accelerators. A result moves through host memory."""
    time_s = np.column_stack([blocks.time_s[:, 0], blocks.time_s[:, 1]])
    send = np.zeros(blocks.count)
    for src, cost in zip(blocks.net_src, blocks.net_cost_s, strict=True):
        send[src] += cost
    move = send[:, None, None] * np.array([[2.0, 1.0], [1.0, 0.0]])
    host = Slot(1, math.inf, one_call=False, parallel=True)
    accelerators = [Slot(0, problem.types[0].memory_bytes) for _ in range(problem.types[0].num_devices)]
    return Tasks(time_s, blocks.preds, move, blocks.memory_bytes, [host, *accelerators])


def _evaluator(problem: LoadProblem, blocks: Blocks) -> Evaluator:
    makespan = call_latency(problem)

    def value(home: Sequence[int] | None) -> float:
        if home is None:
            return math.inf
        of_node = np.zeros(problem.num_nodes, np.int32)
        for nodes, device in zip(blocks.nodes, home, strict=True):
            of_node[list(nodes)] = device
        return makespan(of_node)

    return value


def _filled(problem: LoadProblem, blocks: Blocks, order: Sequence[int], count: int) -> list[int]:
    home, device, used = [0] * blocks.count, 1, 0.0
    for b in order:
        if used + blocks.memory_bytes[b] > problem.types[0].memory_bytes:
            device, used = device + 1, 0.0
        if device <= count and math.isfinite(blocks.time_s[b, 0]):
            home[b] = device
            used += blocks.memory_bytes[b]
    return home


def _shared(blocks: Blocks, order: Sequence[int], count: int) -> list[int]:
    work = np.where(np.isfinite(blocks.time_s[:, 0]), blocks.time_s[:, 0], 0.0)
    total, before, home = max(float(work.sum()), 1e-300), 0.0, [0] * blocks.count
    for b in order:
        if math.isfinite(blocks.time_s[b, 0]):
            home[b] = 1 + min(count - 1, int((before + work[b] / 2) / total * count))
        before += work[b]
    return home


def _local_search(evaluate: Evaluator, order: Sequence[int], count: int, restarts: int = 4, most: int = 4000) -> float:
    """Ends of the calls' intervals (begin, end, begin, end ...) along the order; between them is the host's."""
    rng = random.Random(0)

    def value(ends: Sequence[int]) -> float:
        home = [0] * len(order)
        for d in range(count):
            for b in order[ends[2 * d] : ends[2 * d + 1]]:
                home[b] = d + 1
        return evaluate(home)

    best, spent = value([0] * (2 * count)), 0  # the host alone
    for _ in range(restarts):
        ends = sorted(rng.randint(0, len(order)) for _ in range(2 * count))
        now, better = value(ends), True
        while better and spent < most:
            better = False
            for i in range(len(ends)):
                for step in (-16, -4, -1, 1, 4, 16):
                    tried = sorted([*ends[:i], min(len(order), max(0, ends[i] + step)), *ends[i + 1 :]])
                    spent += 1
                    if (new := value(tried)) < now:
                        ends, now, better = tried, new, True
        best = min(best, now)
    return best
