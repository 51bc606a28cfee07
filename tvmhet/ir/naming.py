"""Names of operators that a person can find in the model, and short names of what they compute."""

from __future__ import annotations

import tvm
from tvm import relax

from tvmhet.ir.bindings import Bindings

_CALL_TIR = ("relax.call_tir", "relax.call_tir_inplace")


def operator_stem(call: relax.Call) -> str:
    """The operator's short name: `relax.nn.conv2d` -> `conv2d`; the callee's for `call_tir` and kernels."""
    if not isinstance(call.op, tvm.ir.Op):
        return str(call.op.name_hint)
    name = str(call.op.name)
    return str(call.args[0].name_hint) if name in _CALL_TIR else name.split(".")[-1]


def module_of(param: str) -> str:
    """`p_layer1_conv1_weight` -> `layer1_conv1`: a parameter without its last word and torch.export's prefix."""
    for prefix in ("p_", "b_", "c_"):
        param = param.removeprefix(prefix)
    return param.rpartition("." if "." in param else "_")[0]


def operator_names(bindings: Bindings) -> dict[str, str]:
    """Return the new name of each call, in order. Deterministic; unique among calls and parameters."""
    weights = set(bindings.param_names[bindings.num_input :])
    taken = set(bindings.param_names)
    names: dict[str, str] = {}
    for old, call in bindings.calls.items():
        stem = operator_stem(call)
        modules = [m for t in bindings.reads(old) if t in weights and (m := module_of(t))]
        base = stem
        if modules:
            base = modules[0] if modules[0] not in taken else f"{modules[0]}_{stem}"
        name, i = base, 0
        while name in taken:
            i += 1
            name = f"{base}_{i}"
        taken.add(name)
        names[old] = name
    return names
