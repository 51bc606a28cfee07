"""The roofline: hand-computed times, shares from data, dtypes that a device has not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tvmhet.cluster.device import DeviceType
from tvmhet.cost.model import OpDesc
from tvmhet.cost.roofline import SPEC_SHEET, Efficiency, Roofline, peak_flop_per_s, supports
from tvmhet.cost.workload import kernel_of
from tvmhet.errors import BadInput, BadModel


def test_large_matmul_runs_at_the_peak_of_its_dtype(a100: DeviceType) -> None:
    n = 8192
    for dtype, peak in (("float32", 19.5e12), ("bfloat16", 312e12)):
        (seconds,) = Roofline(a100, SPEC_SHEET).predict((kernel_of(OpDesc("linear", (1, n, n, n), dtype)),)).seconds
        assert seconds == pytest.approx(3e-6 + 2 * n**3 / peak)


def test_elementwise_runs_at_memory_speed(a100: DeviceType) -> None:
    op = OpDesc("elementwise", (2 * 10**8, 10**8), "bfloat16", "add")
    (seconds,) = Roofline(a100, SPEC_SHEET).predict((kernel_of(op),)).seconds
    assert seconds == pytest.approx(3e-6 + 6e8 / 2.039e12)


def test_a_dtype_that_the_device_has_not_is_refused_by_name(a100: DeviceType, cpu: DeviceType) -> None:
    desc = kernel_of(OpDesc("linear", (1, 8, 8, 8), "bfloat16"))
    with pytest.raises(BadInput, match=r"cpu-test.*bfloat16(.|\n)*float32"):
        Roofline(cpu, SPEC_SHEET).predict((desc,))
    assert supports(a100, desc) and not supports(cpu, desc)
    assert peak_flop_per_s(cpu, "elementwise", "bfloat16") == 90e9


@pytest.mark.parametrize("text", ["", "shares: 3", "shares: {cuda: {default: {compute: 1}}}", "shares: [", "[]"])
def test_malformed_efficiency_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "roofline.yaml"
    path.write_text(text)
    with pytest.raises(BadModel, match=r"roofline\.yaml"):
        Efficiency.load(path)


def test_shares_scale_both_roofs(tmp_path: Path, a100: DeviceType) -> None:
    path = tmp_path / "roofline.yaml"
    path.write_text("shares: {cuda: {default: {compute: 0.5, memory: 0.25, low: 0.5, high: 2}}}")
    out = Roofline(a100, Efficiency.load(path)).predict(
        (
            kernel_of(OpDesc("linear", (1, 8192, 8192, 8192), "float32")),
            kernel_of(OpDesc("movement", (10**8, 10**8), "float32")),
        )
    )
    assert out.seconds[0] == pytest.approx(3e-6 + 2 * 8192**3 / 19.5e12 / 0.5)
    assert out.seconds[1] == pytest.approx(3e-6 + 8e8 / 2.039e12 / 0.25)
    assert out.high[1] == pytest.approx(2 * out.seconds[1])
