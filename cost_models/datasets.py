"""Readers of the published measurements that the learned models are trained on: columns and seconds per GPU type.

    load(DIR) ──► {"matmul_tensor": {"h100-sxm-80gb": Sample(table, seconds), ...}, ...}

DIR holds one folder per source (`neusight`, `aiconfigurator`, `vidur`, `llmservingsim`), each as its README there
describes it.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml
from numpy.typing import NDArray

from tvmhet.cluster.catalog import device_type
from tvmhet.cost.columns import Columns, columns
from tvmhet.cost.model import OpDesc
from tvmhet.cost.operators import SCHEMA, parse
from tvmhet.cost.physics import peaks
from tvmhet.cost.workload import kernel_of
from tvmhet.errors import BadInput

Floats = NDArray[np.float64]
Row = Mapping[str, str]

#: Column of the wide tables -> device type.
AICONFIGURATOR = {
    "a100_sxm": "a100-sxm-80gb",
    "l40s": "l40s",
    "h100_sxm": "h100-sxm-80gb",
    "h200_sxm": "h200-sxm-141gb",
    "b200_sxm": "b200",
    "gb200": "gb200",
    "rtx_pro_6000_server": "rtx-pro-6000",
}
#: Device of the long tables -> device type.
NEUSIGHT = {
    "Tesla P4": "p4",
    "Tesla P100-PCIE-16GB": "p100-pcie-16gb",
    "Tesla V100-PCIE-32GB": "v100-pcie-32gb",
    "Tesla T4": "t4",
    "NVIDIA A100-PCIE-40GB": "a100-pcie-40gb",
    "NVIDIA A100 80GB PCIe": "a100-pcie-80gb",
}

#: Where each group's rows come from: files below DIR, upstream commit.
SOURCES = {
    "neusight": "https://github.com/sitar-lab/NeuSight @ 6945927d9afcca2b9daf021f8395e53edc5b4eef (MIT)",
    "aiconfigurator": "https://github.com/ai-dynamo/aiconfigurator @ 095f58a51c4ca8e61b66ec108d86f223f8d559ce"
    " (Apache-2.0)",
    "vidur": "https://github.com/microsoft/vidur @ 7d47513363ec447a741ac5e47241580b47724fbf (MIT)",
    "llmservingsim": "https://github.com/casys-kaist/LLMServingSim @ 5daddb2 (MIT)",
}
FILES: Mapping[str, tuple[str, ...]] = {
    "matmul_tensor": ("aiconfigurator/gemm_sglang_0.5.10.csv.gz",),
    "matmul_narrow": ("aiconfigurator/gemm_sglang_0.5.10.csv.gz",),
    "batched_vector": ("neusight/ops_bmm.csv.gz",),
    "linear_vector": ("neusight/ops_linear.csv.gz",),
    "conv": ("neusight/ops_conv.csv.gz",),
    "stream": ("neusight/ops_vec.csv.gz",),
    "softmax": ("neusight/ops_vec.csv.gz",),
    "norm": ("neusight/ops_vec.csv.gz",),
    "attention_prefill": ("aiconfigurator/context_attention_perf_sglang_0.5.10.csv.gz",),
    "attention_decode": ("aiconfigurator/generation_attention_perf_sglang_0.5.10.csv.gz",),
    "moe": ("aiconfigurator/moe_sglang_0.5.10.csv.gz",),
}


@dataclass(frozen=True, slots=True)
class Sample:
    """Measured kernels of one group on one device type."""

    table: Columns
    seconds: Floats

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> Sample:
        """Return the selected rows."""
        return Sample(self.table.take(rows), self.seconds[rows])

    def __len__(self) -> int:
        return len(self.seconds)


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a CSV file, gzipped or not. Raises BadInput if it is missing."""
    if not path.exists():
        raise BadInput(f"data file {path} is missing", "give --data a folder laid out as cost_models/datasets.py says")
    opener: Callable[..., object] = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", newline="") as file:  # type: ignore[attr-defined]
        yield from csv.DictReader(file)


def _gemm(dtype: str, as_dtype: str) -> Callable[[Row], OpDesc | None]:
    def op(r: Row) -> OpDesc | None:
        if r["gemm_dtype"] != dtype:
            return None
        return OpDesc("linear", (1, int(r["m"]), int(r["n"]), int(r["k"])), as_dtype)

    return op


