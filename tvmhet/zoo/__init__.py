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
from tvmhet.zoo.convnext import convnext_t
from tvmhet.zoo.dlrm import dlrm
from tvmhet.zoo.gpt2 import gpt2_decoder, gpt2_small
from tvmhet.zoo.inception import inception_v3
from tvmhet.zoo.lstm import lstm
from tvmhet.zoo.mobilenet import mobilenet_v3
from tvmhet.zoo.moe import moe
from tvmhet.zoo.resnet import resnet50
from tvmhet.zoo.t5 import t5_small
from tvmhet.zoo.vit import vit_b16

__all__ = [
    "MODELS",
    "bert_base",
    "convnext_t",
    "dlrm",
    "get",
    "gpt2_decoder",
    "gpt2_small",
    "inception_v3",
    "lstm",
    "mobilenet_v3",
    "moe",
    "resnet50",
    "t5_small",
    "vit_b16",
]

Factory = Callable[..., tuple[torch.nn.Module, tuple[torch.Tensor, ...]]]

MODELS: dict[str, Factory] = {
    f.__name__: f
    for f in (
        bert_base,
        convnext_t,
        dlrm,
        gpt2_decoder,
        gpt2_small,
        inception_v3,
        lstm,
        mobilenet_v3,
        moe,
        resnet50,
        t5_small,
        vit_b16,
    )
}


def get(name: str, **sizes: Any) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Return `(module, example_inputs)` of the model called `name`; `sizes` are its factory's arguments."""
    if name not in MODELS:
        raise BadInput(f"the zoo has no model {name!r}", f"choose one of {', '.join(sorted(MODELS))}")
    return MODELS[name](**sizes)
