"""Write out an ONNX Loop or Scan whose number of steps is known: Relax has no loops.

Before:  h, ys = Loop(3, true, h0) { h = Tanh(h + i); y = h * 2 }
After:   h0/1 = Tanh(h0 + 0);  h0/2 = Tanh(h0/1 + 1);  h = Tanh(h0/2 + 2);  ys = Concat of each step's y

Exporters make them of scripted loops, and of recurrent layers that are none of ONNX's own. A condition that a step
computes is followed from step to step, as far as it depends on no data. Left as they are, and so refused later: loops
that go on until data says so, without a step, of more than `MAX_STEPS` steps, or of more than `MAX_NODES` nodes when
written out. The model that was given is left as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmhet.ir.onnx_nodes import operator_set
from tvmhet.ir.transform.choose_onnx_branch import renamed
from tvmhet.ir.transform.fold_onnx_shapes import MAX_ELEMENTS, evaluate, reads, static_shape, with_types

if TYPE_CHECKING:
    import onnx

MAX_STEPS = 1024
MAX_NODES = 50_000
_FIRST_OPSET = 9  # Scan was another operator before
_AXES_AS_INPUT = 13  # of Unsqueeze


def unroll_onnx_loops(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with its loops written out where they can be; `proto` itself if none is."""
    import onnx

    opset = operator_set(proto)
    if opset < _FIRST_OPSET or not any(n.op_type in _WRITERS for n in proto.graph.node):
        return proto
    typed = with_types(proto)
    values = {i.name: onnx.numpy_helper.to_array(i) for i in proto.graph.initializer}
    nodes: list[Any] = []
    changed = False
    for node in proto.graph.node:
        write = _WRITERS.get(node.op_type)
        steps = None if write is None else write(_Steps(node, opset, typed, values))
        nodes += [node] if steps is None else steps
        changed |= steps is not None
    if not changed:
        return proto
    out = onnx.ModelProto()
    out.CopyFrom(proto)
    del out.graph.node[:]
    out.graph.node.extend(nodes)
    return out


@dataclass
class _Steps:
    """The nodes of the steps so far, and what is known of their results."""

    node: Any
    opset: int
    typed: onnx.ModelProto
    values: Mapping[str, np.ndarray]
    nodes: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        import onnx

        self.attributes = {a.name: onnx.helper.get_attribute_value(a) for a in self.node.attribute}
        self.body = self.attributes["body"]
        self.prefix = next(filter(None, self.node.output))
        self.known = dict(self.values)
        self._inner = [
            *(onnx.helper.make_node("Constant", [], [i.name], value=i) for i in self.body.initializer),
            *self.body.node,
        ]

    def add(self, operator: str, *inputs: str, result: str | None = None, **attributes: Any) -> str:
        """Append a node and return the name of its result."""
        import onnx

        name = result or f"{self.prefix}/{len(self.nodes)}"
        self.nodes.append(onnx.helper.make_node(operator, list(inputs), [name], **attributes))
        return name

    def constant(self, value: Any, dtype: str) -> str:
        """Append a constant, which is known, and return its name."""
        import onnx

        array = np.array(value, dtype)
        name = self.add("Constant", value=onnx.numpy_helper.from_array(array))
        self.known[name] = array
        return name

    def step(self, index: int, inputs: Sequence[str]) -> list[str]:
        """Append the nodes of one step of the body and return the names of its results."""
        names = dict(zip((i.name for i in self.body.input), inputs, strict=True))
        made = {name for n in self._inner for name in n.output if name}
        names |= {name: f"{self.prefix}/{index}/{name}" for name in made}
        for inner in self._inner:
            node = renamed(inner, names)
            self.nodes.append(node)
            self._follow(node)
        return [names.get(o.name, o.name) for o in self.body.output]

    def _follow(self, node: Any) -> None:
        """Note what a node makes, if it is small and depends on nothing but what is known."""
        if reads(node) != set(node.input) - {""} or any(i and i not in self.known for i in node.input):
            return
        made = evaluate(node, self.known, self.typed)
        if made is not None and all(isinstance(v, np.ndarray) and v.size <= MAX_ELEMENTS for v in made):
            self.known.update(zip(node.output, made, strict=False))

    def finish(self, finals: Sequence[str], gathered: Sequence[Sequence[str]], axes: Sequence[int]) -> list[Any]:
        """Append what gives the node's results their names, and return all nodes."""
        states, stacked = self.node.output[: len(finals)], self.node.output[len(finals) :]
        for name, source in zip(states, finals, strict=True):
            if name:
                self.add("Identity", source, result=name)
        for name, parts, axis in zip(stacked, gathered, axes, strict=False):
            if name:
                self.add("Concat", *[self._with_axis(p, axis) for p in parts], result=name, axis=axis)
        return self.nodes

    def _with_axis(self, part: str, axis: int) -> str:
        if self.opset < _AXES_AS_INPUT:
            return self.add("Unsqueeze", part, axes=[axis])
        return self.add("Unsqueeze", part, self.constant([axis], "int64"))

    @property
    def is_long(self) -> bool:
        """Whether this is more than is written out."""
        return len(self.nodes) > MAX_NODES


