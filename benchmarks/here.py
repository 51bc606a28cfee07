"""The device types of this machine, and code compiled for its first GPU."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from tvmhet.cluster.cpu import read_cpu
from tvmhet.cluster.local import cuda_ordinals, type_of


def cpu_types() -> tuple[str, ...]:
    """Return one device type for each x86-64 level of this processor, lowest first. Exits below x86-64-v2."""
    levels = read_cpu().levels
    if not levels:
        raise SystemExit("this benchmark needs an x86-64-v2 processor or later")
    return tuple(f"cpu-{level}" for level in levels)


def gpu_type() -> str:
    """Return the device type of this machine's first GPU. Exits without one."""
    ordinals = cuda_ordinals()
    if not ordinals:
        raise SystemExit("this machine has no NVIDIA GPU that can be described: see tvmhet devices --local")
    return type_of(min(ordinals, key=lambda name: ordinals[name]))


def on_gpu(executable: Any) -> Any:
    """Return the virtual machine of a compiled stage, on the first GPU."""
    import tvm
    from tvm import relax

    from tvmhet.runtime.cubins import compiled_for
    from tvmhet.runtime.cuda import architecture

    arch = architecture(0)
    with tempfile.TemporaryDirectory() as folder, compiled_for(arch):
        executable.export_library(str(Path(folder) / "stage.so"))  # it holds source, which loading compiles
        return relax.VirtualMachine(tvm.runtime.load_module(str(Path(folder) / "stage.so")), tvm.cuda(0))
