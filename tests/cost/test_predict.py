"""The JSONL interface: one answer a line in order, every field checked, errors that name the line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tvmhet.cluster.catalog import device_type
from tvmhet.cluster.device import DeviceType
from tvmhet.cost.model import KernelDesc, OpDesc
from tvmhet.cost.operators import SCHEMA, ExchangeDesc, parse
from tvmhet.cost.predict import predict_jsonl
from tvmhet.cost.schema import EXAMPLES, MEANING, example_line, schema_text
from tvmhet.errors import BadInput


def write(path: Path, records: object) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))  # type: ignore[attr-defined]
    return path


def answers(path: Path, records: object, device: str) -> list[dict[str, Any]]:
    predict_jsonl(write(path / "ops.jsonl", records), path / "pred.jsonl", device_type(device))
    return [json.loads(line) for line in (path / "pred.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", ["a100-sxm-80gb", "l4", "v100-pcie-32gb", "cpu-x86-64-v3"])
def test_one_answer_a_line_in_order(tmp_path: Path, name: str) -> None:
    device = device_type(name)
    usable = [json.loads(example_line(op)) for op in SCHEMA]
    usable = [e for e in usable if e.get("dtype", "float32") in device.peak_flop_per_s]
    usable = [e for e in usable if not device.is_cpu or "gpus" not in e]
    out = answers(tmp_path, usable, name)
    assert len(out) == len(usable)
    for example, answer in zip(usable, out, strict=True):
        assert set(answer) == {"seconds", "low", "high", "source", "in_range"}
        assert 0 < answer["low"] <= answer["seconds"] <= answer["high"] < 1
        assert answers(tmp_path, [example], name) == [answer]


def test_equal_lines_have_equal_answers_in_their_places(tmp_path: Path) -> None:
    one, two = {"op": "softmax", "rows": 8192, "cols": 512}, {"op": "linear", "m": 512, "n": 512, "k": 64}
    out = answers(tmp_path, [one, two, one, one, two], "t4")
    assert out[0] == out[2] == out[3] != out[1] == out[4]


def test_the_schema_shows_every_operator_and_field() -> None:
    assert set(EXAMPLES) == set(MEANING) == set(SCHEMA)
    blocks = {block.partition(":")[0]: block for block in schema_text().split("\n\n")}
    for op, fields in SCHEMA.items():
        shown = {name.strip() for line in blocks[op].splitlines()[1:] for name in line.partition(":")[0].split(",")}
        assert fields.keys() <= shown and example_line(op) in blocks[op]
    assert max(map(len, schema_text().splitlines())) <= 130


LINEAR = {"op": "linear", "m": 512, "n": 512, "k": 64}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"op": "conv9d"}, "operator 'conv9d' is unknown"),
        ({"op": None}, "op is None"),
        ({"m": 0}, "m is 0"),
        ({"m": -5}, "m is -5"),
        ({"m": 2.5}, "m is 2.5"),
        ({"m": True}, "m is True"),
        ({"m": None}, "m is null"),
        ({"m": "512"}, "m is '512'"),
        ({"m": float("nan")}, "m is nan"),
        ({"m": float("inf")}, "m is inf"),
        ({"m": 10**400}, "m is 1000000000.*more than 2"),
        ({"q": 1}, "field 'q' is unknown"),
        ({"rows": 1}, "'rows' gives 'm', which another field gives"),
        ({"dtype": "float31"}, "dtype is 'float31'"),
        ({"dtype": 4}, "dtype is 4"),
        ({"dtype": "bfloat16"}, "cannot compute linear in bfloat16"),
        ({"maker": "me"}, "maker is 'me'"),
        ({"pass": "sideways"}, "pass is 'sideways'"),
        ({"backward": 1}, "backward is 1"),
    ],
)
def test_bad_lines_are_refused_by_number_and_nothing_is_written(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    source = write(tmp_path / "ops.jsonl", [LINEAR, LINEAR, {**LINEAR, **change}, LINEAR])
    with pytest.raises(BadInput, match=f"line 3: .*{message}") as caught:
        predict_jsonl(source, tmp_path / "out.jsonl", device_type("v100-pcie-32gb"))
    assert caught.value.remedy
    assert [p.name for p in tmp_path.iterdir()] == ["ops.jsonl"]


BAD_OPERATORS: list[tuple[dict[str, Any], str]] = [
    ({"op": "linear", "m": 1, "n": 1}, "field 'k' is missing"),
    ({"op": "pooling", "n": 1, "c": 1, "h": 2, "w": 2, "kh": 3, "kw": 3}, "a window over 3 does not fit h 2"),
    ({"op": "elementwise", "name": "frobnicate", "shape": [4]}, "name is 'frobnicate'"),
    ({"op": "elementwise", "name": "add", "shape": []}, r"shape is \[\]"),
    ({"op": "elementwise", "name": "add", "shape": [4, 0]}, r"shape is \[4, 0\]"),
    ({"op": "elementwise", "name": "add", "shape": 4}, "shape is 4"),
    ({"op": "elementwise", "name": "relu", "shape": [4], "scalar": True}, "relu takes no second operand"),
    ({"op": "softmax", "shape": [4, -1]}, r"shape is \[4, -1\]"),
    ({"op": "conv2d", "n": 1, "c": 6, "h": 9, "w": 9, "oc": 8, "kh": 3, "kw": 3, "groups": 3}, "3 groups do not"),
    ({"op": "conv2d", "n": 1, "c": 6, "h": 9, "w": 9, "oc": 8, "kh": 3, "kw": 3, "stride": 0}, "stride is 0"),
    ({"op": "conv2d", "n": 1, "c": 6, "h": 9, "w": 9, "oc": 8, "kh": 3, "kw": 3, "stride": [1, 1, 1]}, "stride is"),
    ({"op": "moe", "tokens": 1, "hidden": 8, "inter": 8, "topk": 9, "experts": 8}, "topk is 9"),
    ({"op": "attention", "batch": 1}, "phase is None"),
    ({"op": "attention_decode", "batch": 1, "heads": 8, "kv_heads": 3, "kv_len": 4, "head_dim": 64}, "kv_heads is 3"),
    ({"op": "all_reduce", "gpus": 1, "bytes": 4}, "gpus is 1"),
    ({"op": "all_reduce", "gpus": 2}, "bytes is 0, elements 0"),
    ({"op": "all_reduce", "gpus": 2, "bytes": 4, "maker": "tvm"}, "leave both fields out"),
]


@pytest.mark.parametrize(("record", "message"), BAD_OPERATORS)
def test_bad_operators_are_refused(record: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        parse(record)


@pytest.mark.parametrize("record", [[1], 3, None, "linear"])
def test_what_is_no_object_is_refused(record: Any) -> None:
    with pytest.raises(BadInput, match="an operator is"):
        parse(record)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"op": ', "line 3 is no JSON object"),
        ('{"op": "softmax", "rows": 1, "rows": 2, "cols": 1}', "line 3: field 'rows' is given twice"),
        ("[" * 100_000, "line 3 is no JSON object"),
    ],
)
def test_broken_json(tmp_path: Path, a100: DeviceType, line: str, message: str) -> None:
    path = tmp_path / "ops.jsonl"
    path.write_text('{"op": "softmax", "rows": 1, "cols": 1}\n\n' + line + "\n")
    with pytest.raises(BadInput, match=message):
        predict_jsonl(path, tmp_path / "out.jsonl", a100)


def test_files_that_cannot_be_read(tmp_path: Path, a100: DeviceType) -> None:
    with pytest.raises(BadInput, match="no-such-file"):
        predict_jsonl(tmp_path / "no-such-file", tmp_path / "out.jsonl", a100)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInput, match="binary"):
        predict_jsonl(tmp_path / "binary", tmp_path / "out.jsonl", a100)
    assert not (tmp_path / "out.jsonl").exists()


CONV = {"op": "conv2d", "n": 8, "c": 64, "h": 56, "w": 56, "oc": 128, "kh": 3, "kw": 3, "stride": 2, "padding": 1}
PREFILL = {"op": "attention_prefill", "batch": 2, "heads": 32, "kv_heads": 8, "q_len": 1024, "head_dim": 128}
ADD = {"op": "elementwise", "name": "add", "shape": [64, 1024]}
SPELLINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"op": "bmm", "B": 8, "M": 4, "N": 5, "K": 6}, {"op": "matmul", "b": 8, "m": 4, "n": 5, "k": 6}),
    ({"op": "matmul", "m": 4, "n": 5, "k": 6}, {"op": "matmul", "b": 1, "m": 4, "n": 5, "k": 6}),
    (
        {"op": "GEMM", "m": 4.0, "n": 5, "k": 6, "dtype": "BF16"},
        {**LINEAR, "m": 4, "n": 5, "k": 6, "dtype": "bfloat16"},
    ),
    ({"op": "dense", "tokens": 512, "in_features": 64, "out_features": 512}, LINEAR),
    ({**LINEAR, "maker": "cublas"}, LINEAR),
    ({**LINEAR, "pass": "backward"}, {**LINEAR, "backward": True}),
    ({**LINEAR, "pass": "forward", "dtype": "fp32"}, LINEAR),
    ({"op": "layernorm", "shape": [4, 8, 16]}, {"op": "layer_norm", "rows": 32, "cols": 16}),
    ({"op": "softmax", "b": 32, "h": 16}, {"op": "softmax", "rows": 32, "cols": 16}),
    ({"op": "rms_norm", "rows": 32, "cols": 16}, {"op": "layer_norm", "rows": 32, "cols": 16, "name": "rms_norm"}),
    ({"op": "batch_norm", "shape": [4, 8, 5, 5]}, {"op": "batch_norm", "rows": 8, "cols": 100}),
    ({"op": "mean", "rows": 32, "cols": 16}, {"op": "reduction", "rows": 32, "cols": 16, "name": "mean"}),
    ({"op": "add", "shape": [64, 1024]}, ADD),
    ({"op": "elementwise", "name": "add", "numel": 65536}, ADD),
    (
        {"op": "elementwise", "name": "mul_scalar", "shape": [4]},
        {**ADD, "name": "multiply", "shape": [4], "scalar": True},
    ),
    ({"op": "addu", "B": 4, "H": 8}, {"op": "elementwise", "name": "add", "shape": [4, 8], "scalar": True}),
    ({"op": "swish", "shape": [4]}, {"op": "elementwise", "name": "silu", "shape": [4]}),
    ({"op": "cat", "shape": [4]}, {"op": "movement", "name": "concat", "shape": [4]}),
    (
        {"op": "conv2d", "n": 8, "c": 64, "h": 56, "w": 56, "k": 128, "r": 3, "s": 3, "stride": [2, 2], "padding": 1},
        CONV,
    ),
    (
        {"op": "conv", "batch": 8, "in_channels": 64, "input_size": 56, "out_channels": 128, "kernel_size": 3}
        | {"stride": 2, "padding": "same"},
        CONV,
    ),
    ({**{k: v for k, v in CONV.items() if k not in ("kh", "kw")}, "k": [3, 3]}, CONV),
    (
        {"op": "conv", "B": 8, "Input_Channel": 64, "Output_Channel": 128, "Kernel_Size": 3, "Input_Size": 56}
        | {"Stride": 2, "Padding": 1},
        CONV,
    ),
    (
        {"op": "attention", "phase": "context", "b": 2, "num_heads": 32, "num_kv_heads": 8, "isl": 1024, "d": 128},
        PREFILL,
    ),
    ({"op": "allreduce", "num_gpus": 4, "elements": 8, "dtype": "half"}, {"op": "all_reduce", "gpus": 4, "bytes": 16}),
]


@pytest.mark.parametrize(("theirs", "ours"), SPELLINGS)
def test_other_spellings_mean_the_same(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    assert parse(theirs) == parse(ours)


def test_a_spelling_leaves_its_record_alone() -> None:
    record = {"op": "attention", "phase": "decode", "b": 2, "h": 32, "s": 1024, "d": 128}
    before = dict(record)
    parse(record)
    assert record == before


def test_convolution_arithmetic() -> None:
    desc = parse(CONV)
    assert isinstance(desc, KernelDesc)
    assert desc.ops == (OpDesc("conv2d", (8, 64, 56, 56, 128, 3, 3, 28, 28, 1), "float32"),)
    assert desc.flop == 2 * 8 * 128 * 28 * 28 * 64 * 9
    oblong = parse({**CONV, "stride": [1, 2], "padding": [0, 1], "dilation": [2, 1]})
    assert isinstance(oblong, KernelDesc) and oblong.root.sizes[7:9] == (52, 28)


def test_operands_are_counted() -> None:
    for name, scalar, operands in (("add", False, 2), ("add", True, 1), ("gelu", False, 1), ("where", False, 3)):
        desc = parse({"op": "elementwise", "name": name, "shape": [8, 8], "scalar": scalar})
        assert isinstance(desc, KernelDesc) and desc.root.sizes == (64 * operands, 64)


def test_generated_kernels_say_that_their_ratio_is_assumed(tmp_path: Path) -> None:
    base = {"op": "matmul", "b": 8, "m": 512, "n": 512, "k": 64}
    library, made = answers(tmp_path, [base, {**base, "maker": "tvm"}], "t4")
    assert (library["source"], made["source"]) == ("learned", "assumed")
    assert made["seconds"] > library["seconds"] and not made["in_range"]
    assert made["high"] / made["low"] == pytest.approx(4 * library["high"] / library["low"], rel=1e-4)


def test_exchanges_have_the_spread_of_their_likes(tmp_path: Path) -> None:
    assert parse({"op": "send", "gpus": 2, "bytes": 8}) == ExchangeDesc("send", 2, 8)
    sizes = [2**i for i in range(3, 31, 3)]
    lines = [{"op": "all_reduce", "gpus": 8, "bytes": size} for size in sizes]
    fitted, inferred = answers(tmp_path, lines, "h100-sxm-80gb"), answers(tmp_path, lines, "t4")
    assert {a["source"] for a in fitted} == {"learned"} and {a["source"] for a in inferred} == {"inferred"}
    assert all(a["in_range"] for a in fitted) and not any(a["in_range"] for a in inferred)
    for found in (fitted, inferred):
        assert (np.diff([a["seconds"] for a in found]) > 0).all()
    assert np.mean([math.log(a["high"] / a["low"]) for a in fitted]) < np.mean(
        [math.log(a["high"] / a["low"]) for a in inferred]
    )
    with pytest.raises(BadInput, match=r"line 1: all_reduce between 'cpu-x86-64-v3' devices"):
        answers(tmp_path, lines, "cpu-x86-64-v3")
