"""A device type in a file of its own: the catalogue's format, names by key, field or file, errors with their line."""

import pytest

from tvmhet.cluster.catalog import device_type
from tvmhet.cluster.device_file import find_device, read_device
from tvmhet.errors import BadClusterFile, BadQuantity, UnknownDeviceType

ENTRY = """  architecture: Ada
  target: {kind: cuda, arch: sm_89}
  sms: 46
  lanes_per_sm: 128
  boost_clock: 2475 MHz
  memory: 12 GiB
  bandwidth: 504 GB/s
  l2: 36 MiB
  rates: {float32: 29.1 TFLOP/s, bfloat16: 58.3 TFLOP/s}
  power: 200 W
"""


def flat(text: str) -> str:
    return "\n".join(line[2:] for line in text.splitlines())


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("mine:\n" + ENTRY, "mine"),
        (flat(ENTRY), "gpu"),
        ("name: other\n" + flat(ENTRY), "other"),
        ("devices:\n  mine:\n" + "\n".join("  " + line for line in ENTRY.splitlines()), "mine"),
    ],
)
def test_the_entry_may_stand_alone_or_under_its_name(tmp_path, text, name):
    path = tmp_path / "gpu.yaml"
    path.write_text(text)
    device = find_device(str(path))
    assert (device.name, device.num_sms, device.compute_capability) == (name, 46, "8.9")
    assert device.dram_byte_per_s == 504e9 and device.peak("bfloat16") == 58.3e12


def test_like_a_known_type(tmp_path):
    path = tmp_path / "gpu.yml"
    path.write_text("bigger: {like: l4, sms: 60}")
    device = read_device(path)
    assert device.num_sms == 60 and device.l2_bytes == device_type("l4").l2_bytes


def test_a_name_is_the_catalogues():
    assert find_device("A100") == device_type("a100-sxm-80gb")
    with pytest.raises(UnknownDeviceType, match="a10O"):
        find_device("a10O")


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("mine:\n  like: l4\n  smss: 3\n", BadClusterFile, r"gpu.yaml:3: unknown key 'smss'"),
        ("mine:\n  like: l4\n  memory: 12\n", BadQuantity, r"gpu.yaml:3: mine.memory"),
        (
            "mine: {like: l4, usable_memory: 25 GiB}",
            BadClusterFile,
            "a usable_memory of 25.0 GiB, more than its memory, 24.0",
        ),
        ("mine: {like: l44}", UnknownDeviceType, r"gpu.yaml:1: .*'l44'"),
        ("mine:\n" + ENTRY.replace("  sms: 46\n", ""), BadClusterFile, r"gpu.yaml:1: .*'mine' has no sms"),
        ("mine:\n" + ENTRY.replace("  power: 200 W\n", ""), BadClusterFile, "has no power"),
        ("mine:\n" + ENTRY.replace("504 GB/s", "-504 GB/s"), BadQuantity, "gpu.yaml:8"),
        ("a: {like: l4}\nb: {like: l4}\n", BadClusterFile, "2 device entries, a, b"),
        ("", BadClusterFile, "no device entry"),
        ("- 3", BadClusterFile, "no device entry"),
        ("a: [", BadClusterFile, "not YAML"),
        ("mine: 3", BadClusterFile, "mine is 3"),
    ],
)
def test_mistakes_name_file_and_line(tmp_path, text, error, message):
    path = tmp_path / "gpu.yaml"
    path.write_text(text)
    with pytest.raises(error, match=message):
        read_device(path)
    with pytest.raises(BadClusterFile, match="cannot be read"):
        read_device(tmp_path / "gone.yaml")


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("Tesla V100-PCIE-32GB", "v100-pcie-32gb"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm-80gb"),
        ("NVIDIA GeForce RTX 3090", "rtx-3090"),
        ("NVIDIA A40", "a40"),
        ("gb200_sxm", "gb200"),
    ],
)
def test_names_as_drivers_and_tables_spell_them(name, slug):
    assert find_device(name).name == slug
