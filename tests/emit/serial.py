"""A kernel scheduled for a GPU as a program for one thread: what its blocks say, with every thread's loop run in turn.

Before:  for i in T.thread_binding(256, "threadIdx.x"): ...     After:  for i in range(256): ...

A schedule means the same with any kind of loops; a tile that threads load together is loaded whole by each here. What
this cannot show is what comes later: barriers between threads, and the code of the kernel.
"""

from __future__ import annotations

import json
from typing import Any

import tvm

_THREAD_BINDING, _SERIAL = 4, 0  # tirx.ForKind
_NONE = 0  # the first node of saved IR


def serial(func: Any) -> Any:
    """Return the kernel with its thread loops serial and its shared and local buffers in plain memory."""
    tree = json.loads(tvm.ir.save_json(func))
    nodes = tree["nodes"]
    assert nodes[_NONE] == {"type": "None"}
    for node in list(nodes):
        data = node.get("data")
        if node["type"] == "tirx.For" and data["kind"] == _THREAD_BINDING:
            data |= {"kind": _SERIAL, "thread_binding": _NONE}
        elif node["type"] == "ffi.String" and data in ("shared", "local"):
            node["data"] = "global"
        elif node["type"] == "tirx.AttrStmt" and nodes[data["attr_key"]].get("data") == "thread_extent":
            node |= {"type": "tirx.For", "data": _loop(nodes, data)}
    return tvm.ir.load_json(json.dumps(tree))


def _loop(nodes: list[dict[str, Any]], launch: dict[str, Any]) -> dict[str, Any]:
    """The loop over a thread index that was bound by hand."""
    first = len(nodes)
    extent = nodes[launch["value"]]
    zero = {"type": extent["type"], "data": {**extent["data"], "value": first}}
    nodes += [{"type": "int", "data": 0}, zero, {"type": "ffi.Map", "data": []}]
    return {
        "span": _NONE,
        "loop_var": nodes[launch["node"]]["data"]["var"],
        "min": first + 1,
        "extent": launch["value"],
        "kind": _SERIAL,
        "body": launch["body"],
        "thread_binding": _NONE,
        "annotations": first + 2,
        "step": _NONE,
    }


def num_threads_bound(func: Any) -> int:
    """Return how many loops of a kernel are bound to threads, by a schedule or by hand."""
    nodes = json.loads(tvm.ir.save_json(func))["nodes"]
    by_schedule = sum(n["type"] == "tirx.For" and n["data"]["kind"] == _THREAD_BINDING for n in nodes)
    launches = [n for n in nodes if n["type"] == "tirx.AttrStmt"]
    return by_schedule + sum(nodes[n["data"]["attr_key"]].get("data") == "thread_extent" for n in launches)
