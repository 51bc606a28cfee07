"""A model as every later layer takes it: a Relax module whose `main` takes inputs then parameters, and the values.

    main(x, p_conv_weight, p_conv_bias)      params = {"p_conv_weight": ..., "p_conv_bias": ...}
         ╰─ num_input = 1

    main(x, cache, p_weight) -> (y, cache at the next call)      states = (State("cache", zeros),)
            ╰─ num_state = 1 of num_input = 2

Parameters stay inputs of `main` so that a stage can be handed just the ones it reads; the values are bound at build.
So do states, which calls hand on to each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import tvm
from tvm import relax

from tvmhet.errors import BadModel
from tvmhet.ir.attrs import NUM_INPUT_ATTR, NUM_SESSIONS_ATTR, NUM_STATE_ATTR
from tvmhet.results import Structure

ENTRY = "main"
_ALIGNMENT = 64  # bytes; TVM refuses tensors that are less aligned


@dataclass(frozen=True, slots=True)
class State:
    """A tensor that a call reads and renews, such as a cache of keys, by the user's name, and its first value."""

    name: str
    initial: Any


@dataclass(frozen=True)
class Model:
    """A Relax module and its parameter values.

    `mod["main"]` takes `num_inputs` inputs, then exactly the parameters of `params`, in that order. Values are TVM
    tensors on the CPU; those that came from torch share memory with the torch module (zero copy), so do not train it in
    place afterwards. `whole_reason` says why the module cannot be cut into stages (control flow, an unbound shape);
    None means that `main` is one dataflow block of operator calls. `name` is what reports call the model. Without
    `has_values` (a torch module on the meta device) the tensors of `params` have sizes but no contents: the model
    can be planned, not built. `structure` is what a call returns, None as `main` does.

    `states` are the last of the inputs of `main`, and what they are at the next call the last of its results.
    """

    mod: tvm.IRModule
    params: Mapping[str, Any] = field(default_factory=dict)
    whole_reason: str | None = None
    name: str = "main"
    has_values: bool = True
    structure: Structure | None = None
    states: tuple[State, ...] = ()

    def __post_init__(self) -> None:
        names = [str(v.name) for v in self.main.params[self.num_inputs :]]
        if names != list(self.params):
            missing, extra = sorted(set(names) - set(self.params)), sorted(set(self.params) - set(names))
            raise BadModel(
                f"the parameters of 'main' and the values given differ: no value for {missing[:5]}, "
                f"no parameter for {extra[:5]}, of {len(names)} parameters and {len(self.params)} values",
                "give one value per parameter of 'main' after its inputs, in the same order",
            )

    @property
    def main(self) -> relax.Function:
        """The entry function."""
        return self.mod[ENTRY]

    @property
    def num_inputs(self) -> int:
        """How many leading parameters of `main` are inputs: the user's, then the states."""
        return int(self.main.attrs[NUM_INPUT_ATTR])

    @property
    def inputs(self) -> tuple[relax.Var, ...]:
        """The user's inputs, in call order."""
        return tuple(self.main.params[: self.num_inputs - self.num_states])

    @property
    def num_states(self) -> int:
        """How many of the inputs, after the user's, are states."""
        attrs = self.main.attrs or {}
        return int(attrs[NUM_STATE_ATTR]) if NUM_STATE_ATTR in attrs else 0

    @property
    def num_sessions(self) -> int:
        """How many sessions have states of their own."""
        attrs = self.main.attrs or {}
        return int(attrs[NUM_SESSIONS_ATTR]) if NUM_SESSIONS_ATTR in attrs else 1

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of one session, each once."""
        return sum(tensor_bytes(state.initial) for state in self.states)

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the user's inputs, in call order."""
        return tuple(str(v.name) for v in self.inputs)

    @property
    def param_bytes(self) -> int:
        """Bytes of all parameter values."""
        return sum(tensor_bytes(value) for value in self.params.values())


def require_values(model: Model) -> None:
    """Raise BadModel for a model whose parameters have no contents."""
    if not model.has_values:
        raise BadModel(
            f"the parameters of {model.name} are on torch's meta device and have no values",
            "it can be planned as it is; to build it, import the module with its weights loaded",
        )


def tensor_bytes(value: Any) -> int:
    """Bytes of a TVM tensor."""
    view = to_torch(value)
    return int(view.numel() * view.element_size())


def to_torch(value: Any) -> torch.Tensor:
    """View a TVM tensor as a torch tensor; the memory is shared."""
    return torch.from_dlpack(value)


def from_torch_tensor(value: torch.Tensor) -> Any:
    """View a torch tensor as a TVM tensor on the CPU; the memory is shared where layout, alignment and device allow."""
    dense = value.detach()
    dense = dense.to_dense() if dense.layout != torch.strided else dense
    dense = dense.cpu().contiguous()
    if dense.data_ptr() % _ALIGNMENT:  # a view into another tensor
        dense = dense.clone()
    return tvm.runtime.from_dlpack(dense)


def from_numpy(value: np.ndarray) -> Any:
    """Return a numpy array as a TVM tensor on the CPU; the memory is shared where it is aligned and writable."""
    if (
        value.flags.writeable
        and value.flags.c_contiguous
        and value.ctypes.data % _ALIGNMENT == 0
        and value.dtype.kind in "biuf"
    ):
        return from_torch_tensor(torch.from_numpy(value))
    return tvm.runtime.tensor(value)
