"""Compile CUDA source for a compute capability without a GPU, and read what each kernel takes of one.

    source of a stage ──► NVRTC (with its own ptxas) ──► cubin, and per kernel: registers, spills, shared memory

NVRTC and its headers come with `pip install tvmhet[nvrtc]`, at version 12.9: the last that still makes code for sm_60
and sm_70. The options are those with which TVM compiles such source where it is loaded, but for `--use_fast_math`: that
makes tanh 5e-4 wrong (tanh.approx) and sin and cos of large arguments more (the positions of a long sequence), so of
what it means only division, roots (within 2 ulp) and subnormal numbers are taken. TVM's own function for it
(`tvm.support.nvcc`) drops the log, which is where ptxas says what the kernels take.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import tvm

from tvmhet.cluster.device import DeviceType
from tvmhet.emit.nvrtc_headers import STANDARD_HEADERS
from tvmhet.errors import BadInput, MissingPackage, UnsupportedOperator

_OPTIONS = (
    "-default-device", "--device-int128", "--ftz=true", "--prec-div=false", "--prec-sqrt=false", "--disable-warnings",
    "--ptxas-options=-v", "--ptxas-options=--register-usage-level=10",
)  # fmt: skip
_PREAMBLE = """#ifndef INFINITY
#define INFINITY (__int_as_float(0x7f800000))
#endif
#define inff INFINITY
"""  # TVM writes a bfloat16 that is infinite as __float2bfloat16_rn(inff)
_REMEDY = "pip install tvmhet[nvrtc]"
_REGISTERS_PER_SM = 65536  # of every compute capability from 6.0 to 12.0 (CUDA C++ programming guide)
_WARP = 32
_ENTRY = re.compile(r"Compiling entry function '(?P<name>[^']+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_BOUNDS = re.compile(r"__global__ void __launch_bounds__\((\d+)\) (\w+)\(")


@dataclass(frozen=True, slots=True)
class KernelResources:
    """What ptxas gave one kernel: registers and spilled bytes of a thread, shared memory and threads of a block."""

    name: str
    threads: int
    registers: int
    spill_bytes: int  # stored, then loaded again
    stack_bytes: int
    shared_bytes: int

    def occupancy(self, device: DeviceType) -> float:
        """Return the share of a multiprocessor's threads that blocks of this kernel can fill, 0 to 1.

        Limited by registers, shared memory and threads; 0 for a kernel of which no block fits.
        """
        warps = -(-self.threads // _WARP)
        blocks = device.max_threads_per_sm // (warps * _WARP)
        blocks = min(blocks, _REGISTERS_PER_SM // (max(1, self.registers) * warps * _WARP))
        if self.shared_bytes:
            blocks = min(blocks, device.shared_bytes_per_sm // self.shared_bytes)
        return blocks * warps * _WARP / device.max_threads_per_sm


@dataclass(frozen=True, slots=True)
class Cubin:
    """Machine code for one compute capability, and its kernels in the order of the source."""

    arch: str
    code: bytes
    kernels: tuple[KernelResources, ...]


def compile_cubin(source: str, arch: str) -> Cubin:
    """Compile CUDA source as TVM's codegen writes it for an architecture such as "sm_80".

    Raises MissingPackage without NVRTC or its headers, UnsupportedOperator with the compiler's first error.
    """
    if re.fullmatch(r"sm_\d+[af]?", arch) is None:
        raise BadInput(f"{arch!r} is no CUDA architecture", 'give one such as "sm_80"')
    nvrtc = _nvrtc()
    options = [o.encode() for o in (f"--gpu-architecture={arch}", *_OPTIONS, *(f"-I{p}" for p in include_dirs()))]
    program = ctypes.c_void_p()
    text = (_PREAMBLE + source).encode()
    _check(nvrtc, nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, b"stage.cu", *_in_memory(STANDARD_HEADERS)))
    try:
        status = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        log = _read(nvrtc, "ProgramLog", program).decode(errors="replace").rstrip("\0")
        if status:
            raise UnsupportedOperator(
                f"NVRTC cannot compile the source for {arch}: {_first_error(log)}",
                "pin its operators to another device type, or report the operator to Apache TVM",
            )
        code = _read(nvrtc, "CUBIN", program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return Cubin(arch, code, kernel_resources(source, log))


def cuda_sources(module: tvm.runtime.Module) -> tuple[str, ...]:
    """Return the CUDA source of each device module that a compiled stage imports."""
    own = (module.inspect_source(),) if module.kind == "cuda" else ()
    return (*own, *(source for imported in module.imports for source in cuda_sources(imported)))


def kernel_resources(source: str, log: str) -> tuple[KernelResources, ...]:
    """Return what ptxas (`-v`) says of the kernels of `source`, in the order of the source."""
    threads = {name: int(count) for count, name in _BOUNDS.findall(source)}
    found = {}
    for part in log.split("ptxas info    : Compiling")[1:]:
        part = "Compiling" + part
        entry, used = _ENTRY.match(part), _USED.search(part)
        if entry is None or used is None:
            continue
        stack, stored, loaded = map(int, spills.groups()) if (spills := _SPILLS.search(part)) else (0, 0, 0)
        shared = _SHARED.search(part)
        name = entry["name"]
        found[name] = KernelResources(
            name, threads.get(name, 0), int(used[1]), stored + loaded, stack, int(shared[1]) if shared else 0
        )
    return tuple(found[name] for name in threads if name in found)


def include_dirs() -> tuple[Path, ...]:
    """Return where CUDA's headers lie: those of the pip package, else those under $CUDA_PATH or /usr/local/cuda."""
    if (packaged := _package_dir("nvidia.cuda_runtime")) is not None:
        return (packaged / "include",)
    root = Path(os.environ.get("CUDA_PATH", "/usr/local/cuda")) / "include"
    found = tuple(p for p in (root, root / "cccl") if p.is_dir())
    if not any((p / "cuda_fp16.h").exists() for p in found):
        raise MissingPackage("CUDA's headers were not found, so no cubin can be made", _REMEDY)
    return found


