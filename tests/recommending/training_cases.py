"""Training a small chain on a small random market, and every plan of every fleet of it, written apart from the package.

The chain, its times and the links are taken from the study as numbers; schedules, memory and exchanges are not.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from functools import lru_cache

import numpy as np
import torch
from torch import nn

from tests.solve.fleets import shapes
from tvmhet.candidates import candidate_kernels
from tvmhet.cluster import InstanceOffer, Market, Running, device_type
from tvmhet.cluster.link import Link
from tvmhet.cost.table import Entry, TimeTable
from tvmhet.ir.importers import from_torch
from tvmhet.ir.prepare import Prepared, prepare
from tvmhet.planning_training import TrainingGoal, TrainingGraph
from tvmhet.recommending.job import Goal, Job
from tvmhet.recommending.training import TrainingStudy
from tvmhet.times import Candidates

TYPES = ("t4", "l4", "a100")
DIMS = (64, 128, 32, 256, 64, 64, 128, 32, 96)  # of eight layers
SIZE, BATCH, ITERATIONS = 2, 16, 1_000_000
RUNNING = Running(startup_s=60.0, checkpoint_s=5.0)


@lru_cache(maxsize=1)
def chain() -> tuple[Prepared, Candidates]:
    """Eight matrix products in a row, each a kernel of its own."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(DIMS)))
    prepared = prepare(from_torch(layers, torch.zeros(SIZE, DIMS[0])))
    candidates = Candidates.of(prepared.graph, candidate_kernels(prepared.graph, ("tvm",)))
    assert [k.ops for k in candidates.kernels] == [(v,) for v in range(len(DIMS) - 1)]
    return prepared, candidates


def random_study(seed: int) -> TrainingStudy:
    """Draw times, prices, links and memory; at most six devices, two of each type."""
    rng = random.Random(seed)
    prepared, candidates = chain()
    num = len(candidates.kernels)
    state = 4 * 4 * sum(a * b for a, b in itertools.pairwise(DIMS))
    offers, table = [], TimeTable.empty(num, TYPES)
    for name in TYPES:
        speed = rng.choice([1.0, 2.0, 5.0])
        room = int(state * rng.uniform(0.3, 1.3)) if seed % 2 else 2**30
        device = dataclasses.replace(device_type(name), name=name, memory_bytes=room)
        sold = rng.choice([(1, 1), (1, 2), (1, 2), (2, 1)])
        inside = Link(rng.choice([0.0, 1e-6]), rng.choice([1e8, 1e9, 1e10]), "inside")
        offers.append(InstanceOffer(name, device, sold[0], speed * sold[0] * rng.uniform(0.5, 3), sold[1], link=inside))
        times = [rng.uniform(1e-4, 1e-3) / speed for _ in range(num)]
        table = table.with_entries(name, {k: Entry(t, 0.8 * t, 1.25 * t, "measured") for k, t in enumerate(times)})
    network = Link(rng.choice([0.0, 1e-5]), rng.choice([1e8, 1e9, 1e10]), "network")
    backward = table.seconds * np.array([[rng.choice([1.0, 2.0, 2.5]) for _ in TYPES] for _ in range(num)])
    graph = TrainingGraph(SIZE, prepared.graph, candidates, table, backward, "drawn")
    goal = TrainingGoal(BATCH, schedules=("1f1b",), recompute=False)
    return TrainingStudy(prepared, (graph,), goal, Market(tuple(offers), network=network, running=RUNNING))


def iterations(study: TrainingStudy) -> dict[tuple[int, ...], float]:
    """Instances of each offer -> the least seconds of an iteration on them, over every plan; inf where none fits.

    A plan takes its closed form, or its run where that is longer: so the closed form bounds what it takes.
    """
    problem = study.problem
    sizes = [o.num_devices for o in study.market.offers]
    exact: dict[tuple[int, ...], float] = {}
    for used, plans in _pipelines(problem).items():
        exact[used] = math.inf
        for seconds, after, cuts, kinds, replicas in sorted(plans):
            if seconds >= exact[used]:
                break
            exact[used] = min(exact[used], max(seconds, run_s(problem, cuts, kinds, replicas, after)))
    return {
        counts: min(
            (s for used, s in exact.items() if all(u <= n * d for u, n, d in zip(used, counts, sizes, strict=True))),
            default=math.inf,
        )
        for counts in itertools.product(*(range(o.max_instances + 1) for o in study.market.offers))
        if any(counts)
    }


