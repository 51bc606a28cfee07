"""Library kernels: torch functions that the Relax VM calls through DLPack, one entry per row of `LIBRARY_FAMILIES`.

    R.call_dps_packed("tvmhet.library", (spec, x, w, bias), out_ty=...)

`spec` is the JSON program of `tvmhet.graph.library`. It is compiled once per process into a plain Python function of
torch views; results are written into the VM's own memory. Importing this module registers the packed function.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
import tvm_ffi

from tvmhet.errors import BadBundle
from tvmhet.ir.attrs import LIBRARY_FUNCTION

Attrs = Mapping[str, Any]
Step = Callable[[Sequence[torch.Tensor]], torch.Tensor]  # arguments -> a new tensor
Write = Callable[[Sequence[torch.Tensor], torch.Tensor], None]  # arguments, out


def _axis(attrs: Attrs) -> int:
    return int(attrs["axis"])


def _conv2d(attrs: Attrs) -> Step:
    stride, dilation, groups = list(attrs["strides"]), list(attrs["dilation"]), int(attrs["groups"])
    padding = list(attrs["padding"][:2])

    def run(a: Sequence[torch.Tensor]) -> torch.Tensor:
        bias = a[2].reshape(-1) if len(a) == 3 else None
        return F.conv2d(a[0], a[1], bias, stride, padding, dilation, groups)

    return run


def _max_pool2d(attrs: Attrs) -> Step:
    size, stride, dilation = list(attrs["pool_size"]), list(attrs["strides"]), list(attrs["dilation"])
    padding, ceil_mode = list(attrs["padding"][:2]), bool(attrs["ceil_mode"])
    return lambda a: F.max_pool2d(a[0], size, stride, padding, dilation, ceil_mode)


def _avg_pool2d(attrs: Attrs) -> Step:
    size, stride, padding = list(attrs["pool_size"]), list(attrs["strides"]), list(attrs["padding"][:2])
    ceil_mode, count_pad = bool(attrs["ceil_mode"]), bool(attrs["count_include_pad"])
    return lambda a: F.avg_pool2d(a[0], size, stride, padding, ceil_mode, count_pad)


def _layer_norm(attrs: Attrs) -> Step:
    num_axes, epsilon = len(attrs["axes"]), float(attrs["epsilon"])
    center, scale = bool(attrs["center"]), bool(attrs["scale"])

    def run(a: Sequence[torch.Tensor]) -> torch.Tensor:
        return F.layer_norm(a[0], a[0].shape[-num_axes:], a[1] if scale else None, a[2] if center else None, epsilon)

    return run


def _rows_of(attrs: Attrs, a: Sequence[torch.Tensor]) -> torch.Tensor:
    """The row indices of an embedding: TVM's "clip" takes the nearest row, torch refuses one out of range."""
    return a[1].clamp(0, a[0].shape[0] - 1) if attrs.get("mode") == "clip" else a[1]


#: Functions that make a new tensor.
STEPS: Mapping[str, Callable[[Attrs], Step]] = {
    "matmul": lambda attrs: lambda a: _linear(a) if len(a) == 3 else torch.matmul(a[0], a[1]),
    "nn.conv2d": _conv2d,
    "nn.max_pool2d": _max_pool2d,
    "nn.avg_pool2d": _avg_pool2d,
    "nn.softmax": lambda attrs: lambda a: torch.softmax(a[0], _axis(attrs)),
    "nn.log_softmax": lambda attrs: lambda a: torch.log_softmax(a[0], _axis(attrs)),
    "nn.layer_norm": _layer_norm,
    "nn.gelu": lambda attrs: lambda a: F.gelu(a[0]),
    "nn.gelu_tanh": lambda attrs: lambda a: F.gelu(a[0], approximate="tanh"),
    "nn.silu": lambda attrs: lambda a: F.silu(a[0]),
    "nn.relu": lambda attrs: lambda a: torch.relu(a[0]),
    "tanh": lambda attrs: lambda a: torch.tanh(a[0]),
    "sigmoid": lambda attrs: lambda a: torch.sigmoid(a[0]),
    "exp": lambda attrs: lambda a: torch.exp(a[0]),
    "erf": lambda attrs: lambda a: torch.erf(a[0]),
    "take": lambda attrs: lambda a: F.embedding(_rows_of(attrs, a), a[0]),
}


def _linear(a: Sequence[torch.Tensor]) -> torch.Tensor:
    x, w, bias = a
    return torch.addmm(bias.reshape(-1), x.reshape(-1, x.shape[-1]), w).reshape(*x.shape[:-1], w.shape[1])


