"""A placement by name: which operators form a kernel, which kernels a stage, which devices run it. Plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KernelPlacement:
    """One kernel: the operators it fuses (by name, in topological order) and who makes it ("tvm", "library",
    "concurrent").

    `spec` is the program of a library kernel (`tvmhet.graph.library`), the branches of a concurrent one
    (`tvmhet.graph.concurrent`), the schedule of a tuned one (`tvmhet.graph.schedule`), "" for a kernel that TVM makes
    by the rules.
    """

    name: str
    ops: tuple[str, ...]
    maker: str
    spec: str = ""


@dataclass(frozen=True, slots=True)
class StagePlacement:
    """One stage: kernels in execution order, the device type, and the ids of the devices that replicate it."""

    index: int
    kernels: tuple[KernelPlacement, ...]
    device_type: str
    devices: tuple[str, ...]

    @property
    def ops(self) -> tuple[str, ...]:
        """Names of all operators of the stage, kernel by kernel."""
        return tuple(o for k in self.kernels for o in k.ops)
