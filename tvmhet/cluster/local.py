"""This machine as a ClusterSpec: its NVIDIA GPUs, and one CPU device on the cores this process may use.

A GPU that the catalogue knows gets the catalogue's figures with the memory that NVML reports. One that it does not
know becomes a device type of its own from what NVML says, and a note tells which figures stand in. The CPU device has
all usable cores, at the highest x86-64 level they run.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from tvmhet.cluster.catalog import catalog, normalise
from tvmhet.cluster.cpu import Cpu, read_cpu
from tvmhet.cluster.device import DeviceType
from tvmhet.cluster.nodes import NodeClass
from tvmhet.cluster.nvml import Gpu, NvmlReport, read_nvml, visible_gpus
from tvmhet.cluster.schema import DeviceEntry
from tvmhet.cluster.spec import ClusterSpec
from tvmhet.cluster.units import Dimension, exact_quantity, gib
from tvmhet.errors import NotSupported

_NODE = "local"
_NVML = "reported by NVML"
_LANES = {3: 192, 6: 128, 7: 64, 8: 128, 9: 128, 10: 128, 12: 128}  # float32 lanes of an SM by major version
_LANES_OF = {(6, 0): 64, (8, 0): 64}  # and the data-center parts that differ (CUDA C++ Programming Guide)
_TRANSFERS_PER_CLOCK = 2  # NVML's memory clock is half the rate of a pin, for GDDR and for HBM
_CUDA_LIMITS = {"max_threads_per_block": 1024, "max_shared_memory_per_block": 49152, "thread_warp_size": 32}


def detect() -> ClusterSpec:
    """Return the machine this process runs on. Raises NotSupported on a CPU below x86-64-v2 without a GPU."""
    return cluster_of(read_cpu(), _visible())


def cuda_ordinals() -> dict[str, int]:
    """Return the CUDA ordinal of each GPU of `detect()`, by device id such as "local/t4:0"."""
    return ordinals_of(_visible())


def ordinal_of(device: DeviceType) -> int | None:
    """Return the CUDA ordinal of this machine's first GPU of a type, None if it has none."""
    return min((n for device_id, n in cuda_ordinals().items() if type_of(device_id) == device.name), default=None)


def ordinals_for(device_ids: Sequence[str]) -> dict[str, int]:
    """Return the CUDA ordinals of devices of a cluster that this machine stands for, by id.

    "rack-1/t4:0" is this machine's first T4, and so is "rack-1/t4-rack-1:0", as `ClusterSpec.from_ray` may call it.
    Where the ids name a GPU twice, or one that is not here, they take the ordinals in turn.
    """
    if not device_ids:
        return {}
    here = {name.rpartition("/")[2]: ordinal for name, ordinal in cuda_ordinals().items()}
    names = {d: d.rpartition("/")[2].replace(f"-{machine_of(d)}:", ":") for d in device_ids}
    if len(set(names.values())) == len(names) and here.keys() >= set(names.values()):
        return {device: here[name] for device, name in names.items()}
    return {device: i for i, device in enumerate(names)}


def type_of(device_id: str) -> str:
    """Return the name of the type in a device id.

    >>> type_of("local/h100-sxm-80gb:0")
    'h100-sxm-80gb'
    """
    return device_id.rpartition("/")[2].rpartition(":")[0]


def machine_of(device_id: str) -> str:
    """Return the machine in a device id, as cluster files name it.

    >>> machine_of("rack-1/h100-sxm-80gb:0")
    'rack-1'
    """
    return device_id.rpartition("/")[0]


