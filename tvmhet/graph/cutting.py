"""What one device of a team runs: a model cut so that each of `degree` devices does its part (tensor split).

    layer_norm ─► q, k, v ─► attention, head by head ─► o ══► add          ══►  partial sums, added up over the team
                  columns                               rows
    layer_norm ─► fc1 ─► gelu ─► fc2 ══► add                               (Shoeybi et al., "Megatron-LM", 2019)

A product with a parameter makes columns of its result where the operators that read them can work on their part, up to
products that read a part: they make partial sums, which the devices add up (all-reduce). All else runs whole on every
device. A tensor is cut along one axis or not at all; operators that no rule knows keep their tensors whole. An axis may
consist of blocks, each cut (heads of several samples that a reshape merged); a transposed parameter is cut as its own.
Where a product's columns are only read piece by piece (q, k and v made by one), each piece of them is cut. With `joins`
the model's own results may be cut, too (a language model's logits): one device joins the parts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from types import MappingProxyType

from tvmhet.graph.cutting_rules import (
    ELEMENTWISE,
    MOVES,
    PRODUCTS,
    REDUCTIONS,
    RESHAPES,
    RULES,
    Axis,
    Step,
    elementwise,
    pieces_read,
    reshape,
)
from tvmhet.graph.opgraph import Operator, OpGraph, PatternKind, Tensor


@dataclass(frozen=True, slots=True)
class Cut:
    """How a tensor is dealt out: along `axis` (from the right), of each run of so many elements an equal part."""

    axis: int
    runs: tuple[int, ...]

    def share(self, device: int, degree: int) -> tuple[tuple[int, int], ...]:
        """Return where along the axis the elements of one device begin and end, in order.

        >>> Cut(-1, (8, 4)).share(1, 2)
        ((4, 8), (10, 12))
        """
        first = accumulate(self.runs[:-1], initial=0)
        sizes = [run // degree for run in self.runs]
        return tuple((at + device * n, at + (device + 1) * n) for at, n in zip(first, sizes, strict=True))


@dataclass(frozen=True)
class Part:
    """One device's part: the graph with its tensors, operators whose results are added up, and how tensors are cut.

    Operators `uncut` make no columns, and inputs `untaken` are whole, because some operator could not work on parts.
    """

    graph: OpGraph
    degree: int
    summed: frozenset[int]
    cuts: Mapping[int, Cut]
    uncut: frozenset[str] = frozenset()
    untaken: frozenset[str] = frozenset()

    @cached_property
    def cut(self) -> frozenset[int]:
        """The tensors of which every device has a part."""
        return frozenset(self.cuts)

    @property
    def whole(self) -> frozenset[int]:
        """Tensors, parameters among them, that every device has whole."""
        return frozenset(range(len(self.graph.tensors))) - self.cut

    def can_run(self, ops: Sequence[int]) -> bool:
        """Can one kernel run these operators? Not where one reads sums that are still to be added up."""
        inside = set(ops)
        outputs = (t for i in inside & self.summed for t in self.graph.operators[i].outputs)
        return not any(inside & set(self.graph.tensors[t].consumers) for t in outputs)

    def summed_bytes(self, ops: Sequence[int]) -> tuple[int, ...]:
        """Return the bytes of each result of these operators that is added up."""
        return tuple(
            self.graph.tensors[t].size_bytes for i in ops if i in self.summed for t in self.graph.operators[i].outputs
        )

    def joined_bytes(self, ops: Sequence[int]) -> tuple[int, ...]:
        """Return the bytes of each result of the model that these operators make in parts, as a whole."""
        made = (t for i in ops for t in self.graph.operators[i].outputs)
        tensors = self.graph.tensors
        return tuple(tensors[t].size_bytes * self.degree for t in made if t in self.cuts and tensors[t].is_output)

    def flowing_back_bytes(self, ops: Sequence[int]) -> tuple[int, ...]:
        """Return the bytes of each gradient that the backward passes of these operators leave in partial sums.

        Of a whole tensor that operators on parts read, every device has a part of the gradient's sum; it is added up
        once, with the first of them. Inputs send none; of parameters held whole it is small, and left out.
        """
        own = set(ops)
        read = dict.fromkeys(t for i in ops for t in self.graph.operators[i].inputs)
        return tuple(
            self.graph.tensors[t].size_bytes
            for t in read
            if t in self.trained and t not in self.cut and not self.graph.tensors[t].is_param
            if (on_part := self._readers_on_parts(t)) and on_part[0] in own
        )

    def _readers_on_parts(self, tensor: int) -> list[int]:
        operators = self.graph.operators
        return sorted(i for i in self.graph.tensors[tensor].consumers if self.cut & set(operators[i].outputs))

    @cached_property
    def trained(self) -> frozenset[int]:
        """Tensors of floats that depend on a parameter."""
        found = {i for i, t in enumerate(self.graph.tensors) if t.is_param and _is_float(t)}
        for op in self.graph.operators:
            if found & set(op.inputs):
                found |= {t for t in op.outputs if _is_float(self.graph.tensors[t])}
        return frozenset(found)


def _is_float(tensor: Tensor) -> bool:
    return tensor.dtype.startswith(("float", "bfloat"))


def part_of(
    graph: OpGraph,
    degree: int,
    *,
    joins: bool = False,
    uncut: frozenset[str] = frozenset(),
    untaken: frozenset[str] = frozenset(),
    alike: Mapping[int, int] = MappingProxyType({}),
    behind: frozenset[str] = frozenset(),
) -> Part | None:
    """Return what one of `degree` devices runs; None where nothing of the model can be cut.

    With `joins` results of the model may be cut as other tensors are. `uncut` and `untaken` are as in `Part`. Results
    that are keys of `alike` are cut as the parameters that they belong to: gradients, new values. Products `behind`, of
    a backward pass, make columns only with parameters that are cut already.
    """
    banned = frozenset(i for i, op in enumerate(graph.operators) if op.name in uncut)
    banned |= {_taking(i) for i, t in enumerate(graph.tensors) if t.name in untaken}
    inputs: dict[int, int] = {}  # of the model, or filled with one number: those in parts, with their axes
    while True:
        spread = _Spread(graph, degree, banned, joins, alike, behind, axis=dict(inputs))
        spread.run()
        if not spread.conflicts and not spread.wanted:
            break
        if not spread.wanted:  # with which conflicts may be gone; taking parts of inputs is given up first
            banned |= frozenset(i for i in spread.conflicts if i < 0) or spread.conflicts
        inputs = {t: axis for t, axis in {**spread.wanted, **inputs}.items() if _taking(t) not in banned}
    if not spread.axis.keys() - inputs.keys():
        return None
    for t, view in spread.views.items():
        if view.base in spread.axis:
            spread.axis[t] = view.axis_of(spread.axis[view.base])
            spread.runs |= {t: spread.runs[view.base]} if view.base in spread.runs else {}
    tensors = tuple(_cut(t, spread.axis[i], degree) if i in spread.axis else t for i, t in enumerate(graph.tensors))
    operators = tuple(_shared(op, spread, tensors, degree) for op in graph.operators)
    cut = replace(graph, operators=operators, tensors=tensors, _index={})
    return Part(
        cut,
        degree,
        spread.summed,
        {t: spread.cut_of(t) for t in sorted(spread.axis)},
        frozenset(graph.operators[i].name for i in banned if i >= 0),
        frozenset(graph.tensors[_taking(i)].name for i in banned if i < 0),
    )


def _taking(tensor: int) -> int:
    """What stands among products for taking parts of an input of the model."""
    return -1 - tensor


def _cut(tensor: Tensor, axis: int, degree: int) -> Tensor:
    shape = list(tensor.shape)
    shape[axis] //= degree
    return replace(tensor, shape=tuple(shape), size_bytes=tensor.size_bytes // degree)


def _shared(op: Operator, spread: _Spread, tensors: Sequence[Tensor], degree: int) -> Operator:
    axes = [spread.axis.get(t) for t in (*op.inputs, *op.outputs)]
    if all(a is None for a in axes):
        return op
    return replace(
        op,
        flop=op.flop / degree,
        read_bytes=sum(tensors[t].size_bytes for t in dict.fromkeys(op.inputs)),
        write_bytes=sum(tensors[t].size_bytes for t in op.outputs),
        signature=f"{op.signature} / {degree} along {axes}",
    )


@dataclass(frozen=True, slots=True)
class _View:
    """A parameter's transpose, or a function of each element: its dim j is dim `order[j]` of the parameter."""

    base: int
    order: tuple[int, ...]

    def base_axis(self, axis: int) -> int:
        """Return the parameter's axis that lies at an axis of the view."""
        return self.order[axis] - len(self.order)

    def axis_of(self, base_axis: int) -> int:
        """Return the view's axis at which the parameter's lies."""
        return self.order.index(len(self.order) + base_axis) - len(self.order)


