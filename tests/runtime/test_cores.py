"""Devices get distinct physical cores while there are any, and library kernels the limits of their device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tvmhet.cluster import local
from tvmhet.errors import NotSupported
from tvmhet.runtime import CpuDevice, DeviceBinding, assign_cores, check_host_runs, cores, host_cores
from tvmhet.runtime.cores import worker_environment
from tvmhet.runtime.described import bind_described, describe_devices

HOST = ((0, 4), (1, 5), (2, 6), (3, 7))  # four physical cores of two hyper-threads


def test_distinct_physical_cores_first() -> None:
    bindings = assign_cores([CpuDevice("a", 1), CpuDevice("b", 2, "x86-64-v3"), CpuDevice("c", 1)], HOST)
    assert [b.cores for b in bindings.values()] == [(0,), (1, 2), (3,)]
    assert not any(b.shared_cores for b in bindings.values())
    assert bindings["b"].isa == "x86-64-v3"


def test_too_many_devices_share_and_say_so() -> None:
    bindings = assign_cores([CpuDevice("a", 3), CpuDevice("b", 2), CpuDevice("c", 1)], HOST)
    assert [b.cores for b in bindings.values()] == [(0, 1, 2), (0, 3), (1,)]
    assert [b.shared_cores for b in bindings.values()] == [True, True, True]
    bindings = assign_cores([CpuDevice("a", 1), CpuDevice("b", 3), CpuDevice("c", 1)], HOST)
    assert [b.shared_cores for b in bindings.values()] == [True, False, True]


def test_a_device_named_twice_counts_once() -> None:
    bindings = assign_cores([CpuDevice("a"), CpuDevice("b"), CpuDevice("a"), CpuDevice("b")], HOST[:2])
    assert [(b.cores, b.shared_cores) for b in bindings.values()] == [((0,), False), ((1,), False)]


def test_a_device_larger_than_the_host_gets_it_all() -> None:
    assert assign_cores([CpuDevice("a", 64)], HOST)["a"].cores == (0, 1, 2, 3)


def test_devices_are_told_with_the_cores_that_they_want(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are bound next may have more cores than this host, and its GPUs in another order."""
    bound = assign_cores([CpuDevice("a", 3, "x86-64-v3")], HOST[:2])
    assert bound["a"].cores == (0, 1) and bound["a"].num_cores == 3
    told = describe_devices([*bound.values(), DeviceBinding("rack-1/t4:0", "cuda", ordinal=0)])
    monkeypatch.setattr(cores, "host_cores", lambda: HOST)
    monkeypatch.setattr(local, "cuda_ordinals", lambda: {"local/l4:0": 0, "local/t4:0": 1})
    again = bind_described(told)
    assert again["a"] == DeviceBinding("a", "llvm", "x86-64-v3", (0, 1, 2), num_cores=3)
    assert again["rack-1/t4:0"] == DeviceBinding("rack-1/t4:0", "cuda", ordinal=1)


def test_host_cores_are_those_this_process_may_use() -> None:
    assert {cpu for cpus in host_cores() for cpu in cpus} == os.sched_getaffinity(0)


def test_environment_limits_isa_and_threads() -> None:
    base = {"PATH": "/bin", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "OMP_NUM_THREADS": "16"}
    v2 = worker_environment(DeviceBinding("a", "llvm", "x86-64-v2", (0, 1)), base)
    assert (v2["ONEDNN_MAX_CPU_ISA"], v2["MKL_ENABLE_INSTRUCTIONS"], v2["ATEN_CPU_CAPABILITY"]) == (
        "SSE41",
        "SSE4_2",
        "default",
    )
    assert (v2["OMP_NUM_THREADS"], v2["TVM_NUM_THREADS"], v2["TVM_BIND_THREADS"]) == ("2", "2", "0")
    v4 = worker_environment(DeviceBinding("a", "llvm", "x86-64-v4", (0,)), base)
    assert "ONEDNN_MAX_CPU_ISA" not in v4 and v4["PATH"] == "/bin"
    unlimited = worker_environment(DeviceBinding("a", "llvm", None, ()), base)
    assert (unlimited["ONEDNN_MAX_CPU_ISA"], unlimited["OMP_NUM_THREADS"]) == ("AVX512_CORE", "16")


