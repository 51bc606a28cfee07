"""The checker's own figures of what follows the passes of a training iteration: gradients added up, weights updated.

Written from the rules alone; see check_training.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tvmhet.solve.check_facts import PlanFacts, transfer_s
from tvmhet.solve.problem import Link, Weight, Wire


class Exchanges(PlanFacts):
    """All-reduces and updates of one plan."""

    def reduce_s(self) -> list[float]:
        """Seconds of each placing's all-reduces; on a place whose rings cross a wire no less than all rings on it."""
        out = [self._alone_s(i) for i in range(len(self.placed))]
        for place in {p.place for p in self.placed}:
            here = [i for i, p in enumerate(self.placed) if p.place == place]
            wires = {i: [w for w in self.forward.wires if self._crosses(i, w)] for i in here}
            waits = [i for i in here if wires[i]]
            if waits:
                least = max(self._wire_s(w) for i in waits for w in wires[i])
                out[waits[0]] += max(0.0, least - sum(out[i] for i in here))
        return out

    def updated_bytes(self, i: int) -> float:
        """Of one device; a weight that several stages read is updated by the first of them."""
        earlier = set().union(*(self.nodes(j) for j in range(self.stage_of[i][0]))) if self.stage_of[i][0] else set()
        mine = (w for w in self._mine(i) if not set(w.nodes) & earlier)
        return sum(self.on_device(w, self.placed[i].degree, w.update_bytes) for w in mine)

    def _mine(self, i: int) -> list[Weight]:
        """Weights that are first read, on this place, by stage i."""
        here = [j for j, q in enumerate(self.placed) if q.place == self.placed[i].place and j < i]
        seen = set().union(*(self.nodes(j) for j in here)) if here else set()
        return [w for w in self.forward.weights if set(w.nodes) & self.nodes(i) and not set(w.nodes) & seen]

    def _gradient_bytes(self, i: int) -> float:
        return sum(w.size_bytes for w in self._mine(i)) * self.problem.gradient_ratio

    def _device_bytes(self, i: int, degree: int) -> float:
        """Gradients on one of `degree` devices that run placing i."""
        return sum(self.on_device(w, degree) for w in self._mine(i)) * self.problem.gradient_ratio

    def _alone_s(self, i: int) -> float:
        p = self.placed[i]
        parts = [self.placed[j] for j in self.stage_of[i]]
        every = self._gradient_bytes(i)
        if len(parts) > 1:
            links = [self.forward.links[a.group][b.group] for a in parts for b in parts]
            nets = [self.problem.all_reduce[q.group] for q in parts]
            replicas = sum(q.num_replicas for q in parts)
            own = max(self._device_bytes(i, q.degree) for q in parts)
            between = max(_ring_s(x, every, replicas) for x in [*links, *(net.outer for net in nets)])
            reduce = max(between, *(_ring_s(net.inner, own, replicas) for net in nets))
        else:
            net = self.problem.all_reduce[p.group]
            inside = max(1, net.num_inside // p.degree)  # replicas of a machine
            reduce = _ring_s(net.inner, self._device_bytes(i, p.degree), min(p.num_replicas, inside))
            reduce += _ring_s(net.outer, every, math.ceil(p.num_replicas / inside))
        return reduce + sum(self._tied_s(w) for w in self._mine(i))

    def _owners(self, weight: Weight) -> dict[int, list[int]]:
        """By place that reads a weight: the groups of its first stage that does."""
        first: dict[int, list[int]] = {}
        for parts in self.parts:
            if set(weight.nodes) & self.nodes(parts[0]):
                first.setdefault(self.placed[parts[0]].place, [self.placed[j].group for j in parts])
        return first

    def _pairs(self, weight: Weight) -> list[tuple[int, int]]:
        first = self._owners(weight)
        return [
            (a, b) for x, mine in first.items() for y, other in first.items() if x != y for a in mine for b in other
        ]

    def _tied_s(self, weight: Weight) -> float:
        """Seconds to add up the gradients of a weight that stages of several places read."""
        links = [self.forward.links[a][b] for a, b in self._pairs(weight)]
        if not links:
            return 0.0
        slow = max(links, key=lambda x: transfer_s(x, weight.size_bytes))
        return _ring_s(slow, weight.size_bytes * self.problem.gradient_ratio, len(self._owners(weight)))

    def _crosses(self, i: int, wire: Wire) -> bool:
        """Does a ring of placing i pass the wire with any bytes?"""
        groups = [self.placed[j].group for j in self.stage_of[i]]
        own = _times(wire, [(a, b) for a in groups for b in groups]) * self._gradient_bytes(i)
        tied = [w for w in self._mine(i) if w.size_bytes * self.problem.gradient_ratio > 0]
        return own > 0 or any(_times(wire, self._pairs(w)) for w in tied)

    def _wire_s(self, wire: Wire) -> float:
        """Seconds in which all rings pass a wire: each member of a ring of n passes on 2 (n - 1) / n of the bytes."""
        passed = 0.0
        for parts in self.parts:
            groups, n = [self.placed[j].group for j in parts], sum(self.placed[j].num_replicas for j in parts)
            times = _times(wire, [(a, b) for a in groups for b in groups])
            passed += times * 2 * (n - 1) / n * self._gradient_bytes(parts[0])
        for w in self.forward.weights:
            n = max(1, len(self._owners(w)))
            passed += _times(wire, self._pairs(w)) * 2 * (n - 1) / n * w.size_bytes * self.problem.gradient_ratio
        return passed / wire.byte_per_s


def _ring_s(link: Link, size: float, members: int) -> float:
    return 2 * (members - 1) * transfer_s(link, size / members) if members > 1 else 0.0


def _times(wire: Wire, pairs: Sequence[tuple[int, int]]) -> int:
    """How often a ring over these pairs of groups passes a wire: once in each direction that is on it."""
    return max((sum(way in wire.ways for way in ((a, b), (b, a))) for a, b in pairs if a != b), default=0)
