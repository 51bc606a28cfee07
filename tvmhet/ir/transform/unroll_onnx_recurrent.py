"""Write out ONNX's recurrent operators step by step: TVM's front end has none of them.

Before:  y, y_h, y_c = LSTM(x, w, r, b)                                x: [3 steps, batch, inputs]
After:   g = MatMul(x, w') + b;  a step: Gather(g, t) + MatMul(h, r'), its gates sliced, activated, joined to h and c

Taken: LSTM, GRU and RNN of a fixed number of steps, in both directions and layouts, with initial states, peepholes and
clipping. Left as they are, and so refused later: sequences of unlike lengths, coupled gates, activations with
parameters, operator sets before 11. The model that was given is left as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmhet.ir.onnx_nodes import Known, Nodes, operator_set, write_out

if TYPE_CHECKING:
    import onnx

_PLAIN_ACTIVATIONS = frozenset({"Sigmoid", "Tanh", "Relu", "Softsign", "Softplus"})
_DEFAULTS = {"LSTM": ("Sigmoid", "Tanh", "Tanh"), "GRU": ("Sigmoid", "Tanh"), "RNN": ("Tanh",)}
_DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
_FIRST_OPSET = 11  # Slice and Clip take their limits as inputs since


def unroll_onnx_recurrent(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with its recurrent operators written out where they can be."""
    return write_out(proto, dict.fromkeys(_DEFAULTS, _unroll)) if operator_set(proto) >= _FIRST_OPSET else proto


def _unroll(made: Nodes, node: Any, attributes: Mapping[str, Any]) -> bool:
    layer = _read(node, attributes, made.known)
    if layer is not None:
        _write(_Writer(made), layer, node)
    return layer is not None


@dataclass(frozen=True)
class _Layer:
    kind: str
    steps: int
    batch: int
    hidden: int
    backwards: tuple[bool, ...]  # one for each direction
    activations: tuple[str, ...]
    clip: float | None
    batch_first: bool
    linear_before_reset: bool
    dtype: np.dtype[Any]


def _read(node: Any, attrs: Mapping[str, Any], known: Known) -> _Layer | None:
    """Return what the node says, or None where it says something that is not written out."""
    shape, dtype = known.shape(node.input[0]), known.dtype(node.input[0])
    if shape is None or dtype is None:
        return None
    batch_first = bool(attrs.get("layout", 0))
    batch, steps = shape[:2] if batch_first else shape[1::-1]
    backwards = _DIRECTIONS[attrs.get("direction", b"forward").decode()]
    given = tuple(a.decode() for a in attrs.get("activations", ())) or _DEFAULTS[node.op_type] * len(backwards)
    lengths = node.input[4] if len(node.input) > 4 else ""
    if lengths and not (lengths in known.values and bool((known.values[lengths] == steps).all())):
        return None
    if attrs.get("input_forget") or not _PLAIN_ACTIVATIONS.issuperset(given) or "hidden_size" not in attrs:
        return None
    linear = bool(attrs.get("linear_before_reset", 0))
    clip = attrs.get("clip")
    return _Layer(node.op_type, steps, batch, attrs["hidden_size"], backwards, given, clip, batch_first, linear, dtype)


@dataclass(frozen=True)
class _Writer:
    """Appends the nodes of a layer."""

    made: Nodes

    def emit(self, op: str, *inputs: str, name: str | None = None, **attributes: Any) -> str:
        """Append a node with one result; return the result's name."""
        return self.made.add(op, *inputs, result=name, **attributes)

    def ints(self, *numbers: int) -> str:
        """Return the name of a constant vector."""
        return self.made.constant(numbers, "int64")

    def at(self, x: str, index: int) -> str:
        """x[index] along the first dim."""
        return self.emit("Gather", x, self.made.constant(index, "int64"), axis=0)

    def columns(self, x: str, part: int, size: int) -> str:
        """The part of `size` columns along the last dim."""
        return self.emit("Slice", x, self.ints(part * size), self.ints((part + 1) * size), self.ints(-1))

    def reshape(self, x: str, *dims: int) -> str:
        """x with other dims."""
        return self.emit("Reshape", x, self.ints(*dims))

    def join(self, parts: list[str], axis: int) -> str:
        """The parts one after the other; one part as it is."""
        return parts[0] if len(parts) == 1 else self.emit("Concat", *parts, axis=axis)


