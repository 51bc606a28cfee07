"""What DRAM gives: known types, likes of the same kind of memory, and what that changes in predictions."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvmhet.cluster.catalog import device_type, device_types
from tvmhet.cost.boosted import LearnedModel
from tvmhet.cost.dram import DramShares, kind
from tvmhet.cost.model import OpDesc
from tvmhet.cost.physics import Scalars
from tvmhet.cost.scalars import Fit, infer
from tvmhet.cost.workload import kernel_of
from tvmhet.errors import BadModel

TRUE = Scalars(launch_s=2e-6, compute=0.6, sustained=0.6, dram=0.8, cache=1.3, load=40.0)


def test_kinds_of_memory() -> None:
    assert [kind(device_type(n)) for n in ("h100", "a30", "rtx-3090", "rtx-a6000", "a40", "l4")] == (
        ["stacked", "stacked", "plain", "plain", "inline-ecc", "inline-ecc"]
    )


def test_a_type_takes_after_its_likes() -> None:
    shares = DramShares({"h100-sxm-80gb": 0.92, "rtx-3090": 0.9, "a40": 0.8})
    assert shares.of(device_type("a40")) == 0.8
    for name, like in (("h200-sxm-141gb", 0.92), ("rtx-a6000", 0.9), ("a10", 0.8)):
        assert shares.of(device_type(name)) == pytest.approx(like, rel=0.03)
    assert shares.without({"a40"}).of(device_type("a40")) > 0.85
    assert DramShares().of(device_type("a40")) == 1.0


@given(st.sampled_from([d.name for d in device_types() if not d.is_cpu]))
def test_a_share_lies_among_the_measured_ones(name: str) -> None:
    shares = DramShares.load()
    assert min(shares.known.values()) - 1e-12 <= shares.of(device_type(name)) <= max(shares.known.values()) + 1e-12


def test_a_group_is_fitted_relative_to_the_memory() -> None:
    """A kernel that reaches 0.6 of what a T4's memory gives reaches 0.6 of what an H100's gives."""
    t4, h100 = device_type("t4"), device_type("h100")
    fits, shares = [Fit(t4, dataclasses.replace(TRUE, dram=0.45))], DramShares({"t4": 0.75, "h100-sxm-80gb": 0.9})
    assert infer(h100, fits, "float32", host_bound=True, dram=shares).dram == pytest.approx(0.54)
    assert infer(h100, fits, "float32", host_bound=True).dram == pytest.approx(0.45)
    assert infer(t4, fits, "float32", host_bound=True, dram=shares).dram == 0.45


@pytest.mark.parametrize("name", ["h100-sxm-80gb", "a40", "rtx-3090", "rtx-a6000", "a100-sxm-80gb"])
def test_long_additions_reach_what_was_measured(name: str) -> None:
    device, values = device_type(name), 200_000_000
    add = kernel_of(OpDesc("elementwise", (2 * values, values), "float32", "add"))
    seconds = LearnedModel.load(device, "queued").predict([add]).seconds[0]
    share = 12 * values / seconds / device.dram_byte_per_s
    assert share == pytest.approx(DramShares.load().known[name], rel=0.06)


@pytest.mark.parametrize("text", ["", "shares: 3", "shares: {t4: fast}", "shares: {t4: 7}", "schema: 1"])
def test_a_malformed_table_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "dram.yaml").write_text(text)
    with pytest.raises(BadModel, match=r"dram\.yaml"):
        DramShares.load(tmp_path / "dram.yaml")
