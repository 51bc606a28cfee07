"""A name for what a kernel computes: equal keys run equally fast on one device, in any model.

    conv ─► add ─► relu      key = sha256 of (signature, inputs as "i0" or "o0.0") per operator, and the live-outs

Built from operator signatures and their wiring alone, so it is stable across processes and TVM versions.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence

from tvmhet.errors import BadGraph
from tvmhet.graph.fusion import Branch
from tvmhet.graph.opgraph import OpGraph


def kernel_key(
    graph: OpGraph, ops: Sequence[int], maker: str, branches: Sequence[Branch] = (), panels: Collection[int] = ()
) -> str:
    """Return the key of the kernel that runs `ops` (ascending) by `maker`, in `branches` if any.

    Of the tensors that it reads, those of `panels` may be stored in panels. Raises BadGraph without signatures.
    """
    local: dict[int, str] = {}
    lines: list[object] = [maker]
    num_inputs = 0
    inside = set(ops)
    for k, i in enumerate(ops):
        op = graph.operators[i]
        if not op.signature:
            raise BadGraph(f"operator {op.name!r} has no signature", "extract the graph from a module")
        for t in op.inputs:
            if t not in local:
                local[t] = f"i{num_inputs}"
                num_inputs += 1
        lines.append([op.signature, [local[t] for t in op.inputs]])
        local |= {t: f"o{k}.{j}" for j, t in enumerate(op.outputs)}
    tensors = (graph.tensors[t] for i in ops for t in graph.operators[i].outputs)
    outs = [t.name for t in tensors if t.is_output or not inside.issuperset(t.consumers)]
    lines.append([local[t] for i in ops for t in graph.operators[i].outputs if graph.tensors[t].name in outs])
    if read := [name for t, name in local.items() if t in panels]:
        lines.append(["panels", read])
    if branches:
        place = {i: k for k, i in enumerate(ops)}
        lines.append([[[place[i] for i in kernel] for kernel in branch.kernels] for branch in branches])
    return hashlib.sha256(json.dumps(lines).encode()).hexdigest()[:32]


def graph_key(graph: OpGraph) -> str:
    """Return a hash of the whole graph: names, signatures and wiring. A plan is bound to it."""
    lines = [
        [[op.name, op.signature, op.inputs, op.outputs] for op in graph.operators],
        [[t.name, t.shape, t.dtype] for t in graph.tensors],
        [graph.inputs, graph.outputs],
    ]
    if graph.num_states:
        lines.append([graph.num_states, graph.num_sessions])
    return hashlib.sha256(json.dumps(lines).encode()).hexdigest()
