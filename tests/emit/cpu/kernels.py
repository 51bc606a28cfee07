"""Kernels as the pipeline makes them, and the same compiled with and without our rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tvm
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from tvm import relax

from tvmhet.emit.cpu.blocks import CpuTarget
from tvmhet.emit.cpu.fast_math import fast_math
from tvmhet.emit.cpu.rules import RULES
from tvmhet.emit.cpu.shares import in_shares
from tvmhet.emit.lower import kernel_passes, make_target

LEVELS = ("x86-64-v2", "x86-64-v3")  # what every machine that runs the tests has
Make = Callable[..., relax.Expr]

few = settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
extent = st.sampled_from([1, 2, 3, 5, 7, 8, 12, 16, 17, 24, 31, 33, 40, 49, 64, 67])


def target(level: str = "x86-64-v3", num_cores: int = 1) -> tvm.target.Target:
    """Return the target of a CPU device type."""
    return make_target({"kind": "llvm", "mcpu": level, "num-cores": num_cores})


def kernel(make: Make, *shapes: tuple[int, ...], dtype: str = "float32") -> Any:
    """Return the one PrimFunc of `make(x0, x1, ...)`: the calls of an expression fused into one kernel."""
    builder = relax.BlockBuilder()
    params = [relax.Var(f"x{i}", relax.TensorType(s, dtype)) for i, s in enumerate(shapes)]
    with builder.function("fused", params, attrs={"Primitive": True}, private=True):
        with builder.dataflow():
            out = builder.emit_output(make(*params))
        builder.emit_func_output(out)
    fused = builder.get().get_global_vars()[0]
    outer = [relax.Var(f"y{i}", relax.TensorType(s, dtype)) for i, s in enumerate(shapes)]
    with builder.function("main", outer):
        with builder.dataflow():
            out = builder.emit_output(relax.Call(fused, outer))
        builder.emit_func_output(out)
    with target():
        mod = tvm.transform.Sequential(kernel_passes())(builder.finalize())
    (func,) = [f for f in mod.functions.values() if isinstance(f, tvm.tirx.PrimFunc)]
    return func


def scheduled(func: Any, level: str = "x86-64-v3", num_cores: int = 1) -> tuple[str, Any]:
    """Return the first rule that takes a kernel, and what it makes; ("", func) if none does."""
    cpu = CpuTarget.of(target(level, num_cores))
    for name, rule in RULES:
        schedule = rule(func, cpu)
        if schedule is not None:
            return name, schedule.mod["main"]
    return "", func


def run(func: Any, inputs: list[np.ndarray], level: str = "x86-64-v3", num_cores: int = 1) -> np.ndarray:
    """Compile a kernel and return its result."""
    out = func.params[-1]
    shape = tuple(int(e.value) for e in out.shape)
    result = tvm.runtime.tensor(np.full(shape, np.nan if "float" in str(out.dtype) else 77, str(out.dtype)))
    func = in_shares(func, num_cores).with_attr("global_symbol", "main")
    executable = tvm.compile(func, target=target(level, num_cores))
    executable(*map(tvm.runtime.tensor, inputs), result)
    return result.numpy()


def check(make: Make, *shapes: tuple[int, ...], rule: str | None, level: str = "x86-64-v3", num_cores: int = 1) -> None:
    """Assert that `rule` (any if None) takes the kernel and equals the unscheduled kernel within 1e-5."""
    func = kernel(make, *shapes)
    name, fast = scheduled(func, level, num_cores)
    assert name == rule or (rule is None and name)
    rng = np.random.default_rng(0)
    inputs = [rng.uniform(-1, 1, s).astype("float32") for s in shapes]
    got, want = run(fast_math(fast), inputs, level, num_cores), run(func, inputs, level)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
