"""A stage as its worker has it: compiled functions, and what it holds between the passes of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from tvmhet.runtime import vm
from tvmhet.runtime.cuda import torch_stream
from tvmhet.runtime.program import Array, DeviceBinding
from tvmhet.runtime.training_device import DeviceMemory
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

    def __call__(self, *scopes: Mapping[str, Any]) -> dict[str, Any]:
        """Take each argument from the first scope that has it; return the results by name, held by nobody else."""
        arguments = [next(scope[name] for scope in scopes if name in scope) for name in self.inputs]
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
        self._zeros = memory.zeros({f"sum.{p}": state[p] for p in stage.parameters})
        self.begin()

    def begin(self) -> None:
        """Start a step: no gradients yet."""
        self.sums: dict[str, Any] = dict(self._zeros)
        self.stash: dict[int, dict[str, Any]] = {}
        self.buffers: dict[str, Any] = {}
