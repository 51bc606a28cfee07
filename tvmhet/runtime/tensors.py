"""The user's tensors at the edge: checked against the program, read as numpy uncopied, given back as they came."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tvmhet.errors import BadInput
from tvmhet.results import Structure, structured
from tvmhet.runtime.arena import ALIGNMENT_BYTES
from tvmhet.runtime.program import Array, ValueSpec, numpy_dtype


def check_inputs(inputs: Sequence[Any], specs: Sequence[ValueSpec]) -> list[Array]:
    """Return the inputs as numpy arrays, in order. Nothing is cast: a wrong dtype is the caller's to mend.

    Takes numpy arrays and scalars, torch tensors, TVM tensors, and whatever else speaks DLPack. Raises BadInput.
    """
    if len(inputs) != len(specs):
        raise BadInput(
            f"the model takes {len(specs)} inputs ({', '.join(s.name for s in specs)}); got {len(inputs)}",
            "pass one tensor per input, in this order",
        )
    return [check_input(value, spec) for value, spec in zip(inputs, specs, strict=True)]


def check_input(value: Any, spec: ValueSpec) -> Array:
    """Return one tensor as an array. Raises BadInput for what is none, or has another shape or dtype."""
    if is_torch(value) and (value.is_meta or value.is_sparse or value.is_quantized):
        what = "on the meta device, without values" if value.is_meta else "sparse or quantised"
        raise BadInput(
            f"input {spec.name!r} is a torch tensor {what}", f"pass a dense one of {spec.shape} {spec.dtype}"
        )
    array = to_numpy(value)
    if array is None:
        raise BadInput(
            f"input {spec.name!r} is a {type(value).__name__}, not a tensor",
            f"pass a numpy array, a torch tensor or a TVM tensor of {spec.shape} {spec.dtype}",
        )
    if array.shape != spec.shape or array.dtype != numpy_dtype(spec.dtype):
        raise BadInput(
            f"input {spec.name!r} must be {spec.shape} {spec.dtype}; got {array.shape} {array.dtype.name}",
            "reshape or cast it; a build is for one shape (see bind_shapes)",
        )
    return array


def to_numpy(value: Any) -> Array | None:
    """Return a tensor of any kind as a numpy array, shared where the host can; None when it is no tensor."""
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, np.generic):
        return np.asarray(value)
    if is_torch(value):
        return _from_torch(value)
    if not hasattr(value, "__dlpack__"):
        return None
    if callable(getattr(value, "numpy", None)):  # a TVM tensor with its own way out of any device and dtype
        array: Array = value.numpy()
        return array
    return np.from_dlpack(value)


def array_over(tensor: Any) -> Array | None:
    """Return an array over the memory of a host tensor, kept alive by it; None where numpy lacks the dtype."""
    try:
        array: Array = np.from_dlpack(tensor)
    except (BufferError, RuntimeError, TypeError):
        return None
    return array


def is_torch(value: Any) -> bool:
    """Whether `value` is a torch tensor; torch is not imported to find out."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _from_torch(tensor: Any) -> Array:
    import torch

    host = tensor.detach().cpu().contiguous()
    if host.is_floating_point() and host.element_size() <= 2 and host.dtype is not torch.float16:
        # bfloat16, float8: torch has no numpy form of these, pass their bits
        name = str(host.dtype).removeprefix("torch.")
        bits = host.view({1: torch.uint8, 2: torch.int16}[host.element_size()])
        array: Array = bits.numpy().view(numpy_dtype(name))
        return array
    plain: Array = host.numpy()
    return plain


def to_torch(array: Array) -> Any:
    """Return a torch tensor over the memory of an array that the caller gives up."""
    import torch

    if array.dtype.isbuiltin != 1:  # of ml_dtypes
        bits = torch.from_numpy(array.view(f"uint{8 * array.dtype.itemsize}"))
        return bits.view(getattr(torch, array.dtype.name))
    return torch.from_numpy(array)


def to_user(arrays: Iterable[Array], as_torch: bool, structure: Structure) -> Any:
    """Return a call's result: tensors of numpy or torch, as `PipelineProgram.structure` says."""
    return structured((to_torch(a) if as_torch else a for a in arrays), structure)


def empty_aligned(spec: ValueSpec) -> Array:
    """Return a new array whose first byte lies where TVM's kernels want it."""
    raw = np.empty(spec.size_bytes + ALIGNMENT_BYTES, np.uint8)
    offset = -raw.ctypes.data % ALIGNMENT_BYTES
    return np.ndarray(spec.shape, numpy_dtype(spec.dtype), raw.data, offset)