def _package_dir(name: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return None
    places = list(spec.submodule_search_locations or []) if spec else []
    return Path(places[0]) if places else None


@cache
def _nvrtc() -> ctypes.CDLL:
    """NVRTC's library: that of the pip package, else one that the system finds.

    Not by cuda-bindings: torch for CUDA 13 wants those of CUDA 13, whose NVRTC no longer makes code for sm_70.
    """
    package = _package_dir("nvidia.cuda_nvrtc")
    places = [str(package / "lib" / "libnvrtc.so.12")] if package is not None else []
    for name in (*places, "libnvrtc.so.12", "libnvrtc.so.13"):
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        return library
    raise MissingPackage("NVRTC cannot be used: libnvrtc.so was not found", _REMEDY)


def _in_memory(headers: Mapping[str, str]) -> tuple[int, ctypes.Array[ctypes.c_char_p], ctypes.Array[ctypes.c_char_p]]:
    """Return how many headers there are, their texts and their names, as NVRTC takes them."""
    strings = ctypes.c_char_p * len(headers)
    return len(headers), strings(*(t.encode() for t in headers.values())), strings(*(n.encode() for n in headers))


def _check(nvrtc: ctypes.CDLL, status: int) -> None:
    if status:
        raise RuntimeError(f"NVRTC: {nvrtc.nvrtcGetErrorString(status).decode()}")


def _read(nvrtc: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> bytes:
    """What NVRTC made, "CUBIN" or "ProgramLog"."""
    size = ctypes.c_size_t()
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    made = ctypes.create_string_buffer(size.value)
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}")(program, made))
    return made.raw


def _first_error(log: str) -> str:
    lines = log.strip().splitlines()
    return next((line for line in lines if "error" in line), lines[0] if lines else "no message")[:300]
