"""Device types shared by the cost tests."""

from __future__ import annotations

import pytest

from tvmhet.cluster.device import DeviceType

_A100 = DeviceType(
    name="a100-test",  # figures: NVIDIA A100 SXM4 80 GB data sheet
    kind="cuda",
    target={"kind": "cuda", "arch": "sm_80"},
    memory_bytes=80 * 2**30,
    dram_byte_per_s=2.039e12,
    l2_bytes=40 * 2**20,
    peak_flop_per_s={"float32": 19.5e12, "tfloat32": 156e12, "float16": 312e12, "bfloat16": 312e12, "float64": 19.5e12},
    launch_s=3e-6,
    num_sms=108,
    clock_hz=1.41e9,
    power_w=400.0,
    host_byte_per_s=32e9,
    peer_byte_per_s=300e9,
)

_CPU = DeviceType(
    name="cpu-test",
    kind="llvm",
    target={"kind": "llvm", "mcpu": "x86-64-v3"},
    memory_bytes=8 * 2**30,
    dram_byte_per_s=20e9,
    l2_bytes=2 * 2**20,
    peak_flop_per_s={"float32": 90e9, "float64": 45e9},
    launch_s=2e-6,
    num_sms=1,
    clock_hz=2.8e9,
    power_w=60.0,
    host_byte_per_s=20e9,
    peer_byte_per_s=20e9,
)


@pytest.fixture(scope="session")
def a100() -> DeviceType:
    """An A100 written by hand, so that cost tests depend on no data file."""
    return _A100


@pytest.fixture(scope="session")
def cpu() -> DeviceType:
    """One AVX2 core."""
    return _CPU
