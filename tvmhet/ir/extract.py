"""Normalised Relax module -> OpGraph: who reads what from C++, FLOPs and fusion pattern from one legalisation.

Each distinct call (operator, attributes, argument types) is legalised once, all of them in one module, so that a
model with 48 equal layers costs as much as one with a single layer.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import tvm
from tvm import relax

from tvmhet import _tvm
from tvmhet._passes import passes_func
from tvmhet.graph.opgraph import Operator, OpGraph, PatternKind, Tensor
from tvmhet.ir.attrs import NUM_SESSIONS_ATTR, NUM_STATE_ATTR
from tvmhet.ir.bindings import Bindings, flatten, live_ins, outline
from tvmhet.ir.legalize import legalize_ops


@dataclass(frozen=True, slots=True)
class NotAGraph:
    """Why a module cannot be cut into operators; it is then placed whole."""

    reason: str


@dataclass(frozen=True, slots=True)
class _Legalised:
    """What one legalisation of a call showed."""

    flop: float
    pattern: PatternKind


def extract(mod: tvm.IRModule, like: OpGraph | None = None) -> OpGraph | NotAGraph:
    """Return the operator graph of `main`, or why it has none. `mod` went through NameOperators.

    Operator and tensor names are the variables' names. `flop` is 0 for an operator that TVM does not legalise. What is
    known of the operators of `like` is not found out again.
    """
    if "main" not in {g.name_hint for g in mod.get_global_vars()}:
        return NotAGraph("the module has no function 'main'")
    flat = passes_func("tvmhet.ExtractGraph")(mod["main"])
    if reason := str(flat["reason"]):
        return NotAGraph(reason)
    bindings = Bindings(mod["main"])
    tensors = _tensors(flat)
    signatures = _signatures(mod, flat, tensors)
    legalised = {op.signature: _Legalised(op.flop, op.pattern) for op in like.operators} if like else {}
    first: dict[str, str] = {}
    for name, signature in zip(bindings.calls, signatures, strict=True):
        if signature not in legalised:
            first.setdefault(signature, name)
    legalised |= _legalise(mod, bindings, first)
    operators = tuple(
        _operator(flat, i, signature, tensors, legalised[signature]) for i, signature in enumerate(signatures)
    )
    attrs = mod["main"].attrs or {}
    return OpGraph(
        operators,
        tensors,
        tuple(map(int, flat["inputs"])),
        tuple(map(int, flat["outputs"])),
        int(attrs[NUM_STATE_ATTR]) if NUM_STATE_ATTR in attrs else 0,
        int(attrs[NUM_SESSIONS_ATTR]) if NUM_SESSIONS_ATTR in attrs else 1,
    )


def dtype_bytes(dtype: str) -> float:
    """Bytes of one element of a TVM dtype; half a byte for 4-bit types."""
    if dtype == "bool":
        return 1.0
    digits = "".join(c if c.isdigit() else " " for c in dtype).split()
    if dtype.startswith(("float8", "bfloat16")) or not digits:
        return float(np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize)
    return int(digits[0]) / 8


def _tensors(flat: Mapping[str, Any]) -> tuple[Tensor, ...]:
    consumers: list[list[int]] = [[] for _ in flat["tensor_names"]]
    for op, inputs in enumerate(flat["op_inputs"]):
        for t in sorted(set(map(int, inputs))):
            consumers[t].append(op)
    params, outputs = set(map(int, flat["params"])), set(map(int, flat["outputs"]))
    tensors = []
    for i, name in enumerate(flat["tensor_names"]):
        shape, dtype = tuple(map(int, flat["tensor_shapes"][i])), str(flat["tensor_dtypes"][i])
        tensors.append(
            Tensor(
                name=str(name),
                shape=shape,
                dtype=dtype,
                size_bytes=math.ceil(math.prod(shape) * dtype_bytes(dtype)),
                producer=int(flat["tensor_producers"][i]),
                consumers=tuple(consumers[i]),
                is_param=i in params,
                is_output=i in outputs,
            )
        )
    return tuple(tensors)


def _signatures(mod: tvm.IRModule, flat: Mapping[str, Any], tensors: Sequence[Tensor]) -> list[str]:
    """One text per operator: equal texts compute the same on equal inputs. PrimFuncs are named by their content."""
    prims = {
        g.name_hint: f"{_tvm.structural_hash(f) & (2**64 - 1):016x}"
        for g, f in mod.functions_items()
        if isinstance(f, _tvm.PrimFunc)
    }
    out = []
    for family, attrs, inputs, outputs in zip(
        flat["op_families"], flat["op_attrs"], flat["op_inputs"], flat["op_outputs"], strict=True
    ):
        types = [f"{t.dtype}{list(t.shape)}" for t in (tensors[int(i)] for i in (*inputs, *outputs))]
        callee = json.loads(str(attrs)).get("arg0") if str(family).startswith("call_tir") else None
        text = json.dumps([str(family), str(attrs), types, prims.get(callee, "") if callee else ""])
        out.append(hashlib.sha256(text.encode()).hexdigest()[:32])
    return out


def _legalise(mod: tvm.IRModule, bindings: Bindings, first: Mapping[str, str]) -> dict[str, _Legalised]:
    """Legalise one call of each signature; one that TVM cannot legalise is opaque with 0 FLOP: building it will say."""
    try:
        return _legalise_together(mod, bindings, first)
    except Exception:  # one call spoils the module for all: find it by trying each alone
        found: dict[str, _Legalised] = {}
        for signature, call in first.items():
            try:
                found |= _legalise_together(mod, bindings, {signature: call})
            except Exception:
                found[signature] = _Legalised(0.0, PatternKind.OPAQUE)
        return found


def _legalise_together(mod: tvm.IRModule, bindings: Bindings, first: Mapping[str, str]) -> dict[str, _Legalised]:
    """Legalise one call of each signature, all in one module."""
    probe = tvm.IRModule({g: f for g, f in mod.functions_items() if isinstance(f, _tvm.PrimFunc)})
    names = {}
    for i, (signature, call) in enumerate(first.items()):
        outs = list(flatten(bindings.results[call]))
        func = outline(bindings, [call], live_ins(bindings, [call]), outs, always_tuple=True)
        names[f"probe{i}"] = signature
        probe[f"probe{i}"] = func.with_attr("global_symbol", f"probe{i}")
    passes = [
        relax.backend.DispatchSampling(),
        relax.backend.DispatchSortScan(),
        legalize_ops(),
        relax.transform.AnnotateTIROpPattern(),
    ]
    with tvm.target.Target("llvm"):
        probe = tvm.transform.Sequential(passes)(probe)
    flop = {g.name_hint: _flop(f) for g, f in probe.functions_items() if isinstance(f, _tvm.PrimFunc)}
    return {signature: _inspect(probe, probe[name], flop) for name, signature in names.items()}


def _flop(func: Any) -> float:
    try:
        return float(_tvm.estimate_tir_flops(tvm.IRModule({"main": func})))
    except Exception:  # a PrimFunc with data-dependent loops has no static count
        return 0.0


def _inspect(mod: tvm.IRModule, func: relax.Function, flop: Mapping[str, float]) -> _Legalised:
    """One `call_tir` gives its PrimFunc's pattern; anything else cannot be fused."""
    calls = [b.value for block in func.body.blocks for b in block.bindings if isinstance(b.value, relax.Call)]
    callees = [str(c.args[0].name_hint) for c in calls if c.op == tvm.ir.Op.get("relax.call_tir")]
    total = sum(flop[c] for c in callees)
    if len(calls) != 1 or len(callees) != 1:
        return _Legalised(total, PatternKind.OPAQUE)
    attrs = mod[callees[0]].attrs
    pattern = PatternKind(int(attrs["op_pattern"])) if "op_pattern" in attrs else PatternKind.OPAQUE
    return _Legalised(total, pattern)


def _operator(
    flat: Mapping[str, Any], i: int, signature: str, tensors: Sequence[Tensor], legalised: _Legalised
) -> Operator:
    inputs, outputs = tuple(map(int, flat["op_inputs"][i])), tuple(map(int, flat["op_outputs"][i]))
    attrs = json.loads(str(flat["op_attrs"][i]))
    attrs |= {k: v for k, v in attrs.pop("attrs", {}).items() if k != "_type"}
    return Operator(
        name=str(flat["op_names"][i]),
        family=str(flat["op_families"][i]),
        attrs=attrs,
        inputs=inputs,
        outputs=outputs,
        flop=legalised.flop,
        read_bytes=sum(tensors[t].size_bytes for t in set(inputs)),
        write_bytes=sum(tensors[t].size_bytes for t in set(outputs)),
        pattern=legalised.pattern,
        signature=signature,
    )
