"""Find the operator that breaks the chain from the loss to the parameters, with its module, for an error message.

relu ──► argmax ──► mean          argmax takes a tensor that needs a gradient and returns one that cannot have it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from tvmhet.errors import NoGradient
from tvmhet.ir.training_places import paths_while_running


class _Watcher(TorchFunctionMode):
    """Notes the operators whose tensor result has no derivative although an operand needs one."""

    def __init__(self, running: Sequence[str]) -> None:
        super().__init__()
        self._running = running
        self.broken: list[tuple[str, str]] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.is_grad_enabled() and any(_needs_gradient(x) for x in tree_leaves((args, kwargs or {}))):
            results = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
            name = getattr(func, "__name__", str(func))
            if results and not any(_has_gradient(x) for x in results) and not _is_factory(name):
                self.broken.append((name, self._running[-1] if self._running else ""))
        return result


def _is_factory(name: str) -> bool:
    """True for what reads an operand's shape only."""
    return name.endswith("_like") or name.startswith("new_") or name in ("detach", "size", "__get__")


def _needs_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _has_gradient(value: torch.Tensor) -> bool:
    return value.requires_grad and "NotImplemented" not in type(value.grad_fn).__name__


def missing_gradient(module: nn.Module, batch: Sequence[torch.Tensor]) -> NoGradient | None:
    """Run the module once; return the error that names the last operator without a gradient.

    None where the step has its gradients, or fails for another reason.
    """
    needs = False
    with paths_while_running(module) as running:
        watcher = _Watcher(running)
        with watcher, torch.enable_grad(), suppress(Exception):
            needs = module(*batch)[0].requires_grad
    if not watcher.broken or (needs and not _undefined(module, batch)):
        return None
    name, place = watcher.broken[-1]
    where = f" in module {place!r}" if place else " outside any submodule"
    return NoGradient(
        f"operator {name!r}{where} has no gradient, and the loss depends on parameters through it",
        "replace it by a differentiable one, or detach it where no gradient is wanted",
    )


def _undefined(module: nn.Module, batch: Sequence[torch.Tensor]) -> bool:
    """True when the backward pass itself fails."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    try:
        with torch.enable_grad():
            torch.autograd.grad(module(*batch)[0], parameters, allow_unused=True)
    except RuntimeError:
        return True
    return False
