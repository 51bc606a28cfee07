"""The analytic part: known limits of tiles, caches and power, and laws that hold for any shape."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tvmhet.cluster.catalog import device_type
from tvmhet.cost.boosted import LearnedModel
from tvmhet.cost.columns import columns
from tvmhet.cost.compass import minimise
from tvmhet.cost.inputs import INPUTS, inputs
from tvmhet.cost.likes import likeness
from tvmhet.cost.model import OpDesc
from tvmhet.cost.physics import Scalars, constants, estimate, memory_s
from tvmhet.cost.scalars import Fit, fit_scalars, infer
from tvmhet.cost.workload import kernel_of
from tvmhet.errors import BadModel

V100 = device_type("v100-pcie-32gb")
H100 = device_type("h100-sxm-80gb")
IDEAL = Scalars(launch_s=5e-6, compute=1.0, sustained=1.0, dram=1.0, cache=4.0, load=256.0)


def table(*ops: OpDesc):  # type: ignore[no-untyped-def]
    (only,) = columns([kernel_of(op) for op in ops]).values()
    return only


def linear(m: int, n: int, k: int) -> OpDesc:
    return OpDesc("linear", (1, m, n, k), "float32")


def test_a_product_that_fills_the_machine_runs_at_peak() -> None:
    found = estimate(table(linear(128 * 80, 256 * 20, 8192)), V100, IDEAL, constants())
    ideal = 2 * 128 * 80 * 256 * 20 * 8192 / 14e12
    assert found.compute_s[0] == pytest.approx(ideal, rel=0.01)
    assert found.fill[0] == pytest.approx(1.0)


def test_one_tile_more_than_a_wave_costs_a_wave() -> None:
    """80 SMs: 80 tiles of 256 x 128 take one round; a row more starts another for everybody, or smaller tiles."""
    exact, over = estimate(
        table(linear(256 * 80, 128, 4096), linear(256 * 80 + 1, 128, 4096)), V100, IDEAL, constants()
    ).compute_s
    assert 1.05 < over / exact <= 2.0


BY_VALUES = {
    "pooled": (OpDesc("pooling", (64, 64, 112, 112, 3, 3, 56, 56), "float32", "max_pool2d"), 64 * 64 * 56 * 56 * 9),
    "channel": (OpDesc("conv2d", (64, 64, 112, 112, 64, 3, 3, 56, 56, 64), "float32"), 64 * 64 * 56 * 56 * 9),
    "wide_channel": (OpDesc("conv2d", (64, 64, 56, 56, 64, 7, 7, 56, 56, 64), "float32"), 64 * 64 * 56 * 56 * 49),
    "function": (OpDesc("elementwise", (2 * 4096 * 14336, 4096 * 14336), "float16", "silu"), 2 * 4096 * 14336),
    "rms_norm": (OpDesc("layer_norm", (4096, 8192), "float16", "rms_norm"), 4096 * 8192),
}


@pytest.mark.parametrize("kind", BY_VALUES)
def test_what_is_done_with_each_value_costs_clocks_whatever_the_lanes_of_an_sm(kind: str) -> None:
    """An SM of an H100 or L40S has twice the lanes of a V100's, which indices and functions do not use."""
    op, values = BY_VALUES[kind]
    assert columns([kernel_of(op)]).keys() == {"norm" if kind == "rms_norm" else "stream"}
    for device in (V100, H100, device_type("l40s")):
        found = estimate(table(op), device, IDEAL, constants()).compute_s[0]
        rate = getattr(constants(), f"{kind}_values_per_sm_clock")
        assert found * device.clock_hz * device.num_sms == pytest.approx(values / rate)


def test_halving_the_width_of_an_activation_does_not_halve_its_time_where_arithmetic_counts() -> None:
    half, single = (OpDesc("elementwise", (2**28, 2**28), dtype, "gelu") for dtype in ("float16", "float32"))
    narrow, wide = estimate(table(half, single), H100, IDEAL, constants()).seconds
    assert 0.6 * wide < narrow < 0.9 * wide


