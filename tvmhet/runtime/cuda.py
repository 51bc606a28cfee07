"""TVM's CUDA runtime in this process: loaded, or refused with what is missing.

    libtvm_runtime_cuda.so ──needs──► libcudart.so.13 (pip's nvidia-cuda-runtime, or torch's), libcuda.so.1 (driver)

`import tvm` loads it where it can and says nothing where it cannot; the first kernel would then fail with "Cannot find
ffi.Module.load_from_bytes.cuda". The wheel does not bring CUDA's own runtime, so it is looked for among pip's packages,
where torch for CUDA 13 puts it too.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

from tvmhet.errors import MissingPackage, NotSupported

CUDART = "libcudart.so.13"  # with which the wheel of apache-tvm 0.27 is linked
_EXIST, _COMPUTE_VERSION = 0, 4  # tvm/runtime/device_api.h: DeviceAttrKind
_CUDA = 2  # DLPack's kDLCUDA
_INSTALL = 'pip install "tvmhet[nvrtc]", which brings it, or install CUDA 13'
_DRIVER = "install an NVIDIA driver of version 580 or later (CUDA 13)"


def load_cuda() -> None:
    """Load TVM's CUDA runtime. Raises MissingPackage without CUDA's runtime library, NotSupported without a driver."""
    import tvm_ffi

    if _registered(tvm_ffi):
        return
    with suppress(OSError):  # the loader's words come below, from the library that needs it
        ctypes.CDLL(str(_cudart() or CUDART), mode=ctypes.RTLD_GLOBAL)
    tvm = importlib.import_module("tvm")
    if _registered(tvm_ffi):
        return
    library = Path(str(tvm.__file__)).parent / "lib" / "libtvm_runtime_cuda.so"
    try:
        ctypes.CDLL(str(library))  # its functions register themselves
    except OSError as error:
        if "libcuda.so" in str(error):
            raise NotSupported(f"this machine has no NVIDIA driver: {error}", _DRIVER) from error
        raise MissingPackage(f"TVM's CUDA runtime cannot be loaded: {error}", _INSTALL) from error


def architecture(ordinal: int) -> str:
    """Return the architecture of a CUDA device, such as "sm_80". Raises NotSupported where CUDA does not see it."""
    import tvm_ffi

    load_cuda()
    attribute = tvm_ffi.get_global_func("runtime.GetDeviceAttr")
    if not attribute(_CUDA, ordinal, _EXIST):
        raise NotSupported(
            f"CUDA sees no GPU {ordinal}: {_reason()}",
            f"look at nvidia-smi and CUDA_VISIBLE_DEVICES; {_DRIVER}",
        )
    return f"sm_{str(attribute(_CUDA, ordinal, _COMPUTE_VERSION)).replace('.', '')}"


def torch_stream(ordinal: int) -> Callable[[], AbstractContextManager[Any]]:
    """Return what makes a context in which torch's kernels go to the stream of TVM's: the default one of the device.

    A caller may have chosen another, and torch's streams do not wait for the default one. Raises MissingPackage for a
    torch that cannot use the device.
    """
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        raise MissingPackage(
            f"library kernels on a GPU are torch's, and torch {torch.__version__} sees no GPU",
            "install torch for CUDA (https://pytorch.org), or build with makers=('tvm',)",
        )
    return partial(torch.cuda.stream, torch.cuda.default_stream(ordinal))


@cache
def runtime_library() -> ctypes.CDLL:
    """Return CUDA's runtime library. Raises OSError, with the loader's words, without it."""
    library = ctypes.CDLL(str(_cudart() or CUDART))
    library.cudaGetErrorString.restype = ctypes.c_char_p
    return library


def _registered(tvm_ffi: Any) -> bool:
    return tvm_ffi.get_global_func("device_api.cuda", allow_missing=True) is not None


def _cudart() -> Path | None:
    """Where pip has put CUDA's runtime library; None where it has not."""
    with suppress(ModuleNotFoundError):
        spec = importlib.util.find_spec("nvidia.cu13")
        for place in spec.submodule_search_locations or () if spec else ():
            if (found := Path(place) / "lib" / CUDART).is_file():
                return found
    return None


def _reason() -> str:
    """What CUDA says of its devices: how many there are, or its error, such as a driver that is too old."""
    try:
        runtime = runtime_library()
    except OSError as error:
        return str(error)
    count = ctypes.c_int()
    status = runtime.cudaGetDeviceCount(ctypes.byref(count))
    if not status:
        return f"it counts {count.value}"
    return str(runtime.cudaGetErrorString(status).decode())
