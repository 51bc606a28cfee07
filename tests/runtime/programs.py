"""Programs and answers that the tests of the runtime share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tvmhet.runtime import CpuDevice, DeviceBinding, ValueSpec, assign_cores

if TYPE_CHECKING:
    import tvm

SHAPE = (4, 8)


def add_scale_module(num_inputs: int, num_outputs: int, dtype: str) -> tvm.IRModule:
    """main(x0.., w) = ((x0 + .. + w) * 1, (x0 + .. + w) * 2, ..): exact on small whole numbers."""
    from tvm import relax  # here, so that the scripts which only need the programs start without TVM

    builder = relax.BlockBuilder()
    ty = relax.TensorType(SHAPE, dtype)
    params = [relax.Var(f"x{i}", ty) for i in range(num_inputs)] + [relax.Var("w", ty)]
    with builder.function("main", params):
        with builder.dataflow():
            total = params[0]
            for var in params[1:]:
                total = builder.emit(relax.op.add(total, var))
            scaled = [
                builder.emit(relax.op.multiply(total, relax.const(np.asarray(k + 1), dtype)))
                for k in range(num_outputs)
            ]
            out = builder.emit_output(relax.Tuple(scaled))
        builder.emit_func_output(out)
    return builder.finalize()


def two_cpus(isa: str | None = None) -> dict[str, DeviceBinding]:
    """Bindings of two CPU devices, on two cores where this machine has two."""
    return assign_cores([CpuDevice("cpu0", 1, isa), CpuDevice("cpu1", 1, isa)])


def specs(*names: str, dtype: str = "float32") -> dict[str, ValueSpec]:
    """Values of the tests' one shape."""
    return {name: ValueSpec.of(name, SHAPE, dtype) for name in names}


def full(value: float, dtype: str = "float32") -> np.ndarray:
    """An array of the tests' one shape."""
    return np.full(SHAPE, value).astype(dtype)


def skip_answer(x: np.ndarray) -> tuple[np.ndarray, ...]:
    """What `skip_program` returns."""
    h = x + 1
    b = 2 * h + 10
    c = h + b + 1
    y = c + x + 10
    return y, h, x, full(1), y
