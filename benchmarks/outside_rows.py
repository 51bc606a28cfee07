"""Products and attention that no model was trained on, from other laboratories: section `outside` of cost_models.py.

vidur timed the layers of language models in float16 on A40, A100 and H100, LLMServingSim in bfloat16 on five types, one
layer at a time, and attention on two. A40, RTX A6000, RTX 3090 and RTX 4090 are in no training table. The shipped
models predict all rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import datasets
import numpy as np

from tvmhet.cluster.catalog import device_type
from tvmhet.cost.boosted import LearnedModel
from tvmhet.cost.model import OpDesc
from tvmhet.cost.workload import kernel_of

if TYPE_CHECKING:
    from cost_models import Bench

_VIDUR = {"a40": "a40", "a100": "a100-sxm-80gb", "h100": "h100-sxm-80gb"}
_SERVING = {"RTX3090": "rtx-3090", "A6000": "rtx-a6000", "H100": "h100-sxm-80gb", "RTX4090": "rtx-4090",
            "RTXPRO6000": "rtx-pro-6000"}  # fmt: skip
#: (n, k) of the products in Llama-3.1-8B (its config.json): hidden 4096, intermediate 14336, 8 key-value heads of 128.
_LLAMA = {
    "q_proj": (4096, 4096), "k_proj": (1024, 4096), "v_proj": (1024, 4096), "o_proj": (4096, 4096),
    "gate_proj": (14336, 4096), "up_proj": (14336, 4096), "down_proj": (4096, 14336), "qkv_proj": (6144, 4096),
    "gate_up_proj": (28672, 4096),
}  # fmt: skip
#: Its heads of queries and of keys and values.
_HEADS = (32, 8)

Times = dict[tuple[str, str, OpDesc], list[float]]


def outside(bench: Bench) -> None:
    """Print the error of the shipped models per source and device type."""
    found: dict[tuple[str, str, str], list[tuple[OpDesc, float]]] = {}
    for (source, device, op), seconds in {
        **_vidur(bench.data), **_serving(bench.data), **_attention(bench.data)
    }.items():  # fmt: skip
        kind = op.family.removeprefix("attention_") if op.family.startswith("attention") else "products"
        found.setdefault((kind, source, device), []).append((op, float(np.median(seconds))))
    bench.line("\n16-bit kernels of other laboratories, not trained on; absolute error of the shipped models, %")
    bench.line(
        f"{'kernels':<10}{'source':<16}{'type':<16}{'trained on':>11}{'rows':>7}{'mean':>7}{'median':>8}{'bias':>7}"
        f"{'in 80 %':>9}"
    )
    for (kind, source, name), rows in sorted(found.items()):
        device = device_type(name)
        model = LearnedModel.load(device)
        times = model.predict([kernel_of(op) for op, _ in rows])
        seconds = np.array([s for _, s in rows])
        error = times.seconds / seconds - 1
        inside = (times.low <= seconds) & (seconds <= times.high)
        group = "matmul_tensor" if kind == "products" else f"attention_{kind}"
        trained = "yes" if name in model.groups[group].card.fits else "no"
        bench.line(
            f"{kind:<10}{source:<16}{name:<16}{trained:>11}{len(rows):>7}{100 * np.abs(error).mean():>7.1f}"
            f"{100 * np.median(np.abs(error)):>8.1f}{100 * np.median(error):>+7.1f}{100 * inside.mean():>9.0f}"
        )


def _vidur(data: Path) -> Times:
    found: Times = {}
    for row in datasets.read_rows(data / "vidur" / "mlp.csv.gz"):
        for op, column in _vidur_ops(row):
            if row[column]:
                found.setdefault(("vidur", _VIDUR[row["gpu"]], op), []).append(float(row[column]) * 1e-3)
    return found


def _vidur_ops(row: Mapping[str, str]) -> Iterator[tuple[OpDesc, str]]:
    """Yield the four products of one layer, split over tensor-parallel workers, with the columns of their times."""
    ways = int(row["num_tensor_parallel_workers"])
    hidden, inter, rows = int(row["n_embd"]), int(row["n_expanded_embd"]), int(row["num_tokens"])
    heads, kv_heads = int(row["n_head"]), max(int(row["n_kv_head"]), ways)
    up = inter * (2 if row["use_gated_mlp"] == "True" else 1)
    shapes = {
        "attn_pre_proj_ms": ((heads + 2 * kv_heads) * (hidden // heads) // ways, hidden),
        "attn_post_proj_ms": (hidden, hidden // ways),
        "mlp_up_proj_ms": (up // ways, hidden),
        "mlp_down_proj_ms": (hidden, inter // ways),
    }
    for column, (n, k) in shapes.items():
        yield OpDesc("linear", (1, rows, n, k), "float16"), column


def _serving(data: Path) -> Times:
    """Times of Llama-3.1-8B on one device; of the same layer and tokens at several cache lengths all are kept."""
    found: Times = {}
    for file, layer, tokens, time, unit_s, ways in (
        ("v0_layers.csv.gz", "layer_name", "input", "latency(ns)", 1e-9, ("tp_size", "1")),
        ("dense.csv.gz", "layer", "tokens", "time_us", 1e-6, ("tp", "tp1")),
    ):
        for row in datasets.read_rows(data / "llmservingsim" / file):
            if row["model"] != "meta-llama/Llama-3.1-8B" or row[ways[0]] != ways[1] or row[layer] not in _LLAMA:
                continue
            device = _SERVING.get(row["gpu"])
            if device is not None:
                op = OpDesc("linear", (1, int(row[tokens]), *_LLAMA[row[layer]]), "bfloat16")
                found.setdefault(("llmservingsim", device, op), []).append(float(row[time]) * unit_s)
    return found


def _attention(data: Path) -> Times:
    """Attention of Llama-3.1-8B on one device: a prompt's chunk after what the cache holds, or a batch that decodes."""
    found: Times = {}
    for row in datasets.read_rows(data / "llmservingsim" / "attention.csv.gz"):
        device = _SERVING.get(row["gpu"])
        if device is None or row["model"] != "meta-llama/Llama-3.1-8B" or row["tp"] != "tp1":
            continue
        chunk, before = int(row["prefill_chunk"]), int(row["kv_prefill"])
        batch, cached = int(row["n_decode"]), int(row["kv_decode"])
        if (chunk > 0) == (batch > 0):
            continue
        op = (
            OpDesc("attention_prefill", (1, *_HEADS, chunk, before + chunk, 128, 0), "bfloat16", "causal")
            if chunk
            else OpDesc("attention_decode", (batch, *_HEADS, 1, max(cached, 1), 128, 0), "bfloat16", "causal")
        )
        found.setdefault(("llmservingsim", device, op), []).append(float(row["time_us"]) * 1e-6)
    return found
