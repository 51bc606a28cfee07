"""Kernels that no model was trained on, from other laboratories: section `outside` of cost_models.py.

vidur timed the layers of language models in float16 on A40, A100 and H100, LLMServingSim in bfloat16 on five types, one
layer at a time, and attention on two. Products, activations, normalisations and attention are compared. Additions, and
activations by torch's own kernels, show what a type's DRAM gives: they are used for that (`dram.yaml`) and left out.
A40, RTX A6000, RTX 3090 and RTX 4090 are in no training table of kernels. The shipped models predict all rows.
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

_HIDDEN, _INNER = 4096, 14336
#: (n, k) of the products in Llama-3.1-8B (its config.json): hidden 4096, intermediate 14336, 8 key-value heads of 128.
_LLAMA = {
    "q_proj": (4096, 4096), "k_proj": (1024, 4096), "v_proj": (1024, 4096), "o_proj": (4096, 4096),
    "gate_proj": (14336, 4096), "up_proj": (14336, 4096), "down_proj": (4096, 14336), "qkv_proj": (6144, 4096),
    "gate_up_proj": (28672, 4096),
}  # fmt: skip
#: Its heads of queries and of keys and values.
_HEADS = (32, 8)

_KINDS = {"linear": "products", "elementwise": "activation", "layer_norm": "norm", "attention_prefill": "prefill",
          "attention_decode": "decode"}  # fmt: skip
_GROUPS = {"products": "matmul_tensor", "activation": "stream", "norm": "norm", "prefill": "attention_prefill",
           "decode": "attention_decode"}  # fmt: skip
#: Kinds whose models were trained on eager calls: these rows were timed on the device, without the host.
_EAGER = ("activation", "norm")

Times = dict[tuple[str, str, OpDesc], list[float]]


def outside(bench: Bench) -> None:
    """Print the error of the shipped models per source and device type."""
    found: dict[tuple[str, str, str], list[tuple[OpDesc, float]]] = {}
    for (source, device, op), seconds in {
        **_vidur(bench.data), **_serving(bench.data), **_attention(bench.data)
    }.items():  # fmt: skip
        kind = _KINDS[op.family]
        found.setdefault((kind, source, device), []).append((op, float(np.median(seconds))))
    bench.line("\n16-bit kernels of other laboratories, not trained on; absolute error of the shipped models, %")
    bench.line(
        f"{'kernels':<11}{'source':<16}{'type':<16}{'trained on':>11}{'rows':>7}{'mean':>7}{'median':>8}{'bias':>7}"
        f"{'in 80 %':>9}"
    )
    for (kind, source, name), rows in sorted(found.items()):
        device = device_type(name)
        model = LearnedModel.load(device, "queued" if kind in _EAGER else "published")
        times = model.predict([kernel_of(op) for op, _ in rows])
        seconds = np.array([s for _, s in rows])
        error = times.seconds / seconds - 1
        inside = (times.low <= seconds) & (seconds <= times.high)
        trained = "yes" if name in model.groups[_GROUPS[kind]].card.fits else "no"
        bench.line(
            f"{kind:<11}{source:<16}{name:<16}{trained:>11}{len(rows):>7}{100 * np.abs(error).mean():>7.1f}"
            f"{100 * np.median(np.abs(error)):>8.1f}{100 * np.median(error):>+7.1f}{100 * inside.mean():>9.0f}"
        )


def _vidur(data: Path) -> Times:
    found: Times = {}
    for row in datasets.read_rows(data / "vidur" / "mlp.csv.gz"):
        for op, column in _vidur_ops(row):
            if row[column]:
                found.setdefault(("vidur", datasets.VIDUR[row["gpu"]], op), []).append(float(row[column]) * 1e-3)
    return found


def _vidur_ops(row: Mapping[str, str]) -> Iterator[tuple[OpDesc, str]]:
    """Yield the kernels of one layer, split over tensor-parallel workers, with the columns of their times."""
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
    values, gated = rows * inter // ways, row["use_gated_mlp"] == "True"
    yield OpDesc("elementwise", ((1 + gated) * values, values), "float16", "silu" if gated else "gelu"), "mlp_act_ms"
    yield OpDesc("layer_norm", (rows, hidden), "float16", "rms_norm"), "input_layernorm_ms"


def _serving(data: Path) -> Times:
    """Times of Llama-3.1-8B on one device; of the same layer and tokens at several cache lengths all are kept."""
    found: Times = {}
    for file, layer, tokens, time, unit_s, ways in (
        ("v0_layers.csv.gz", "layer_name", "input", "latency(ns)", 1e-9, ("tp_size", "1")),
        ("dense.csv.gz", "layer", "tokens", "time_us", 1e-6, ("tp", "tp1")),
    ):
        for row in datasets.read_rows(data / "llmservingsim" / file):
            if row["model"] != "meta-llama/Llama-3.1-8B" or row[ways[0]] != ways[1]:
                continue
            device = datasets.SERVING.get(row["gpu"])
            op = _serving_op(row[layer], int(row[tokens]), one_kernel=file == "dense.csv.gz")
            if device is not None and op is not None:
                found.setdefault(("llmservingsim", device, op), []).append(float(row[time]) * unit_s)
    return found


def _serving_op(layer: str, tokens: int, one_kernel: bool) -> OpDesc | None:
    """Return the operator of a layer; of activations and normalisations where one kernel makes them."""
    if layer in _LLAMA:
        return OpDesc("linear", (1, tokens, *_LLAMA[layer]), "bfloat16")
    if layer == "act_fn" and one_kernel:
        return OpDesc("elementwise", (2 * tokens * _INNER, tokens * _INNER), "bfloat16", "silu")
    if layer == "final_layernorm" and one_kernel:
        return OpDesc("layer_norm", (tokens, _HIDDEN), "bfloat16", "rms_norm")
    return None


def _attention(data: Path) -> Times:
    """Attention of Llama-3.1-8B on one device: a prompt's chunk after what the cache holds, or a batch that decodes."""
    found: Times = {}
    for row in datasets.read_rows(data / "llmservingsim" / "attention.csv.gz"):
        device = datasets.SERVING.get(row["gpu"])
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