def run_s(problem, cuts, kinds, replicas, after) -> float:
    """Seconds of one 1F1B run, event by event; `after`: of each stage's all-reduce and update.

    A device does one thing at a time. Micro-batch m is on replica m % r; its B comes as many micro-batches after its F
    as the replicas from here to the end are, less one. A move takes both its ends, goes before any pass, and before its
    maker's next pass.
    """
    forward, backward, _, _, hop, host = _chain_numbers(problem)
    count, k = problem.global_batch // SIZE, len(kinds)
    seconds, needs, waits = {}, {}, {}  # (is a pass, micro-batch, stage, backward) -> ...
    for i, (g, r) in enumerate(zip(kinds, replicas, strict=True)):
        lag = sum(replicas[i:]) - 1 if i + 1 < k else 0
        idle = problem.groups[g].stage_overhead_s
        for replica in range(r):
            mine = [(m + lag * b, b, m) for m in range(replica, count, r) for b in (0, 1)]
            before: list[tuple] = []
            for _, b, m in sorted(mine):
                times = (backward if b else forward)[cuts[i] : cuts[i + 1], g]
                seconds[1, m, i, b] = math.fsum(times) + idle + (host[g] if i == 0 and not b else 0.0)
                needs[1, m, i, b] = [(i, replica)]
                waits[1, m, i, b] = [*before]
                before = [(1, m, i, b)]
                to = i - 1 if b else i + 1
                if 0 <= to < k and (move := hop[cuts[max(i, to)], g, kinds[to]]) > 0:
                    seconds[0, m, i, b] = move
                    needs[0, m, i, b] = [(i, replica), (to, m % replicas[to])]
                    waits[0, m, i, b] = [(1, m, i, b)]
                    before.append((0, m, i, b))
    for _, m, i, b in list(waits):
        source = (m, i + 1 if b else i - 1, b)
        if 0 <= source[1] < k:
            waits[1, m, i, b].append((0, *source) if (0, *source) in seconds else (1, *source))
    done: dict[tuple, float] = {}
    running: dict[tuple, float] = {}
    left, now = sorted(seconds), 0.0
    while left or running:
        busy = {d for t in running for d in needs[t]}
        for t in list(left):
            if busy.isdisjoint(needs[t]) and all(w in done for w in waits[t]):
                running[t] = now + seconds[t]
                busy.update(needs[t])
                left.remove(t)
        now = min(running.values())
        for t in [t for t, end in running.items() if end <= now]:
            done[t] = running.pop(t)
    last = [max(done[1, m, i, 1] for m in range(count)) for i in range(k)]
    return max(now, *(x + y for x, y in zip(last, after, strict=True)))


def _chain_numbers(problem):
    """Forward and backward seconds [node, group], bytes that a node reads, its weight's, the links' seconds."""
    (micro,) = problem.options
    p = micro.forward
    forward = np.array([k.time_s for k in p.kernels])
    reads = np.array([next(e.size_bytes for e in p.edges if v in e.dsts) for v in range(p.num_nodes)], float)
    weight = np.array([next(w.size_bytes for w in p.weights if v in w.nodes) for v in range(p.num_nodes)], float)
    hop = np.array([[[x.latency_s + s / x.byte_per_s for x in row] for row in p.links] for s in reads])
    host = np.array([x.latency_s + reads[0] / x.byte_per_s for x in p.host_links])
    return forward, np.array(micro.backward_s), reads, weight, hop, host


def _ring(link, size, members):
    return np.where(members < 2, 0.0, 2 * (members - 1) * (link.latency_s + size / members / link.byte_per_s))


