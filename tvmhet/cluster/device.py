"""One kind of device: what it computes, stores and moves per second, and the target TVM compiles it for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True)
class DeviceType:
    """A device model such as an L4, or one CPU core set limited to an instruction set.

    Figures are per device, SI units. `peak_flop_per_s` maps a dtype ("float32", "float16", "bfloat16", "float8",
    "int8", ...) to the dense peak on the fastest unit that serves it (tensor cores where a dtype has them);
    "tfloat32" is the tensor-core rate that float32 matmuls may opt into. `launch_s` is the fixed cost of one kernel.
    """

    name: str
    kind: str  # TVM target kind: "cuda" or "llvm"
    target: Mapping[str, Any]  # a dict that tvm.target.Target accepts
    memory_bytes: int
    dram_byte_per_s: float
    l2_bytes: int
    peak_flop_per_s: Mapping[str, float]
    launch_s: float
    num_sms: int  # streaming multiprocessors; cores for a CPU
    clock_hz: float
    power_w: float
    host_byte_per_s: float  # host link, one direction (PCIe or the memory bus)
    peer_byte_per_s: float  # device to device inside a node, one direction (NVLink, else the host link)
    aliases: tuple[str, ...] = ()
    usd_per_h: float | None = None
    sources: Mapping[str, str] = field(default_factory=dict)  # field name -> data sheet

    def __post_init__(self) -> None:
        for attr in ("target", "peak_flop_per_s", "sources"):
            object.__setattr__(self, attr, MappingProxyType(dict(getattr(self, attr))))

    @property
    def is_cpu(self) -> bool:
        """Whether kernels run on host cores."""
        return self.kind == "llvm"
