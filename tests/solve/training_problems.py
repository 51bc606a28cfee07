"""Small random training problems."""

from __future__ import annotations

import random
from dataclasses import replace

from tests.solve.problems import random_problem
from tvmhet.solve.collectives import AllReduce
from tvmhet.solve.iteration import IterationProblem, MicroBatch, Split, stashes_of_edges
from tvmhet.solve.problem import DeviceGroup, Edge, Kernel, Link, Problem, Weight
from tvmhet.solve.schedules import Schedule


def random_iteration(seed: int, *, one_link: bool = True, fused: bool = False, **limits: int) -> IterationProblem:
    """Draw a training problem over a random DAG; about half of them are short of memory, `fused` with fusion there.

    Fusion then decides memory, too, which only a search of all covers sees: of small problems.
    """
    rng = random.Random(seed)
    tight = rng.random() < 0.5
    base = random_problem(seed, one_link=one_link, **{"most_nodes": 5, **limits})
    if tight:
        if not fused:
            base = replace(base, kernels=tuple(k for k in base.kernels if len(k.nodes) == 1))
        base = replace(base, groups=tuple(replace(g, memory_bytes=rng.randint(60, 300)) for g in base.groups))
    else:
        base = replace(base, groups=tuple(replace(g, memory_bytes=1e5) for g in base.groups))
    options = []
    global_batch = rng.choice([2, 4, 6])
    for size in sorted({1, rng.choice([d for d in (1, 2, 3) if global_batch % d == 0])}):
        kernels = tuple(replace(k, time_s=tuple(t * (0.5 + 0.5 * size) for t in k.time_s)) for k in base.kernels)
        edges = tuple(replace(e, size_bytes=e.size_bytes * size) for e in base.edges)
        forward = replace(base, kernels=kernels, edges=edges)
        backward = tuple(tuple(t * rng.choice([1.0, 2.0, 2.5]) for t in k.time_s) for k in kernels)
        splits = ()
        if rng.random() < 0.3:
            splits = (Split(0, 2, tuple(k.time_s[0] * 0.6 for k in kernels), tuple(b[0] * 0.6 for b in backward)),)
        no_gradient = frozenset(i for i in range(len(edges)) if rng.random() < 0.2)
        options.append(MicroBatch(size, forward, backward, stashes_of_edges(forward), no_gradient, splits))
    groups = base.groups
    reduce = tuple(AllReduce(Link(0.1, rng.choice([5.0, 50.0])), rng.choice([1, 2, 8]), Link(0.5, 4.0)) for _ in groups)
    schedules = rng.choice([(s,) for s in Schedule] + [tuple(Schedule)] * 3)
    problem = IterationProblem(
        tuple(options),
        global_batch,
        reduce,
        tuple(rng.choice([0.0, 0.01]) for _ in groups),
        gradient_ratio=rng.choice([1.0, 0.5]),
        state_ratio=rng.choice([0.0, 1.0, 2.0]),
        reduce_overlap=rng.choice([0.0, 0.0, 0.5]),
        schedules=schedules,
        may_recompute=rng.random() < 0.7,
        most_chunks=2,
    )
    ratio = tuple(rng.choice([0.5, 0.8, 1.0]) for _ in groups) if rng.random() < 0.4 else ()
    extra = rng.choice([0, 0, 5])
    later = random.Random(-seed - 1)
    weights = tuple(replace(w, update_bytes=extra, is_whole=later.random() < 0.3) for w in base.weights)
    whole = [later.random() < 0.3 for _ in base.edges]  # does a team keep this tensor whole
    return replace(
        problem,
        options=tuple(
            replace(
                o,
                repeat_ratio=ratio,
                forward=replace(o.forward, weights=weights),
                stashes=tuple(replace(s, is_whole=w) for s, w in zip(o.stashes, whole, strict=False)),
            )
            for o in problem.options
        ),
    )


