"""cuDNN's convolutions of float32 in float32: torch lets them round to TF32 (1e-3) unless it is told not to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

Step = Callable[[Sequence[Any]], torch.Tensor]  # arguments -> a tensor
Write = Callable[[Sequence[Any], torch.Tensor], None]  # arguments, out
Call = TypeVar("Call", bound=Callable[..., Any])


class _Float32:
    """torch's setting is the process's: the first thread that comes changes it, the last that leaves sets it back."""

    def __init__(self) -> None:
        self._lock, self._inside, self._before = threading.Lock(), 0, True

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = torch.backends.cudnn.allow_tf32
                torch.backends.cudnn.allow_tf32 = False
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                torch.backends.cudnn.allow_tf32 = self._before


_FLOAT32 = _Float32()


def in_float32(call: Call) -> Call:
    """The step or write with its convolutions in float32, where cuDNN makes them."""

    def run(a: Sequence[Any], *out: torch.Tensor) -> Any:
        if a[0].device.type != "cuda":
            return call(a, *out)
        with _FLOAT32:
            return call(a, *out)

    return run  # type: ignore[return-value]
