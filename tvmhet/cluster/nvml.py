"""What NVML says of this machine's NVIDIA GPUs. Reading only: no setting is ever changed.

NVML is reached through `nvidia-ml-py`. A machine without a driver, or with one that does not answer, has no GPU here;
the reason is kept for the notes of the cluster.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# One link's rate in one direction by NVLink version, as nvmlDeviceGetNvLinkVersion counts (NVIDIA whitepapers of P100,
# V100, A100, H100 and Blackwell): the version doubles lanes or signalling, never both.
_NVLINK_BYTE_PER_S = {1: 20e9, 2: 25e9, 3: 25e9, 4: 25e9, 5: 50e9}
_MAX_NVLINKS = 18


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as NVML reports it; None where the driver or the card does not say."""

    index: int
    name: str
    memory_bytes: int
    compute_capability: tuple[int, int]
    clock_hz: float | None
    memory_clock_hz: float | None
    memory_bus_bits: int | None
    num_cores: int | None
    pcie_generation: int | None
    pcie_width: int | None
    nvlink_byte_per_s: float | None  # all active links together, one direction
    power_w: float | None


@dataclass(frozen=True, slots=True)
class NvmlReport:
    """The GPUs in index order, and why there are none."""

    gpus: tuple[Gpu, ...]
    reason: str = ""


def read_nvml() -> NvmlReport:
    """Return what NVML reports. Never raises: without an answer, `reason` says what is missing."""
    try:
        import pynvml
    except ImportError:
        return NvmlReport((), "the package nvidia-ml-py is not installed")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        return NvmlReport((), "no NVIDIA GPU on this machine")
    except pynvml.NVMLError as e:
        return NvmlReport((), f"the NVIDIA driver does not answer ({e})")
    try:
        count = pynvml.nvmlDeviceGetCount()
        gpus = tuple(_read(pynvml, i) for i in range(count))
        return NvmlReport(gpus, "" if gpus else "no NVIDIA GPU on this machine")
    except pynvml.NVMLError as e:
        return NvmlReport((), f"the NVIDIA driver does not answer ({e})")
    finally:
        pynvml.nvmlShutdown()


def _read(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def ask(question: Callable[..., Any], *args: Any) -> Any:
        """Return the answer, or None from a card or driver that does not know the question."""
        try:
            return question(handle, *args)
        except nvml.NVMLError:
            return None

    name = nvml.nvmlDeviceGetName(handle)
    clock_mhz = ask(nvml.nvmlDeviceGetMaxClockInfo, nvml.NVML_CLOCK_SM)
    memory_mhz = ask(nvml.nvmlDeviceGetMaxClockInfo, nvml.NVML_CLOCK_MEM)
    power_mw = ask(nvml.nvmlDeviceGetPowerManagementDefaultLimit)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(
        index=index,
        name=name.decode() if isinstance(name, bytes) else name,
        memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        compute_capability=(int(major), int(minor)),
        clock_hz=clock_mhz and clock_mhz * 1e6,
        memory_clock_hz=memory_mhz and memory_mhz * 1e6,
        memory_bus_bits=ask(nvml.nvmlDeviceGetMemoryBusWidth),
        num_cores=ask(nvml.nvmlDeviceGetNumGpuCores),
        pcie_generation=ask(nvml.nvmlDeviceGetMaxPcieLinkGeneration),
        pcie_width=ask(nvml.nvmlDeviceGetMaxPcieLinkWidth),
        nvlink_byte_per_s=_nvlink(nvml, ask),
        power_w=power_mw and power_mw / 1e3,
    )


def _nvlink(nvml: Any, ask: Callable[..., Any]) -> float | None:
    total = 0.0
    for link in range(_MAX_NVLINKS):
        if ask(nvml.nvmlDeviceGetNvLinkState, link) == nvml.NVML_FEATURE_ENABLED:
            version = ask(nvml.nvmlDeviceGetNvLinkVersion, link)
            total += _NVLINK_BYTE_PER_S.get(version or 0, 0.0)
    return total or None
