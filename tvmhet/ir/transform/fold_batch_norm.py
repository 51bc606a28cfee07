"""Turn an inference batch norm into one multiply and one add, and move the multiply into the convolution before it.

Before:  c = R.nn.conv2d(x, w)                     After:  c = R.nn.conv2d(x, w * scale)
         b = R.nn.batch_norm(c, g, beta, mean, var)        y = c + shift
         y = b[0]

with scale = g / sqrt(var + eps) and shift = beta - mean * scale, written as arithmetic on parameters that
`fold_parameters` computes once. A bias added between the two is scaled with them. Where the producer is no
convolution or matmul with a parameter as weight, or has other readers: y = c * scale + shift. Batch norms in training
mode are left alone. Runs before DecomposeOpsForInference. Idempotent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax

from tvmhet.ir.parameters import parameter_values
from tvmhet.ir.rewrite import (
    Rebuild,
    Step,
    bindings_of,
    dtype_of,
    num_uses,
    op_name,
    rewrite_straight_lines,
    shape_of,
)

op = relax.op

#: Where a convolution's weight keeps its output channels, by operator and kernel layout.
_OUT_CHANNEL_AXIS = {
    ("nn.conv1d", "OIW"): 0,
    ("nn.conv2d", "OIHW"): 0,
    ("nn.conv3d", "OIDHW"): 0,
    ("nn.conv1d_transpose", "IOW"): 1,
    ("nn.conv2d_transpose", "IOHW"): 1,
    ("nn.conv3d_transpose", "IODHW"): 1,
}


@tvm.transform.module_pass(opt_level=0, name="tvmhet.FoldBatchNorm")
class FoldBatchNorm:
    """Fold every inference batch norm; see the picture above."""

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return rewrite_straight_lines(mod, _make_step)


@dataclass(frozen=True)
class _Facts:
    """What the step must know of the function: the batch norms, who may be rewritten, what is parameters only."""

    values: dict[Any, Any]  # old variable -> its bound value
    norms: dict[Any, Any]  # variable of an inference batch norm -> its call
    uses: dict[Any, int]
    constant: frozenset[Any]  # old variables computed from parameters and constants only

    def is_constant(self, expr: Any) -> bool:
        return isinstance(expr, tvm.ir.GenericConst) or expr in self.constant


def _make_step(func: relax.Function) -> Step | None:
    values = {b.var: b.value for b in bindings_of(func)}
    norms = {v: e for v, e in values.items() if op_name(e) == "nn.batch_norm" and not e.attrs.training}
    if not norms:
        return None
    facts = _Facts(values, norms, num_uses(func), parameter_values(func))

    def step(state: Rebuild, var: relax.Var, value: Any) -> Any:
        if var not in norms:
            return value
        state.became[var] = relax.Tuple(_results(state, facts, norms[var]))
        return None

    return step


def _results(state: Rebuild, facts: _Facts, norm: relax.Call) -> list[Any]:
    """Return the batch norm's three results: the normalised tensor, and mean and variance as they came."""
    _, gamma, beta, mean, var = (state.replaced(a) for a in norm.args)
    wide, dtype = _widen(state, norm), _wide_dtype(norm)
    scale = state.emit(op.rsqrt(state.emit(op.add(wide(var), relax.const(float(norm.attrs.epsilon), dtype)))))
    if norm.attrs.scale:
        scale = state.emit(op.multiply(wide(gamma), scale))
    negative = state.emit(op.negative(state.emit(op.multiply(wide(mean), scale))))
    shift = state.emit(op.add(wide(beta), negative)) if norm.attrs.center else negative
    return [_apply(state, facts, norm, scale, shift), mean, var]


def _wide_dtype(norm: relax.Call) -> str:
    """The dtype in which scale and shift are computed."""
    return "float64" if dtype_of(norm.args[0]) == "float64" else "float32"


