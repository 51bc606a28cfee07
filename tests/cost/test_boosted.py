"""The shipped learned models: hashes, physics between the lines of the device table, dispatch, range flags."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tvmhet._data import data_path
from tvmhet.cluster.catalog import device_type, device_types
from tvmhet.cluster.device import DeviceType
from tvmhet.cost.boosted import LearnedModel, load_groups
from tvmhet.cost.columns import GROUPS
from tvmhet.cost.model import OpDesc
from tvmhet.cost.roofline import peak_flop_per_s
from tvmhet.cost.workload import kernel_of
from tvmhet.errors import BadInput, BadModel


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from([d.name for d in device_types() if not d.is_cpu]),
    family=st.sampled_from(["matmul", "linear"]),
    sizes=st.tuples(*[st.integers(1, 2**e) for e in (6, 14, 14, 14)]),
    dtype=st.sampled_from(["float32", "float16"]),
    queued=st.booleans(),
)
def test_no_product_is_faster_than_the_data_sheet(
    name: str, family: str, sizes: tuple[int, ...], dtype: str, queued: bool
) -> None:
    device, op = device_type(name), OpDesc(family, sizes, dtype)
    seconds = LearnedModel.load(device, "queued" if queued else "published").predict([kernel_of(op)]).seconds[0]
    assert seconds >= 2 * np.prod(np.array(sizes, dtype=np.float64)) / peak_flop_per_s(device, family, dtype) * (
        1 - 1e-9
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the softmax model, to be tampered with."""
    for name in ("softmax.ubj", "softmax.yaml"):
        shutil.copy(data_path("trained") / name, tmp_path)
    return tmp_path


def test_every_group_ships_with_a_card_that_says_where_it_comes_from() -> None:
    groups = load_groups(data_path("trained"))
    assert tuple(groups) == GROUPS
    for group, model in groups.items():
        about = model.card.about
        assert about["trained_on"]["sources"] and about["seed"] == 0 and about["versions"]["xgboost"], group
        unseen = about["error_percent"]["unseen_type_and_shape"]
        assert set(unseen) == set(model.card.fits) and all(e["mean_ape"] > 0 for e in unseen.values())
        assert (data_path("trained") / model.card.file).stat().st_size < 3e6


