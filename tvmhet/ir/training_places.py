"""Where in a model the calls of a joint graph stand: traced, they carry no module's name.

The step is run forward once more, without values, and what is called is noted with the innermost module. The k-th call
of an operator in the joint graph is the k-th noted: the forward pass comes first there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode


@contextmanager
def paths_while_running(module: nn.Module) -> Iterator[list[str]]:
    """Keep the paths of the submodules that run, outermost first; those of a `WithLoss` are its model's."""
    running: list[str] = []
    handles = []
    for name, child in module.named_modules():
        place = name.removeprefix("model").removeprefix(".")
        handles.append(child.register_forward_pre_hook(lambda _m, _a, p=place: running.append(p)))
        handles.append(child.register_forward_hook(lambda _m, _a, _r: _leave(running), always_call=True))
    try:
        yield running
    finally:
        for handle in handles:
            handle.remove()


def _leave(running: list[str]) -> None:
    """Forget the innermost module; a forward hook that returns None leaves the result as it is."""
    running.pop()


class _Noted(TorchDispatchMode):
    def __init__(self, running: Sequence[str]) -> None:
        super().__init__()
        self._running = running
        self.places: dict[str, list[str]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.places.setdefault(_name(func), []).append(self._running[-1] if self._running else "")
        return func(*args, **(kwargs or {}))


def places_of_calls(module: nn.Module, run: Callable[[], Any]) -> dict[str, list[str]]:
    """Return, by operator without namespace and overload, the module of each call while `run` runs `module`."""
    with paths_while_running(module) as running, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        noted = _Noted(running)
        with noted:
            run()
    return noted.places


def give_places(graph: fx.Graph, places: dict[str, list[str]]) -> None:
    """Write the modules into the nodes' metadata, where `fx_node.describe` reads them."""
    left = {name: iter(found) for name, found in places.items()}
    for node in graph.nodes:
        if node.op == "call_function" and (path := next(left.get(_name(node.target), iter(())), "")):
            node.meta["nn_module_stack"] = {path: (path, "")}


def _name(operator: Any) -> str:
    """`prims.nextafter.default`, `aten.nextafter.default` and `aten.nextafter_.default` are all nextafter."""
    parts = str(operator).split(".")
    return (parts[1] if len(parts) > 1 else parts[0]).removesuffix("_")