def _views_of(graph: OpGraph) -> dict[int, _View]:
    found: dict[int, _View] = {}
    for op in graph.operators:
        if len(op.inputs) != 1 or len(op.outputs) != 1:
            continue
        (source,), tensor = op.inputs, graph.tensors[op.inputs[0]]
        rank = len(tensor.shape)
        if source not in found and not (tensor.is_param and rank):
            continue
        from_ = found.get(source, _View(source, tuple(range(rank))))
        if op.family in ("permute_dims", "transpose"):
            order = tuple(int(a) % rank for a in op.attrs.get("axes") or range(rank - 1, -1, -1))
            found[op.outputs[0]] = _View(from_.base, tuple(from_.order[a] for a in order))
        elif op.pattern is PatternKind.ELEM_WISE and graph.tensors[op.outputs[0]].shape == tensor.shape:
            found[op.outputs[0]] = from_
    return found


def _sources_of(graph: OpGraph) -> list[frozenset[int]]:
    """By tensor: the inputs of the model of which it is a function, element by element; none if of anything else.

    What is filled with one number is as an input.
    """
    found = [frozenset({i}) if t.producer < 0 and not t.is_param else frozenset() for i, t in enumerate(graph.tensors)]
    for op in graph.operators:
        if op.family == "full":
            found[op.outputs[0]] = frozenset(op.outputs)
        elif op.pattern in ELEMENTWISE and op.family not in MOVES:
            shape = graph.tensors[op.outputs[0]].shape
            large = [t for t in op.inputs if math.prod(graph.tensors[t].shape) > 1]
            if all(found[t] and graph.tensors[t].shape == shape for t in large):
                found[op.outputs[0]] = frozenset[int]().union(*(found[t] for t in large))
    return found


