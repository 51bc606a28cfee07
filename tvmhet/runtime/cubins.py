"""Machine code for the CUDA source of a stage, offered to TVM's loader in place of a compilation.

    stage0.so: CUDA source ──► TVM's loader asks for it compiled ──► the cubin of that very source, if the device is of
                                                                     its architecture; else compiled for that device

A file of cubins is a zip: `kernels.json` (architecture, compiler, what each kernel takes) and a cubin per source, named
by the sha256 of the source, so that one of another source is never loaded. TVM's loader calls the registered function
`tvm_callback_cuda_compile` for each device module, in the thread that loads the stage.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvmhet.errors import MissingPackage

_KERNELS = "kernels.json"
_DATE = (1980, 1, 1, 0, 0, 0)  # of entries: equal cubins make equal files
_CALLBACK = "tvm_callback_cuda_compile"
_local = threading.local()
_lock = threading.Lock()
_installed: list[Any] = []  # the callback of before, once ours stands in its place


def _name(source: str) -> str:
    return f"{hashlib.sha256(source.encode()).hexdigest()}.cubin"


@dataclass(frozen=True, slots=True)
class Cubins:
    """A file of cubins: its architecture such as "sm_80", the code by name, and what ptxas says of each kernel."""

    arch: str
    code: Mapping[str, bytes]
    kernels: Sequence[Mapping[str, Any]]

    @classmethod
    def read(cls, path: Path) -> Cubins:
        """Read a file of cubins. Raises ValueError for another file."""
        try:
            with zipfile.ZipFile(path) as archive:
                about = json.loads(archive.read(_KERNELS))
                code = {name: archive.read(name) for name in archive.namelist() if name != _KERNELS}
        except (zipfile.BadZipFile, KeyError) as error:
            raise ValueError(f"{path.name} is no file of cubins: {error}") from error
        return cls(str(about["arch"]), code, about["kernels"])


def write_cubins(path: Path, arch: str, code: Mapping[str, bytes], kernels: Sequence[Mapping[str, Any]]) -> None:
    """Write cubins, given by their source, and what is known of their kernels."""
    entries = {_KERNELS: json.dumps({"arch": arch, "kernels": list(kernels)}, indent=1).encode()}
    entries |= {_name(source): code[source] for source in sorted(code, key=_name)}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries.items():
            archive.writestr(zipfile.ZipInfo(name, _DATE), content, zipfile.ZIP_DEFLATED)


@contextmanager
def compiled_for(device_arch: str, cubins: Cubins | None = None) -> Iterator[None]:
    """While a stage is loaded in this thread, give TVM machine code for a device: cubins if they suit, else compiled.

    `device_arch` is as "sm_80". Code for "sm_90a" runs on sm_90, code for "sm_80" is not given to any other device.
    Left alone, TVM compiles for the first GPU of the process, whichever GPU the stage is for.
    """
    _install()
    suits = cubins is not None and cubins.arch.rstrip("af") == device_arch
    _local.code = cubins.code if cubins is not None and suits else {}
    _local.arch = device_arch
    try:
        yield
    finally:
        _local.code, _local.arch = {}, None


def _install() -> None:
    import tvm_ffi

    importlib.import_module("tvm")  # registers the function that ours stands for
    with _lock:
        if not _installed:
            _installed.append(tvm_ffi.get_global_func(_CALLBACK))
            tvm_ffi.register_global_func(_CALLBACK, _compiled(_installed[0]), override=True)


def _compiled(compiler: Callable[[str], Any]) -> Callable[[str], Any]:
    """The callback: the cubin that is offered, else what is compiled for the device; outside, `compiler` as before."""

    def compiled(source: str) -> Any:
        known = getattr(_local, "code", {}).get(_name(source))
        if known is not None:
            return known
        arch = getattr(_local, "arch", None)
        return compiler(source) if arch is None else _compile(source, arch, compiler)

    return compiled


def _compile(source: str, arch: str, compiler: Callable[[str], Any]) -> Any:
    """Compile by NVRTC as for bundles; by TVM's `compiler`, which wants a CUDA toolkit, where that is not installed.

    TVM's own variable TVM_CUDA_COMPILE_MODE asks for the latter. Raises MissingPackage when neither can.
    """
    if "TVM_CUDA_COMPILE_MODE" not in os.environ:
        with suppress(MissingPackage):
            return importlib.import_module("tvmhet.emit.nvrtc").compile_cubin(source, arch).code
    target = importlib.import_module("tvm.target").Target
    try:
        with target({"kind": "cuda", "arch": arch}):
            return compiler(source)
    except Exception as error:  # TVM's compilers raise anything
        raise MissingPackage(
            f"kernels cannot be compiled for {arch}: {error}",
            "pip install tvmhet[nvrtc], or run an exported bundle that carries cubins for this GPU",
        ) from error