def test_a_changed_model_is_refused_before_it_is_parsed(folder: Path) -> None:
    data = bytearray((folder / "softmax.ubj").read_bytes())
    data[len(data) // 2] ^= 0xFF
    (folder / "softmax.ubj").write_bytes(bytes(data))
    with pytest.raises(BadModel, match=r"softmax\.ubj has sha256"):
        load_groups(folder)


@pytest.mark.parametrize("loss", ["softmax.ubj", "card", "inputs", "interval", "fits"])
def test_missing_and_malformed_parts_are_refused(folder: Path, loss: str) -> None:
    card = folder / "softmax.yaml"
    tree = yaml.safe_load(card.read_text())
    if loss == "softmax.ubj":
        (folder / loss).unlink()
    elif loss == "card":
        card.write_text("schema: [")
    else:
        tree[loss] = {"inputs": ["other"], "interval": {"measured": {}}, "fits": {"t4": {"launch_s": "x"}}}[loss]
        card.write_text(yaml.safe_dump(tree))
    with pytest.raises(BadModel, match="softmax"):
        load_groups(folder)


def linear(m: int, n: int, k: int, dtype: str = "float32") -> OpDesc:
    return OpDesc("linear", (1, m, n, k), dtype)


@pytest.mark.parametrize("device", [d.name for d in device_types() if not d.is_cpu])
def test_every_gpu_type_is_predicted_between_its_peak_and_a_twentieth_of_it(device: str) -> None:
    kind = device_type(device)
    (seconds,) = LearnedModel.load(kind).predict((kernel_of(linear(4096, 4096, 4096)),)).seconds
    share = 2 * 4096**3 / seconds / kind.peak_flop_per_s["float32"]
    assert 0.05 < share < 1.1, share


def test_a_faster_device_of_the_same_kind_is_faster() -> None:
    slow = device_type("t4")
    fast = dataclasses.replace(
        slow,
        name="t4-doubled",
        num_sms=2 * slow.num_sms,
        dram_byte_per_s=2 * slow.dram_byte_per_s,
        power_w=2 * slow.power_w,
        peak_flop_per_s={d: 2 * r for d, r in slow.peak_flop_per_s.items()},
    )
    kernels = [kernel_of(linear(m, 4096, 4096)) for m in (512, 2048, 8192)]
    kernels += [kernel_of(OpDesc("softmax", (65536, 1024), "float32", "softmax"))]
    ratio = LearnedModel.load(slow).predict(kernels).seconds / LearnedModel.load(fast).predict(kernels).seconds
    assert (ratio > 1.3).all() and (ratio < 3.0).all(), ratio


@pytest.mark.parametrize(
    ("op", "least_s"),
    [
        (OpDesc("elementwise", (64, 64), "float32", "relu"), 1.2e-6),
        (OpDesc("movement", (64, 64), "float32", "copy"), 1.2e-6),
        (OpDesc("embedding", (4, 64, 16), "float32", "take"), 2.0e-6),
    ],
    ids=lambda x: getattr(x, "family", None),
)
def test_small_queued_kernels_take_their_start(op: OpDesc, least_s: float) -> None:
    """As an H100's of torch do in a graph."""
    found = LearnedModel.load(device_type("h100-sxm-80gb"), "queued").predict([kernel_of(op)]).seconds
    assert found == pytest.approx([least_s], rel=0.05)


def test_queued_kernels_pay_the_launch_of_the_device_and_not_of_an_eager_call() -> None:
    kind = device_type("v100-pcie-32gb")
    small = (kernel_of(OpDesc("elementwise", (1024, 1024), "float32", "relu")),)
    large = (kernel_of(OpDesc("elementwise", (2**28, 2**28), "float32", "relu")),)
    eager, queued = LearnedModel.load(kind), LearnedModel.load(kind, "queued")
    assert eager.predict(small).seconds[0] > 20e-6 > queued.predict(small).seconds[0] > kind.launch_s
    assert queued.predict(large).seconds[0] == pytest.approx(eager.predict(large).seconds[0], rel=0.05)


def test_in_range_means_inside_the_training_data() -> None:
    model = LearnedModel.load(device_type("l4"))
    ops = {
        linear(1024, 1024, 1024): True,
        linear(10**6, 10**6, 1024): False,
        linear(1024, 1024, 1024, "float64"): False,
        dataclasses.replace(linear(1024, 1024, 1024), backward=True): False,
        OpDesc("softmax", (1024, 1024), "float32", "softmax"): True,
        OpDesc("reduction", (1024, 1024), "float32", "sum"): False,
        OpDesc("batch_norm", (1024, 1024), "float32", "batch_norm"): False,
        OpDesc("movement", (2**20, 2**20), "float32", "copy"): False,
        OpDesc("embedding", (1024, 32000, 1024), "float32"): False,
        OpDesc("pooling", (8, 64, 112, 112, 3, 3, 56, 56), "float32", "max_pool2d"): False,
        OpDesc("conv2d", (8, 64, 56, 56, 64, 3, 3, 56, 56, 64), "float32"): False,  # by channel
        OpDesc("elementwise", (2**20, 2**20), "float32", "relu"): True,
        OpDesc("elementwise", (2**20, 2**20), "float32", "besselj"): False,
        OpDesc("elementwise", (2**21, 2**20), "float32", "subtract"): True,  # runs like add
    }
    found = model.predict([kernel_of(op) for op in ops])
    assert found.in_range.tolist() == list(ops.values())


def test_intervals_are_wider_on_types_that_were_never_measured(a100: DeviceType) -> None:
    kernels = [kernel_of(linear(m, 2048, 2048)) for m in (64, 512, 4096)]
    known = LearnedModel.load(device_type("v100-pcie-32gb")).predict(kernels)
    unknown = LearnedModel.load(a100).predict(kernels)
    assert (np.log(known.high / known.low) < np.log(unknown.high / unknown.low)).all()
    assert known.source == unknown.source == ("learned",) * 3


def test_matrix_dtypes_that_a_device_has_not_are_refused() -> None:
    with pytest.raises(BadInput, match="v100-pcie-32gb"):
        LearnedModel.load(device_type("v100-pcie-32gb")).predict([kernel_of(linear(8, 8, 8, "bfloat16"))])


def test_cpu_types_get_the_roofline(cpu: DeviceType) -> None:
    found = LearnedModel.load(cpu).predict([kernel_of(linear(64, 64, 64))])
    assert found.source == ("roofline",)
