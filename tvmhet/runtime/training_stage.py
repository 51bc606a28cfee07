"""A stage as its worker has it: compiled functions, and what it holds between the passes of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from tvmhet.runtime import vm
from tvmhet.runtime.cuda import torch_stream
from tvmhet.runtime.program import Array, DeviceBinding
from tvmhet.runtime.training_device import DeviceMemory, bytes_of
from tvmhet.runtime.training_program import RELEASE_FUNCTION, Function, Share, TrainingStage


class _Loaded:
    """A compiled function, called with tensors by name."""

    def __init__(self, function: Function, binding: DeviceBinding) -> None:
        self.inputs, self.outputs = function.inputs, function.outputs
        self._call, self._let_go = vm.load_functions(
            function.library, ("main", RELEASE_FUNCTION), binding.kind, binding.ordinal, function.cubins
        )
        self._on_stream: Callable[[], AbstractContextManager[Any]] = nullcontext
        if function.needs_library and binding.kind == "cuda":
            self._on_stream = torch_stream(binding.ordinal)
        self._scope_of: list[int] = []

    def __call__(self, *scopes: Mapping[str, Any]) -> dict[str, Any]:
        """Take each argument from the first scope that has it; return the results by name, held by nobody else.

        Every call has the same names in its scopes.
        """
        if not self._scope_of:
            self._scope_of = [next(i for i, scope in enumerate(scopes) if name in scope) for name in self.inputs]
        arguments = [scopes[i][name] for i, name in zip(self._scope_of, self.inputs, strict=True)]
        with self._on_stream():
            found = vm.with_memory(self._call, *arguments)
        results = dict(zip(self.outputs, found, strict=True))
        del found
        self._let_go()
        return results


class OwnStage:
    """A stage of this device: its functions, and what it holds during a step."""

    def __init__(
        self,
        stage: TrainingStage,
        replica: int,
        binding: DeviceBinding,
        state: Mapping[str, Array],
        memory: DeviceMemory,
    ) -> None:
        self.stage, self.replica = stage, replica
        self.renewed = frozenset(stage.buffers.values())
        self.share: Share = stage.shares[replica]
        self.forward, self.backward = (_Loaded(f[replica], binding) for f in (stage.forward, stage.backward))
        self.reduce, self.norm = (
            None if f is None else _Loaded(f, binding) for f in (self.share.reduce, self.share.norm)
        )
        self.updates = [_Loaded(f, binding) for f in self.share.updates]
        functions = [self.forward, self.backward, *self.updates]
        self.reads = frozenset(name for f in functions for name in f.inputs) | self.renewed
        self._read_back = frozenset(self.backward.inputs)
        self._stash_bytes = -1  # of one micro-batch, the same for all
        self._zeros = memory.zeros({f"sum.{p}": state[p] for p in stage.parameters})
        self.begin()

    def begin(self) -> None:
        """Start a step: no gradients yet."""
        self.sums: dict[str, Any] = dict(self._zeros)
        self._stash: dict[int, dict[str, Any]] = {}
        self.buffers: dict[str, Any] = {}

    def keep(self, microbatch: int, tensors: Mapping[str, Any]) -> int:
        """Keep what of `tensors` the backward pass reads; return its bytes."""
        held = {n: v for n, v in tensors.items() if n in self._read_back}
        if self._stash_bytes < 0:
            self._stash_bytes = bytes_of(held.values())
        self._stash[microbatch] = held
        return self._stash_bytes

    def release(self, microbatch: int) -> tuple[dict[str, Any], int]:
        """Return what was kept, and its bytes."""
        return self._stash.pop(microbatch), self._stash_bytes
