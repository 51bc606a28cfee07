"""A GPU's own memory in training: copies of what a micro-batch needs, and the state, which stays.

    shared memory ──lend──► copies for one micro-batch ──► function ──► results ──copy──► shared memory
    state, generation g ──► held on the GPU ──► renewed in place, and copied to the state, generation 1 - g

What crosses devices goes over the host's shared memory, so any two devices work together.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tvmhet.runtime import vm
from tvmhet.runtime.program import Array, DeviceBinding
from tvmhet.runtime.training_device import State, Tensors, check_shared


class GpuMemory:
    """A GPU's memory. Tensors lent once are lent again, as taking memory from CUDA stops the device."""

    is_shared = False

    def __init__(self, binding: DeviceBinding) -> None:
        self._kind, self._ordinal = binding.kind, binding.ordinal
        self._free: dict[tuple[tuple[int, ...], str], list[Any]] = {}
        self._lent: dict[Hashable, list[Any]] = {}
        self._idle_bytes = vm.available_bytes(self._kind, self._ordinal)

    def lend(self, views: Tensors, borrower: Hashable) -> Tensors:
        """Copies on the GPU."""
        found = {}
        for name, view in views.items():
            free = self._free.setdefault(_kind_of(view), [])
            found[name] = free.pop() if free else self._empty(view)
            vm.copy(view, found[name])
        self._lent.setdefault(borrower, []).extend(found.values())
        return found

    def take_back(self, borrower: Hashable) -> None:
        """Keep the tensors for others of their shape and type."""
        for tensor in self._lent.pop(borrower, ()):
            self._free[_kind_of(tensor)].append(tensor)

    def hold(self, states: Sequence[Tensors], read: frozenset[str], written_elsewhere: frozenset[str]) -> State:
        """Copies that stay on the GPU from step to step."""
        return _HeldState(self, states, read, written_elsewhere)

    def zeros(self, like: Mapping[str, Array]) -> dict[str, Any]:
        """All in one place, as long as the longest."""
        size = max((a.nbytes for a in like.values()), default=0)
        pages = self.lend({"zeros": vm.host_view(np.zeros(size, np.uint8))}, "zeros")["zeros"]
        return {name: vm.view_as(pages, a) for name, a in like.items()}

    def finish(self) -> None:
        """Wait for the device's stream."""
        vm.wait_for(self._kind, self._ordinal)

    def limit(self, limit_bytes: int, shared_bytes: int) -> None:
        """Nothing beyond what is known now: the GPU ends what does not fit it."""
        check_shared(limit_bytes, shared_bytes)

    def used_bytes(self) -> int:
        """How much less is free on the GPU than at first: of this worker, where nobody else uses the GPU."""
        return self._idle_bytes - vm.available_bytes(self._kind, self._ordinal)

    def _empty(self, like: Any) -> Any:
        return vm.with_memory(vm.empty_on, self._kind, self._ordinal, like)


class _HeldState:
    """The state once: renewed in place, and read from the shared memory again after a step that was not kept."""

    def __init__(
        self, memory: GpuMemory, states: Sequence[Tensors], read: frozenset[str], written_elsewhere: frozenset[str]
    ) -> None:
        self._memory, self._states = memory, states
        self._read, self._elsewhere = sorted(read), sorted(read & written_elsewhere)
        self.current: dict[str, Any] = {}
        self._if_kept = (-1, -1)  # the generation and the count of restores, should the last step be kept
        self._next: Tensors = {}

    def begin(self, generation: int, restores: int) -> None:
        """After a step that was kept only what other devices have renewed is read."""
        kept = (generation, restores) == self._if_kept
        self._load(self._elsewhere if kept else self._read, generation)
        self._next, self._if_kept = self._states[1 - generation], (1 - generation, restores)

    def renew(self, name: str, value: Any) -> None:
        """Write it to the shared memory and here, where nothing reads the old value any more."""
        vm.copy(value, self._next[name])
        if name in self.current:
            vm.copy(value, self.current[name])

    def _load(self, names: Iterable[str], generation: int) -> None:
        views = {n: self._states[generation][n] for n in names}
        for name in views.keys() & self.current.keys():
            vm.copy(views[name], self.current[name])
        self.current |= self._memory.lend({n: view for n, view in views.items() if n not in self.current}, "state")


def _kind_of(tensor: Any) -> tuple[tuple[int, ...], str]:
    return tuple(tensor.shape), str(tensor.dtype)
