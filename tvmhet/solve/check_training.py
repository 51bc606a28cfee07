"""The independent checker of training plans: recomputes all that a solution claims, and names every broken rule.

It shares no code with the search or with the closed forms, and is written for plainness, not for speed.
"""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction

from tvmhet.errors import BrokenSolution
from tvmhet.solve.check_exchanges import Exchanges, transfer_s
from tvmhet.solve.iteration import IterationProblem, IterationSolution, MicroBatch
from tvmhet.solve.problem import Edge, Wire
from tvmhet.solve.schedules import Schedule
from tvmhet.solve.solution import Status

_TOLERANCE = 1e-9  # relative, for sums taken in another order


def check_training(problem: IterationProblem, solution: IterationSolution) -> None:
    """Return quietly if `solution` is legal and its figures are right; else raise BrokenSolution with all that is not.

    Checked: each node in one stage (and in all its unlike replicas), order, finite times, pins, counts, shares, what
    the schedule demands of places and micro-batches, memory, the iteration's time and the side of the bound.
    """
    if broken := _Check(problem, solution).broken():
        raise BrokenSolution("the training plan is not legal: " + "; ".join(broken), "this is a defect of the solver")


class _Check:
    def __init__(self, problem: IterationProblem, solution: IterationSolution) -> None:
        self.problem, self.solution = problem, solution
        self.stages = solution.stages
        self.placed = [s.placing for s in solution.stages]

    def broken(self) -> list[str]:
        """One sentence per broken rule; empty if the solution is legal."""
        if self.solution.status is Status.INFEASIBLE:
            found = ["infeasible, yet it has stages"] if self.stages else []
            return found if self.solution.reason else [*found, "infeasible without a reason"]
        if not 0 <= self.solution.option < len(self.problem.options):
            return [f"there is no micro-batch option {self.solution.option}"]
        self.micro: MicroBatch = self.problem.options[self.solution.option]
        self.forward = self.micro.forward
        self.count = self.problem.global_batch // self.micro.size
        self.nodes_of: dict[int, set[int]] = {}
        self.parts = self._replicas()
        self.stage_of = {i: parts for parts in self.parts for i in parts}
        found = self._cover() or self._devices() or self._schedule()
        return found or [*self._memory(), *self._value()]

    def _nodes(self, i: int) -> set[int]:
        if i not in self.nodes_of:
            self.nodes_of[i] = {v for k in self.placed[i].kernels for v in self.forward.kernels[k].nodes}
        return self.nodes_of[i]

    def _replicas(self) -> list[list[int]]:
        """The parts of each stage: neighbours with shares that run the same nodes."""
        out: list[list[int]] = []
        for i, p in enumerate(self.placed):
            if i and p.share and self.placed[i - 1].share and self._nodes(i) == self._nodes(i - 1):
                out[-1].append(i)
            else:
                out.append([i])
        return out

    def _cover(self) -> list[str]:
        """Every way through the model, by one part of each stage, runs each node once and in order."""
        found: list[str] = []
        for way in range(max(map(len, self.parts), default=0)):
            through = [parts[min(way, len(parts) - 1)] for parts in self.parts]
            run = [(v, i, k) for i in through for k in self.placed[i].kernels for v in self.forward.kernels[k].nodes]
            times = Counter(v for v, _, _ in run)
            found += [f"node {v} is run {times[v]} times" for v in range(self.forward.num_nodes) if times[v] != 1]
            at = {v: n for n, (v, _, _) in enumerate(run)}
            kernel = {v: (i, k) for v, i, k in run}
            found += [
                f"node {d} reads node {e.src}, which runs later"
                for e in self.forward.edges
                for d in e.dsts
                if not found and e.src >= 0 and at[d] < at[e.src] and kernel[d] != kernel[e.src]
            ]
        return found

    def _devices(self) -> list[str]:
        found: list[str] = []
        used: dict[int, dict[int, int]] = {}
        for i, p in enumerate(self.placed):
            if not 0 <= p.group < len(self.problem.groups) or min(p.num_replicas, p.degree) < 1 or not p.kernels:
                return [f"stage {i} has no group, no replica or no kernel"]
            used.setdefault(p.group, {})[p.place] = p.num_replicas * p.degree
            if p.recompute and not self.problem.may_recompute:
                found.append(f"stage {i} recomputes, which was not allowed")
            for k in p.kernels:
                if not math.isfinite(self._kernel_s(i, k)[0] + self._kernel_s(i, k)[1]):
                    found.append(f"stage {i}: kernel {k} cannot run on {self.problem.groups[p.group].name!r}")
            for v in self._nodes(i):
                if p.group not in self.forward.pins.get(v, {p.group}):
                    found.append(f"node {v} is pinned elsewhere than {self.problem.groups[p.group].name!r}")
        for g, places in used.items():
            if sum(places.values()) > self.problem.groups[g].num_devices:
                found.append(f"{sum(places.values())} devices of {self.problem.groups[g].name!r} are used")
        return found

    def _schedule(self) -> list[str]:
        found: list[str] = []
        places = [p.place for p in self.placed]
        if self.solution.schedule not in self.problem.schedules:
            found.append(f"the schedule {self.solution.schedule.value} was not allowed")
        if self.solution.num_microbatches != self.count:
            found.append(f"{self.solution.num_microbatches} micro-batches are claimed, there are {self.count}")
        if self.solution.schedule is Schedule.INTERLEAVED:
            ring = len(set(places))
            if places != [i % ring for i in range(len(places))] or ring < 2 or len(places) % ring:
                found.append(f"interleaved places {places} do not go round")
            if len({(p.num_replicas) for p in self.placed}) > 1 or self.count % (ring * self.placed[0].num_replicas):
                found.append(f"{self.count} micro-batches do not go round {ring} interleaved devices")
        elif len(set(places)) != len(places):
            found.append(f"stages share places {places} without interleaving")
        for parts in self.parts:
            shares = [self.placed[i].share or self.count for i in parts]
            if len(parts) > 1 and not self.problem.may_mix:
                found.append(f"stages {parts} are unlike replicas, which were not allowed")
            if sum(shares) != self.count or any(self.placed[i].num_replicas > self._share(i) for i in parts):
                found.append(f"stages {parts} share {shares} of {self.count} micro-batches")
        return found

    def _kernel_s(self, i: int, k: int) -> tuple[float, float]:
        p = self.placed[i]
        if p.degree == 1:
            return self.forward.kernels[k].time_s[p.group], self.micro.backward_s[k][p.group]
        for s in self.micro.splits:
            if (s.group, s.degree) == (p.group, p.degree):
                return s.forward_s[k], s.backward_s[k]
        return math.inf, math.inf

    def _share(self, i: int) -> int:
        return self.placed[i].share or self.count

    def _most(self, i: int) -> int:
        return math.ceil(self._share(i) / self.placed[i].num_replicas)

    def _held(self, i: int) -> int:
        """Micro-batches whose stash a replica of a stage holds at most, where stages share no places.

        Each replica of a stage has its micro-batches in the middle of equal parts of all; in 1F1B one comes back when
        as many others have followed as all replicas of this and of the later stages have between their own, less one.
        Two waves let no more than one in each wave pass, the second half of the stages no more than one.
        """
        if self.solution.schedule is Schedule.GPIPE:
            return self._most(i)
        between = [
            math.ceil(self.count / min(self._share(j) // self.placed[j].num_replicas for j in parts))
            if len(parts) > 1
            else self.placed[parts[0]].num_replicas
            for parts in self.parts
        ]
        at = self.parts.index(self.stage_of[i])
        if at == len(self.parts) - 1:
            return 1
        turns = [
            (Fraction(self.count * (2 * n + 1), 2 * own), j, r)
            for j in self.stage_of[i]
            for r in range(self.placed[j].num_replicas)
            for own in [len(range(r, self._share(j), self.placed[j].num_replicas))]
            for n in range(own)
        ]
        order = [(j, r) for _, j, r in sorted(turns)]
        reach = sum(between[at:])
        if self.solution.schedule is Schedule.WAVELET:
            reach = min(reach, max(between) * (2 if at < len(self.parts) // 2 else 1))
        return max(order[m : m + reach].count(order[m]) for m in range(self.count) if order[m][0] == i)

    def _memory(self) -> list[str]:
        found: list[str] = []
        for place in sorted({p.place for p in self.placed}):
            mine = [i for i, p in enumerate(self.placed) if p.place == place]
            p = self.placed[mine[0]]
            nodes = set().union(*(self._nodes(i) for i in mine))
            weights = sum(w.size_bytes for w in self.forward.weights if nodes & set(w.nodes))
            state = weights * (1 + self.problem.gradient_ratio + self.problem.state_ratio) / p.degree
            stash = [self._stash(i) for i in mine]
            kept = self._interleaved_peak(place, stash) if len(mine) > 1 else self._held(mine[0]) * stash[0]
            need = state + max(self._working(i) for i in mine) + kept
            limit = self.problem.groups[p.group].memory_bytes
            if need > limit * (1 + _TOLERANCE) + 1:
                found.append(f"place {place} needs {need:.0f} bytes, a device has {limit:.0f}")
            found += [
                f"stage {i} claims {self.stages[i].memory_bytes} bytes, its place needs {need:.0f}"
                for i in mine
                if abs(need - self.stages[i].memory_bytes) > 1 + _TOLERANCE * need
            ]
        return found

    def _live_in(self, i: int) -> float:
        nodes = self._nodes(i)
        return sum(e.size_bytes for e in self.forward.edges if e.src not in nodes and nodes & set(e.dsts))

    def _stash(self, i: int) -> float:
        return self._live_in(i) if self.placed[i].recompute else self._whole_stash(i)

    def _whole_stash(self, i: int) -> float:
        kept = sum(s.size_bytes for s in self.micro.stashes if self._nodes(i) & set(s.nodes))
        return kept / self.placed[i].degree

    def _working(self, i: int) -> float:
        """Live-ins, the largest set of live results with workspace, and the rebuilt stash where it recomputes."""
        kernels = [set(self.forward.kernels[k].nodes) for k in self.placed[i].kernels]
        at = {v: j for j, nodes in enumerate(kernels) for v in nodes}
        lives = [(e.size_bytes, *self._life(e, at, len(kernels))) for e in self.forward.edges if e.src in at]
        peak = 0.0
        for j, k in enumerate(self.placed[i].kernels):
            live = sum(size for size, first, last in lives if first <= j <= last)
            peak = max(peak, live + self.forward.kernels[k].workspace_bytes)
        return self._live_in(i) + peak + (self._whole_stash(i) if self.placed[i].recompute else 0.0)

    @staticmethod
    def _life(e: Edge, at: dict[int, int], num: int) -> tuple[int, int]:
        """The first and the last of a stage's `num` kernels at which a tensor made in it takes memory."""
        leaves = e.is_output or any(d not in at for d in e.dsts)
        last = num - 1 if leaves else max((at[d] for d in e.dsts), default=-1)
        inside = not leaves and all(at[d] == at[e.src] for d in e.dsts)  # of one kernel: never stored
        return at[e.src], -1 if inside else last

    def _interleaved_peak(self, place: int, stash: list[float]) -> float:
        """Walk the order: forward passes in rounds of `ring` through the chunks, backward passes in the same rounds."""
        ring, v, total = len({p.place for p in self.placed}), len(stash), 0
        total = self._most(place) * v
        ahead = min(total, 2 * (ring - 1 - place) + (v - 1) * ring)
        held = top = 0.0
        for k in range(total + ahead):
            held += stash[k // ring % v] if k < total else 0.0
            top = max(top, held)
            held -= stash[v - 1 - (k - ahead) // ring % v] if k >= ahead else 0.0
        return top

    def _value(self) -> list[str]:
        moves = self._moves()
        pipeline = max(self._pipeline_s(moves), self.count * max(map(self._wire_s, self.forward.wires), default=0.0))
        exchanges = Exchanges(self.problem, self.micro, self.placed, self.parts, self._nodes)
        after: dict[int, float] = {}
        for i, (p, reduce) in enumerate(zip(self.placed, exchanges.reduce_s(), strict=True)):
            shown = max(0.0, reduce - self.problem.reduce_overlap * self._passes(i)[1])
            shown += self.problem.update_s_per_byte[p.group] * exchanges.updated_bytes(i) / p.degree
            after[p.place] = after.get(p.place, 0.0) + shown
        value = pipeline + max(after.values())
        found = []
        for name, real, claimed in (
            ("pipeline", pipeline, self.solution.pipeline_s),
            ("iteration", value, self.solution.iteration_s),
        ):
            if abs(real - claimed) > _TOLERANCE * max(abs(real), abs(claimed)):
                found.append(f"the {name} takes {real} s, not {claimed} s")
        bound = self.solution.lower_bound_s
        if bound > value * (1 + 1e-6):
            found.append(f"the lower bound {bound} s exceeds the iteration's {value} s")
        if self.solution.status is Status.OPTIMAL and value - bound > 1e-5 * value:
            found.append(f"called optimal with bound {bound} s under {value} s")
        return found

    def _moves(self) -> list[list[float]]:
        """Per stage: activations received and sent, gradients received and sent, results to the host; seconds.

        Mean seconds of a micro-batch, which goes to each part of another stage as often as its share says.
        """
        out = [[0.0] * 5 for _ in self.placed]
        home = {v: parts for parts in self.parts for v in self._nodes(parts[0])}
        for index, e in enumerate(self.forward.edges):
            for readers in [parts for parts in self.parts if self._nodes(parts[0]) & set(e.dsts)]:
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
                            out[i][column] += seconds * self._share(other) / self.count
            for a in home[e.src] if e.is_output and e.src >= 0 else ():
                out[a][4] += transfer_s(self.forward.host_links[self.placed[a].group], e.size_bytes)
        return out

    def _wire_s(self, wire: Wire) -> float:
        """Seconds of one micro-batch on a wire: each pair of placings passes on as much as their shares say."""
        share = [self._share(i) / self.count for i in range(len(self.placed))]
        taken = 0.0
        for index, e in enumerate(self.forward.edges):
            makers = [i for i in range(len(self.placed)) if e.src in self._nodes(i)]
            readers = [i for i in range(len(self.placed)) if self._nodes(i) & set(e.dsts)]
            for b in readers if e.src < 0 else ():
                taken += e.size_bytes * share[b] * ((-1, self.placed[b].group) in wire.ways)
            for a in makers:
                taken += e.size_bytes * share[a] * (e.is_output and (self.placed[a].group, -1) in wire.ways)
                for b in readers:
                    if self.placed[a].place == self.placed[b].place or self._nodes(a) == self._nodes(b):
                        continue
                    ways = [(self.placed[a].group, self.placed[b].group)]
                    ways += [] if index in self.micro.no_gradient else [ways[0][::-1]]
                    taken += e.size_bytes * share[a] * share[b] * sum(way in wire.ways for way in ways)
        return taken / wire.byte_per_s

    def _passes(self, i: int) -> tuple[float, float]:
        forward = sum(self._kernel_s(i, k)[0] for k in self.placed[i].kernels)
        backward = sum(self._kernel_s(i, k)[1] for k in self.placed[i].kernels)
        return forward, backward + (forward if self.placed[i].recompute else 0.0)

    def _busy(self, i: int, moves: list[list[float]]) -> tuple[float, float, float]:
        """Seconds of one micro-batch: forward and backward pass with their transfers, and its way through the stage."""
        (f, b), (rf, sf, rb, sb, host) = self._passes(i), moves[i]
        idle = self.problem.groups[self.placed[i].group].stage_overhead_s
        way = f + b + 2 * idle + rf + rb + host
        if self.forward.overlap_transfers:
            return max(f + idle, rf, sf + host), max(b + idle, rb, sb), way
        return f + idle + rf + sf + host, b + idle + rb + sb, way

    def _pipeline_s(self, moves: list[list[float]]) -> float:
        busy = [self._busy(i, moves) for i in range(len(self.placed))]
        most = [self._most(i) for i in range(len(self.placed))]
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
                if self.solution.schedule is not Schedule.GPIPE and self._held(i) < most[i]:
                    pace = max(pace, (way + sum(through[at + 1 :])) / self._held(i))
                ends.append((most[i] - 1) * pace + way - through[at])
        ahead = [(n - 1) * f for n, (f, _, _) in zip(most, busy, strict=True)]
        return sum(through) + max(ends) + (max(ahead) if self.solution.schedule is Schedule.GPIPE else 0.0)
