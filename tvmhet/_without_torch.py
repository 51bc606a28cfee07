"""Import TVM in a process that has no use for torch: tvm_ffi and TVM import torch wherever it can be imported.

That takes 2 to 3 s of CPU and 200 MB, of 4 to 5 s in all. This file imports nothing of either.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_torch() -> Iterator[None]:
    """What is imported in this block finds no torch, unless it is there already. Afterwards torch can be imported."""
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # the import system takes this for "there is none"
    try:
        yield
    finally:
        del sys.modules["torch"]