def _attention(family: str) -> Callable[[Row], OpDesc | None]:
    def op(r: Row) -> OpDesc | None:
        if (r["attn_dtype"], r["kv_cache_dtype"]) != ("bfloat16", "bfloat16") or r["beam_width"] != "1":
            return None
        q_len, step = int(r["isl"]), int(r["step"])
        heads, kv_heads = int(r["num_heads"]), int(r["num_key_value_heads"]) or int(r["num_heads"])
        window = int(float(r["window_size"]))
        sizes = (int(r["batch_size"]), heads, kv_heads, q_len, q_len + step, int(r["head_dim"]), window)
        return OpDesc(family, sizes, "bfloat16", "causal")

    return op


def _moe(r: Row) -> OpDesc | None:
    if r["moe_dtype"] != "bfloat16" or r["moe_ep_size"] != "1":
        return None
    inter = int(r["inter_size"]) // int(r["moe_tp_size"])
    sizes = (int(r["num_tokens"]), int(r["hidden_size"]), inter, int(r["topk"]), int(r["num_experts"]))
    return OpDesc("moe", sizes, "bfloat16", "" if r["distribution"] == "balanced" else "power_law")


def _product(family: str) -> Callable[[Row], OpDesc | None]:
    """Read NeuSight's product of (M, N) by (N, K): it sums over N, and K counts the result's columns.

    The recorded grids say so: ceil(K / tile) x ceil(M / tile) thread blocks in 95 to 97 % of the linear rows, which no
    other reading explains, and the operators traced in whole models, whose shapes are known, agree.
    """
    return lambda r: OpDesc(family, tuple(int(r[c]) for c in "BMKN"), "float32")


def _conv(r: Row) -> OpDesc | None:
    b, c, oc, k, size, stride, pad = (
        int(r[f]) for f in ("B", "Input_Channel", "Output_Channel", "Kernel_Size", "Input_Size", "Stride", "Padding")
    )
    out = (size + 2 * pad - k) // stride + 1
    return OpDesc("conv2d", (b, c, size, size, oc, k, k, out, out, 1), "float32")


_ELEMENTWISE = {"add": "add", "mul": "multiply", "div": "divide", "pow": "power"}
_UNARY = ("relu", "gelu", "tanh")


def _stream(r: Row) -> OpDesc | None:
    count = int(r["B"]) * int(r["H"])
    if r["op"] in _ELEMENTWISE:
        return OpDesc("elementwise", (2 * count, count), "float32", _ELEMENTWISE[r["op"]])
    if r["op"] in _UNARY:
        return OpDesc("elementwise", (count, count), "float32", r["op"])
    if r["op"][:-1] in _ELEMENTWISE:
        return OpDesc("elementwise", (count, count), "float32", _ELEMENTWISE[r["op"][:-1]] + "_scalar")
    return None


def _rows(name: str, family: str) -> Callable[[Row], OpDesc | None]:
    return lambda r: OpDesc(family, (int(r["B"]), int(r["H"])), "float32", family) if r["op"] == name else None


_OPS: Mapping[str, tuple[Callable[[Row], OpDesc | None], ...]] = {
    "matmul_tensor": (_gemm("bfloat16", "bfloat16"),),
    "matmul_narrow": (_gemm("fp8", "float8"),),
    "batched_vector": (_product("matmul"),),
    "linear_vector": (_product("linear"),),
    "conv": (_conv,),
    "stream": (_stream,),
    "softmax": (_rows("softmax", "softmax"),),
    "norm": (_rows("ln", "layer_norm"),),
    "attention_prefill": (_attention("attention_prefill"),),
    "attention_decode": (_attention("attention_decode"),),
    "moe": (_moe,),
}


def _times(row: Row) -> Iterator[tuple[str, float]]:
    """Yield (device type, seconds) of the measurements in a row of a wide or a long table."""
    if "latency_ms" in row:
        yield NEUSIGHT[row["device"]], float(row["latency_ms"]) * 1e-3
        return
    for column, device in AICONFIGURATOR.items():
        if row.get(column):
            yield device, float(row[column]) * 1e-3