def test_without_winograd_a_window_costs_the_same_at_any_stride() -> None:
    """Many pixels and channels: 4 x 4 pixels of 3 x 3 windows take 36 products instead of 144."""
    near, far = (OpDesc("conv2d", (64, 256, n, n, 256, 3, 3, 56, 56, 1), "float32") for n in (56, 112))
    plain = dataclasses.replace(IDEAL, winograd=False)
    saved, strided = estimate(table(near, far), V100, IDEAL, constants()).compute_s
    whole, _ = estimate(table(near, far), V100, plain, constants()).compute_s
    assert whole == pytest.approx(strided) and saved < 0.6 * whole


def test_plans_take_the_library_of_today() -> None:
    """Published times are of an older library, which saved arithmetic on every type."""
    saves = {
        (device.name, dispatch): LearnedModel.load(device, dispatch).scalars("conv").winograd
        for device in (V100, H100)
        for dispatch in ("published", "queued")
    }
    assert saves == {
        (V100.name, "published"): True, (V100.name, "queued"): True,
        (H100.name, "published"): True, (H100.name, "queued"): False,
    }  # fmt: skip


def test_warps_outside_the_result_skip_their_arithmetic() -> None:
    """One tile of 128 x 128 with 32 live columns takes a quarter of a full one; the rows of a warp are 128 there."""
    one = dataclasses.replace(IDEAL, tile=2)
    ops = table(*(OpDesc("matmul", (8000, m, n, 256), "float32") for m, n in ((128, 128), (128, 32), (32, 128))))
    full, narrow, low = estimate(ops, V100, one, constants()).compute_s
    assert narrow == pytest.approx(full / 4) and low == pytest.approx(full)


def prefill(batch: int, heads: int, q_len: int, kv_len: int) -> OpDesc:
    return OpDesc("attention_prefill", (batch, heads, heads, q_len, kv_len, 128, 0), "bfloat16", "causal")


def decode(batch: int, kv_heads: int, kv_len: int) -> OpDesc:
    return OpDesc("attention_decode", (batch, 4 * kv_heads, kv_heads, 1, kv_len, 128, 0), "bfloat16", "causal")


def test_a_long_prompt_runs_at_peak_and_a_lone_head_at_half() -> None:
    """One head of 128 tiles of queries on 132 SMs: the last tile sees all keys, the average one half of them."""
    many, lone = estimate(
        table(prefill(8, 64, 16384, 16384), prefill(1, 1, 16384, 16384)), H100, IDEAL, constants()
    ).compute_s
    pairs = 16384 * 16385 / 2
    assert many == pytest.approx(4 * 8 * 64 * 128 * pairs / H100.peak("bfloat16"), rel=0.02)
    assert lone == pytest.approx(4 * 128 * pairs / H100.peak("bfloat16") * 132 / 64, rel=0.02)


def test_decoding_is_bound_by_loads_and_by_blocks() -> None:
    """Twice the keys take twice the loads; many sequences of one key each take their blocks' overhead."""
    slow = dataclasses.replace(IDEAL, load=10.0, block=4000.0)
    one, two, tiny = estimate(
        table(decode(64, 8, 4096), decode(64, 8, 8192), decode(4096, 8, 1)), H100, slow, constants()
    ).compute_s
    assert two == pytest.approx(2 * one, rel=0.1)
    assert tiny == pytest.approx(4096 * 8 / H100.num_sms * 4000 / H100.clock_hz, rel=0.1)


def test_operands_that_take_turns_outgrow_l2_together() -> None:
    some = np.array([H100.l2_bytes / 4])
    alone, in_turns, from_dram = (memory_s(some, H100, IDEAL, constants(), sets)[0] for sets in (1.0, 8.0, 1e3))
    assert alone < 0.7 * in_turns and in_turns == pytest.approx(from_dram, rel=0.01)


