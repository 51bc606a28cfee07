"""The JSONL interface: one answer a line in order, every field checked, errors that name the line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tvmhet.cluster.catalog import device_type
from tvmhet.cluster.device import DeviceType
from tvmhet.cost.model import OpDesc
from tvmhet.cost.operators import SCHEMA, parse, schema_text
from tvmhet.cost.predict import predict_jsonl
from tvmhet.errors import BadInput

EXAMPLES: tuple[dict[str, Any], ...] = (
    {"op": "matmul", "b": 8, "m": 512, "n": 512, "k": 64, "dtype": "float32", "maker": "library"},
    {"op": "linear", "b": 2, "m": 512, "n": 1024, "k": 256},
    {"op": "conv2d", "n": 8, "c": 64, "h": 56, "w": 56, "oc": 128, "kh": 3, "kw": 3, "stride": 2, "padding": 1},
    {"op": "elementwise", "name": "add", "shape": [64, 1024]},
    {"op": "elementwise", "name": "gelu", "shape": [64, 1024], "maker": "tvm"},
    {"op": "softmax", "rows": 8192, "cols": 512},
    {"op": "layer_norm", "rows": 8192, "cols": 512, "backward": True},
    {"op": "batch_norm", "rows": 64, "cols": 50176},
    {"op": "reduction", "rows": 64, "cols": 50176, "name": "mean"},
    {
        "op": "attention_prefill",
        "batch": 1,
        "heads": 32,
        "q_len": 1024,
        "head_dim": 128,
        "kv_heads": 8,
        "dtype": "bf16",
    },
    {"op": "attention_decode", "batch": 8, "heads": 32, "kv_len": 1024, "head_dim": 128, "dtype": "bfloat16"},
    {"op": "moe", "tokens": 64, "hidden": 2048, "inter": 768, "topk": 8, "experts": 128, "dtype": "bfloat16"},
    {"op": "embedding", "tokens": 512, "vocab": 30522, "dim": 768},
    {"op": "pooling", "n": 8, "c": 64, "h": 112, "w": 112, "kh": 3, "kw": 3, "stride": 2, "padding": 1},
    {"op": "movement", "name": "transpose", "shape": [1024, 1024]},
)


def write(path: Path, records: object) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))  # type: ignore[attr-defined]
    return path


@pytest.mark.parametrize("name", ["a100-sxm-80gb", "l4", "v100-pcie-32gb", "cpu-x86-64-v3"])
def test_one_answer_a_line_in_order(tmp_path: Path, name: str) -> None:
    device = device_type(name)
    usable = [e for e in EXAMPLES if e.get("dtype", "float32") == "float32" or "bfloat16" in device.peak_flop_per_s]
    out = tmp_path / "pred.jsonl"
    assert predict_jsonl(write(tmp_path / "ops.jsonl", usable), out, device) == len(usable)
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    alone = tmp_path / "alone.jsonl"
    for example, answer in zip(usable, answers, strict=True):
        assert set(answer) == {"seconds", "low", "high", "source", "in_range"}
        assert 0 < answer["low"] <= answer["seconds"] <= answer["high"] < 1
        predict_jsonl(write(tmp_path / "one.jsonl", [example]), alone, device)
        assert json.loads(alone.read_text()) == answer


def test_examples_cover_the_schema() -> None:
    assert {e["op"] for e in EXAMPLES} == set(SCHEMA)
    text = schema_text()
    assert all(f'"op": "{op}"' in text and all(f"  {name}:" in text for name in SCHEMA[op]) for op in SCHEMA)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"op": "conv9d"}, "operator 'conv9d' is unknown"),
        ({"op": None}, "operator None is unknown"),
        ({"m": 0}, "m is 0"),
        ({"m": -5}, "m is -5"),
        ({"m": 2.5}, "m is 2.5"),
        ({"m": True}, "m is True"),
        ({"m": "512"}, "m is '512'"),
        ({"m": float("nan")}, "m is nan"),
        ({"q": 1}, "field 'q' is unknown"),
        ({"dtype": "float31"}, "dtype 'float31' is unknown"),
        ({"dtype": 4}, "dtype is 4"),
        ({"dtype": "bfloat16"}, "cannot compute linear in bfloat16"),
        ({"maker": "cublas"}, "maker 'cublas' is unknown"),
    ],
)
def test_bad_lines_are_refused_by_number(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    good = {"op": "linear", "m": 512, "n": 512, "k": 64}
    source = write(tmp_path / "ops.jsonl", [good, good, {**good, **change}, good])
    with pytest.raises(BadInput, match=f"line 3: .*{message}"):
        predict_jsonl(source, tmp_path / "out.jsonl", device_type("v100-pcie-32gb"))


def test_missing_fields_and_broken_json(tmp_path: Path, a100: DeviceType) -> None:
    with pytest.raises(BadInput, match="field 'k' is missing"):
        parse({"op": "linear", "m": 1, "n": 1})
    path = tmp_path / "ops.jsonl"
    path.write_text('{"op": "softmax", "rows": 1, "cols": 1}\n\n{"op": \n')
    with pytest.raises(BadInput, match="line 3 is no JSON object"):
        predict_jsonl(path, tmp_path / "out.jsonl", a100)
    with pytest.raises(BadInput, match="no-such-file"):
        predict_jsonl(tmp_path / "no-such-file", tmp_path / "out.jsonl", a100)


@pytest.mark.parametrize("record", [{"op": "pooling", "n": 1, "c": 1, "h": 2, "w": 2, "kh": 3, "kw": 3}, [1], 3, None])
def test_what_is_no_operator_is_refused(record: Any) -> None:
    with pytest.raises(BadInput):
        parse(record)


def test_convolution_arithmetic() -> None:
    desc = parse(EXAMPLES[2])
    assert desc.ops == (OpDesc("conv2d", (8, 64, 56, 56, 128, 3, 3, 28, 28, 1), "float32"),)
    assert desc.flop == 2 * 8 * 128 * 28 * 28 * 64 * 9
    with pytest.raises(BadInput, match="3 groups do not divide"):
        parse({**EXAMPLES[2], "groups": 3})


def test_generated_kernels_say_that_their_ratio_is_assumed(tmp_path: Path) -> None:
    base = {"op": "matmul", "b": 8, "m": 512, "n": 512, "k": 64}
    out = tmp_path / "out.jsonl"
    predict_jsonl(write(tmp_path / "ops.jsonl", [base, {**base, "maker": "tvm"}]), out, device_type("t4"))
    library, made = (json.loads(line) for line in out.read_text().splitlines())
    assert (library["source"], made["source"]) == ("learned", "assumed")
    assert made["seconds"] > library["seconds"] and not made["in_range"]
    assert made["high"] / made["low"] == pytest.approx(4 * library["high"] / library["low"], rel=1e-4)