#: Attention tables hold many shapes that one or two types measured under other conditions: keep the common ones.
_MIN_DEVICES = {"attention_prefill": 6, "attention_decode": 6}


def load_group(data: Path, group: str, every: int = 1) -> dict[str, Sample]:
    """Return the measured kernels of `group` by device type; with `every` > 1, each n-th row of the files."""
    ops: dict[str, list[OpDesc]] = {}
    seconds: dict[str, list[float]] = {}
    for file, make in zip(FILES[group], _OPS[group], strict=True):
        for i, row in enumerate(read_rows(data / file)):
            op = make(row) if i % every == 0 else None
            times = list(_times(row)) if op is not None else []
            for device, time in times if len(times) >= _MIN_DEVICES.get(group, 1) else ():
                ops.setdefault(device, []).append(op)  # type: ignore[arg-type]
                seconds.setdefault(device, []).append(time)
    kernels = {op: kernel_of(op) for device_ops in ops.values() for op in device_ops}
    samples = {
        device: Sample(columns([kernels[op] for op in ops[device]])[group], np.array(seconds[device]))
        for device in sorted(ops)
    }
    return {device: sample for device, sample in samples.items() if possible(device, sample)}


#: Files of `python -m benchmarks.gpu_rows measure`, by device type.
QUEUED = {
    path.name.removeprefix("gpu_").removesuffix(".jsonl.gz"): path
    for path in sorted((Path(__file__).parent / "measured").glob("gpu_*.jsonl.gz"))
}


def load_queued(group: str) -> dict[str, Sample]:
    """Return the kernels of `group` that were timed in a queue of them, without launches, by device type.

    Convolutions in parts are left out: their few rows are unlike all others.
    """
    samples = {}
    for device, path in QUEUED.items():
        rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()[1:]]
        rows = [row for row in rows if "queued_s" in row]
        descs = [parse({k: v for k, v in row.items() if k in ("op", "dtype", *SCHEMA[row["op"]])}) for row in rows]
        table = columns(descs).get(group)
        if table is not None:
            found = Sample(table, np.array([row["queued_s"] for row in rows])[table.index])
            samples[device] = found.take(table.sizes[:, -1] == 1) if group == "conv" else found
    return samples


#: More than this share of rows above the data sheet's peak, and a type's rows are not what their columns say.
_MOST_IMPOSSIBLE = 0.01


def possible(device: str, sample: Sample) -> bool:
    """Whether the measured times leave room for the arithmetic that the rows name.

    B200's prefill attention claims up to 9.8 times the chip's peak, growing with the length: its kernels skip most of
    what a full causal mask asks for. Convolutions save arithmetic (Winograd), so they are not judged.
    """
    if sample.table.group == "conv":
        return True
    above = sample.table.flop / sample.seconds > peaks(sample.table, device_type(device))
    return float(np.mean(above)) <= _MOST_IMPOSSIBLE


#: Files of `streams`.
STREAM_FILES = ("neusight/ops_vec.csv.gz", "vidur/mlp.csv.gz", "llmservingsim/v0_layers.csv.gz")
VIDUR = {"a40": "a40", "a100": "a100-sxm-80gb", "h100": "h100-sxm-80gb"}
SERVING = {"RTX3090": "rtx-3090", "A6000": "rtx-a6000", "H100": "h100-sxm-80gb", "RTX4090": "rtx-4090",
           "RTXPRO6000": "rtx-pro-6000"}  # fmt: skip
#: Llama-3.1-8B (its config.json). Its activation is two of torch's kernels there, SiLU and a product: five passes.
_LLAMA, _LLAMA_INNER, _SILU_PASSES = "meta-llama/Llama-3.1-8B", 14336, 5


