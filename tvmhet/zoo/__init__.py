"""Plain torch definitions of well-known models, with random weights from a seed. No download, no torchvision.

Each factory returns `(module, example_inputs)`: the module in eval mode at its published size, unless arguments shrink
it. `get("resnet50")` finds one by name; the command line takes "tvmhet.zoo:resnet50".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tvmhet.errors import BadInput
from tvmhet.zoo.bert import bert_base
from tvmhet.zoo.resnet import resnet50

__all__ = ["MODELS", "bert_base", "get", "resnet50"]

Factory = Callable[..., tuple[torch.nn.Module, tuple[torch.Tensor, ...]]]

MODELS: dict[str, Factory] = {f.__name__: f for f in (bert_base, resnet50)}


def get(name: str, **sizes: Any) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Return `(module, example_inputs)` of the model called `name`; `sizes` are its factory's arguments."""
    if name not in MODELS:
        raise BadInput(f"the zoo has no model {name!r}", f"choose one of {', '.join(sorted(MODELS))}")
    return MODELS[name](**sizes)
