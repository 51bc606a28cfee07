"""The few calls into TVM's runtime that run a compiled stage: load, view, copy, wait.

`import tvm` takes seconds of CPU and a worker needs none of the compiler, so this file loads only the runtime library
and speaks to it through tvm_ffi. Stages that call functions which TVM registers from Python get the whole of tvm.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from tvmhet._passes import load_passes
from tvmhet.errors import MissingPackage
from tvmhet.runtime.cubins import Cubins, compiled_for
from tvmhet.runtime.cuda import architecture
from tvmhet.runtime.program import Array, numpy_dtype

_DEVICE_TYPE = {"llvm": 1, "cuda": 2}  # DLPack's kDLCPU and kDLCUDA
_AVAILABLE_MEMORY = 15  # tvm/runtime/device_api.h: DeviceAttrKind
_POOLED_ALLOCATOR = 2  # tvm.runtime.vm.VirtualMachine.POOLED_ALLOCATOR
_DLPACK_KINDS = "biuf"  # numpy kinds that numpy itself exports through DLPack


@lru_cache(maxsize=1)
def _ffi() -> Any:
    """Load TVM's runtime library and that of passes/ (once) and return tvm_ffi."""
    import tvm_ffi
    from tvm_ffi.libinfo import load_lib_ctypes

    spec = importlib.util.find_spec("tvm")
    if spec is None or spec.origin is None:
        raise MissingPackage("running a compiled stage needs apache-tvm", "pip install apache-tvm==0.27.0.post1")
    folder = Path(spec.origin).parent / "lib"
    load_lib_ctypes("tvm", "tvm_runtime", "RTLD_GLOBAL", extra_lib_paths=[folder])
    load_lib_ctypes("tvm", "tvm_runtime_extra", "RTLD_GLOBAL", extra_lib_paths=[folder])  # sort, top-k
    load_passes()  # TensorAt, where stages have their tensors
    return tvm_ffi


@cache
def _runtime_func(name: str) -> Any:
    return _ffi().get_global_func(name)


def load_function(
    library: Path, function: str, kind: str, ordinal: int, cubins: Path | None = None
) -> Callable[..., Any]:
    """Return a function of an exported Relax VM executable, ready to run on one device: see `load_functions`."""
    return load_functions(library, (function,), kind, ordinal, cubins)[0]


def load_functions(
    library: Path, functions: Sequence[str], kind: str, ordinal: int, cubins: Path | None = None
) -> tuple[Callable[..., Any], ...]:
    """Return functions of an exported Relax VM executable, in one machine, ready to run on one device.

    A machine holds the last result of any of them until the next call. Host memory for shape functions is on CPU 0.
    `cubins` is machine code for its CUDA source; where the device is of another architecture, and where there is none,
    the source is compiled for the device. Raises RuntimeError with TVM's text when the file cannot be loaded or its
    source not compiled, MissingPackage and NotSupported where CUDA is not as it needs.
    """
    if kind == "cuda":
        arch = architecture(ordinal)
        with compiled_for(arch, None if cubins is None else Cubins.read(cubins)):
            return _load_any(library, functions, kind, ordinal)
    return _load_any(library, functions, kind, ordinal)


def _load_any(library: Path, functions: Sequence[str], kind: str, ordinal: int) -> tuple[Callable[..., Any], ...]:
    """As `_initialise`, with the whole of tvm where a stage calls what TVM registers from Python."""
    try:
        return _initialise(library, functions, kind, ordinal)
    except RuntimeError as error:
        if "Cannot find" not in str(error) or "registry" not in str(error):
            raise
        importlib.import_module("tvm")  # registers relax.run.unique and others
        return _initialise(library, functions, kind, ordinal)


def _initialise(library: Path, functions: Sequence[str], kind: str, ordinal: int) -> tuple[Callable[..., Any], ...]:
    machine = _ffi().load_module(str(library.resolve()))["vm_load_executable"]()
    devices = [(_DEVICE_TYPE[kind], ordinal)]
    if kind != "llvm":
        devices.append((_DEVICE_TYPE["llvm"], 0))
    machine["vm_initialization"](*(x for device in devices for x in (*device, _POOLED_ALLOCATOR)))
    return tuple(machine[name] for name in functions)


def host_view(array: Array) -> Any:
    """Return a TVM tensor over the memory of a C-contiguous, 64-byte aligned array; nothing is copied.

    One without elements has no memory to share, and numpy's strides of it are not those that TVM asks for.
    """
    if not array.size:
        return empty_on("llvm", 0, array)
    ffi = _ffi()
    if array.dtype.kind in _DLPACK_KINDS and array.dtype.isbuiltin == 1:  # ml_dtypes calls float8 kinds "f" too
        return ffi.from_dlpack(array)
    raw = ffi.from_dlpack(array.view(f"uint{8 * array.dtype.itemsize}"))  # bfloat16, float8: DLPack knows, numpy not
    return view_as(raw, array)


def empty_on(kind: str, ordinal: int, like: Any) -> Any:
    """Return a new tensor on a device with the shape and dtype of an array or a tensor."""
    ffi = _ffi()
    device = ffi.device({"llvm": "cpu"}.get(kind, kind), ordinal)
    return _runtime_func("runtime.TVMTensorAllocWithScope")(
        ffi.Shape(tuple(like.shape)), ffi.dtype(str(like.dtype)), device, None
    )


def view_as(raw: Any, like: Array) -> Any:
    """Return a tensor over the first bytes of another, on its device, with the shape and dtype of an array."""
    ffi = _ffi()
    return _runtime_func("runtime.TVMTensorCreateView")(raw, ffi.Shape(like.shape), ffi.dtype(like.dtype.name), 0)


def span(tensor: Any) -> tuple[int, int]:
    """Return the first address of a dense tensor and the first behind it."""
    begin = int(tensor.data_ptr())
    return begin, begin + math.prod(tensor.shape) * numpy_dtype(str(tensor.dtype)).itemsize


def copy(source: Any, target: Any) -> None:
    """Copy one tensor into another of the same shape and dtype, on any two devices. May return early on a GPU."""
    _runtime_func("runtime.TVMTensorCopyFromTo")(source, target)


def with_memory(call: Callable[..., Any], *arguments: Any) -> Any:
    """Call; where memory runs out, once more after TVM's allocators have given back what they keep."""
    try:
        return call(*arguments)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    _runtime_func("vm.builtin.memory_manager.clear")()
    return call(*arguments)


def available_bytes(kind: str, ordinal: int) -> int:
    """Return how much of a GPU's memory is free."""
    return int(_runtime_func("runtime.GetDeviceAttr")(_DEVICE_TYPE[kind], ordinal, _AVAILABLE_MEMORY))


def is_out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed, on the host or on a GPU (TVM's CUDA runtime and torch say "out of memory")."""
    text = str(error)
    return isinstance(error, MemoryError) or any(s in text for s in ("bad_alloc", "not enough memory", "out of memory"))


def wait_for(kind: str, ordinal: int) -> None:
    """Block until the device has finished everything asked of it. Host stages are always finished."""
    if kind != "llvm":
        _runtime_func("runtime.Device_StreamSync")(_ffi().device(kind, ordinal), 0)