def _loop(steps: _Steps) -> list[Any] | None:
    trip_count, condition, *states = steps.node.input
    limit = MAX_STEPS + 1
    if trip_count:
        if (count := steps.known.get(trip_count)) is None:
            return None
        limit = min(limit, int(count.reshape(())))
    if not condition:
        condition = steps.constant(True, "bool")
    gathered: list[list[str]] = [[] for _ in range(len(steps.body.output) - 1 - len(states))]
    index = 0
    while index < limit:
        if (goes_on := steps.known.get(condition)) is None or steps.is_long:
            return None
        if not goes_on.all():
            break
        counter = steps.constant(index, "int64")
        condition, *results = steps.step(index, [counter, condition, *states])
        states = results[: len(states)]
        for parts, part in zip(gathered, results[len(states) :], strict=True):
            parts.append(part)
        index += 1
    if index > MAX_STEPS or (index == 0 and any(steps.node.output[len(states) :])):
        return None
    return steps.finish(states, gathered, [0] * len(gathered))


def _scan(steps: _Steps) -> list[Any] | None:
    num_scanned = int(steps.attributes["num_scan_inputs"])
    num_states = len(steps.node.input) - num_scanned
    num_stacked = len(steps.body.output) - num_states
    states, scanned = list(steps.node.input[:num_states]), steps.node.input[num_states:]
    shapes = [static_shape(steps.typed, name, steps.known) for name in scanned]
    axes, backwards = _each(steps, "scan_input_axes", num_scanned), _each(steps, "scan_input_directions", num_scanned)
    if any(shape is None for shape in shapes):
        return None
    lengths = {shape[axis] for shape, axis in zip(shapes, axes, strict=True) if shape is not None}
    (count,) = lengths if len(lengths) == 1 else (0,)
    if not 0 < count <= MAX_STEPS:
        return None
    gathered: list[list[str]] = [[] for _ in range(num_stacked)]
    for index in range(count):
        if steps.is_long:
            return None
        slices = [
            steps.add("Gather", name, steps.constant(count - 1 - index if back else index, "int64"), axis=axis)
            for name, axis, back in zip(scanned, axes, backwards, strict=True)
        ]
        results = steps.step(index, [*states, *slices])
        states = results[:num_states]
        for parts, part in zip(gathered, results[num_states:], strict=True):
            parts.append(part)
    turned = _each(steps, "scan_output_directions", num_stacked)
    gathered = [parts[::-1] if back else parts for parts, back in zip(gathered, turned, strict=True)]
    return steps.finish(states, gathered, _each(steps, "scan_output_axes", num_stacked))


def _each(steps: _Steps, attribute: str, count: int) -> list[int]:
    """A list of integers, one for each scanned input or output; zeros where it is not given."""
    return list(steps.attributes.get(attribute) or [0] * count)


_WRITERS = {"Loop": _loop, "Scan": _scan}
