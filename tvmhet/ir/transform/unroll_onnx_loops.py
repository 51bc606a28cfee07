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
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmhet.ir.onnx_nodes import Nodes, operator_set, write_out
from tvmhet.ir.transform.choose_onnx_branch import renamed
from tvmhet.ir.transform.fold_onnx_shapes import MAX_ELEMENTS, evaluate, reads

if TYPE_CHECKING:
    import onnx

MAX_STEPS = 1024
MAX_NODES = 50_000
_FIRST_OPSET = 9  # Scan was another operator before


def unroll_onnx_loops(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with its loops written out where they can be; `proto` itself if none is."""
    return write_out(proto, _WRITERS) if operator_set(proto) >= _FIRST_OPSET else proto


class _Steps:
    """Step after step of a loop's body, and what is known of their results."""

    def __init__(self, made: Nodes, body: onnx.GraphProto) -> None:
        import onnx

        self.known = dict(made.known.values)
        self._made = made
        self._body = body
        constants = [onnx.helper.make_node("Constant", [], [i.name], value=i) for i in body.initializer]
        self._inner = [*constants, *body.node]

    def constant(self, value: Any, dtype: str) -> str:
        """Append a constant, which is known, and return its name."""
        name = self._made.constant(value, dtype)
        self.known[name] = np.array(value, dtype)
        return name

    def append(self, index: int, inputs: Sequence[str]) -> list[str]:
        """Append the nodes of one step and return the names of its results."""
        names = dict(zip((i.name for i in self._body.input), inputs, strict=True))
        made = {name for n in self._inner for name in n.output if name}
        names |= {name: f"{self._made.result}/{index}/{name}" for name in made}
        for inner in self._inner:
            node = renamed(inner, names)
            self._made.nodes.append(node)
            self._follow(node)
        return [names.get(o.name, o.name) for o in self._body.output]

    def _follow(self, node: Any) -> None:
        """Note what a node makes, if it is small and depends on nothing but what is known."""
        if reads(node) != set(node.input) - {""} or any(i and i not in self.known for i in node.input):
            return
        made = evaluate(node, self.known, self._made.known.proto)
        if made is not None and all(isinstance(v, np.ndarray) and v.size <= MAX_ELEMENTS for v in made):
            self.known.update(zip(node.output, made, strict=False))


def _loop(made: Nodes, node: Any, attributes: Mapping[str, Any]) -> bool:
    steps = _Steps(made, attributes["body"])
    trip_count, condition, *states = node.input
    limit = MAX_STEPS + 1
    if trip_count:
        if (count := steps.known.get(trip_count)) is None:
            return False
        limit = min(limit, int(count.reshape(())))
    if not condition:
        condition = steps.constant(True, "bool")
    gathered: list[list[str]] = [[] for _ in node.output[len(states) :]]
    index = 0
    while index < limit:
        if (goes_on := steps.known.get(condition)) is None or len(made.nodes) > MAX_NODES:
            return False
        if not goes_on.all():
            break
        condition, *results = steps.append(index, [steps.constant(index, "int64"), condition, *states])
        states = results[: len(states)]
        _gather(gathered, results[len(states) :])
        index += 1
    if index > MAX_STEPS or (index == 0 and any(node.output[len(states) :])):
        return False
    _finish(made, node, states, gathered, [0] * len(gathered))
    return True


def _scan(made: Nodes, node: Any, attributes: Mapping[str, Any]) -> bool:
    def each(attribute: str, count: int) -> list[int]:
        """A number for each of what is scanned or gathered; zeros where none are given."""
        return list(attributes.get(attribute) or [0] * count)

    steps = _Steps(made, attributes["body"])
    num_states = len(node.input) - int(attributes["num_scan_inputs"])
    states, scanned = list(node.input[:num_states]), node.input[num_states:]
    axes, backwards = each("scan_input_axes", len(scanned)), each("scan_input_directions", len(scanned))
    shapes = [made.known.shape(name) for name in scanned]
    lengths = {None if shape is None else shape[axis] for shape, axis in zip(shapes, axes, strict=True)}
    count = lengths.pop()
    if lengths or count is None or not 0 < count <= MAX_STEPS:
        return False
    gathered: list[list[str]] = [[] for _ in node.output[num_states:]]
    for index in range(count):
        if len(made.nodes) > MAX_NODES:
            return False
        slices = [
            made.add("Gather", name, steps.constant(count - 1 - index if back else index, "int64"), axis=axis)
            for name, axis, back in zip(scanned, axes, backwards, strict=True)
        ]
        results = steps.append(index, [*states, *slices])
        states = results[:num_states]
        _gather(gathered, results[num_states:])
    turned = each("scan_output_directions", len(gathered))
    gathered = [parts[::-1] if back else parts for parts, back in zip(gathered, turned, strict=True)]
    _finish(made, node, states, gathered, each("scan_output_axes", len(gathered)))
    return True


def _gather(gathered: Sequence[list[str]], results: Sequence[str]) -> None:
    """Add a step's results to those before; a node may leave out the last ones."""
    for parts, part in zip(gathered, results, strict=False):
        parts.append(part)


def _finish(
    made: Nodes, node: Any, states: Sequence[str], gathered: Sequence[Sequence[str]], axes: Sequence[int]
) -> None:
    """Append what gives the last states, and what was gathered along new axes, the names of the node's results."""
    for name, source in zip(node.output, states, strict=False):
        if name:
            made.add("Identity", source, result=name)
    for name, parts, axis in zip(node.output[len(states) :], gathered, axes, strict=True):
        if name:
            made.add("Concat", *[made.on_axes("Unsqueeze", p, [axis]) for p in parts], result=name, axis=axis)


_WRITERS = {"Loop": _loop, "Scan": _scan}
