"""This machine as a cluster: GPUs through a fake NVML, the CPU through made-up /proc files, and both for real."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tvmhet.cluster import ClusterSpec, device_type, local
from tvmhet.cluster.cpu import isa_levels, read_cpu
from tvmhet.cluster.local import cluster_of, cpu_type, find_gpu, gpu_type, ordinals_of
from tvmhet.cluster.nvml import Gpu, NvmlReport, visible_gpus
from tvmhet.errors import NotSupported

ROOT = Path(__file__).parents[2]
V2 = "cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3"
V3 = V2 + " avx avx2 bmi1 bmi2 f16c fma abm movbe xsave"
V4 = V3 + " avx512f avx512bw avx512cd avx512dq avx512vl"
PROBE = """
import json
from tvmhet.cluster import ClusterSpec
spec = ClusterSpec.from_local()
links = {f"{a.name} {b.name}": spec.link(a, b).byte_per_s for a in spec.groups() for b in spec.groups()}
types = {t.name: [t.memory_bytes, t.host_byte_per_s, t.num_sms, t.dram_byte_per_s] for t in spec.device_types()}
again = ClusterSpec.from_yaml(spec.to_yaml()).content_hash() == spec.content_hash()
print(json.dumps([spec.counts(), spec.notes, links, types, again]))
"""


@pytest.fixture(scope="session")
def fake_nvml(tmp_path_factory):
    """Return a folder that holds the fake libnvidia-ml.so.1."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    assert compiler is not None, "no C compiler for the fake NVML library: building tvmhet needs one, too"
    out = tmp_path_factory.mktemp("nvml")
    source = Path(__file__).with_name("fake_nvml.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(out / "libnvidia-ml.so.1"), str(source)], check=True)
    return out


def probe(folder, **variables):
    """Detect in a child process that sees the fake library (dlopen reads LD_LIBRARY_PATH at start)."""
    env = {**os.environ, "LD_LIBRARY_PATH": str(folder), "PYTHONPATH": str(ROOT), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    env.pop("CUDA_VISIBLE_DEVICES", None)
    env |= variables
    run = subprocess.run([sys.executable, "-c", PROBE], env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    counts, notes, links, types, again = json.loads(run.stdout)
    assert again, "the detected cluster must round-trip through a file"
    return {k: v for k, v in counts.items() if not k.startswith("cpu-")}, notes, links, types


def test_known_gpus_become_catalogue_types(fake_nvml):
    text = (
        "NVIDIA A100-SXM4-80GB|81920|8.0|1410|1593|5120|6912|4|16|12|25000;"
        "NVIDIA A100-SXM4-80GB|81920|8.0|1410|1593|5120|6912|4|16|12|25000;"
        "Tesla T4|15360|7.5|1590|5001|256|2560|3|8|0|0"
    )
    counts, notes, links, types = probe(fake_nvml, FAKE_NVML=text)
    assert counts == {"a100-sxm-80gb": 2, "t4": 1}
    assert notes == []
    assert links["a100-sxm-80gb a100-sxm-80gb"] == 300e9
    assert types["t4"][:2] == [14336 * 2**20, 15.75e9 / 2], "memory less 1 GiB, and half the lanes of the slot"
    assert links["a100-sxm-80gb t4"] == 15.75e9 / 2


def test_an_unknown_gpu_is_described_by_nvml(fake_nvml):
    text = ";".join(["NVIDIA Imagined 9000|20480|8.9|2000|9000|256|5120|4|16|4|26000"] * 2)
    counts, notes, links, types = probe(fake_nvml, FAKE_NVML=text)
    assert counts == {"imagined-9000": 2}
    assert links["imagined-9000 imagined-9000"] == 4 * 26e9
    assert types["imagined-9000"] == [19 * 2**30, 31.5e9, 40, 256 / 8 * 18e9]
    assert len(notes) == 1
    assert "'NVIDIA Imagined 9000' is not in the catalogue" in notes[0]


TWO = "NVIDIA L4|23034|8.9|2040|6251|192|7424|4|16|0|0;Tesla T4|15360|7.5|1590|5001|256|2560|3|16|0|0"


def test_hidden_gpus_are_no_devices(fake_nvml):
    counts, notes, _, _ = probe(fake_nvml, FAKE_NVML=TWO, CUDA_VISIBLE_DEVICES="1")
    assert (counts, notes) == ({"t4": 1}, ["CUDA_VISIBLE_DEVICES hides 1 of 2 GPUs"])
    counts, notes, _, _ = probe(fake_nvml, FAKE_NVML=TWO, CUDA_VISIBLE_DEVICES="")
    assert (counts, notes) == ({}, ["CUDA_VISIBLE_DEVICES hides 2 of 2 GPUs"])


def test_unlike_gpus_need_a_fixed_order(fake_nvml):
    _, notes, _, _ = probe(fake_nvml, FAKE_NVML=TWO, CUDA_DEVICE_ORDER="FASTEST_FIRST")
    assert "set CUDA_DEVICE_ORDER=PCI_BUS_ID" in notes[0]


@pytest.mark.parametrize(
    ("variable", "indices"),
    [
        (None, [0, 1, 2]), ("", []), ("2,0", [2, 0]), ("0,7,1", [0]), ("1, 1", [1]), ("-1", []), ("GPU-b", [1]),
        ("GPU-", []), ("MIG-a", []), ("GPU-c,0", [2, 0]),
    ],
)  # fmt: skip
def test_cuda_visible_devices(variable, indices):
    gpus = tuple(gpu(index=i, uuid=f"GPU-{u}") for i, u in enumerate("abc"))
    assert [g.index for g in visible_gpus(gpus, variable)] == indices


def test_device_ids_have_their_cuda_ordinals():
    mute = gpu("NVIDIA Imagined 9000", index=1, num_cores=None)
    report = NvmlReport((gpu(), mute, gpu("Tesla T4", 15, (7, 5), index=2), gpu(index=3)))
    assert ordinals_of(report) == {"local/l4:0": 0, "local/t4:0": 2, "local/l4:1": 3}
    ids = [i for g in cluster_of(cpu_of("fpu"), report).groups() for i in g.device_ids]
    assert set(ids) == set(ordinals_of(report))


@pytest.mark.parametrize(
    ("devices", "ordinals"),
    [
        (["rack-1/t4:0", "rack-1/l4:1"], [2, 3]),
        (["rack-1/t4-rack-1:0", "rack-1/l4:1"], [2, 3]),  # as from_ray tells it from another machine's
        (["rack-1/t4:0", "rack-2/t4:0"], [0, 1]),  # two machines, one stands for both
        (["rack-1/a100:0", "rack-1/t4:0"], [0, 1]),  # a GPU that is not here
        ([], []),
    ],
)
def test_devices_of_a_cluster_are_this_machines_gpus_of_their_types(devices, ordinals, monkeypatch):
    monkeypatch.setattr(local, "cuda_ordinals", lambda: {"local/l4:0": 0, "local/t4:0": 2, "local/l4:1": 3})
    assert local.ordinals_for(devices) == dict(zip(devices, ordinals, strict=True))


def test_a_driver_that_fails_is_a_note(fake_nvml):
    counts, notes, _, _ = probe(fake_nvml, FAKE_NVML_FAIL="1")
    assert counts == {}
    assert "driver does not answer" in notes[0]


def test_a_driver_without_gpus_is_a_note(fake_nvml):
    counts, notes, _, _ = probe(fake_nvml, FAKE_NVML="")
    assert (counts, notes) == ({}, ["no NVIDIA GPU on this machine"])


def gpu(name="NVIDIA L4", gib=22.5, capability=(8, 9), **changes):
    values = dict(
        index=0, name=name, memory_bytes=int(gib * 2**30), compute_capability=capability, clock_hz=2.04e9,
        memory_clock_hz=6.251e9, memory_bus_bits=192, num_cores=7424, pcie_generation=4, pcie_width=16,
        num_nvlinks=0, nvlink_byte_per_s=None, power_w=72.0,
    )  # fmt: skip
    return Gpu(**(values | changes))


@pytest.mark.parametrize(
    ("name", "gib", "capability", "slug"),
    [
        ("Tesla K80", 11.2, (3, 7), "k80"), ("Tesla P4", 7.4, (6, 1), "p4"),
        ("Tesla P100-PCIE-16GB", 16, (6, 0), "p100-pcie-16gb"), ("Tesla V100-SXM2-16GB", 16, (7, 0), "v100-sxm2-16gb"),
        ("Tesla V100-PCIE-32GB", 32, (7, 0), "v100-pcie-32gb"), ("Tesla T4", 15, (7, 5), "t4"),
        ("NVIDIA GeForce RTX 2080 Ti", 11, (7, 5), "rtx-2080-ti"), ("NVIDIA GeForce RTX 4090", 24, (8, 9), "rtx-4090"),
        ("NVIDIA A10G", 22.1, (8, 6), "a10g"), ("NVIDIA A10", 22.5, (8, 6), "a10"), ("NVIDIA A40", 45, (8, 6), "a40"),
        ("NVIDIA RTX A6000", 48, (8, 6), "rtx-a6000"), ("NVIDIA A100-PCIE-40GB", 40, (8, 0), "a100-pcie-40gb"),
        ("NVIDIA A100 80GB PCIe", 80, (8, 0), "a100-pcie-80gb"), ("A100-SXM4-40GB", 39.6, (8, 0), "a100-sxm-40gb"),
        ("NVIDIA L40S", 45, (8, 9), "l40s"), ("NVIDIA H100 PCIe", 79.6, (9, 0), "h100-pcie-80gb"),
        ("NVIDIA H100 80GB HBM3", 79.6, (9, 0), "h100-sxm-80gb"), ("NVIDIA H200", 139.8, (9, 0), "h200-sxm-141gb"),
        ("NVIDIA GH200 480GB", 95.6, (9, 0), "gh200"), ("NVIDIA B200", 178.4, (10, 0), "b200"),
        ("NVIDIA RTX 6000 Ada Generation", 48, (8, 9), "rtx-6000-ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 95.6, (12, 0), "rtx-pro-6000"),
    ],
)  # fmt: skip
def test_nvml_names_find_their_type(name, gib, capability, slug):
    found = find_gpu(gpu(name, gib, capability))
    assert found is not None
    assert found.name == slug
    here, _ = gpu_type(gpu(name, gib, capability))
    assert here.nominal_memory_bytes == found.nominal_memory_bytes
    assert here.memory_bytes <= gib * 2**30 - min(2**30, gib * 2**29)
    assert here.memory_bytes == pytest.approx(found.memory_bytes, rel=0.08), "what the table says of such cards"


@pytest.mark.parametrize(
    ("name", "gib", "capability"),
    [
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4.8, (8, 0)),  # a slice
        ("NVIDIA A100-SXM4-40GB", 4.8, (8, 0)),  # its name, a slice's memory
        ("NVIDIA L4", 22.5, (9, 0)),  # another architecture
        ("GRID V100D-8Q", 8, (7, 0)),
        ("NVIDIA H100 NVL", 94, (9, 0)),
    ],
)
def test_other_gpus_are_not_mistaken_for_a_known_type(name, gib, capability):
    assert find_gpu(gpu(name, gib, capability)) is None
    device, note = gpu_type(gpu(name, gib, capability))
    assert device.nominal_memory_bytes == int(gib * 2**30)
    assert device.memory_bytes == int((gib - 1) * 2**30)
    assert "not in the catalogue" in note


def test_two_cards_of_one_name_that_differ_are_two_types():
    spec = cluster_of(cpu_of(V3), NvmlReport((gpu(), gpu(index=1, pcie_width=4))))
    assert list(spec.counts()) == ["l4", "l4-gpu1", "cpu-x86-64-v3-2core"]
    assert ClusterSpec.from_yaml(spec.to_yaml()).content_hash() == spec.content_hash()


def test_nvlink_that_is_not_wired_is_not_counted():
    card = gpu("NVIDIA A100-SXM4-40GB", 40, (8, 0))
    assert gpu_type(card)[0].nvlink_byte_per_s is None
    assert gpu_type(card)[0].peer_byte_per_s == 31.5e9


def test_an_unknown_gpu_that_says_too_little_is_left_out_with_a_note():
    mute = gpu("NVIDIA Imagined 9000", num_cores=None, memory_bus_bits=None)
    with pytest.raises(NotSupported, match="NVML does not report its sms, bandwidth"):
        gpu_type(mute)
    spec = cluster_of(cpu_of(V3), NvmlReport((mute, gpu(index=1))))
    assert list(spec.counts()) == ["l4", "cpu-x86-64-v3-2core"]
    assert "so it is left out" in spec.notes[0]


def cpu_of(flags, cores=(0, 1), **changes):
    from tvmhet.cluster.cpu import Cpu

    levels = isa_levels(frozenset(flags.split()))
    return Cpu(**({"cores": cores, "levels": levels, "model": "Some CPU", "clock_hz": 3e9, "memory_bytes": 2**33,
                   "l2_bytes": 2**21} | changes))  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "levels"),
    [
        ("fpu sse sse2", ()), (V2, ("x86-64-v2",)), (V3, ("x86-64-v2", "x86-64-v3")),
        (V4, ("x86-64-v2", "x86-64-v3", "x86-64-v4")), (V4.replace("avx2 ", ""), ("x86-64-v2",)),
        (V3.replace("abm ", ""), ("x86-64-v2",)), (V4.replace("avx512vl", ""), ("x86-64-v2", "x86-64-v3")),
    ],
)  # fmt: skip
def test_isa_levels_need_the_ones_below(flags, levels):
    assert isa_levels(frozenset(flags.split())) == levels


def test_the_cpu_device_has_the_machine_s_figures():
    device = cpu_type(cpu_of(V3, cores=(0, 1, 4)))
    assert (device.name, device.num_sms, device.memory_bytes) == ("cpu-x86-64-v3-3core", 3, 2**33)
    assert device.peak_flop_per_s["float32"] == 3 * 3e9 * 32
    assert device.sources["memory"] == "this machine"
    assert device.target["num-cores"] == 3
    assert cpu_type(cpu_of("fpu")) is None


def test_a_machine_with_nothing_to_run_on():
    with pytest.raises(NotSupported, match="does not run x86-64-v2"):
        cluster_of(cpu_of("fpu"), NvmlReport((), "no NVIDIA GPU on this machine"))


def test_proc_and_sys_are_read(tmp_path):
    files = {
        "proc/cpuinfo": f"model name\t: Some CPU @ 3\nflags\t\t: {V3}\ncpu MHz\t\t: 2900.5\n",
        "proc/meminfo": "MemTotal:       16777216 kB\n",
        "sys/fs/cgroup/memory.max": "4294967296\n",
        "sys/devices/system/cpu/cpu0/cache/index2/level": "2\n",
        "sys/devices/system/cpu/cpu0/cache/index2/size": "2048K\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    cpu = read_cpu(tmp_path)
    assert (cpu.model, cpu.levels[-1], cpu.clock_hz) == ("Some CPU @ 3", "x86-64-v3", 2900.5e6)
    assert (cpu.memory_bytes, cpu.l2_bytes) == (2**32, 2**21), "the control group's limit is less than the machine's"
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
    frequency = tmp_path / "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq"
    frequency.parent.mkdir(parents=True)
    frequency.write_text("3500000\n")
    assert (read_cpu(tmp_path).memory_bytes, read_cpu(tmp_path).clock_hz) == (2**34, 3.5e9)


def test_a_machine_that_shows_nothing_still_reads(tmp_path):
    cpu = read_cpu(tmp_path)
    assert (cpu.levels, cpu.memory_bytes, cpu.clock_hz) == ((), None, None)


def test_this_machine():
    if "sse4_2" not in Path("/proc/cpuinfo").read_text().split():
        pytest.skip("this processor has no sse4_2, which x86-64-v2 needs")
    spec = ClusterSpec.from_local()
    cpu = spec.groups()[-1]
    assert cpu.device.is_cpu
    assert cpu.device.num_sms == len(os.sched_getaffinity(0))
    assert cpu.memory_bytes > 2**28
    assert ClusterSpec.from_yaml(spec.to_yaml()).content_hash() == spec.content_hash()
    assert device_type(cpu.device.name).num_sms == cpu.device.num_sms
