"""Load the C++ library of passes/ once; everything it registers is reached by its `tvmhet.*` name.

tvm_ffi is imported when it is needed: a worker keeps it from importing torch before that (`runtime.worker`).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

_LIBRARY = Path(__file__).parent / "lib" / "libtvmhet_passes.so"


@cache
def load_passes() -> Any:
    """Register what passes/ defines in this process, once. Raises ImportError where it was not built."""
    if not _LIBRARY.exists():
        raise ImportError(f"tvmhet's C++ library is missing: {_LIBRARY}. Build it with 'make venv' or 'pip install .'.")
    import tvm_ffi

    return tvm_ffi.load_module(str(_LIBRARY))


@cache
def passes_func(name: str) -> Any:
    """Return the function that passes/ registered as `name`, for example `tvmhet.CriticalPath`."""
    import tvm_ffi

    load_passes()
    return tvm_ffi.get_global_func(name)
