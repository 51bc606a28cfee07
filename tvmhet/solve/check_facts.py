"""What the parts of the checker of training plans all need: nodes and replicas of stages, their shares and passes.

Written from the rules alone; see check_training.py.
"""

from __future__ import annotations

import math
from fractions import Fraction

from tvmhet.solve.iteration import IterationProblem, IterationSolution, MicroBatch
from tvmhet.solve.problem import Link, Weight
from tvmhet.solve.schedules import Schedule

TOLERANCE = 1e-9  # relative, for sums taken in another order


class PlanFacts:
    """A plan whose option exists. `parts`: the placings of each stage, `stage_of`: those of a placing's stage."""

    def __init__(self, problem: IterationProblem, solution: IterationSolution) -> None:
        self.problem, self.solution = problem, solution
        self.placed = [s.placing for s in solution.stages]
        self.micro: MicroBatch = problem.options[solution.option]
        self.forward = self.micro.forward
        self.count = problem.global_batch // self.micro.size
        self._nodes_of: dict[int, set[int]] = {}
        self.parts = self._replicas()
        self.stage_of = {i: parts for parts in self.parts for i in parts}

    def nodes(self, i: int) -> set[int]:
        """What a placing runs."""
        if i not in self._nodes_of:
            self._nodes_of[i] = {v for k in self.placed[i].kernels for v in self.forward.kernels[k].nodes}
        return self._nodes_of[i]

    def _replicas(self) -> list[list[int]]:
        """The parts of each stage: neighbours with shares that run the same nodes."""
        out: list[list[int]] = []
        for i, p in enumerate(self.placed):
            if i and p.share and self.placed[i - 1].share and self.nodes(i) == self.nodes(i - 1):
                out[-1].append(i)
            else:
                out.append([i])
        return out

    def kernel_s(self, i: int, k: int) -> tuple[float, float]:
        """Seconds of both passes of kernel k in placing i."""
        p = self.placed[i]
        if p.degree == 1:
            return self.forward.kernels[k].time_s[p.group], self.micro.backward_s[k][p.group]
        for s in self.micro.splits:
            if (s.group, s.degree) == (p.group, p.degree):
                return s.forward_s[k], s.backward_s[k]
        return math.inf, math.inf

    @staticmethod
    def on_device(w: Weight, degree: int, more: int = 0) -> float:
        """Bytes of a weight or stash, and `more`, that one device of a team has."""
        return w.size_bytes + more if w.is_whole else (w.size_bytes + more) / degree

    def share(self, i: int) -> int:
        """Micro-batches of all replicas of a placing."""
        return self.placed[i].share or self.count

    def most(self, i: int) -> int:
        """Micro-batches of its busiest replica."""
        return math.ceil(self.share(i) / self.placed[i].num_replicas)

    def held(self, i: int) -> int:
        """Micro-batches whose stash a replica of a stage holds at most, where stages share no places.

        Each replica of a stage has its micro-batches in the middle of equal parts of all; in 1F1B one comes back when
        as many others have followed as all replicas of this and of the later stages have between their own, less one.
        Two waves let no more than one in each wave pass, the second half of the stages no more than one.
        """
        if self.solution.schedule is Schedule.GPIPE:
            return self.most(i)
        between = [
            math.ceil(self.count / min(self.share(j) // self.placed[j].num_replicas for j in parts))
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
            for own in [len(range(r, self.share(j), self.placed[j].num_replicas))]
            for n in range(own)
        ]
        order = [(j, r) for _, j, r in sorted(turns)]
        reach = sum(between[at:])
        if self.solution.schedule is Schedule.WAVELET:
            reach = min(reach, max(between) * (2 if at < len(self.parts) // 2 else 1))
        return max(order[m : m + reach].count(order[m]) for m in range(self.count) if order[m][0] == i)

    def passes(self, i: int) -> tuple[float, float]:
        """Compute seconds of a placing's forward and backward pass, what is repeated in the backward pass."""
        forward = sum(self.kernel_s(i, k)[0] for k in self.placed[i].kernels)
        backward = sum(self.kernel_s(i, k)[1] for k in self.placed[i].kernels)
        again = self.micro.repeat_ratio[self.placed[i].group] if self.micro.repeat_ratio else 1.0
        return forward, backward + (again * forward if self.placed[i].recompute else 0.0)


def transfer_s(link: Link, size: float) -> float:
    """Seconds of one transfer; inf where there is no link."""
    return link.latency_s + size / link.byte_per_s if link.byte_per_s > 0 else math.inf
