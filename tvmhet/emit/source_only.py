"""Have TVM make CUDA source and not compile it, whether the machine has a GPU or not.

Where its CUDA runtime is loaded, TVM compiles every kernel at once, for which it wants a CUDA toolkit, and for the
architecture of the plan, which need not be this machine's. A stage carries source (and a bundle cubins beside it), and
is compiled where it is loaded (`runtime/cubins.py`), so that a build is the same everywhere.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import tvm_ffi
from tvm_ffi.registry import remove_global_func

_CREATE = "ffi.Module.create.cuda"  # without it, TVM's code generator leaves the source as it is
_lock = threading.RLock()


@contextmanager
def source_only() -> Iterator[None]:
    """While inside, in any thread, no CUDA module is compiled; loading one is not touched."""
    with _lock:
        create = tvm_ffi.get_global_func(_CREATE, allow_missing=True)
        if create is None:
            yield
            return
        remove_global_func(_CREATE)
        try:
            yield
        finally:
            tvm_ffi.register_global_func(_CREATE, create)
