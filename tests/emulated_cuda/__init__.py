"""Run CUDA stages without a GPU: TVM's host code as it is, the source of its kernels compiled for this CPU.

    stage.so ──TVM's loader──► load_from_bytes.cuda (ours) ──g++──► kernels over fibers (cuda.h), by their CUDA names

`install` makes device type "cuda" the host's own memory, so that everything from one kernel to a placed program runs:
grids, arguments and launches are those of TVM's host code. A kernel runs when it is launched, so what is not seen is a
missing synchronisation with the host. Where TVM has a CUDA runtime of its own, or g++ is missing, this skips.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import re
import shutil
import struct
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm_ffi
from tvm_ffi import libinfo

from tvmhet.runtime import vm

A100 = {"kind": "cuda", "arch": "sm_80", "max_threads_per_block": 1024, "max_shared_memory_per_block": 49152}
_HERE = Path(__file__).parent
_COMPILER = shutil.which(os.environ.get("CXX", "g++"))
_FLAGS = (
    "-std=gnu++17", "-O1", "-shared", "-fPIC", "-w", "-ffp-contract=off", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE",
    "-fno-exceptions", "-fsanitize=bounds,alignment,signed-integer-overflow,integer-divide-by-zero",
    "-fsanitize-undefined-trap-on-error",
)  # fmt: skip
_KERNEL = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\((\d+)\) )?(\w+)\(([^)]*)\) \{')
_SHARED = re.compile(r"__shared__ (?:alignas\(\d+\) )?([\w ]+?) (\w+)\[(\d+)\];")
_loading = threading.Lock()
_folder = tempfile.TemporaryDirectory(prefix="tvmhet-emulated-cuda-")
_HEAD = """#include "cuda.h"
#include <tvm/ffi/c_api.h>
extern "C" { bool emulated_backwards(); void emulated_enter(); void emulated_leave(); }
static int emulated_error(const char* kernel, const char* problem) {
  const char* parts[] = {kernel, ": ", problem};
  TVMFFIErrorSetRaisedFromCStrParts("RuntimeError", parts, 3);
  return -1;
}
"""
_ALIGNED = 64  # TVM's host code asks for tensors that are
_CUDA = 2  # DLPack's kDLCUDA
_COMPUTE_VERSION, _AVAILABLE_MEMORY = 4, 15  # tvm/runtime/device_api.h: DeviceAttrKind
_DEVICE_TYPE_OFFSET = 24 + 8  # in a tensor object: the header of objects, then DLTensor's pointer (tvm/ffi/c_api.h)


@dataclass(frozen=True, slots=True)
class Kernel:
    """What TVM's CUDA module says of a kernel: its arguments' types and what follows them in a launch."""

    name: str
    arguments: tuple[tuple[int, int, int], ...]  # DLPack's code (3: a pointer), bits, lanes
    launch: tuple[str, ...]


def read_cuda_module(data: bytes) -> tuple[list[Kernel], str]:
    """Return the kernels and the source of a CUDA module as `CUDAModuleNode::SaveToBytes` writes it."""
    place = 0

    def take(form: str) -> Any:
        nonlocal place
        (value,) = struct.unpack_from(f"<{form}", data, place)
        place += struct.calcsize(f"<{form}")
        return value

    def text() -> str:
        nonlocal place
        count = take("Q")
        place += count
        return data[place - count : place].decode()

    assert text() == "cuda", "the module holds no source"
    kernels = []
    for _ in range(take("Q")):
        text()
        name = text()
        arguments = tuple((take("B"), take("B"), take("H")) for _ in range(take("Q")))
        launch = tuple(text() for _ in range(take("Q")))
        for _ in range(take("Q")):
            assert take("i") == 0, "a tensor map"
        kernels.append(Kernel(name, arguments, launch))
    return kernels, text()


def _glue(kernel: Kernel, types: list[str], threads: int) -> str:
    """The function that TVM's host code calls: pointers and numbers, then the extents of the grid and the block."""
    assert len(types) == len(kernel.arguments)
    given = []
    for i, ((code, _, _), kind) in enumerate(zip(kernel.arguments, types, strict=True)):
        field = "v_ptr" if code == 3 else "v_float64" if code == 2 else "v_int64"
        given.append(f"({kind})args[{i}].{field}")
    lines = []
    for i, tag in enumerate(kernel.launch, len(types)):
        where, _, axis = tag.partition(".")
        assert where in ("blockIdx", "threadIdx"), tag
        lines.append(f"  {'grid' if where == 'blockIdx' else 'block'}.{axis} = args[{i}].v_int64;")
    return f"""
extern "C" int __tvm_ffi_{kernel.name}(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {{
  Index grid = {{1, 1, 1}}, block = {{1, 1, 1}};
{chr(10).join(lines)}
  result->type_index = 0;
  const char* problem = "{kernel.name}: other arguments than it takes";
  emulated_enter();
  if (count == {len(types) + len(kernel.launch)} && block.x * block.y * block.z <= {threads})
    problem = emulated::launch(grid, block, emulated_backwards(), [=] {{ {kernel.name}({", ".join(given)}); }});
  const int status = problem ? emulated_error("{kernel.name}", problem) : 0;
  emulated_leave();
  return status;
}}"""


