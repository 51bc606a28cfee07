"""Products read weights in panels: T columns at a time, each panel contiguous.

Before:  y = R.matmul(x, w)               After:  y = R.call_tir(matmul_panels, (x, w), ...)
         w: R.Tensor((k, n))                      w: R.Tensor((n // T, k, T))
                                                  matmul_panels: y[m, j] = sum(x[m, i] * w[j // T, i, j % T] for i in k)

Only weights that nothing but products read, as their second operand (`graph/panels.py`), and whose columns are whole
panels. Runs after NameOperators and a plan's rewrites, before FuseByPlan; names stay, other operators are untouched.
What calls the module gives it `in_panels(w, T)` for w.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import tvm
from tvm import relax, te

from tvmhet.errors import BadGraph
from tvmhet.ir.bindings import Bindings, Emitter, readers_of, rebuild_main
from tvmhet.ir.rewrite import op_name, shape_of


@tvm.transform.module_pass(opt_level=0, name="tvmhet.PackWeights")
class PackWeights:
    """Store weights of `main` in panels of so many columns. Raises BadGraph for one that is read in any other way."""

    def __init__(self, columns: Mapping[str, int]) -> None:
        self.columns = dict(columns)

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Return `mod` itself if no weight is named."""
        if not self.columns:
            return mod
        bindings = Bindings(mod["main"])
        products = _products(bindings, self.columns)

        def emit(emitter: Emitter, env: dict[str, relax.Expr]) -> None:
            for name in bindings.calls:
                call = bindings.rebuild(name, env)
                if name in products:
                    product = _product_of_panels(call, shape_of(bindings.calls[name]))
                    call = emitter.builder.call_te(product, *call.args, primfunc_name_hint="matmul_panels")
                env |= emitter.emit(call, bindings.results[name], name)

        packed = {w: _panel_type(bindings.types[w], columns) for w, columns in self.columns.items()}
        params = [relax.Var(p.name, packed.get(p.name, p.ty)) for p in bindings.func.params]
        return rebuild_main(mod, bindings, emit, params)


def panel_shape(shape: Sequence[int], columns: int) -> tuple[int, ...]:
    """Return the shape of `in_panels` of a weight.

    >>> panel_shape((768, 2304), 64)
    (36, 768, 64)
    """
    *batch, depth, width = shape
    return (*batch, width // columns, depth, columns)


def in_panels(weight: np.ndarray, columns: int) -> np.ndarray:
    """Return [.., k, n] as [.., n // columns, k, columns]: a view, which is packed where it is copied to be read.

    >>> in_panels(np.arange(8).reshape(2, 4), 2).tolist()
    [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    """
    *batch, depth, width = weight.shape
    return np.moveaxis(weight.reshape(*batch, depth, width // columns, columns), -2, -3)


def _products(bindings: Bindings, columns: Mapping[str, int]) -> frozenset[str]:
    """The products that read the weights."""
    readers = readers_of(bindings)
    found: set[str] = set()
    for weight, width in columns.items():
        names = readers.get(weight, ())
        if not names or weight in bindings.producer or not all(_multiplies(bindings, n, weight) for n in names):
            raise BadGraph(f"weight {weight!r} is not read by products alone", "plan this module again")
        shape = shape_of(bindings.calls[next(iter(names))].args[1])
        assert shape is not None
        if (num_columns := shape[-1]) % width:
            raise BadGraph(
                f"weight {weight!r} has {num_columns} columns, no multiple of {width}",
                f"give a divisor of {num_columns}",
            )
        found.update(names)
    return frozenset(found)


def _multiplies(bindings: Bindings, name: str, weight: str) -> bool:
    """Whether an operator is a product of something else and the weight."""
    call = bindings.calls[name]
    return op_name(call) == "matmul" and [r == weight for r in bindings.reads(name)] == [False, True]


def _panel_type(ty: relax.TensorType, columns: int) -> relax.TensorType:
    return relax.TensorType(panel_shape([int(d) for d in ty.shape], columns), ty.dtype)


def _product_of_panels(call: relax.Call, shape: tuple[int, ...] | None) -> object:
    """The product as a tensor expression of its operands."""
    assert shape is not None
    result = shape

    def product(x: te.Tensor, w: te.Tensor) -> te.Tensor:
        columns = int(w.shape[-1])
        k = te.reduce_axis((0, x.shape[-1]), name="k")

        def at(*place: tvm.tirx.Var) -> tvm.tirx.PrimExpr:
            *before, n = place
            batch = before[: len(w.shape) - 3]
            return te.sum(x[(*before, k)] * w[(*batch, n // columns, k, n % columns)], axis=k)

        return te.compute(result, at, name="matmul")

    return product
