"""Give each operator of a training step its stage, and say what every stage reads, keeps, sends and adds up.

    stage 0         stage 1
    conv ─► relu ─► matmul ─► loss            the planner places the forward operators
    conv' ◄ relu' ◄ matmul' ◄──┘              the backward ones follow

A backward operator runs on the earliest stage that has what it reads and is not before its readers. So gradients flow
from late stages to early ones, and the gradient of a parameter ends, summed, where the parameter lives: on the first
stage that reads it. Parameters that several stages read (tied weights) need no other rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tvmhet.errors import BadGraph
from tvmhet.ir.bindings import flatten, readers_of
from tvmhet.ir.training_step import Step


@dataclass(frozen=True, slots=True)
class StageParts:
    """One stage of a training step by names of calls, tensors and weights.

    `reads` come from the micro-batch, noise or earlier stages; `outputs` go to later stages or are the loss. `saved`
    is what the backward half reads of the stage's own forward half and of its `reads`. Gradients `received` come from
    later stages, those `sent` go to earlier ones. `gradients` are (parameter, tensor) of the parameters that live here,
    `buffers` (buffer, tensor of its new value).
    """

    index: int
    forward: tuple[str, ...]
    backward: tuple[str, ...]
    reads: tuple[str, ...]
    outputs: tuple[str, ...]
    saved: tuple[str, ...]
    received: tuple[str, ...]
    sent: tuple[str, ...]
    gradients: tuple[tuple[str, str], ...]
    buffers: tuple[tuple[str, str], ...]

    def recomputed(self, step: Step) -> tuple[str, ...]:
        """Return the forward calls that must be run again when only `reads` are kept, in order."""
        needed: set[str] = set()
        own = set(self.forward)
        wanted = [step.bindings.producer.get(t, "") for t in self.saved]
        while wanted:
            call = wanted.pop()
            if call in own and call not in needed:
                needed.add(call)
                wanted += [step.bindings.producer.get(t, "") for t in step.bindings.reads(call)]
        return tuple(c for c in self.forward if c in needed)


def split_stages(
    step: Step,
    stages: Sequence[Sequence[str]],
    behind: Sequence[Sequence[str]] = (),
    homes: Mapping[str, int] | None = None,
) -> tuple[StageParts, ...]:
    """Return the parts of each stage; `stages` hold the forward calls by name, in an execution order.

    `behind` are their backward calls, `homes` the stages of parameters, which else follow from the rule above. Raises
    BadGraph unless `stages` hold each forward call once, none is empty and none reads what a later one makes.
    """
    if behind:
        stage_of = {c: k for half in (stages, behind) for k, calls in enumerate(half) for c in calls}
    else:
        stage_of = _place_forward(step, stages)
        _place_backward(step, stage_of, len(stages))
    live = _Liveness(step, stage_of, homes)
    return tuple(live.parts(k) for k in range(len(stages)))


def with_buffers_whole(step: Step, stages: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    """Return the stages with all that reads a buffer in the stage that renews it, so that micro-batches see it renewed.

    Cuts through the renewal of a batch norm's statistics are possible: operators then move to the later stage, with
    those after them that are before it. Raises BadGraph if that leaves a stage empty, or as `split_stages`.
    """
    stage_of, readers = _place_forward(step, stages), readers_of(step.bindings)
    moved = True
    while moved:
        moved = False
        for buffer, new in step.buffers.items():
            users = [c for c in readers.get(buffer, ()) if c in step.forward_set]
            maker = step.bindings.producer.get(new)
            last = max(stage_of[c] for c in (*users, *([maker] if maker else users))) if users else 0
            ahead = [c for c in (*users, *([maker] if maker else [])) if stage_of[c] < last]
            while ahead:
                call = ahead.pop()
                stage_of[call], moved = last, True
                after = (r for t in flatten(step.bindings.results[call]) for r in readers.get(t, ()))
                ahead += [r for r in after if r in step.forward_set and stage_of[r] < last]
    out = tuple(tuple(c for c in step.forward if stage_of[c] == k) for k in range(len(stages)))
    if not all(out):
        raise BadGraph(f"stage {out.index(())} only renews a buffer of a later stage", "join the two stages")
    return out


def _place_forward(step: Step, stages: Sequence[Sequence[str]]) -> dict[str, int]:
    stage_of: dict[str, int] = {}
    known = set(step.forward)
    for k, names in enumerate(stages):
        if not names:
            raise BadGraph(f"stage {k} is empty", "leave it out")
        for name in names:
            if name not in known or name in stage_of:
                what = "is in two stages" if name in stage_of else "is no forward operator of the step"
                raise BadGraph(f"stage {k}: {name!r} {what}", "place each forward operator once")
            stage_of[name] = k
    if missing := [name for name in step.forward if name not in stage_of]:
        raise BadGraph(f"operator {missing[0]!r} is in no stage ({len(missing)} are not)", "place each once")
    for name in step.forward:
        for t in step.bindings.reads(name):
            if (maker := step.bindings.producer.get(t)) and stage_of[maker] > stage_of[name]:
                raise BadGraph(f"{name!r} reads {t!r}, which a later stage makes", "list stages in execution order")
    return stage_of


def _place_backward(step: Step, stage_of: dict[str, int], num_stages: int) -> None:
    """Add the backward calls to `stage_of`, readers before makers."""
    bindings, readers = step.bindings, readers_of(step.bindings)
    homes = _homes(step, stage_of, readers)
    owner: dict[str, int] = {}
    for p, gradient in step.gradients.items():
        owner[gradient] = max(homes[p], owner.get(gradient, 0))
    behind = set(step.backward)
    for call in reversed(step.backward):
        made = tuple(flatten(bindings.results[call]))
        reads = [t for t in bindings.reads(call) if bindings.producer.get(t) not in behind]
        after = [stage_of[r] for t in made for r in readers.get(t, ())] + [owner[t] for t in made if t in owner]
        lowest = max([0, *after, *(stage_of[bindings.producer[t]] for t in reads if t in bindings.producer)])
        kept = [_where(step, t, stage_of, readers) for t in reads]
        fitting = (k for k in range(lowest, num_stages) if all(not places or k in places for places in kept))
        stage_of[call] = next(fitting, lowest)


def _where(
    step: Step, tensor: str, stage_of: Mapping[str, int], readers: Mapping[str, frozenset[str]]
) -> frozenset[int]:
    """Return the stages that hold a tensor after their forward half; empty for a constant of the backward half."""
    holders = readers.get(tensor, frozenset()) & step.forward_set
    maker = step.bindings.producer.get(tensor)
    return frozenset(stage_of[c] for c in (holders | {maker} if maker else holders))


def _homes(step: Step, stage_of: Mapping[str, int], readers: Mapping[str, frozenset[str]]) -> dict[str, int]:
    """Return the stage where each trained parameter lives: the first whose forward half reads it."""
    return {
        p: min((stage_of[r] for r in readers.get(p, frozenset()) if r in step.forward_set), default=0)
        for p in step.gradients
    }


class _Liveness:
    """Who reads which tensor in which half of which stage."""

    def __init__(self, step: Step, stage_of: Mapping[str, int], homes: Mapping[str, int] | None) -> None:
        self._step, self._stage_of = step, stage_of
        self._homes = _homes(step, stage_of, readers_of(step.bindings)) if homes is None else homes
        self._behind = {t for c in step.backward for t in flatten(step.bindings.results[c])}
        self._calls: dict[tuple[int, bool], list[str]] = {}
        for call in step.bindings.calls:
            self._calls.setdefault((stage_of[call], call in step.forward_set), []).append(call)
        self._reads = {k: self._reads_of(k) for k in set(stage_of.values())}

    def parts(self, k: int) -> StageParts:
        step, bindings = self._step, self._step.bindings
        forward, backward = self._calls.get((k, True), []), self._calls.get((k, False), [])
        wanted = {t for other, reads in self._reads.items() if other != k for t in reads} | {step.loss}
        made = [t for c in forward for t in flatten(bindings.results[c])]
        here = set(made) | set(self._reads[k])
        back_reads = _unique(t for c in backward for t in bindings.reads(c))
        own_back = {t for c in backward for t in flatten(bindings.results[c])}
        gone = {t for c in step.backward if self._stage_of[c] < k for t in bindings.reads(c)}
        gone |= {step.gradients[p] for p, home in self._homes.items() if home < k}
        return StageParts(
            index=k,
            forward=tuple(forward),
            backward=tuple(backward),
            reads=self._reads[k],
            outputs=tuple(t for t in made if t in wanted),
            saved=tuple(t for t in back_reads if t in here),
            received=self._received(k, back_reads, own_back),
            sent=tuple(t for c in backward for t in flatten(bindings.results[c]) if t in gone),
            gradients=tuple((p, step.gradients[p]) for p, home in self._homes.items() if home == k),
            buffers=tuple((b, t) for b, t in step.buffers.items() if self._buffer_stage(b, t) == k),
        )

    def _received(self, k: int, back_reads: Sequence[str], own: set[str]) -> tuple[str, ...]:
        """Gradients made by later stages that this one reads, or only adds to a parameter's."""
        ends = [self._step.gradients[p] for p, home in self._homes.items() if home == k]
        return _unique(t for t in (*back_reads, *ends) if t in self._behind and t not in own)

    def _reads_of(self, k: int) -> tuple[str, ...]:
        """Tensors that either half reads and that are no weights, not made here, and not gradients."""
        step, bindings = self._step, self._step.bindings
        own = {t for c in self._calls.get((k, True), []) for t in flatten(bindings.results[c])}
        reads = _unique(
            t for ahead in (True, False) for c in self._calls.get((k, ahead), []) for t in bindings.reads(c)
        )
        return tuple(t for t in reads if t not in step.weights and t not in own and t not in self._behind)

    def _buffer_stage(self, buffer: str, tensor: str) -> int:
        maker = self._step.bindings.producer.get(tensor)
        return self._stage_of[maker] if maker else 0


def _unique(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
