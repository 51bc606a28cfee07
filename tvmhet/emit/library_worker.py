"""The process that times library kernels: oneDNN and MKL on CPUs, cuBLAS and cuDNN on CUDA. `calibrating` starts it.

Reads one JSON object a line from standard input, an operator as `tvmhet predict` takes them; answers each with its
times in seconds, one run each, all kept. It is pinned, and its instruction sets capped, before torch is imported.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from tvmhet.emit.library_steps import STEPS, WRITES

GpuTimes = Callable[..., "tuple[list[float], str]"]  # of a run, repeats and seconds: see tvmhet.runtime.cuda_times
_REPEATS, _BUDGET_S = 25, 1.0
_BINARY = frozenset({"add", "multiply", "divide", "power"})


def main(device: str, gpu_times: GpuTimes | None = None) -> None:
    """Serve until standard input ends. `device` is torch's: "cpu", or "cuda:0", whose runs `gpu_times` times."""
    import torch

    torch.manual_seed(0)
    if device == "cpu":
        torch.set_num_threads(max(1, len(_cores())))
    else:
        torch.cuda.set_device(device)  # events are of the current device
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    name = torch.cuda.get_device_name(device) if device != "cpu" else ""
    print(json.dumps({"ready": name}), flush=True)
    for line in sys.stdin:
        print(json.dumps(_answer(torch, json.loads(line), device, gpu_times)), flush=True)


def _cores() -> set[int]:
    import os

    return os.sched_getaffinity(0)


def _answer(torch: Any, record: Mapping[str, Any], device: str, gpu_times: GpuTimes | None) -> dict[str, Any]:
    try:
        with torch.no_grad():
            if gpu_times is not None:
                run, ordinal = alone(torch, record, device), torch.device(device).index
                times, note = gpu_times(run, ordinal, True, _REPEATS, _BUDGET_S)
                return {"times_s": times, "waited": 0.0, "note": note}
            run = as_called(torch, record, device)
            return _timed_cpu(run, time.thread_time if torch.get_num_threads() == 1 else time.perf_counter)
    except Exception as error:  # whatever torch raises becomes an answer
        return {"times_s": [], "waited": 0.0, "note": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}


def _timed_cpu(run: Callable[[], Any], clock: Callable[[], float]) -> dict[str, Any]:
    """Time single runs by `clock`: of one thread its CPU time, which others on its core do not lengthen."""
    times: list[float] = []
    run()
    began, used = time.perf_counter(), time.process_time()
    while len(times) < _REPEATS and (len(times) < 3 or time.perf_counter() - began < _BUDGET_S):
        start = clock()
        run()
        times.append(clock() - start)
    wall, used = time.perf_counter() - began, time.process_time() - used
    return {"times_s": times, "waited": max(0.0, 1.0 - used / wall), "note": ""}


def as_called(torch: Any, record: Mapping[str, Any], device: str) -> Callable[[], Any]:
    """Return a call that runs an operator as a library kernel of a model does: into memory that is mapped already.

    Operands are made here. KeyError for an operator that the library has not.
    """
    family, attrs, given = _call(record, _makes(torch, record, device))
    step = STEPS[family](attrs)
    out = step(given).clone()
    write = WRITES[family](attrs) if family in WRITES else lambda a, out: out.copy_(step(a))
    return lambda: write(given, out)


def alone(torch: Any, record: Mapping[str, Any], device: str) -> Callable[[], Any]:
    """Return a call of the library's own kernel: copies of results and convolutions that are products are priced apart.

    Operands are made here. KeyError for an operator that the library has not.
    """
    F, make = torch.nn.functional, _makes(torch, record, device)
    if record["op"] == "attention_prefill":
        q, k, v = (make(record["batch"], record["heads"], record["q_len"], record["head_dim"]) for _ in range(3))
        causal = bool(record["causal"])
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    family, attrs, given = _call(record, make)
    if family == "nn.conv2d":
        how = attrs["strides"], list(attrs["padding"][:2]), attrs["dilation"], attrs["groups"]
        return lambda: F.conv2d(*given, None, *how)
    step = STEPS[family](attrs)
    if family not in WRITES:
        return lambda: step(given)
    write, out = WRITES[family](attrs), step(given).clone()
    return lambda: write(given, out)


def _makes(torch: Any, record: Mapping[str, Any], device: str) -> Callable[..., Any]:
    """What makes an operand of a shape, of the record's dtype."""
    dtype = getattr(torch, str(record.get("dtype", "float32")))
    return lambda *shape: torch.rand(*shape, device=device, dtype=torch.float32).to(dtype)


def _call(r: Mapping[str, Any], make: Callable[..., Any]) -> tuple[str, Mapping[str, Any], list[Any]]:
    """The library's family of an operator, its attributes and operands. KeyError for one that the library has not."""
    op = r["op"]
    if op == "linear":
        return "matmul", {}, [make(r["b"] * r["m"], r["k"]), make(r["n"], r["k"]).t()]
    if op == "matmul":
        return "matmul", {}, [make(r["b"], r["m"], r["k"]), make(r["b"], r["k"], r["n"])]
    if op == "conv2d":
        x, w = make(r["n"], r["c"], r["h"], r["w"]), make(r["oc"], r["c"] // r["groups"], r["kh"], r["kw"])
        attrs = {"strides": r["stride"], "padding": [*r["padding"]] * 2, "dilation": [1, 1], "groups": r["groups"]}
        return "nn.conv2d", attrs, [x, w]
    if op == "elementwise":
        name = {"relu": "nn.relu", "gelu": "nn.gelu"}.get(r["name"], r["name"])
        size = math.prod(r["shape"])
        return name, {}, [make(size), make(size)] if name in _BINARY else [make(size)]
    if op == "pooling":
        attrs = {"pool_size": [r["kh"], r["kw"]], "strides": r["stride"], "padding": r["padding"], "dilation": [1, 1]}
        return "nn.max_pool2d", attrs | {"ceil_mode": False}, [make(r["n"], r["c"], r["h"], r["w"])]
    if op == "embedding":
        return "take", {}, [make(r["vocab"], r["dim"]), (make(r["tokens"]).float() * r["vocab"]).long()]
    x = make(r["rows"], r["cols"])
    if op == "reduction":
        return "sum", {"axis": [-1], "keepdims": False}, [x]
    if op == "softmax":
        return "nn.softmax", {"axis": -1}, [x]
    if op == "layer_norm":
        attrs = {"axes": [-1], "epsilon": 1e-5, "center": True, "scale": True}
        return "nn.layer_norm", attrs, [x, make(r["cols"]), make(r["cols"])]
    raise KeyError(op)