def _widen(state: Rebuild, norm: relax.Call) -> Any:
    dtype = _wide_dtype(norm)

    def wide(expr: Any) -> Any:
        return expr if dtype_of(expr) == dtype else state.emit(op.astype(expr, dtype))

    return wide


def _apply(state: Rebuild, facts: _Facts, norm: relax.Call, scale: Any, shift: Any) -> Any:
    """Emit data * scale + shift, with the scale inside the producer where it can be."""
    data, dtype = norm.args[0], dtype_of(norm.args[0])
    rank, axis = len(data.ty.shape.values), int(norm.attrs.axis)
    axis = axis % rank
    bias, producer = _split_bias(facts, data)
    along = _along(axis, rank)
    scaled = _scale_producer(state, facts, producer, scale, axis, rank, _widen(state, norm))
    if scaled is None:
        product = op.multiply(state.replaced(data), _narrow(state, along(state, scale), dtype))
        return state.emit(op.add(state.emit(product), _narrow(state, along(state, shift), dtype)))
    offset = along(state, shift)
    if bias is not None:
        wide_bias = _widen(state, norm)(state.replaced(bias))
        offset = state.emit(op.add(state.emit(op.multiply(wide_bias, along(state, scale))), offset))
    return state.emit(op.add(scaled, _narrow(state, offset, dtype)))


def _split_bias(facts: _Facts, data: Any) -> tuple[Any, Any]:
    """Return (bias, producer) when `data` is read once and is producer + bias with a parameter as bias."""
    value: Any = facts.values.get(data)
    if op_name(value) == "add" and facts.uses.get(data) == 1:
        for bias, producer in ((value.args[1], value.args[0]), (value.args[0], value.args[1])):
            if facts.is_constant(bias) and not facts.is_constant(producer):
                return bias, producer
    return None, data


def _scale_producer(state: Rebuild, facts: _Facts, producer: Any, scale: Any, axis: int, rank: int, widen: Any) -> Any:
    """Emit the producer again with its weight scaled, or return None when it cannot be."""
    call = facts.values.get(producer)
    if not isinstance(call, relax.Call) or facts.uses.get(producer) != 1:
        return None
    weight_axis = _weight_axis(call, axis, rank)
    if weight_axis is None or not facts.is_constant(call.args[1]):
        return None
    data, weight = (state.replaced(a) for a in call.args[:2])
    wide = widen(weight)
    factor = _along(weight_axis, len(weight.ty.shape.values))(state, scale)
    scaled = _narrow(state, state.emit(op.multiply(wide, factor)), dtype_of(weight))
    return state.emit(relax.Call(call.op, [data, scaled, *call.args[2:]], call.attrs, call.ty_args), "folded")


def _weight_axis(call: relax.Call, axis: int, rank: int) -> int | None:
    """Return the axis of the weight that holds the output channels, or None when scaling it is not the same."""
    name = op_name(call)
    if name == "matmul":
        shape = shape_of(call.args[1])
        return 1 if shape is not None and len(shape) == 2 and axis == rank - 1 else None
    if not name.startswith("nn.conv"):
        return None
    attrs = call.attrs
    out_layout = str(attrs.out_layout) or str(attrs.data_layout)
    if out_layout.find("C") != axis or (name.endswith("_transpose") and int(attrs.groups) != 1):
        return None
    return _OUT_CHANNEL_AXIS.get((name, str(attrs.kernel_layout)))


def _along(axis: int, rank: int) -> Any:
    """Return a function that lays a vector along one axis of `rank` axes, so that it broadcasts."""
    missing: Sequence[int] = [a for a in range(rank) if a != axis]
    return lambda state, vector: state.emit(op.expand_dims(vector, list(missing))) if missing else vector


def _narrow(state: Rebuild, expr: Any, dtype: str) -> Any:
    return expr if dtype_of(expr) == dtype else state.emit(op.astype(expr, dtype))
