"""The checker's own closed form of the passes of a training iteration: transfers, wires, and the schedule's pipeline.

Written from the rules alone; see check_training.py.
"""

from __future__ import annotations

from tvmhet.solve.check_facts import PlanFacts, transfer_s
from tvmhet.solve.problem import Wire
from tvmhet.solve.schedules import Schedule


class Pipeline(PlanFacts):
    """Seconds from the first forward to the last backward pass."""

    def seconds(self) -> float:
        """The schedule's closed form, and no less than any wire takes for all micro-batches."""
        moves = self._moves()
        return max(self._pipeline_s(moves), self.count * max(map(self._wire_s, self.forward.wires), default=0.0))

    def _moves(self) -> list[list[float]]:
        """Per stage: activations received and sent, gradients received and sent, results to the host; seconds.

        Mean seconds of a micro-batch, which goes to each part of another stage as often as its share says.
        """
        out = [[0.0] * 5 for _ in self.placed]
        home = {v: parts for parts in self.parts for v in self.nodes(parts[0])}
        for index, e in enumerate(self.forward.edges):
            for readers in [parts for parts in self.parts if self.nodes(parts[0]) & set(e.dsts)]:
                for b in readers:
                    if e.src < 0:
                        out[b][0] += transfer_s(self.forward.host_links[self.placed[b].group], e.size_bytes)
                    for a in home[e.src] if e.src >= 0 else ():
                        if a in readers or self.placed[a].place == self.placed[b].place:
                            continue
                        ga, gb = self.placed[a].group, self.placed[b].group
                        there = transfer_s(self.forward.links[ga][gb], e.size_bytes)
                        back = transfer_s(self.forward.links[gb][ga], e.size_bytes)
                        back = 0.0 if index in self.micro.no_gradient else back
                        for i, other, column, seconds in (
                            (b, a, 0, there),
                            (a, b, 1, there),
                            (a, b, 2, back),
                            (b, a, 3, back),
                        ):
                            out[i][column] += seconds * self.share(other) / self.count
            for a in home[e.src] if e.is_output and e.src >= 0 else ():
                out[a][4] += transfer_s(self.forward.host_links[self.placed[a].group], e.size_bytes)
        return out

    def _wire_s(self, wire: Wire) -> float:
        """Seconds of one micro-batch on a wire: each pair of placings passes on as much as their shares say."""
        share = [self.share(i) / self.count for i in range(len(self.placed))]
        taken = 0.0
        for index, e in enumerate(self.forward.edges):
            makers = [i for i in range(len(self.placed)) if e.src in self.nodes(i)]
            readers = [i for i in range(len(self.placed)) if self.nodes(i) & set(e.dsts)]
            for b in readers if e.src < 0 else ():
                taken += e.size_bytes * share[b] * ((-1, self.placed[b].group) in wire.ways)
            for a in makers:
                taken += e.size_bytes * share[a] * (e.is_output and (self.placed[a].group, -1) in wire.ways)
                for b in readers:
                    if self.placed[a].place == self.placed[b].place or self.nodes(a) == self.nodes(b):
                        continue
                    ways = [(self.placed[a].group, self.placed[b].group)]
                    ways += [] if index in self.micro.no_gradient else [ways[0][::-1]]
                    taken += e.size_bytes * share[a] * share[b] * sum(way in wire.ways for way in ways)
        return taken / wire.byte_per_s

    def _busy(self, i: int, moves: list[list[float]]) -> tuple[float, float, float]:
        """Seconds of one micro-batch: forward and backward pass with their transfers, and its way through the stage."""
        (f, b), (rf, sf, rb, sb, host) = self.passes(i), moves[i]
        idle = self.problem.groups[self.placed[i].group].stage_overhead_s
        way = f + b + 2 * idle + rf + rb + host
        if self.forward.overlap_transfers:
            return max(f + idle, rf, sf + host), max(b + idle, rb, sb), way
        return f + idle + rf + sf + host, b + idle + rb + sb, way

    def _pipeline_s(self, moves: list[list[float]]) -> float:
        busy = [self._busy(i, moves) for i in range(len(self.placed))]
        most = [self.most(i) for i in range(len(self.placed))]
        ways = [w for _, _, w in busy]
        if self.solution.schedule is Schedule.INTERLEAVED:
            ring = len({p.place for p in self.placed})
            rounds = [sum(ways[i : i + ring]) for i in range(0, len(ways), ring)]
            loads = [[sum(busy[i][:2]) for i in range(d, len(busy), ring)] for d in range(ring)]
            return max(rounds) + max(most[0] * sum(w) - min(w) for w in loads)
        through = [min(ways[i] for i in parts) for parts in self.parts]
        ends = [0.0]
        for at, parts in enumerate(self.parts):
            for i in parts:
                f, b, way = busy[i]
                pace = b if self.solution.schedule is Schedule.GPIPE else f + b
                if self.solution.schedule is not Schedule.GPIPE and self.held(i) < most[i]:
                    pace = max(pace, (way + sum(through[at + 1 :])) / self.held(i))
                ends.append((most[i] - 1) * pace + way - through[at])
        ahead = [(n - 1) * f for n, (f, _, _) in zip(most, busy, strict=True)]
        return sum(through) + max(ends) + (max(ahead) if self.solution.schedule is Schedule.GPIPE else 0.0)