def _visible() -> NvmlReport:
    """Return what NVML reports of the GPUs that CUDA_VISIBLE_DEVICES leaves to this process."""
    report = read_nvml()
    shown = visible_gpus(report.gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
    hidden = len(report.gpus) - len(shown)
    reason = f"CUDA_VISIBLE_DEVICES hides {hidden} of {len(report.gpus)} GPUs" if hidden else report.reason
    unlike = len({g.name for g in shown}) > 1 and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"
    if unlike:
        order = "CUDA may number unlike GPUs in another order than NVML; set CUDA_DEVICE_ORDER=PCI_BUS_ID"
        reason = f"{reason}; {order}" if reason else order
    return NvmlReport(shown, reason)


def cluster_of(cpu: Cpu, nvml: NvmlReport) -> ClusterSpec:
    """Return the cluster of one node with these GPUs and this CPU; `notes` say what is not certain."""
    placed, notes = _types_of(nvml)
    types = list(dict.fromkeys(device for device in placed if device is not None))
    devices = [(device, placed.count(device)) for device in types]
    host = cpu_type(cpu)
    if host is None:
        notes.append(f"the CPU {cpu.model or '(unknown)'} does not run x86-64-v2, so it is not a device")
    else:
        devices.append((host, 1))
    if not devices:
        raise NotSupported("; ".join(notes), "use a machine with an NVIDIA GPU or a CPU of x86-64-v2 or later")
    own = tuple(device for device, _ in devices)
    return ClusterSpec((NodeClass(_NODE, tuple(devices)),), custom_types=own, notes=tuple(notes))


def ordinals_of(nvml: NvmlReport) -> dict[str, int]:
    """Return the place of each described GPU in the report, by its device id in `cluster_of`."""
    result: dict[str, int] = {}
    seen: dict[str, int] = {}
    for ordinal, device in enumerate(_types_of(nvml)[0]):
        if device is not None:
            index = seen.get(device.name, 0)
            result[f"{_NODE}/{device.name}:{index}"] = ordinal
            seen[device.name] = index + 1
    return result


def _types_of(nvml: NvmlReport) -> tuple[list[DeviceType | None], list[str]]:
    """Return the type of each GPU in turn (None: it cannot be described) and notes. Equal names are equal types."""
    notes = [nvml.reason] if nvml.reason else []
    types: list[DeviceType | None] = []
    by_name: dict[str, DeviceType] = {}
    for gpu in nvml.gpus:
        try:
            device, note = gpu_type(gpu)
        except NotSupported as e:
            notes.append(f"{e.problem}, so it is left out; {e.remedy}")
            types.append(None)
            continue
        if by_name.setdefault(device.name, device) != device:
            device = dataclasses.replace(device, name=f"{device.name}-gpu{gpu.index}")
        types.append(device)
        notes += [note] if note and note not in notes else []
    return types, notes


def cpu_type(cpu: Cpu) -> DeviceType | None:
    """Return one device of all usable cores at the CPU's highest level, or None below x86-64-v2."""
    if not cpu.levels:
        return None
    one = catalog().find(f"cpu-{cpu.levels[-1]}")
    sources = dict(one.sources)
    if cpu.clock_hz:
        scale = cpu.clock_hz / one.clock_hz
        rates = {d: r * scale for d, r in one.peak_flop_per_s.items()}
        one = dataclasses.replace(one, clock_hz=cpu.clock_hz, peak_flop_per_s=rates)
        sources["boost_clock"] = "this machine"
    if cpu.l2_bytes:
        one, sources["l2"] = dataclasses.replace(one, l2_bytes=cpu.l2_bytes), "this machine"
    if cpu.memory_bytes:
        size = cpu.memory_bytes
        one = dataclasses.replace(one, memory_bytes=size, nominal_memory_bytes=size)
        sources["memory"] = "this machine"
    one = dataclasses.replace(one, sources=sources, notes=f"{cpu.model}. {one.notes}" if cpu.model else one.notes)
    return one.with_cores(len(cpu.cores))


def gpu_type(gpu: Gpu) -> tuple[DeviceType, str]:
    """Return the device type of `gpu`, and a note where the catalogue does not know it.

    Raises NotSupported for an unknown GPU of which NVML reports too little to describe it.
    """
    known = find_gpu(gpu)
    if known is None:
        return _unknown_gpu(gpu)
    sources = {**known.sources, "usable_memory": _NVML}
    device = dataclasses.replace(known, memory_bytes=_usable_bytes(gpu), sources=sources)
    links = catalog().links
    if gpu.pcie_generation and f"pcie{gpu.pcie_generation}" in links and device.host_link.startswith("pcie"):
        device = _with_pcie(device, gpu)
    if device.nvlink_byte_per_s and gpu.num_nvlinks == 0:
        device = dataclasses.replace(device, nvlink_byte_per_s=None, peer_byte_per_s=device.host_byte_per_s)
    return device, ""


def _usable_bytes(gpu: Gpu) -> int:
    """What tensors may fill of NVML's total, of which the driver and a process's context keep about 1 GiB."""
    return max(gpu.memory_bytes - 2**30, gpu.memory_bytes // 2)


def _with_pcie(device: DeviceType, gpu: Gpu) -> DeviceType:
    """Return `device` with the PCIe generation and width that the slot offers."""
    link = catalog().links[f"pcie{gpu.pcie_generation}"]
    width = gpu.pcie_width or 16
    peer = device.peer_byte_per_s if device.peer_byte_per_s != device.host_byte_per_s else None
    rate = link.byte_per_s * width / 16
    return dataclasses.replace(
        device,
        host_link=link.name if width == 16 else "",
        host_byte_per_s=rate,
        host_latency_s=link.latency_s,
        peer_byte_per_s=peer or rate,
        sources={**device.sources, "host_link": _NVML},
    )


def find_gpu(gpu: Gpu) -> DeviceType | None:
    """Return the catalogue's type whose slug or alias is NVML's name of the GPU, or None.

    A card that shares a name but not the compute capability, or has much less memory (a virtual GPU, a slice, another
    edition), is not that type. Drivers report from 90 % (error correction) to a little over 100 % of nominal memory.
    """
    name = normalise(gpu.name).removeprefix("nvidia-")
    device = next((d for d in catalog().types.values() if name in (d.name, *d.aliases)), None)
    if device is None or device.is_cpu or device.compute_capability != "{}.{}".format(*gpu.compute_capability):
        return None
    return device if 0.88 <= gpu.memory_bytes / device.nominal_memory_bytes <= 1.03 else None


def _unknown_gpu(gpu: Gpu) -> tuple[DeviceType, str]:
    """Return a device type made of what NVML reports, and a note that says what it lacks."""
    major, minor = gpu.compute_capability
    lanes = _LANES_OF.get((major, minor), _LANES.get(major, 128))
    known = {
        "sms": gpu.num_cores,
        "boost_clock": gpu.clock_hz,
        "bandwidth": gpu.memory_clock_hz and gpu.memory_bus_bits,
    }
    if missing := [k for k, v in known.items() if not v]:
        raise NotSupported(
            f"GPU {gpu.index} is {gpu.name!r}, which the catalogue does not know, and NVML does not report its "
            f"{', '.join(missing)}",
            "describe it under device_types in a cluster file and read that with ClusterSpec.from_file",
        )
    assert gpu.num_cores and gpu.clock_hz and gpu.memory_clock_hz and gpu.memory_bus_bits
    pin = gpu.memory_clock_hz * _TRANSFERS_PER_CLOCK
    values: dict[str, Any] = {
        "target": {"kind": "cuda", "arch": f"sm_{major}{minor}", **_CUDA_LIMITS},
        "sms": max(1, gpu.num_cores // lanes),
        "lanes_per_sm": lanes,
        "boost_clock": exact_quantity(gpu.clock_hz, Dimension.FREQUENCY),
        "memory": exact_quantity(gpu.memory_bytes, Dimension.BYTES),
        "usable_memory": exact_quantity(_usable_bytes(gpu), Dimension.BYTES),
        "memory_bus": exact_quantity(gpu.memory_bus_bits, Dimension.WIDTH),
        "memory_pin_rate": exact_quantity(pin, Dimension.BIT_RATE),
        "bandwidth": exact_quantity(pin * gpu.memory_bus_bits / 8, Dimension.BYTE_RATE),
        "rates": {"float32": exact_quantity(2 * gpu.num_cores * gpu.clock_hz, Dimension.FLOP_RATE)},
        "source": {"default": _NVML},
        "notes": "not in the catalogue: float32 only, no tensor-core rates",
    }
    if gpu.power_w:
        values["power"] = exact_quantity(gpu.power_w, Dimension.POWER)
    if gpu.num_nvlinks and gpu.nvlink_byte_per_s:
        rate = exact_quantity(gpu.num_nvlinks * gpu.nvlink_byte_per_s, Dimension.BYTE_RATE)
        values["nvlink"] = {"bandwidth": rate, "form": "built-in"}
    name = normalise(gpu.name).removeprefix("nvidia-")
    device = catalog().build(name, DeviceEntry.model_validate(values))
    note = (
        f"{gpu.name!r} is not in the catalogue: its type {name!r} is made of what NVML reports "
        f"({gib(gpu.memory_bytes)}, {device.num_sms} SMs), without tensor-core rates; "
        "describe it under device_types to do better"
    )
    if gpu.pcie_generation and f"pcie{gpu.pcie_generation}" in catalog().links:
        device = _with_pcie(device, gpu)
    return device, note