def _linear_into(a: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    x, w, bias = a
    torch.addmm(bias.reshape(-1), x.reshape(-1, x.shape[-1]), w, out=out.view(-1, w.shape[1]))


#: Functions that write into the result directly, where torch has them.
WRITES: Mapping[str, Callable[[Attrs], Write]] = {
    "matmul": lambda attrs: lambda a, out: _linear_into(a, out) if len(a) == 3 else torch.matmul(a[0], a[1], out=out),
    "nn.softmax": lambda attrs: lambda a, out: torch.softmax(a[0], _axis(attrs), out=out),
    "nn.log_softmax": lambda attrs: lambda a, out: torch.log_softmax(a[0], _axis(attrs), out=out),
    "nn.gelu": lambda attrs: lambda a, out: torch.ops.aten.gelu.out(a[0], out=out),
    "nn.gelu_tanh": lambda attrs: lambda a, out: torch.ops.aten.gelu.out(a[0], approximate="tanh", out=out),
    "nn.silu": lambda attrs: lambda a, out: torch.ops.aten.silu.out(a[0], out=out),
    "nn.relu": lambda attrs: lambda a, out: torch.clamp_min(a[0], 0, out=out),
    "tanh": lambda attrs: lambda a, out: torch.tanh(a[0], out=out),
    "sigmoid": lambda attrs: lambda a, out: torch.sigmoid(a[0], out=out),
    "exp": lambda attrs: lambda a, out: torch.exp(a[0], out=out),
    "erf": lambda attrs: lambda a, out: torch.erf(a[0], out=out),
    "take": lambda attrs: (
        lambda a, out: torch.index_select(a[0], 0, _rows_of(attrs, a).reshape(-1), out=out.view(-1, out.shape[-1]))
    ),
}


def _fold_bias(steps: list[list[Any]]) -> list[tuple[int, list[Any]]]:
    """Give a bias step's argument to the product before it: [matmul, bias] -> [matmul with three arguments]."""
    folded: list[tuple[int, list[Any]]] = []
    for k, (family, attrs, arguments) in enumerate(steps):
        if family == "bias":
            _, (product, product_attrs, product_arguments) = folded.pop()
            folded.append((k, [product, product_attrs, [*product_arguments, arguments[1]]]))
        else:
            folded.append((k, [family, attrs, arguments]))
    return folded


@lru_cache(maxsize=4096)
def compile_spec(spec: str) -> Write:
    """Return the function of a spec: (live-ins, out) -> None. Raises BadBundle for a spec this version cannot run."""
    try:
        *first, (_, last) = _fold_bias(json.loads(spec))
        before = [(f"o{k}", STEPS[family](attrs), arguments) for k, (family, attrs, arguments) in first]
        family, attrs, arguments = last
        make, write = STEPS[family](attrs), WRITES[family](attrs) if family in WRITES else None
    except (KeyError, ValueError, TypeError, IndexError) as error:
        raise BadBundle(f"library kernel {spec[:120]!r} cannot be run: {error!r}", "build the bundle again") from error

    def run(tensors: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        values = {f"i{n}": t for n, t in enumerate(tensors)}
        for name, step, names in before:
            values[name] = step([values[a] for a in names])
        given = [values[a] for a in arguments]
        if write is not None:
            write(given, out)
        else:
            out.copy_(make(given))

    return run


@tvm_ffi.register_global_func(LIBRARY_FUNCTION, override=True)
def _library(spec: str, *tensors: Any) -> None:
    """Run one library kernel: live-ins, then the result to write. An error names the kernel's operators and shapes.

    Tensors from DLPack need no gradients, so torch records none, whatever its mode.
    """
    views = [torch.from_dlpack(t) for t in tensors]
    try:
        compile_spec(str(spec))(views[:-1], views[-1])
    except RuntimeError as error:
        raise RuntimeError(f"library kernel {_describe(str(spec), views[:-1])}: {error}") from error
    except IndexError as error:
        raise IndexError(f"library kernel {_describe(str(spec), views[:-1])}: {error}") from error


def _describe(spec: str, inputs: Sequence[torch.Tensor]) -> str:
    """`matmul+bias on (4, 8) float32, (8, 2) float32, ...`: what a person needs to find the operator in the model."""
    families = "+".join(str(family) for family, _, _ in json.loads(spec))
    return f"{families} on " + ", ".join(f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in inputs)
