"""One kind of device: what it computes, stores and moves per second, and the target TVM compiles it for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from tvmhet.errors import BadInput


@dataclass(frozen=True, slots=True)
class DeviceType:
    """A device model such as an L4, or one CPU core set limited to an instruction set.

    Figures are per device, SI units. `peak_flop_per_s` maps a dtype ("float32", "float16", "bfloat16", "float8",
    "int8", ...) to the dense peak on the fastest unit that serves it (tensor cores where a dtype has them);
    "tfloat32" is the tensor-core rate that float32 matmuls may opt into. `launch_s` is the fixed cost of one kernel.
    Optional figures are None (or 0 where a count has no meaning, as shared memory on a CPU) when not known.
    """

    name: str
    kind: str  # TVM target kind: "cuda" or "llvm"
    target: Mapping[str, Any]  # a dict that tvm.target.Target accepts
    memory_bytes: int  # what tensors may fill: without what ECC, the driver and a process's context keep
    dram_byte_per_s: float
    l2_bytes: int
    peak_flop_per_s: Mapping[str, float]
    launch_s: float
    num_sms: int  # streaming multiprocessors; cores for a CPU
    clock_hz: float  # boost: what the peak rates are quoted at
    power_w: float
    host_byte_per_s: float  # host link, one direction (PCIe, NVLink-C2C or the memory bus)
    peer_byte_per_s: float  # device to device inside a node, one direction (built-in NVLink, else the host link)
    nominal_memory_bytes: int = 0  # as sold; 0: as `memory_bytes`
    aliases: tuple[str, ...] = field(default=(), repr=False)
    usd_per_h: float | None = None
    sources: Mapping[str, str] = field(default_factory=dict, repr=False)  # field name -> data sheet
    architecture: str = ""  # "Ampere", "x86-64-v3", ...
    base_clock_hz: float | None = None  # what the maker promises under full load
    lanes_per_sm: int = 0  # float32 multiply-adds per SM (or core) and cycle
    shared_bytes_per_sm: int = 0
    max_threads_per_sm: int = 0
    memory_bus_bits: int | None = None
    memory_bit_per_s: float | None = None  # of one pin of the memory bus
    inline_ecc: bool = False  # check bits share the DRAM with the data (GDDR cards made for servers): less bandwidth
    host_link: str = ""  # link class: "pcie4", "shm", ...; empty when the file spells the link out
    host_latency_s: float = 0.0
    nvlink_byte_per_s: float | None = None  # one direction; None: the device has no NVLink
    nvlink_is_bridge: bool = False  # an optional bridge that joins two cards, not a built-in fabric
    time_table: str | None = None  # a file of measured times that the user supplies
    notes: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        for attr in ("target", "peak_flop_per_s", "sources"):
            object.__setattr__(self, attr, MappingProxyType(dict(getattr(self, attr))))
        object.__setattr__(self, "nominal_memory_bytes", self.nominal_memory_bytes or self.memory_bytes)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle through plain dicts: worker processes receive device types, and mapping proxies cannot travel."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return _rebuild, ({k: dict(v) if isinstance(v, MappingProxyType) else v for k, v in values.items()},)

    def __hash__(self) -> int:
        """Hash by name: equal types have equal names, and the mappings inside have no hash of their own."""
        return hash(self.name)

    @property
    def is_cpu(self) -> bool:
        """Whether kernels run on host cores."""
        return self.kind == "llvm"

    @property
    def compute_capability(self) -> str | None:
        """CUDA compute capability such as "8.0", or None for other targets."""
        arch = str(self.target.get("arch", ""))
        digits = arch.removeprefix("sm_").rstrip("af")
        return f"{digits[:-1]}.{digits[-1]}" if self.kind == "cuda" and digits.isdigit() else None

    def peak(self, dtype: str) -> float:
        """Return the dense peak in FLOP/s for `dtype`; a dtype without units of its own runs as float32."""
        return self.peak_flop_per_s.get(dtype, self.peak_flop_per_s["float32"])

    def with_cores(self, num_cores: int) -> DeviceType:
        """Return a CPU device of `num_cores` such cores; its name ends in "-<n>core" unless n is 1.

        Arithmetic, bandwidth, L2 and power grow with the cores; memory does not: it is the machine's.
        Raises BadInput for a device that is not one CPU core.
        """
        if not self.is_cpu or self.num_sms != 1:
            raise BadInput(f"{self.name!r} is not a single CPU core, so it cannot be given {num_cores} cores",
                           "leave `cores` out, or give it to a type such as cpu-x86-64-v3")  # fmt: skip
        if num_cores < 1:
            raise BadInput(f"{self.name!r} is given {num_cores} cores", "a CPU device has at least 1 core")
        if num_cores == 1:
            return self
        return dataclasses.replace(
            self,
            name=f"{self.name}-{num_cores}core",
            aliases=(),
            target={**self.target, "num-cores": num_cores},
            num_sms=num_cores,
            peak_flop_per_s={d: r * num_cores for d, r in self.peak_flop_per_s.items()},
            dram_byte_per_s=self.dram_byte_per_s * num_cores,
            l2_bytes=self.l2_bytes * num_cores,
            power_w=self.power_w * num_cores,
        )

    def one_core(self) -> DeviceType:
        """Return one core of a CPU device: what `with_cores` made this of. Raises BadInput for other devices."""
        if not self.is_cpu:
            raise BadInput(f"{self.name!r} is no CPU", "only CPU devices have cores that work alone")
        n = self.num_sms
        return dataclasses.replace(
            self,
            name=self.name.removesuffix(f"-{n}core"),
            target={**self.target, "num-cores": 1},
            num_sms=1,
            peak_flop_per_s={d: r / n for d, r in self.peak_flop_per_s.items()},
            dram_byte_per_s=self.dram_byte_per_s / n,
            l2_bytes=self.l2_bytes // n,
            power_w=self.power_w / n,
        )


def _rebuild(values: dict[str, Any]) -> DeviceType:
    return DeviceType(**values)
