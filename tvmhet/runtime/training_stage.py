"""A stage as its worker has it: compiled functions, and what it holds between the passes of a step."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tvmhet.runtime import vm
from tvmhet.runtime.program import Array, DeviceBinding
from tvmhet.runtime.training_program import RELEASE_FUNCTION, Function, Share, TrainingStage


class _Loaded:
    """A compiled function, called with tensors by name."""

    def __init__(self, function: Function, binding: DeviceBinding) -> None:
        self.inputs, self.outputs = function.inputs, function.outputs
        self._call, self._let_go = vm.load_functions(
            function.library, ("main", RELEASE_FUNCTION), binding.kind, binding.ordinal, function.cubins
        )

    def __call__(self, *scopes: Mapping[str, Any]) -> dict[str, Any]:
        """Take each argument from the first scope that has it; return the results by name, held by nobody else."""
        arguments = [next(scope[name] for scope in scopes if name in scope) for name in self.inputs]
        results = dict(zip(self.outputs, self._called(arguments), strict=True))
        self._let_go()
        return results

    def _called(self, arguments: Sequence[Any]) -> Any:
        """Call; where memory runs out, once more after TVM's allocator has given back what it keeps."""
        try:
            return self._call(*arguments)
        except Exception as error:
            if not vm.is_out_of_memory(error):
                raise
        vm.give_memory_back()
        return self._call(*arguments)


class OwnStage:
    """A stage of this device: its functions, and what it holds during a step."""

    def __init__(self, stage: TrainingStage, replica: int, binding: DeviceBinding, state: Mapping[str, Array]) -> None:
        self.stage, self.replica = stage, replica
        self.share: Share = stage.shares[replica]
        self.forward, self.backward = (_Loaded(f[replica], binding) for f in (stage.forward, stage.backward))
        self.reduce, self.norm = (
            None if f is None else _Loaded(f, binding) for f in (self.share.reduce, self.share.norm)
        )
        self.updates = [_Loaded(f, binding) for f in self.share.updates]
        self._zeros = {f"sum.{p}": vm.host_view(z) for p, z in _zeros_like({p: state[p] for p in stage.parameters})}
        self.renewed = frozenset(stage.buffers.values())
        self.begin()

    def begin(self) -> None:
        """Start a step: no gradients yet."""
        self.sums: dict[str, Any] = dict(self._zeros)
        self.stash: dict[int, dict[str, Any]] = {}
        self.buffers: dict[str, Any] = {}


def _zeros_like(arrays: Mapping[str, Array]) -> Iterator[tuple[str, Array]]:
    """Zeros that are only read: all in one place, which takes no memory, as the system maps its one page of zeros."""
    pages = mmap.mmap(
        -1, max((a.nbytes for a in arrays.values()), default=0) + 1, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    return ((name, np.ndarray(a.shape, a.dtype, pages)) for name, a in arrays.items())


def bytes_of(tensors: Iterable[Any]) -> int:
    """Return the bytes of tensors."""
    return sum(math.prod(t.shape) * np.dtype(str(t.dtype)).itemsize for t in tensors)
