"""What NVML says of this machine's NVIDIA GPUs. Reading only: no setting is ever changed.

NVML is reached through `nvidia-ml-py`. A machine without a driver, or with one that does not answer, has no GPU here;
the reason is kept for the notes of the cluster.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


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
    num_nvlinks: int  # active ones
    nvlink_byte_per_s: float | None  # of one link, one direction
    power_w: float | None
    uuid: str = ""  # "GPU-...", which CUDA_VISIBLE_DEVICES may name


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


def visible_gpus(gpus: tuple[Gpu, ...], variable: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA shows a process whose CUDA_VISIBLE_DEVICES is `variable`, in CUDA's order.

    None shows all. Entries are indices or the beginning of a UUID; as in CUDA, the first that fits none ends the list.
    """
    if variable is None:
        return gpus
    shown: list[Gpu] = []
    for entry in (e.strip() for e in variable.split(",")):
        match = [g for g in gpus if (entry.isdigit() and int(entry) == g.index) or _starts(g.uuid, entry)]
        if len(match) != 1 or match[0] in shown:
            break
        shown += match
    return tuple(shown)


def _starts(uuid: str, entry: str) -> bool:
    return entry.startswith("GPU-") and uuid.startswith(entry)


def _read(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def ask(question: Callable[..., Any], *args: Any) -> Any:
        """Return the answer, or None from a card or driver that does not know the question."""
        try:
            return question(handle, *args)
        except nvml.NVMLError:
            return None

    clock_mhz = ask(nvml.nvmlDeviceGetMaxClockInfo, nvml.NVML_CLOCK_SM)
    memory_mhz = ask(nvml.nvmlDeviceGetMaxClockInfo, nvml.NVML_CLOCK_MEM)
    power_mw = ask(nvml.nvmlDeviceGetPowerManagementDefaultLimit)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(
        index=index,
        name=_text(nvml.nvmlDeviceGetName(handle)),
        memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        compute_capability=(int(major), int(minor)),
        clock_hz=clock_mhz and clock_mhz * 1e6,
        memory_clock_hz=memory_mhz and memory_mhz * 1e6,
        memory_bus_bits=ask(nvml.nvmlDeviceGetMemoryBusWidth),
        num_cores=ask(nvml.nvmlDeviceGetNumGpuCores),
        pcie_generation=ask(nvml.nvmlDeviceGetMaxPcieLinkGeneration),
        pcie_width=ask(nvml.nvmlDeviceGetMaxPcieLinkWidth),
        num_nvlinks=sum(
            ask(nvml.nvmlDeviceGetNvLinkState, link) == nvml.NVML_FEATURE_ENABLED
            for link in range(nvml.NVML_NVLINK_MAX_LINKS)
        ),
        nvlink_byte_per_s=_nvlink_speed(nvml, ask),
        power_w=power_mw and power_mw / 1e3,
        uuid=_text(ask(nvml.nvmlDeviceGetUUID)),
    )


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else value or ""


def _nvlink_speed(nvml: Any, ask: Callable[..., Any]) -> float | None:
    """Return the common speed of the active links, which NVML gives in MB/s."""
    values = ask(nvml.nvmlDeviceGetFieldValues, [nvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON])
    if not values or values[0].nvmlReturn != nvml.NVML_SUCCESS:
        return None
    return values[0].value.uiVal * 1e6 or None