def _pipelines(problem):
    """Devices of each group -> every 1F1B pipeline on exactly these: its closed form, seconds after it, stages."""
    forward, backward, reads, weight, hop, host = _chain_numbers(problem)
    n, groups = forward.shape
    count = problem.global_batch // SIZE
    f, b = (np.vstack([np.zeros(groups), t.cumsum(axis=0)]) for t in (forward, backward))
    w, kept = (np.concatenate([[0.0], t.cumsum()]) for t in (weight, reads))
    idle = np.array([g.stage_overhead_s for g in problem.groups])
    room = np.array([g.memory_bytes for g in problem.groups])
    update = np.array(problem.update_s_per_byte)
    found: dict[tuple[int, ...], list[tuple]] = {}
    # what one pass holds beyond weights and stash: its input, and two results next to each other
    peak = np.zeros((n + 1, n + 1))
    for i, j in itertools.combinations(range(n + 1), 2):
        made = [reads[v + 1] if v + 1 < n else 0.0 for v in range(i, j)]
        peak[i, j] = reads[i] + max((reads[v] if v > i else 0.0) + made[v - i] for v in range(i, j))
    for cuts, kinds, replicas in shapes(n):
        k = kinds.shape[1]
        first, last = cuts[:, :-1], cuts[:, 1:]
        rf, sf, rb, sb = (np.zeros(kinds.shape) for _ in range(4))
        rf[:, 0] = host[kinds[:, 0]]
        for i in range(1, k):
            rf[:, i] = sf[:, i - 1] = hop[cuts[:, i], kinds[:, i - 1], kinds[:, i]]
            sb[:, i] = rb[:, i - 1] = hop[cuts[:, i], kinds[:, i], kinds[:, i - 1]]
        work = f[last, kinds] - f[first, kinds] + b[last, kinds] - b[first, kinds]
        load = work + 2 * idle[kinds] + rf + sf + rb + sb
        path = work + 2 * idle[kinds] + rf + rb
        most = np.ceil(count / replicas)
        away = np.cumsum(replicas[:, ::-1], axis=1)[:, ::-1]
        held = np.minimum(most, np.ceil(away / replicas))
        later = np.cumsum(path[:, ::-1], axis=1)[:, ::-1]
        pace = np.where(held == most, load, np.maximum(load, later / held))
        seconds = path.sum(axis=1) + ((most - 1) * pace).max(axis=1)
        mine = w[last] - w[first]
        after = update[kinds] * mine
        for g, a in enumerate(problem.all_reduce):
            inside, machines = np.minimum(replicas, a.num_inside), np.ceil(replicas / a.num_inside)
            size = mine * problem.gradient_ratio
            after += np.where(kinds == g, _ring(a.inner, size, inside) + _ring(a.outer, size, machines), 0.0)
        seconds += after.max(axis=1)
        state = mine * (1 + problem.gradient_ratio + problem.state_ratio)
        need = state + peak[first, last] + held * (kept[last] - kept[first])
        seconds[(np.ceil(need) > room[kinds]).any(axis=1)] = math.inf
        used = np.stack([(replicas * (kinds == g)).sum(axis=1) for g in range(groups)], axis=1)
        fits = np.isfinite(seconds) & (replicas <= count).all(axis=1)
        fits &= (used <= [g.num_devices for g in problem.groups]).all(axis=1)
        for row in np.flatnonzero(fits):
            plan = (float(seconds[row]), after[row].tolist(), *(x[row].tolist() for x in (cuts, kinds, replicas)))
            found.setdefault(tuple(used[row].tolist()), []).append(plan)
    return found


def random_job(seed: int, table: dict[tuple[int, ...], float], study: TrainingStudy) -> Job:
    """A goal and limits that some fleets keep and some do not; sometimes none does."""
    rng = random.Random(10_000 + seed)
    real = sorted(s for s in table.values() if math.isfinite(s))
    hours = ITERATIONS * rng.choice(real) / 3600
    rent = sum(o.usd_per_h * o.max_instances for o in study.market.offers)
    deadline = hours * rng.uniform(0.9, 1.5) if rng.random() < 0.6 else None
    budget = rent * rng.uniform(0.1, 1.1) * hours if rng.random() < 0.4 else None
    return Job(rng.choice(list(Goal)), BATCH * ITERATIONS, deadline, budget, global_batch=BATCH)


def exhaustive(study: TrainingStudy, job: Job, table: dict[tuple[int, ...], float]) -> float:
    """The best value over every fleet that keeps the limits; inf where none does."""
    best = math.inf
    for counts, seconds in table.items():
        hours = (RUNNING.startup_s + ITERATIONS * seconds * (1 + RUNNING.checkpoint_s / 3600)) / 3600
        bought = list(zip(counts, study.market.offers, strict=True))
        usd = hours * sum(n * o.usd_per_h for n, o in bought)
        kwh = hours * sum(n * o.num_devices * o.device.power_w for n, o in bought) / 1e3
        if hours <= (job.deadline_h or math.inf) and usd <= (job.budget_usd or math.inf):
            best = min(best, {Goal.TIME: hours, Goal.PRICE: usd, Goal.ENERGY: kwh}[job.goal])
    return best