def test_the_host_of_an_eager_call_works_beside_the_kernel() -> None:
    eager = dataclasses.replace(IDEAL, launch_s=30e-6, gap=0.5)
    ops = table(*(OpDesc("elementwise", (n, n), "float32", "relu") for n in (1000, 100_000, 100_000_000)))
    found = estimate(ops, V100, eager, constants())
    assert found.seconds[0] == found.seconds[1] == 30e-6
    assert found.seconds[2] == pytest.approx(15e-6 + found.busy_s[2])


def test_bytes_that_fit_in_l2_move_faster() -> None:
    small, large = np.array([V100.l2_bytes / 8]), np.array([V100.l2_bytes * 8.0])
    speed = [n[0] / memory_s(n, V100, IDEAL, constants())[0] for n in (small, large)]
    assert speed[0] > 1.5 * speed[1] and speed[1] == pytest.approx(900e9, rel=0.05)


def test_power_slows_long_kernels_only() -> None:
    hot = dataclasses.replace(IDEAL, sustained=0.5)
    ops = table(linear(256, 256, 256), linear(32768, 8192, 8192))
    cool_s, hot_s = (estimate(ops, V100, s, constants()).compute_s for s in (IDEAL, hot))
    assert hot_s[0] < 1.05 * cool_s[0] and hot_s[1] > 1.9 * cool_s[1]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 5000), st.sampled_from("mnk"))
def test_more_work_never_takes_less_time(m: int, n: int, k: int, grow: str) -> None:
    """Over factors of 16: within one wave the choice of tile and split may step."""
    bigger = {"m": (16 * m, n, k), "n": (m, 16 * n, k), "k": (m, n, 16 * k)}[grow]
    small, large = estimate(table(linear(m, n, k), linear(*bigger)), V100, IDEAL, constants()).seconds
    assert large >= small * 0.999


@given(st.integers(1, 10**9), st.integers(1, 10**9))
def test_inputs_are_finite_or_missing(read: int, write: int) -> None:
    ops = table(OpDesc("elementwise", (read, write), "float32", "add"))
    rows = inputs(ops, V100, estimate(ops, V100, IDEAL, constants()))
    assert rows.shape == (1, len(INPUTS)) and not np.isinf(rows).any()


def test_scalars_are_found_again_from_times_that_they_made() -> None:
    true = Scalars(launch_s=8e-6, compute=0.7, sustained=0.55, dram=0.75, cache=1.5, load=60.0)
    rng = np.random.default_rng(0)
    sizes = np.exp(rng.uniform(np.log(16), np.log(16384), (400, 3))).astype(int).tolist()
    ops = table(*(linear(*s) for s in sizes))
    seconds = estimate(ops, V100, true, constants()).seconds
    start = Scalars(launch_s=2e-5, compute=0.5, sustained=0.5, dram=0.9, cache=1.0, load=40.0)
    found = fit_scalars(ops, seconds, V100, constants(), start)
    error = np.abs(np.log(estimate(ops, V100, found, constants()).seconds / seconds))
    assert error.mean() < 0.01
    before_kernel_s = found.gap * found.launch_s  # the two are told apart by rows at the floor only, which are few here
    assert before_kernel_s == pytest.approx(8e-6, rel=0.05) and found.compute == pytest.approx(0.7, rel=0.05)


