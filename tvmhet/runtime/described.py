"""Devices as a bundle or another machine is told of them, and tied again to what stands where they are told."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tvmhet.cluster.local import ordinals_for
from tvmhet.runtime.cores import CpuDevice, assign_cores
from tvmhet.runtime.program import DeviceBinding


def describe_devices(bindings: Iterable[DeviceBinding]) -> list[dict[str, Any]]:
    """Return what another machine needs to bind the devices: `bind_described`."""
    return [{"id": b.device_id, "kind": b.kind, "isa": b.isa, "num_cores": b.num_cores} for b in bindings]


def bind_described(devices: Sequence[Mapping[str, Any]]) -> dict[str, DeviceBinding]:
    """Tie the devices to this machine's cores, and to its GPUs of their types."""
    cpus = [CpuDevice(d["id"], d["num_cores"], d["isa"]) for d in devices if d["kind"] == "llvm"]
    gpus = ordinals_for([d["id"] for d in devices if d["kind"] != "llvm"])
    bindings = dict(assign_cores(cpus)) if cpus else {}
    return bindings | {name: DeviceBinding(name, "cuda", ordinal=ordinal) for name, ordinal in gpus.items()}