def equal_chain(
    stages: int,
    microbatches: int,
    *,
    forward_s: float = 1.0,
    backward_s: float = 2.0,
    memory: float = 1e9,
    size: int = 0,
    weight: int = 0,
    link: Link | None = None,
    devices: int = 0,
    **options: object,
) -> IterationProblem:
    """A chain of equal nodes, one per device unless `devices` says otherwise, on one group."""
    edges = (Edge(-1, (0,), size), *(Edge(v, (v + 1,), size) for v in range(stages - 1)))
    link = link or Link()
    forward = Problem(
        stages,
        tuple(Kernel((v,), (forward_s,)) for v in range(stages)),
        edges,
        tuple(Weight((v,), weight) for v in range(stages)) if weight else (),
        (DeviceGroup("g", devices or stages, memory),),
        ((link,),),
        (Link(),),
    )
    micro = MicroBatch(1, forward, tuple((backward_s,) for _ in range(stages)), stashes_of_edges(forward))
    return IterationProblem((micro,), microbatches, (AllReduce(link, 8, link),), (0.0,), **options)


def unlike_chain(seed: int) -> IterationProblem:
    """A chain on three groups of unlike speed in two places; links between the places are slow."""
    rng = random.Random(seed)
    n, groups = rng.randint(8, 16), range(3)
    side = [0, 0, 1] if rng.random() < 0.5 else [0, 1, 1]
    near, far = Link(0.001, 300.0), Link(0.01, rng.choice([3.0, 10.0, 30.0, 100.0]))
    speed = [1.0, rng.choice([0.5, 0.7, 1.5]), rng.choice([0.8, 1.0, 2.0])]
    times = [rng.uniform(0.2, 1.5) for _ in range(n)]
    rows = [tuple(t / s for s in speed) for t in times]
    forward = Problem(
        n,
        tuple(Kernel((v,), row) for v, row in enumerate(rows)),
        (
            Edge(-1, (0,), 1),
            *(Edge(v, (v + 1,), rng.randint(1, 8)) for v in range(n - 1)),
            Edge(n - 1, (), 1, True),
        ),
        tuple(Weight((v,), rng.randint(1, 60)) for v in range(n)),
        tuple(DeviceGroup(f"g{g}", rng.randint(1, 4), 1e9 if rng.random() < 0.6 else 2000.0) for g in groups),
        tuple(tuple(near if side[a] == side[b] else far for b in groups) for a in groups),
        tuple(near if side[g] == 0 else far for g in groups),
    )
    micro = MicroBatch(1, forward, tuple(tuple(2 * t for t in row) for row in rows), stashes_of_edges(forward))
    batch = rng.choice([8, 16, 32])
    reduce = (AllReduce(near, 8, near),) * 3
    return IterationProblem(
        (micro,), batch, reduce, (0.001,) * 3, schedules=(Schedule.ONE_F_ONE_B,), may_recompute=False
    )


def two_branches(seed: int, length: int = 130) -> IterationProblem:
    """Two long chains with an end in common, on two groups: too many downsets to list them."""
    rng = random.Random(seed)
    n = 2 * length + 1
    rows = [tuple(rng.uniform(0.2, 1.5) * s for s in (1.0, 1.7)) for _ in range(n)]
    edges = [
        Edge(v, (v + 1 if v + 1 not in (length, 2 * length) else 2 * length,), rng.randint(1, 9)) for v in range(n - 1)
    ]
    forward = Problem(
        n,
        tuple(Kernel((v,), row) for v, row in enumerate(rows)),
        tuple(edges),
        tuple(Weight((v,), rng.randint(1, 60)) for v in range(n)),
        (DeviceGroup("fast", 2, 1e9), DeviceGroup("slow", 3, 1e9)),
        ((Link(0.001, 30.0),) * 2,) * 2,
        (Link(0.001, 30.0),) * 2,
    )
    micro = MicroBatch(1, forward, tuple(tuple(2 * t for t in row) for row in rows), stashes_of_edges(forward))
    reduce = (AllReduce(Link(0.001, 300.0), 8, Link(0.001, 300.0)),) * 2
    schedules = (Schedule.ONE_F_ONE_B, Schedule.GPIPE)
    return IterationProblem((micro,), 12, reduce, (0.001,) * 2, schedules=schedules, may_recompute=False)
