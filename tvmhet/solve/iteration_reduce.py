"""How long the replicas of stages take to add up their gradients: each alone, and where they share wires.

Alone, replicas on one group take their network's `AllReduce`; on unlike groups they are one ring at the pace of the
slowest link among them. A weight that stages of several places read (tied) has a ring over these places besides.

A ring of n members with groups on both ends of a wire passes it once: 2 (n - 1) / n of its bytes cross. All rings are
taken to be under way at once, when the passes are done, so on every place whose rings cross a wire

    all-reduces of the place  >=  sum over all rings that cross the wire of  bytes / rate

What they would take less is added to the first of its stages that crosses a wire. Rings inside one group are left to
`AllReduce`, whose links are theirs alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tvmhet.solve.collectives import ring_s
from tvmhet.solve.iteration import IterationProblem, MicroBatch, StagePlacing
from tvmhet.solve.iteration_memory import held_weights, home_of, own_weights
from tvmhet.solve.problem import Link, Weight, Wire

Stages = Sequence[Sequence[int]]
_Pairs = Iterable[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class _WiredRing:
    """Placings that add up gradients over wires; `wire_s` are the seconds of each of the problem's wires."""

    members: tuple[int, ...]
    wire_s: tuple[float, ...]


def reduce_s(
    problem: IterationProblem,
    micro: MicroBatch,
    placings: Sequence[StagePlacing],
    stages: Stages,
    held: Sequence[float],
) -> list[float]:
    """Return seconds per placing of the all-reduce of its gradients, beside all others.

    `held`: bytes of the weights that one device of each placing holds.
    """
    out = _alone_s(problem, micro, placings, stages, held)
    rings = _wired_rings(problem, micro, placings, stages)
    taken = [math.fsum(r.wire_s[w] for r in rings) for w in range(len(micro.forward.wires))]
    first: dict[int, int] = {}  # of each place: the stage that waits
    least: dict[int, float] = {}
    for i, ring in sorted(((i, r) for r in rings for i in r.members), key=lambda x: x[0]):
        place = placings[i].place
        first.setdefault(place, i)
        crossed = (all_s for all_s, own_s in zip(taken, ring.wire_s, strict=True) if own_s > 0)
        least[place] = max(least.get(place, 0.0), *crossed)
    for place, i in first.items():
        together = math.fsum(s for s, p in zip(out, placings, strict=True) if p.place == place)
        out[i] += max(0.0, least[place] - together)
    return out


def over_wires_s(
    problem: IterationProblem,
    micro: MicroBatch,
    placings: Sequence[StagePlacing],
    stages: Stages,
) -> dict[int, tuple[float, tuple[float, ...]]]:
    """Return the all-reduce's seconds without others, and how many of each wire, of placings whose rings cross any.

    Each member of a ring has an equal part of what the ring moves over a wire.
    """
    rings = _wired_rings(problem, micro, placings, stages)
    held = held_weights(micro, placings, stages) if rings else []
    alone = _alone_s(problem, micro, placings, stages, held) if rings else []
    wires = range(len(micro.forward.wires))
    out = {}
    for i in sorted({i for r in rings for i in r.members}):
        mine = [r for r in rings if i in r.members]
        own = [math.fsum(r.wire_s[w] for r in mine) for w in wires]
        out[i] = max(alone[i], *own), tuple(math.fsum(r.wire_s[w] / len(r.members) for r in mine) for w in wires)
    return out


def _alone_s(
    problem: IterationProblem,
    micro: MicroBatch,
    placings: Sequence[StagePlacing],
    stages: Stages,
    held: Sequence[float],
) -> list[float]:
    """Return seconds per placing of the all-reduce of its gradients and of tied weights', as if no other went on."""
    out = _tied_s(problem, micro, placings, stages)
    weights = own_weights(micro, placings, stages)
    for parts in stages:
        for i in parts:
            p, size = placings[i], weights[i] * problem.gradient_ratio
            part = max(held[j] for j in parts) * problem.gradient_ratio
            if len(parts) == 1:
                out[i] += problem.all_reduce[p.group].seconds(size, p.num_replicas, p.degree, part)
            else:
                out[i] += _unlike_ring_s(problem, micro, [placings[j] for j in parts], size, part)
    return out


