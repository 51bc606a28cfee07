"""Load the C++ library of passes/ once; everything it registers is reached by its `tvmhet.*` name."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import tvm_ffi

_LIBRARY = Path(__file__).parent / "lib" / "libtvmhet_passes.so"


@cache
def _load() -> Any:
    if not _LIBRARY.exists():
        raise ImportError(f"tvmhet's C++ library is missing: {_LIBRARY}. Build it with 'make venv' or 'pip install .'.")
    return tvm_ffi.load_module(str(_LIBRARY))


@cache
def passes_func(name: str) -> Any:
    """Return the function that passes/ registered as `name`, for example `tvmhet.CriticalPath`."""
    _load()
    return tvm_ffi.get_global_func(name)