@dataclass
class _Spread:
    """The axes along which tensors are cut, if all products but the `banned` make columns where they can."""

    graph: OpGraph
    degree: int
    banned: frozenset[int]
    joins: bool
    alike: Mapping[int, int]
    behind: frozenset[str]
    axis: dict[int, int]  # by tensor; to begin with, of inputs of the model
    summed: frozenset[int] = frozenset()
    conflicts: frozenset[int] = frozenset()  # products that an operator forbids to make columns
    wanted: dict[int, int] = field(default_factory=dict)  # inputs of the model that operators need cut, with their axes
    runs: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by tensor whose columns are dealt piece by piece
    views: dict[int, _View] = field(init=False)
    _blocks: dict[int, int] = field(default_factory=dict)  # by tensor whose cut axis has several
    _sources: Sequence[frozenset[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.views = _views_of(self.graph)
        self._sources = _sources_of(self.graph)

    def run(self) -> None:
        """Fill `axis` and `summed`, operator by operator."""
        made_by = {t: frozenset({_taking(t)}) for t in self.axis}  # by cut tensor: the products whose columns it is of
        owner: dict[int, frozenset[int]] = {}  # by cut parameter: the same
        added: dict[int, frozenset[int]] = {}  # by tensor of which devices make partial sums: the same
        whole: set[int] = set()  # parameters that some operator reads whole
        for i, op in enumerate(self.graph.operators):
            if op.name in self.behind and (self.conflicts or self.wanted):
                return  # what the forward pass cannot do is mended first
            if self.views.keys() & set(op.outputs):
                continue
            cut = [t for t in op.inputs if t in made_by]
            origins = frozenset[int]().union(*(made_by[t] for t in cut))
            found = self._step(i, op, bool(cut))
            params = self._of_parameters(found.params) if found else {}
            if op.name in self.behind and not cut:  # it follows the products that cut its parameters
                origins = origins.union(*(owner[t] for t in params))
            if found is None or any(self._clashes(t, a, whole) for t, a in params.items()):
                self.conflicts |= origins or frozenset({i})
                found, params = Step({}, {}), {}
            self.axis |= params
            owner |= {t: owner.get(t, frozenset()) | (origins or frozenset({i})) for t in params}
            read = [self.views[t].base if t in self.views else t for t in op.inputs if self._is_param(t)]
            again = [t for t in read if t in owner and t not in params]
            self.conflicts |= frozenset[int]().union(*(owner[t] for t in again))  # cut before, read whole here
            whole |= {t for t in read if t not in params}
            self.axis |= found.outputs
            self._blocks |= dict.fromkeys(found.outputs, found.blocks) if found.blocks > 1 else {}
            made_by |= {t: origins or frozenset({i}) for t in found.outputs}
            self.summed |= {i} if found.is_sum else frozenset()
            added |= {t: origins or frozenset({i}) for t in op.outputs if found.is_sum}
        for t in self.graph.outputs:
            if t in self.alike and (t in added or not self._cut_alike(t, self.alike[t])):
                self.conflicts |= added.get(t) or made_by.get(t, owner.get(self.alike[t], frozenset()))
            elif not self.joins:
                self.conflicts |= made_by.get(t, frozenset())

    def _cut_alike(self, a: int, b: int) -> bool:
        return self.axis.keys().isdisjoint((a, b)) or ({a, b} <= self.axis.keys() and self.cut_of(a) == self.cut_of(b))

    def cut_of(self, tensor: int) -> Cut:
        """Return how a tensor of `axis` is cut."""
        axis, blocks = self.axis[tensor], self._blocks.get(tensor, 1)
        size = self.graph.tensors[tensor].shape[axis]
        return Cut(axis, self.runs.get(tensor) or (size // blocks,) * blocks)

    def _is_param(self, tensor: int) -> bool:
        return tensor in self.views or self.graph.tensors[tensor].is_param

    def _of_parameters(self, axes: Mapping[int, int]) -> dict[int, int]:
        """The same axes, of the parameters whose views they are."""
        return {
            self.views[t].base if t in self.views else t: self.views[t].base_axis(a) if t in self.views else a
            for t, a in axes.items()
        }

    def _clashes(self, tensor: int, axis: int, whole: set[int]) -> bool:
        return tensor in whole or self.axis.get(tensor, axis) != axis

    def _step(self, i: int, op: Operator, is_cut: bool) -> Step | None:
        ins = [replace(self.graph.tensors[t], is_param=self._is_param(t)) for t in op.inputs]
        outs = [self.graph.tensors[t] for t in op.outputs]
        if not is_cut:
            return self._columns(i, op, ins, outs)
        if any(not t.shape for t in outs) or (len(outs) > 1 and op.family != "split"):
            return None
        rule = RULES.get(op.family)
        if rule is None and op.pattern in ELEMENTWISE:
            rule = elementwise
        axes = [None if t.is_param else self.axis.get(i) for i, t in zip(op.inputs, ins, strict=True)]
        blocks = {self._blocks.get(i, 1) for i, a in zip(op.inputs, axes, strict=True) if a is not None}
        if len(blocks) > 1:
            return None
        if op.family in ("split", "strided_slice"):
            return self._pieces(op, ins[0], outs, axes[0], *blocks)
        if op.family in RESHAPES:
            return self._in_runs(op, axes, reshape(op, ins[0], outs[0], axes[0], self.degree, *blocks))
        if op.family == "concat" and blocks == {1} and (made := self._side_by_side(op, axes)) is not None:
            return made
        found = rule(op, ins, outs, axes, self.degree) if rule else None
        if found is None and rule is elementwise:
            self._want_inputs(op, axes)
        if found is None or (found.params and blocks != {1}):
            return None
        return self._in_runs(op, axes, replace(found, blocks=max(blocks)))

    def _in_runs(self, op: Operator, axes: Sequence[Axis], found: Step | None) -> Step | None:
        """As `found` if what is dealt out piece by piece is so alike in all operands; results are so, too."""
        if found is None:
            return None
        params = self._of_parameters(found.params)
        dealt = {self.runs.get(t) for t, a in zip(op.inputs, axes, strict=True) if a is not None}
        dealt |= {self.runs.get(t) for t in params if t in self.axis}
        (runs,) = dealt if len(dealt) == 1 else ((),)
        if runs:
            sizes = {self.graph.tensors[t].shape[a] for t, a in found.outputs.items()}
            if found.blocks > 1 or sizes - {sum(runs)}:
                return None
            self.runs |= dict.fromkeys((*found.outputs, *params), runs)
        return found if runs != () else None

    def _side_by_side(self, op: Operator, axes: Sequence[Axis]) -> Step | None:
        """Parts joined along the axis that is cut: the result is dealt out piece by piece. None along another axis."""
        rank, axis = len(self.graph.tensors[op.outputs[0]].shape), axes[0]
        if axis is None or set(axes) != {axis} or int(op.attrs.get("axis") or 0) % rank != rank + axis:
            return None
        sizes = [self.runs.get(t) or (self.graph.tensors[t].shape[axis],) for t in op.inputs]
        self.runs[op.outputs[0]] = tuple(size for own in sizes for size in own)
        return Step({op.outputs[0]: axis}, {})

    def _want_inputs(self, op: Operator, axes: Sequence[Axis]) -> None:
        """Note the inputs of the model whose parts an operator needs that reads something else of them whole.

        Of noise, a device that drops out of its part of a tensor needs a part.
        """
        axis = next(a for a in axes if a is not None)
        whole = [t for t, a in zip(op.inputs, axes, strict=True) if a is None and not self._is_param(t)]
        large = [t for t in whole if self.graph.tensors[t].shape[axis:][:1] not in ((), (1,))]
        inputs = frozenset[int]().union(*(self._sources[t] for t in large))
        free = all(t not in self.axis and _taking(t) not in self.banned for t in inputs)
        if free and all(self._sources[t] and self.graph.tensors[t].shape[axis] % self.degree == 0 for t in large):
            self.wanted |= dict.fromkeys(inputs, axis)

    def _pieces(self, op: Operator, source: Tensor, outs: Sequence[Tensor], axis: Axis, blocks: int) -> Step | None:
        """Pieces along another axis than that which is cut; or along it, if each is cut and nothing else is read."""
        if axis is None or any(int(n) < 0 for n in op.attrs.get("arg4") or ()):  # backwards: of other devices' elements
            return None
        if all(t.shape[axis] == source.shape[axis] for t in outs):
            return self._in_runs(op, [axis], Step(dict.fromkeys(op.outputs, axis), {}, blocks=blocks))
        runs = self._runs_read(op.inputs[0], axis) if blocks == 1 else ()
        if not runs or (made := self._columns_of(op.inputs[0])) is None:
            return None
        self.runs |= dict.fromkeys(made, runs)
        return Step(dict.fromkeys(op.outputs, axis), {})

    def _columns_of(self, tensor: int) -> list[int] | None:
        """Return what has the columns of a tensor, up to the weight of the product that makes them.

        None unless it is columns of a product with a parameter, perhaps after operators that leave them where they are,
        and nothing else reads any of it.
        """
        found, maker = [tensor], self._maker(tensor)
        while maker is not None:
            params = [self.views[t].base if t in self.views else t for t in maker.inputs if self._is_param(t)]
            found += (cut := [t for t in params if t in self.axis])
            if any(len(self._readers_ahead(t)) != 1 for t in cut):
                return None
            before = [t for t in maker.inputs if t in self.axis and not self._is_param(t)]
            if maker.family in PRODUCTS:
                return found if not before and self._is_param(maker.inputs[1]) else None
            stay = maker.family in REDUCTIONS or (maker.pattern in ELEMENTWISE and maker.family not in MOVES)
            stay = stay or (maker.family in RESHAPES and all(self._ends_in(t, maker.outputs[0]) for t in before))
            if not stay or len(before) != 1 or len(set(self.graph.tensors[before[0]].consumers)) != 1:
                return None
            found += before
            maker = self._maker(before[0])
        return None

    def _readers_ahead(self, tensor: int) -> list[int]:
        """The operators that read a tensor, but for those of the backward pass, which follow."""
        return [i for i in self.graph.tensors[tensor].consumers if self.graph.operators[i].name not in self.behind]

    def _ends_in(self, source: int, result: int) -> bool:
        """Whether a reshape leaves the axis that is cut, the last one of both, as it is."""
        shape, new = self.graph.tensors[source].shape, self.graph.tensors[result].shape
        return self.axis[source] == self.axis[result] == -1 and shape[-1] == new[-1]

    def _runs_read(self, tensor: int, axis: int) -> tuple[int, ...]:
        """Return the lengths of the pieces that are read of a tensor's columns, and of those between them.

        () where pieces overlap or a team cannot share them.
        """
        whole = self.graph.tensors[tensor]
        pieces: set[tuple[int, int]] = set()
        for reader in set(whole.consumers):
            found = pieces_read(self.graph.operators[reader], whole, self.graph.tensors, axis)
            if found is None:
                return ()
            pieces.update(found)
        ends = [0, *(at for piece in sorted(pieces) for at in piece), whole.shape[axis]]
        runs = [b - a for a, b in pairwise(ends)]
        if whole.is_output or any(run < 0 or run % self.degree for run in runs):
            return ()
        return tuple(run for run in runs if run)

    def _maker(self, tensor: int) -> Operator | None:
        producer = self.graph.tensors[tensor].producer
        return self.graph.operators[producer] if producer >= 0 else None

    def _columns(self, i: int, op: Operator, ins: Sequence[Tensor], outs: Sequence[Tensor]) -> Step | None:
        """A product with a parameter that reads whole tensors: columns, if it may."""
        if i in self.banned or op.family not in PRODUCTS or not ins[1].is_param or ins[0].is_param:
            return Step({}, {})
        if len(ins[1].shape) < 2 or outs[0].shape[-1] % self.degree:
            return Step({}, {})
        params = {op.inputs[1]: -1 if op.family == "matmul" else -2}
        if op.name in self.behind and not self._of_parameters(params).keys() & self.axis.keys():
            return Step({}, {})
        if len(ins) > 2 and ins[2].is_param:  # the bias of a linear
            params[op.inputs[2]] = -1
        return Step({op.outputs[0]: -1}, params)