def streams(data: Path) -> dict[tuple[str, str], tuple[Floats, Floats]]:
    """Return (bytes moved, seconds) of torch's own streaming kernels by (device type, source).

    The bytes are those of one kernel, as what decides is whether they outgrow L2; the seconds are per kernel too.
    """
    found: dict[tuple[str, str], dict[float, list[float]]] = {}

    def add(device: str, source: str, moved: float, seconds: float) -> None:
        found.setdefault((device, source), {}).setdefault(moved, []).append(seconds)

    for row in read_rows(data / "neusight" / "ops_vec.csv.gz"):
        if row["op"] == "add":
            moved = 12.0 * int(row["B"]) * int(row["H"])
            add(NEUSIGHT[row["device"]], "neusight", moved, float(row["latency_ms"]) * 1e-3)
    for row in read_rows(data / "vidur" / "mlp.csv.gz"):
        if row["add_ms"]:
            moved = 6.0 * int(row["num_tokens"]) * int(row["n_embd"])
            add(VIDUR[row["gpu"]], "vidur", moved, float(row["add_ms"]) * 1e-3)
    for row in read_rows(data / "llmservingsim" / "v0_layers.csv.gz"):
        if (row["model"], row["tp_size"], row["layer_name"]) == (_LLAMA, "1", "act_fn") and row["gpu"] in SERVING:
            moved = _SILU_PASSES * _LLAMA_INNER * float(row["input"])  # of two bytes a value, half of it per kernel
            add(SERVING[row["gpu"]], "llmservingsim", moved, float(row["latency(ns)"]) * 1e-9 / 2)
    return {
        key: (np.array(sorted(rows)), np.array([float(np.median(rows[moved])) for moved in sorted(rows)]))
        for key, rows in sorted(found.items())
    }


def groups() -> Sequence[str]:
    """The groups that can be trained from these data."""
    return tuple(FILES)


def exchanges(data: Path) -> dict[tuple[str, str, int], tuple[Floats, Floats]]:
    """Return (bytes, seconds) of collective and point-to-point exchanges by (device type, operation, devices)."""
    found: dict[tuple[str, str, int], dict[float, list[float]]] = {}
    for row in read_rows(data / "aiconfigurator" / "nccl.csv"):
        device = AICONFIGURATOR.get(row["system"])
        if device is None or row["nccl_dtype"] != "half":
            continue
        operation = {"alltoall": "all_to_all"}.get(row["op_name"], row["op_name"])
        times = found.setdefault((device, operation, int(row["num_gpus"])), {})
        times.setdefault(2.0 * float(row["message_size"]), []).append(float(row["latency"]) * 1e-3)  # sizes in elements
    for row in read_rows(data / "vidur" / "network.csv.gz"):
        device = {"a100_dgx": "a100-sxm-80gb", "h100_dgx": "h100-sxm-80gb", "a40_pairwise_nvlink": "a40"}.get(
            row["topo"]
        )
        if device is None or row["coll"] != "send_recv" or row["devices_per_node"] != "2":
            continue
        times = found.setdefault((device, "send", 2), {})
        times.setdefault(float(row["size"]), []).append(float(row["time_stats.send_recv.median"]) * 1e-3)
    return {
        key: (np.array(sorted(times)), np.array([float(np.median(times[size])) for size in sorted(times)]))
        for key, times in sorted(found.items())
    }


def exchanges_across(data: Path) -> tuple[dict[tuple[int, int], tuple[Floats, Floats]], float]:
    """Return all-reduce times over A100 nodes by (devices, nodes), and the share of its rate that an adapter reached.

    The share is that of the one network whose rate is stated: H100 nodes with one adapter per device.
    """
    found: dict[tuple[int, int], dict[float, float]] = {}
    sends: list[float] = []
    for row in read_rows(data / "vidur" / "network.csv.gz"):
        count, each = int(row["num_workers"]), int(row["devices_per_node"])
        if (row["topo"], row["coll"]) == ("a100_dgx", "all_reduce") and count > each:
            seconds = float(row["time_stats.all_reduce.median"]) * 1e-3
            found.setdefault((count, count // each), {})[float(row["size"])] = seconds
        if (row["topo"], row["coll"], each) == ("h100_dgx", "send_recv", 1):
            sends.append(float(row["size"]) / (float(row["time_stats.send_recv.median"]) * 1e-3))
    node = yaml.safe_load((data / "aiconfigurator" / "h100_sxm.yaml").read_text())["node"]
    runs = {key: (np.array(sorted(v)), np.array([v[size] for size in sorted(v)])) for key, v in sorted(found.items())}
    return runs, max(sends) / float(node["inter_node_bw"])