def _unlike_ring_s(
    problem: IterationProblem,
    micro: MicroBatch,
    placings: Sequence[StagePlacing],
    size_bytes: float,
    held_bytes: float,
) -> float:
    """Seconds to add up `size_bytes`, at most `held_bytes` on one device, over the replicas of several groups."""
    ways = {(micro.forward.links[a.group][b.group], size_bytes) for a in placings for b in placings}
    ways |= {(problem.all_reduce[p.group].outer, size_bytes) for p in placings}
    ways |= {(problem.all_reduce[p.group].inner, held_bytes) for p in placings}
    return max(ring_s(x, size, sum(p.num_replicas for p in placings)) for x, size in ways)


def _tied_s(
    problem: IterationProblem, micro: MicroBatch, placings: Sequence[StagePlacing], stages: Stages
) -> list[float]:
    """Seconds per placing to add up the gradients of weights that stages of several places read."""
    out = [0.0] * len(placings)
    for w, owners in _tied(micro, placings, stages):
        links = (micro.forward.links[a][b] for a, b in _pairs_of(placings, owners))
        slow: Link = max(links, key=lambda x: x.transfer_s(w.size_bytes))
        for i in (i for parts in owners for i in parts):
            out[i] += ring_s(slow, w.size_bytes * problem.gradient_ratio, len(owners))
    return out


def _wired_rings(
    problem: IterationProblem,
    micro: MicroBatch,
    placings: Sequence[StagePlacing],
    stages: Stages,
) -> list[_WiredRing]:
    """Return the rings that cross any wire: of stages on unlike groups, with all their splits, and of tied weights.

    A weight that the devices of a team hold whole passes a wire once for all of them.
    """
    if not micro.forward.wires:
        return []
    weights = own_weights(micro, placings, stages)
    rings: list[tuple[Sequence[int], float, _Pairs]] = []
    for parts in (parts for parts in stages if len(parts) > 1):
        members = sum(placings[i].num_replicas for i in parts)
        rings.append((parts, _passed_on(weights[parts[0]], members), _pairs_of(placings, [[i] for i in parts])))
    for w, owners in _tied(micro, placings, stages):
        every = [i for parts in owners for i in parts]
        rings.append((every, _passed_on(w.size_bytes, len(owners)), _pairs_of(placings, owners)))
    out = []
    for of, size_bytes, pairs in rings:
        gradient_bytes, ways = size_bytes * problem.gradient_ratio, set(pairs)
        seconds = tuple(_crossings(w, ways) * gradient_bytes / w.byte_per_s for w in micro.forward.wires)
        if any(seconds):
            out.append(_WiredRing(tuple(of), seconds))
    return out


def _passed_on(size_bytes: float, members: int) -> float:
    """Bytes that each member of a ring sends to the next."""
    return 2 * (members - 1) / members * size_bytes


def _crossings(wire: Wire, pairs: set[tuple[int, int]]) -> int:
    """How often a ring over these pairs of groups passes a wire: twice if it is one for both directions."""
    return max((((a, b) in wire.ways) + ((b, a) in wire.ways) for a, b in pairs if a != b), default=0)


def _pairs_of(placings: Sequence[StagePlacing], owners: Stages) -> list[tuple[int, int]]:
    """The groups of every two placings of different owners."""
    return [
        (placings[a].group, placings[b].group)
        for x, first in enumerate(owners)
        for y, other in enumerate(owners)
        if x != y
        for a in first
        for b in other
    ]


def _tied(
    micro: MicroBatch, placings: Sequence[StagePlacing], stages: Stages
) -> Iterator[tuple[Weight, list[Sequence[int]]]]:
    """Yield each weight that several places read, with the placings of the first stage on each place that does."""
    home = home_of(micro, placings, stages)
    for w in micro.forward.weights:
        owners: dict[int, Sequence[int]] = {}
        for t in sorted({home[v] for v in w.nodes}):
            owners.setdefault(placings[stages[t][0]].place, stages[t])
        if len(owners) > 1:
            yield w, list(owners.values())
