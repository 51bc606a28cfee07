"""The checker's own figures of memory in a training plan: state, stashes under way, the largest working set.

Written from the rules alone; see check_training.py.
"""

from __future__ import annotations

from itertools import accumulate

from tvmhet.solve.check_facts import TOLERANCE, PlanFacts
from tvmhet.solve.problem import Edge


class Memory(PlanFacts):
    """What every place needs, against what its devices have and what the plan says."""

    def broken(self) -> list[str]:
        """One sentence per place that has too little, and per claim that is not what a place needs."""
        found: list[str] = []
        for place in sorted({p.place for p in self.placed}):
            mine = [i for i, p in enumerate(self.placed) if p.place == place]
            p = self.placed[mine[0]]
            nodes = set().union(*(self.nodes(i) for i in mine))
            weights = sum(self.on_device(w, p.degree) for w in self.forward.weights if nodes & set(w.nodes))
            state = weights * (1 + self.problem.gradient_ratio + self.problem.state_ratio)
            stash = [self._stash(i) for i in mine]
            kept = self._interleaved_peak(place, stash) if len(mine) > 1 else self.held(mine[0]) * stash[0]
            need = state + max(self._working(i) for i in mine) + kept
            limit = self.problem.groups[p.group].memory_bytes
            if need > limit * (1 + TOLERANCE) + 1:
                found.append(f"place {place} needs {need:.0f} bytes, a device has {limit:.0f}")
            found += [
                f"stage {i} claims {self.solution.stages[i].memory_bytes} bytes, its place needs {need:.0f}"
                for i in mine
                if abs(need - self.solution.stages[i].memory_bytes) > 1 + TOLERANCE * need
            ]
        return found

    def _live_in(self, i: int) -> float:
        nodes = self.nodes(i)
        return sum(e.size_bytes for e in self.forward.edges if e.src not in nodes and nodes & set(e.dsts))

    def _stash(self, i: int) -> float:
        return self._live_in(i) if self.placed[i].recompute else self._whole_stash(i)

    def _whole_stash(self, i: int) -> float:
        kept = (s for s in self.micro.stashes if self.nodes(i) & set(s.nodes))
        return sum(self.on_device(s, self.placed[i].degree) for s in kept)

    def _working(self, i: int) -> float:
        """Live-ins, the largest set of live results with workspace, and the rebuilt stash where it recomputes."""
        kernels = [set(self.forward.kernels[k].nodes) for k in self.placed[i].kernels]
        at = {v: j for j, nodes in enumerate(kernels) for v in nodes}
        change = [0] * (len(kernels) + 1)  # of the bytes that live, at each kernel
        for e in self.forward.edges:
            first, last = self._life(e, at, len(kernels)) if e.src in at else (0, -1)
            if first <= last:
                change[first] += e.size_bytes
                change[last + 1] -= e.size_bytes
        workspace = [self.forward.kernels[k].workspace_bytes for k in self.placed[i].kernels]
        peak = max((live + w for live, w in zip(accumulate(change), workspace, strict=False)), default=0)
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
        total = self.most(place) * v
        ahead = min(total, 2 * (ring - 1 - place) + (v - 1) * ring)
        held = top = 0.0
        for k in range(total + ahead):
            held += stash[k // ring % v] if k < total else 0.0
            top = max(top, held)
            held -= stash[v - 1 - (k - ahead) // ring % v] if k >= ahead else 0.0
        return top