def test_workers_keep_the_memory_that_kernels_free() -> None:
    """Blocks of 24 MiB, more than glibc keeps at first, are not taken from the system page by page again."""
    code = """if True:
        import ctypes, resource
        libc = ctypes.CDLL(None)
        libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        libc.free.argtypes, libc.memset.argtypes = [ctypes.c_void_p], [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
        def use(mib):
            block = libc.malloc(mib << 20)
            libc.memset(block, 1, mib << 20)
            libc.free(block)
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        start = use(24)
        print(use(8) - start, use(24) - start)
    """
    worker = worker_environment(DeviceBinding("a", "llvm", None, (0,)), os.environ)
    done = subprocess.run([sys.executable, "-c", code], env=worker, capture_output=True, text=True)
    assert all(int(faults) < 100 for faults in done.stdout.split()), done.stdout
    assert len(done.stdout.split()) == 2, done.stderr
    assert (
        worker_environment(DeviceBinding("a", "llvm"), {"MALLOC_TRIM_THRESHOLD_": "7"})["MALLOC_TRIM_THRESHOLD_"] == "7"
    )


def test_threads_of_several_cores_wait_awake() -> None:
    """Each pool looks for work so often before it sleeps; what the user says of it stays, and one core has no pools."""
    two, one = (DeviceBinding("a", "llvm", None, cores) for cores in ((0, 1), (0,)))
    assert worker_environment(two, {})["GOMP_SPINCOUNT"] == "10000"
    assert worker_environment(two, {})["TVM_THREAD_POOL_SPIN_COUNT"] == "10000"
    assert worker_environment(two, {"GOMP_SPINCOUNT": "7"})["GOMP_SPINCOUNT"] == "7"
    assert "GOMP_SPINCOUNT" not in worker_environment(one, {})


@pytest.mark.parametrize(
    ("isa", "flag", "capability"), [("x86-64-v2", "sse4_2", "DEFAULT"), ("x86-64-v3", "avx2", "AVX2")]
)
def test_torch_obeys_the_limits(isa: str, flag: str, capability: str) -> None:
    """Library kernels see the device's instruction set and threads, not the host's."""
    binding = DeviceBinding("a", "llvm", isa, (0,))
    if flag not in Path("/proc/cpuinfo").read_text().split():
        pytest.skip(f"this processor has no {flag}")
    check_host_runs([binding])
    code = "import torch; print(torch.backends.cpu.get_cpu_capability(), torch.get_num_threads())"
    done = subprocess.run(
        [sys.executable, "-c", code], env=worker_environment(binding, os.environ), capture_output=True, text=True
    )
    assert done.stdout.split() == [capability, "1"], done.stderr


def test_unknown_isa_is_refused() -> None:
    with pytest.raises(NotSupported, match=r"'neon'.*x86-64-v2"):
        worker_environment(DeviceBinding("a", "llvm", "neon"), {})


@pytest.mark.parametrize(
    ("isa", "flags", "missing"),
    [
        ("x86-64-v2", "cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3", None),
        ("x86-64-v3", "cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3 avx f16c", "avx2, bmi1, bmi2, fma, movbe"),
        ("x86-64-v4", "cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3 avx avx2 bmi1 bmi2 f16c fma movbe", "avx512bw"),
        (None, "", None),
    ],
)
def test_host_without_the_instructions_is_refused(isa: str | None, flags: str, missing: str | None) -> None:
    cpuinfo = f"processor\t: 0\nflags\t\t: fpu {flags}\n\nprocessor\t: 1\n"
    bindings = [DeviceBinding("old", "llvm", isa, (0,))]
    if missing is None:
        check_host_runs(bindings, cpuinfo)
        return
    with pytest.raises(NotSupported, match=missing):
        check_host_runs(bindings, cpuinfo)


def test_other_architectures_are_left_to_the_loader() -> None:
    check_host_runs([DeviceBinding("a", "llvm", "x86-64-v4")], "processor\t: 0\nFeatures\t: asimd\n")