def test_inference_prefers_likes_and_respects_power() -> None:
    h100, l40s, l4 = device_type("h100-sxm-80gb"), device_type("l40s"), device_type("l4")
    assert likeness(device_type("h200-sxm-141gb"), h100, "bfloat16") > 5 * likeness(l40s, h100, "bfloat16")
    fits = [
        Fit(h100, dataclasses.replace(IDEAL, compute=0.8, sustained=0.75)),
        Fit(l40s, dataclasses.replace(IDEAL, compute=0.7, sustained=0.55)),
    ]
    found = infer(l4, fits, "bfloat16", host_bound=False)
    watts_per_flop = (52 / 121e12) / (330 / 362e12)  # 20 W of each board are not for arithmetic
    assert found.sustained == pytest.approx((0.75 * 0.55 * watts_per_flop) ** 0.5, rel=0.08)  # 0.7 or 0.8 unbound
    assert found.compute == found.sustained
    assert infer(l40s, fits, "bfloat16", host_bound=False) == fits[1].scalars
    assert found.launch_s == pytest.approx(IDEAL.launch_s * l40s.clock_hz / l4.clock_hz, rel=0.05)
    unknown = infer(dataclasses.replace(l4, name="mine", power_w=1.0), fits, "bfloat16", host_bound=False)
    assert unknown.sustained == unknown.compute
    with pytest.raises(BadModel):
        infer(l4, [], "bfloat16", host_bound=False)


def test_inference_trusts_types_that_power_does_not_hold_back() -> None:
    """A P4 has 75 W for its float32 units: what it reaches says little of a P100 with 250 W."""
    p4, v100, p100 = device_type("p4"), V100, device_type("p100-pcie-16gb")
    fits = [
        Fit(p4, dataclasses.replace(IDEAL, compute=0.4, sustained=0.4, library=2)),
        Fit(v100, dataclasses.replace(IDEAL, compute=0.9, sustained=0.9, library=3)),
    ]
    found = infer(p100, fits, "float32", host_bound=True)
    assert found.compute > 0.8 and found.library == 2  # the arithmetic of the V100, the library of the P4
    assert infer(device_type("t4"), fits, "float32", host_bound=True).sustained < 0.5


def test_types_without_bfloat16_have_matrix_units_all_the_same() -> None:
    """A T4 has 70 W for 65 TFLOP/s in float16: it cannot sustain what an A100 with 400 W for 312 does."""
    fits = [Fit(device_type("a100"), dataclasses.replace(IDEAL, compute=0.85, sustained=0.83))]
    t4, v100 = (infer(device_type(n), fits, "bfloat16", host_bound=False) for n in ("t4", "v100-sxm2-16gb"))
    assert 0.3 < t4.sustained < 0.55 < 0.7 < v100.sustained < 0.9


def test_the_process_of_a_type_decides_its_energy() -> None:
    """An A10 is made in a 10 nm process, not in A100's 7 nm: it takes more energy for a product."""
    fits = [Fit(device_type("a100"), dataclasses.replace(IDEAL, compute=0.9, sustained=0.9))]
    a10 = infer(device_type("a10"), fits, "bfloat16", host_bound=False).sustained
    joule = 380 / (0.9 * 312e12) * 10 / 7
    assert a10 == pytest.approx((0.9 * 130 / joule / 125e12) ** 0.5, rel=0.02)


def test_halved_matrix_units_are_kept_busy() -> None:
    fits = [Fit(device_type("l40s"), dataclasses.replace(IDEAL, compute=0.8, sustained=0.8))]
    full, halved = (infer(device_type(n), fits, "bfloat16", host_bound=False) for n in ("rtx-6000-ada", "rtx-4090"))
    assert full.compute == pytest.approx(0.8, rel=0.02) and halved.compute == pytest.approx(0.92, rel=0.02)


def test_compass_stays_in_its_box() -> None:
    found = minimise(
        lambda x: float(np.sum(np.square(x - 3.0))), np.zeros(3), np.full(3, -1.0), np.array([1.0, 9.0, 2.0])
    )
    np.testing.assert_allclose(found, [1.0, 3.0, 2.0], atol=0.02)


def test_malformed_constants_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "physics.yaml"
    path.write_text("tiles: 3")
    with pytest.raises(BadModel, match=r"physics\.yaml"):
        constants(path)