def _cpp(data: bytes) -> str:
    kernels, source = read_cuda_module(data)
    heads = {name: (int(bound or 1024), parameters) for bound, name, parameters in _KERNEL.findall(source)}
    device = _SHARED.sub(r"static auto& \2 = *(\1(*)[\3])emulated::shared(sizeof(\1[\3]));", source)
    glue = []
    for kernel in kernels:
        threads, parameters = heads[kernel.name]
        types = [re.sub(r"\b__restrict__\b|\w+$", "", p.strip()).strip() for p in parameters.split(",") if p.strip()]
        glue.append(_glue(kernel, types, threads))
    return _HEAD + device + "\n".join(glue)


def _load(data: Any) -> Any:
    """Compile and load the kernels of a CUDA module: TVM's loader calls this, from any worker's thread."""
    with _loading:
        return _compiled(_cpp(bytes(data)))


def _compiled(source: str) -> Any:
    library = Path(_folder.name) / f"{hashlib.sha256(source.encode()).hexdigest()[:24]}.so"
    if not library.exists():
        library.with_suffix(".cc").write_text(source)
        includes = [f"-I{path}" for path in (_HERE, libinfo.find_include_path(), libinfo.find_dlpack_include_path())]
        command = [str(_COMPILER), *_FLAGS, *includes, "-o", str(library), str(library.with_suffix(".cc"))]
        done = subprocess.run([*command, str(_order())], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{_COMPILER} does not take the kernels: {done.stderr[:2000]}")
    return tvm_ffi.load_module(str(library))


_SHARED_STATE = """#include <mutex>
static std::mutex running;  // one kernel at a time: the fibers of a library are its own, and workers are threads
extern "C" {
bool emulated_order;
bool emulated_backwards() { return emulated_order; }
void emulated_enter() { running.lock(); }
void emulated_leave() { running.unlock(); }
}
"""


@cache
def _order() -> Path:
    """A library with what all kernels share: the order of threads, and whose turn it is."""
    library = Path(_folder.name) / "liborder.so"
    source = library.with_suffix(".cc")
    source.write_text(_SHARED_STATE)
    subprocess.run([str(_COMPILER), "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return library


@contextmanager
def backwards() -> Iterator[None]:
    """Inside, the threads of a block, and the blocks, run in reversed order: what depends on it is a race."""
    order = ctypes.c_bool.in_dll(ctypes.CDLL(str(_order())), "emulated_order")
    order.value = True
    try:
        yield
    finally:
        order.value = False


@cache
def install() -> None:
    """Make "cuda" a device of this process, once. Skips the test where that cannot be."""
    assert _COMPILER is not None, "no g++ (or $CXX) for the emulated kernels: building tvmhet needs a C++ compiler, too"
    import tvm  # noqa: F401  # loads its CUDA runtime where there is one

    if tvm_ffi.get_global_func("device_api.cuda", allow_missing=True) is not None:
        pytest.skip("TVM has a CUDA runtime here; tests marked gpu use it")
    tvm_ffi.register_global_func("device_api.cuda", tvm_ffi.get_global_func("device_api.cpu"))
    tvm_ffi.register_global_func("ffi.Module.load_from_bytes.cuda", _load)
    attribute = tvm_ffi.get_global_func("runtime.GetDeviceAttr")
    own = {_COMPUTE_VERSION: lambda: "8.0", _AVAILABLE_MEMORY: _available_bytes}
    tvm_ffi.register_global_func(
        "runtime.GetDeviceAttr",
        lambda device, ordinal, kind: (
            own[kind]() if device == _CUDA and kind in own else attribute(device, ordinal, kind)
        ),
        override=True,
    )


def _available_bytes() -> int:
    """As much less than 16 GiB as this process holds."""
    with open("/proc/self/status") as status:
        (held,) = [int(line.split()[1]) for line in status if line.startswith("RssAnon")]
    return (16 << 30) - 1024 * held


def on_device(array: np.ndarray) -> tuple[Any, np.ndarray]:
    """Return a tensor of the emulated device with the array's content, and an array over its memory.

    Pages that fault lie before it and behind it; what is left of its last 64 bytes is full of ones.
    """
    page = mmap.PAGESIZE
    whole = -(-max(array.nbytes, 1) // page) * page
    base = np.frombuffer(mmap.mmap(-1, whole + 2 * page), np.uint8)
    for begin in (0, whole + page):
        address = ctypes.c_void_p(base.ctypes.data + begin)
        assert ctypes.CDLL(None).mprotect(address, ctypes.c_size_t(page), 0) == 0
    start = page + whole - -(-array.nbytes // _ALIGNED) * _ALIGNED
    base[page : page + whole] = 0xFF
    held = base[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    held[...] = array
    tensor = vm.host_view(held)
    ctypes.c_int32.from_address(tensor.__chandle__() + _DEVICE_TYPE_OFFSET).value = _CUDA
    return tensor, held


def assert_nothing_beside(held: np.ndarray) -> None:
    """Assert that no byte was written between the end of a tensor of `on_device` and the page that faults."""
    beside = -held.nbytes % _ALIGNED
    after = (ctypes.c_uint8 * beside).from_address(held.ctypes.data + held.nbytes)
    assert all(byte == 0xFF for byte in after), "written behind the end of a tensor"