def _write(w: _Writer, layer: _Layer, node: Any) -> None:
    operands = [*node.input, *[""] * (8 - len(node.input))]
    x, swap, states = operands[0], [1, 0, 2], operands[5:7]
    if layer.batch_first:
        x = w.emit("Transpose", x, perm=swap)
        states = [w.emit("Transpose", s, perm=swap) if s else "" for s in states]
    per_direction = [_direction(w, layer, d, x, operands, states) for d in range(len(layer.backwards))]
    all_steps = w.join([w.join(d.outputs, 0) for d in per_direction], 1)
    last_h = w.join([w.reshape(d.h, 1, layer.batch, layer.hidden) for d in per_direction], 0)
    finals = [(all_steps, [2, 0, 1, 3]), (last_h, swap)]
    if layer.kind == "LSTM":
        finals.append((w.join([w.reshape(d.c, 1, layer.batch, layer.hidden) for d in per_direction], 0), swap))
    for name, (value, perm) in zip(node.output, finals, strict=False):
        if name and layer.batch_first:
            w.emit("Transpose", value, perm=perm, name=name)
        elif name:
            w.emit("Identity", value, name=name)


@dataclass
class _Run:
    """One direction's results: every step's as [1, 1, batch, hidden] in order of time, and the last states."""

    outputs: list[str]
    h: str
    c: str


def _direction(w: _Writer, layer: _Layer, d: int, x: str, operands: list[str], states: list[str]) -> _Run:
    n = len(layer.activations) // len(layer.backwards)
    step = _Step(w, layer, layer.activations[d * n : (d + 1) * n])
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[layer.kind]
    recurrent = w.emit("Transpose", w.at(operands[2], d), perm=[1, 0])
    inputs = w.emit("MatMul", x, w.emit("Transpose", w.at(operands[1], d), perm=[1, 0]))
    bias = ""
    if operands[3]:
        both = w.at(operands[3], d)
        inputs = w.emit("Add", inputs, w.columns(both, 0, gates * layer.hidden))
        bias = w.columns(both, 1, gates * layer.hidden)
    peepholes = w.at(operands[7], d) if layer.kind == "LSTM" and operands[7] else ""
    h, c = (w.at(s, d) if s else "" for s in states)
    if not h or (layer.kind == "LSTM" and not c):
        zeros = w.made.constant(np.zeros((layer.batch, layer.hidden)), layer.dtype)
        h, c = h or zeros, c or zeros
    outputs = [""] * layer.steps
    for t in reversed(range(layer.steps)) if layer.backwards[d] else range(layer.steps):
        h, c = step.run(w.at(inputs, t), h, c, recurrent, bias, peepholes)
        outputs[t] = w.reshape(h, 1, 1, layer.batch, layer.hidden)
    return _Run(outputs, h, c)


@dataclass(frozen=True)
class _Step:
    """One step of one direction, gate by gate as ONNX defines it."""

    w: _Writer
    layer: _Layer
    activations: tuple[str, ...]

    def run(self, x: str, h: str, c: str, recurrent: str, bias: str, peepholes: str) -> tuple[str, str]:
        """Return the next (h, c) from the step's input part of all gates and the states before."""
        w, size = self.w, self.layer.hidden
        product = w.emit("MatMul", h, recurrent)
        product = w.emit("Add", product, bias) if bias else product
        if self.layer.kind == "GRU":
            return self._gru(x, h, product, recurrent, bias), c
        sums = w.emit("Add", x, product)
        if self.layer.kind == "RNN":
            return self._act(0, sums), c
        i, o, f, g = (w.columns(sums, part, size) for part in range(4))
        if peepholes:
            i = w.emit("Add", i, w.emit("Mul", w.columns(peepholes, 0, size), c))
            f = w.emit("Add", f, w.emit("Mul", w.columns(peepholes, 2, size), c))
        c = w.emit("Add", w.emit("Mul", self._act(0, f), c), w.emit("Mul", self._act(0, i), self._act(1, g)))
        if peepholes:
            o = w.emit("Add", o, w.emit("Mul", w.columns(peepholes, 1, size), c))
        return w.emit("Mul", self._act(0, o), self._act(2, c)), c

    def _gru(self, x: str, h: str, product: str, recurrent: str, bias: str) -> str:
        w, size = self.w, self.layer.hidden
        z, r = (self._act(0, w.emit("Add", w.columns(x, p, size), w.columns(product, p, size))) for p in range(2))
        if self.layer.linear_before_reset:
            inner = w.emit("Mul", r, w.columns(product, 2, size))
        else:
            inner = w.emit("MatMul", w.emit("Mul", r, h), w.columns(recurrent, 2, size))
            inner = w.emit("Add", inner, w.columns(bias, 2, size)) if bias else inner
        new = self._act(1, w.emit("Add", w.columns(x, 2, size), inner))
        return w.emit("Add", new, w.emit("Mul", z, w.emit("Sub", h, new)))  # (1 - z) * new + z * h

    def _act(self, which: int, x: str) -> str:
        limit = self.layer.clip
        if limit is not None:
            limits = (self.w.made.constant(sign * limit, self.layer.dtype) for sign in (-1, 1))
            x = self.w.emit("Clip", x, *limits)
        return self.w.emit(self.activations[which], x)
