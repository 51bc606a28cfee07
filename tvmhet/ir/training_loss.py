"""A module followed by its loss, as one module: in its own dtype, or in a narrower one on copies of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from tvmhet.errors import BadLoss
from tvmhet.ir.torch_call import CallForm, arguments_of


class WithLoss(nn.Module):
    """The module followed by its loss, as one module that takes inputs, then targets."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Any],
        num_inputs: int,
        dtype: torch.dtype | None = None,
        form: CallForm | None = None,
    ) -> None:
        super().__init__()
        self.model, self._loss, self._num_inputs, self._dtype, self._form = model, loss, num_inputs, dtype, form

    def forward(self, *batch: torch.Tensor) -> tuple[torch.Tensor]:
        inputs, targets = batch[: self._num_inputs], batch[self._num_inputs :]
        args, kwargs = arguments_of(inputs, self._form)
        narrow = self._dtype is not None
        result = run_in(self._dtype, self.model, args, kwargs) if narrow else self.model(*args, **kwargs)
        return (check_scalar(self._computed(result, targets)),)

    def _computed(self, result: Any, targets: Sequence[torch.Tensor]) -> Any:
        try:
            return self._loss(result, *targets)
        except Exception as error:
            if type(error) not in (TypeError, ValueError, IndexError, RuntimeError):
                raise  # of tracing, not of the loss
            lines = str(error).strip().splitlines() or [""]
            raise BadLoss(
                f"the loss cannot be computed of {_described(result)} and {len(targets)} targets"
                f"{''.join(f', {_described(t)}' for t in targets)}: {type(error).__name__}: {lines[0][:300]}",
                "give example_targets= that fit what the module returns, or a loss that takes them",
            ) from error


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {str(value.dtype)[6:]}"
    return f"a {type(value).__name__}"


def run_in(dtype: torch.dtype, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return what the module makes of copies in `dtype` of its float32 parameters and inputs, as float32.

    Batch norms keep their float32 parameters, and every buffer stays as it is. Gradients come back through the copies:
    in float32, for the module's own parameters.
    """
    kept = {id(p) for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) for p in m.parameters()}
    copies = {n: p.to(dtype) for n, p in model.named_parameters() if p.dtype == torch.float32 and id(p) not in kept}

    def narrowed(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype == torch.float32 else x

    result = torch.func.functional_call(model, copies, *tree_map(narrowed, (tuple(args), dict(kwargs))))
    return tree_map(lambda y: y.float() if isinstance(y, torch.Tensor) and y.dtype == dtype else y, result)


def check_scalar(loss: Any) -> torch.Tensor:
    """Return a loss that is one real number; raise BadLoss for any other."""
    if not isinstance(loss, torch.Tensor):
        raise BadLoss(f"the loss is a {type(loss).__name__}", "return one scalar tensor, such as F.mse_loss(y, target)")
    if loss.numel() != 1 or not loss.dtype.is_floating_point:
        raise BadLoss(
            f"the loss has shape {tuple(loss.shape)} and dtype {str(loss.dtype)[6:]}, not one real number",
            'reduce it to a scalar: loss.mean(), or reduction="mean" of the loss function',
        )
    return loss.reshape(())
