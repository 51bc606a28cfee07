"""The torch functions of library kernels, one entry per row of `LIBRARY_FAMILIES`, and the steps that chains fold into.

`STEPS` make a new tensor (or a view), `WRITES` write into the result's own memory, where torch has such a form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F

from tvmhet.emit.float32 import Step, Write, in_float32
from tvmhet.emit.library_convolutions import Sliding, is_for_onednn, planar
from tvmhet.emit.library_cudnn import ConvolutionOnGpu
from tvmhet.emit.library_products import (
    is_pointwise,
    is_product_on_gpu,
    pointwise,
    pointwise_weight_gradient,
    product,
    product_into,
)
from tvmhet.graph.library_rows import CONVOLUTIONS, TRANSPOSED_CONVOLUTIONS

#: In the keys of measured times, by device kind: raise it when a row calls the library in another way.
STEPS_VERSIONS: Mapping[str, int] = MappingProxyType({"llvm": 3, "cuda": 5})

Attrs = Mapping[str, Any]


def _axis(attrs: Attrs) -> int:
    return int(attrs["axis"])


def _convolution(attrs: Attrs) -> Step:
    how = Sliding.of(attrs)

    def run(a: Sequence[Any]) -> torch.Tensor:
        x, w, *bias = a
        if max(how.stride) == 1 and (
            is_pointwise(x, w.shape[2:], how.padding, how.groups) or is_product_on_gpu(x, w, how.padding, how.groups)
        ):
            made = pointwise(w.flatten(1), x)
            return made.add_(bias[0].reshape(-1, 1, 1)) if bias else made
        return how.convolve(x, w, bias[0].reshape(-1) if bias else None)

    return run


def _convolution_relu(attrs: Attrs) -> Step:
    """Convolution, bias or none, relu."""
    plain, joined = _convolution(attrs), ConvolutionOnGpu(attrs).joined

    def run(a: Sequence[Any]) -> torch.Tensor:
        made = joined(a[0], a[1], a[2] if len(a) > 2 else None)
        return plain(a).relu_() if made is None else made

    return run


def _convolution_into(attrs: Attrs, on_cpu: Callable[[Attrs], Write], *, relu: bool = False) -> Write:
    """What writes a convolution and what follows it: on CPUs `on_cpu`."""
    if len(attrs["strides"]) == 1:
        of_planes = _convolution_into(planar(attrs), on_cpu, relu=relu)
        return lambda a, out: of_planes(_planes(a), out.unsqueeze(2))
    on_gpu, written = ConvolutionOnGpu(attrs), on_cpu(attrs)

    def write(a: Sequence[Any], out: torch.Tensor) -> None:
        if a[0].device.type == "cuda":
            on_gpu.into(out, *a, relu=relu)
        else:
            written(a, out)

    return in_float32(write)


def _of_planes(step: Callable[[Attrs], Step]) -> Callable[[Attrs], Step]:
    """A step of convolutions, for those along one axis, too: images of one row."""

    def made(attrs: Attrs) -> Step:
        if len(attrs["strides"]) > 1:
            return in_float32(step(attrs))
        of_planes = in_float32(step(planar(attrs)))
        return lambda a: of_planes(_planes(a)).squeeze(2)

    return made


def _planes(a: Sequence[Any]) -> list[Any]:
    """Tensors of three axes as images of one row."""
    return [t.unsqueeze(2) if isinstance(t, torch.Tensor) and t.dim() == 3 else t for t in a]


def _copied(step: Step) -> Write:
    return lambda a, out: out.copy_(step(a))


def _clamped(step: Step) -> Write:
    return lambda a, out: torch.clamp_min(step(a), 0, out=out)


def _convolution_residual(attrs: Attrs) -> Step:
    """Convolution, bias or None, residual, relu if `attrs["relu"]`: for images one oneDNN call for float32 on CPUs."""
    plain, joined = _convolution(attrs), ConvolutionOnGpu(attrs).joined
    how, relu = Sliding.of(attrs), bool(attrs["relu"])

    def run(a: Sequence[Any]) -> torch.Tensor:
        x, w, bias, other = a
        if how.rank == 2 and is_for_onednn(x):
            return torch.ops.mkldnn._convolution_pointwise.binary(
                x, other.contiguous(), w, None if bias is None else bias.reshape(-1), how.padding, how.stride,
                how.dilation, how.groups, "add", 1.0, "relu" if relu else None, [], None,
            )  # fmt: skip
        made = joined(x, w, bias, other) if relu else None
        if made is not None:
            return made
        total = plain([x, w] if bias is None else [x, w, bias]).add_(other)
        return total.relu_() if relu else total

    return run


def _convolution_transpose(attrs: Attrs) -> Step:
    how, extra = Sliding.of(attrs), list(attrs["output_padding"])

    def run(a: Sequence[Any]) -> torch.Tensor:
        x, w = a
        if not is_pointwise(x, w.shape[2:], how.padding, how.groups):
            return how.spread(x, w, extra)
        made = pointwise(w.flatten(1).t(), x)
        if max(how.stride) == 1:
            return made
        size = [s * (n - 1) + 1 + e for s, n, e in zip(how.stride, x.shape[2:], extra, strict=True)]
        spread = made.new_zeros(*made.shape[:2], *size)
        spread[:, :, :: how.stride[0], :: how.stride[1]] = made
        return spread

    return run


def _window(attrs: Attrs) -> tuple[list[int], list[int], list[int], list[int], bool]:
    """Size, stride, padding, dilation and rounding of a pooling window."""
    size, stride, dilation = (list(attrs[key]) for key in ("pool_size", "strides", "dilation"))
    return size, stride, list(attrs["padding"][:2]), dilation, bool(attrs["ceil_mode"])


def _max_pool2d(attrs: Attrs) -> Step:
    window = _window(attrs)
    return lambda a: F.max_pool2d(a[0], *window)


def _max_pool2d_backward(attrs: Attrs) -> Step:
    window = _window(attrs)

    def run(a: Sequence[Any]) -> torch.Tensor:
        _, where = torch.ops.aten.max_pool2d_with_indices(a[1], *window)
        return torch.ops.aten.max_pool2d_with_indices_backward(a[0], a[1], *window, where)

    return run


def _avg_pool2d(attrs: Attrs) -> Step:
    size, stride, padding, _, ceil_mode = _window(attrs)
    count_pad = bool(attrs["count_include_pad"])
    return lambda a: F.avg_pool2d(a[0], size, stride, padding, ceil_mode, count_pad)


def _avg_pool2d_backward(attrs: Attrs) -> Step:
    size, stride, padding, _, ceil_mode = _window(attrs)
    count_pad = bool(attrs["count_include_pad"])
    return lambda a: torch.ops.aten.avg_pool2d_backward(a[0], a[1], size, stride, padding, ceil_mode, count_pad, None)


def _adaptive_avg_pool2d(attrs: Attrs) -> Step:
    size = list(attrs["output_size"]) if attrs.get("output_size") else None
    return lambda a: F.adaptive_avg_pool2d(a[0], size or a[0].shape[2:])


def _layer_norm(attrs: Attrs) -> Step:
    num_axes, epsilon = len(attrs["axes"]), float(attrs["epsilon"])
    center, scale = bool(attrs["center"]), bool(attrs["scale"])

    def run(a: Sequence[Any]) -> torch.Tensor:
        return F.layer_norm(a[0], a[0].shape[-num_axes:], a[1] if scale else None, a[2] if center else None, epsilon)

    return run


def _attention(attrs: Attrs) -> Step:
    """Relax's attention: (batch, length, heads, width) each, and a bias."""
    scale = None if attrs.get("scale") is None else float(attrs["scale"])

    def run(a: Sequence[Any]) -> torch.Tensor:
        q, k, v = (t.transpose(1, 2) for t in a[:3])
        return F.scaled_dot_product_attention(q, k, v, a[3] if len(a) == 4 else None, scale=scale).transpose(1, 2)

    return run


def _folded_attention(attrs: Attrs) -> Step:
    """Attention as operators: queries, transposed keys, values, and a mask; `attrs["scale"]` multiplies the scores."""
    scale = float(attrs["scale"])

    def run(a: Sequence[Any]) -> torch.Tensor:
        q, keys, v = a[:3]
        mask = a[3] if len(a) == 4 else None
        if not 2 <= q.dim() == keys.dim() == v.dim() <= 3:
            return F.scaled_dot_product_attention(q, keys.transpose(-1, -2), v, mask, scale=scale)
        lead = (None,) * (4 - q.dim())  # torch's fused kernels take four axes only
        if mask is not None and mask.dim() == 3:
            mask = mask[None]
        made = F.scaled_dot_product_attention(q[lead], keys.transpose(-1, -2)[lead], v[lead], mask, scale=scale)
        return made[(0,) * len(lead)]

    return run


def _rows_of(attrs: Attrs, a: Sequence[Any]) -> torch.Tensor:
    """The row indices of an embedding: TVM's "clip" takes the nearest row, torch refuses one out of range."""
    rows: torch.Tensor = a[1].clamp(0, a[0].shape[0] - 1) if attrs.get("mode") == "clip" else a[1]
    return rows


def _reduced(attrs: Attrs, a: Sequence[Any]) -> tuple[list[int], bool]:
    axes = attrs["axis"]
    return list(range(a[0].dim())) if axes is None else [int(x) for x in axes], bool(attrs["keepdims"])


def _permute(attrs: Attrs) -> Step:
    axes = attrs["axes"]
    return lambda a: a[0].permute(*(axes or reversed(range(a[0].dim()))))


def _expand(attrs: Attrs) -> Step:
    def run(a: Sequence[Any]) -> torch.Tensor:
        rank = a[0].dim() + len(attrs["axis"])
        out: torch.Tensor = a[0]
        for axis in sorted(int(x) % rank for x in attrs["axis"]):
            out = out.unsqueeze(axis)
        return out

    return run


def _cut(a: Sequence[Any]) -> torch.Tensor:
    """A view of one range along each of some axes."""
    x, axes, begin, end = a
    out: torch.Tensor = x
    for axis, first, last in zip(axes, begin, end, strict=True):
        out = out.narrow(int(axis), int(first), int(last) - int(first))
    return out


def _conv2d_weight_gradient(attrs: Attrs) -> Step:
    """Input and output gradient with batch and channels exchanged, then what cuts the result to the weight's size."""
    stride, dilation, padding = list(attrs["dilation"]), list(attrs["strides"]), list(attrs["padding"][:2])

    def run(a: Sequence[Any]) -> torch.Tensor:
        x, gradient = a[0].transpose(0, 1), a[1].transpose(0, 1)
        size = [gradient.shape[1], x.shape[1], *(
            (x.shape[d + 2] + 2 * padding[d] - stride[d] * (gradient.shape[d + 2] - 1) - 1) // dilation[d] + 1
            for d in range(2)
        )]  # fmt: skip
        if len(a) > 2:
            _, _, axes, begin, end = a
            for axis, first, last in zip(axes, begin, end, strict=True):
                size[int(axis)] = int(last) - int(first)
        if is_pointwise(x, size[2:], padding, 1):
            rows, columns = (s * (n - 1) + 1 for s, n in zip(stride, gradient.shape[2:], strict=True))
            return pointwise_weight_gradient(x[:, :, : rows : stride[0], : columns : stride[1]], gradient)
        like, wanted = x.new_empty(size), [False, True, False]
        return torch.ops.aten.convolution_backward(
            gradient, x, like, None, stride, padding, dilation, False, [0, 0], 1, wanted
        )[1]

    return run


def _squeeze(attrs: Attrs) -> Step:
    axes = attrs["axis"]
    return lambda a: a[0].squeeze() if axes is None else a[0].squeeze(tuple(int(x) for x in axes))


def _matmul(a: Sequence[Any]) -> torch.Tensor:
    x, w, *bias = a
    if w.dim() != 2:
        return torch.matmul(x, w)
    return product(x.reshape(-1, x.shape[-1]), w, *(b.reshape(-1) for b in bias)).reshape(*x.shape[:-1], w.shape[1])


def _matmul_into(a: Sequence[Any], out: torch.Tensor) -> None:
    x, w, *bias = a
    if w.dim() != 2:
        torch.matmul(x, w, out=out)
        return
    product_into(x.reshape(-1, x.shape[-1]), w, bias[0].reshape(-1) if bias else None, out.view(-1, w.shape[1]))


def _each(**functions: Callable[..., Any]) -> dict[str, Callable[[Attrs], Step]]:
    """Rows whose function takes the arguments as they are."""
    return {name: lambda attrs, f=f: lambda a: f(*a) for name, f in functions.items()}  # type: ignore[misc]


def _each_into(**functions: Callable[..., Any]) -> dict[str, Callable[[Attrs], Write]]:
    return {name: lambda attrs, f=f: lambda a, out: f(*a, out=out) for name, f in functions.items()}  # type: ignore[misc]


_PLAIN: Mapping[str, Callable[..., Any]] = {
    name: getattr(torch, name)
    for name in ("tanh", "sigmoid", "exp", "erf", "log", "sqrt", "rsqrt", "negative", "abs", "clip")
}
_BINARY: Mapping[str, Callable[..., Any]] = {
    "add": torch.add, "subtract": torch.subtract, "multiply": torch.multiply, "divide": torch.divide,
    "power": torch.pow, "maximum": torch.maximum, "minimum": torch.minimum, "where": torch.where,
}  # fmt: skip

#: Functions that make a new tensor.
STEPS: Mapping[str, Callable[[Attrs], Step]] = {
    "matmul": lambda attrs: _matmul,
    **dict.fromkeys(CONVOLUTIONS, _of_planes(_convolution)),
    **dict.fromkeys(TRANSPOSED_CONVOLUTIONS, _of_planes(_convolution_transpose)),
    "nn.max_pool2d": _max_pool2d,
    "nn.avg_pool2d": _avg_pool2d,
    "nn.adaptive_avg_pool2d": _adaptive_avg_pool2d,
    "grad.max_pool2d_backward": _max_pool2d_backward,
    "grad.avg_pool2d_backward": _avg_pool2d_backward,
    "nn.attention": _attention,
    "nn.attention_bias": _attention,
    "nn.softmax": lambda attrs: lambda a: torch.softmax(a[0], _axis(attrs)),
    "nn.log_softmax": lambda attrs: lambda a: torch.log_softmax(a[0], _axis(attrs)),
    "nn.layer_norm": _layer_norm,
    "nn.gelu": lambda attrs: lambda a: F.gelu(a[0]),
    "nn.gelu_tanh": lambda attrs: lambda a: F.gelu(a[0], approximate="tanh"),
    "nn.silu": lambda attrs: lambda a: F.silu(a[0]),
    "nn.relu": lambda attrs: lambda a: torch.relu(a[0]),
    **_each(**_PLAIN, **_BINARY),
    "sum": lambda attrs: lambda a: torch.sum(a[0], *_reduced(attrs, a)),
    "mean": lambda attrs: lambda a: torch.mean(a[0], *_reduced(attrs, a)),
    "max": lambda attrs: lambda a: torch.amax(a[0], *_reduced(attrs, a)),
    "min": lambda attrs: lambda a: torch.amin(a[0], *_reduced(attrs, a)),
    "take": lambda attrs: lambda a: F.embedding(_rows_of(attrs, a), a[0]),
    "reshape": lambda attrs: lambda a: a[0].reshape(a[1]),
    "permute_dims": _permute,
    "expand_dims": _expand,
    "squeeze": _squeeze,
    "concat": lambda attrs: lambda a: torch.cat(list(a), _axis(attrs)),
    "strided_slice": lambda attrs: _cut,
    "scatter_nd": lambda attrs: lambda a: torch.index_add(a[0], 0, a[1].reshape(-1), a[2]),
}

#: Steps that no operator of a graph is named after: what chains fold into, and a `take` of one constant index.
FOLDED: Mapping[str, Callable[[Attrs], Step]] = {
    "convolution_relu": _of_planes(_convolution_relu),
    "convolution_residual": _of_planes(_convolution_residual),
    "attention": _folded_attention,
    "conv2d_weight_gradient": lambda attrs: in_float32(_conv2d_weight_gradient(attrs)),
    "softmax_backward": lambda attrs: lambda a: torch.ops.aten._softmax_backward_data(*a, _axis(attrs), a[1].dtype),
    "select": lambda attrs: lambda a: a[0].select(_axis(attrs), int(attrs["index"])),
}

#: Functions that write into the result directly, where torch has them.
WRITES: Mapping[str, Callable[[Attrs], Write]] = {
    **dict.fromkeys(CONVOLUTIONS, lambda attrs: _convolution_into(attrs, lambda planar: _copied(_convolution(planar)))),
    "convolution_relu": lambda attrs: _convolution_into(
        attrs, lambda planar: _clamped(_convolution(planar)), relu=True
    ),
    "convolution_residual": lambda attrs: _convolution_into(
        attrs, lambda planar: _copied(_convolution_residual(planar)), relu=attrs["relu"]
    ),
    "matmul": lambda attrs: _matmul_into,
    "nn.softmax": lambda attrs: lambda a, out: torch.softmax(a[0], _axis(attrs), out=out),
    "nn.log_softmax": lambda attrs: lambda a, out: torch.log_softmax(a[0], _axis(attrs), out=out),
    "nn.gelu": lambda attrs: lambda a, out: torch.ops.aten.gelu.out(a[0], out=out),
    "nn.gelu_tanh": lambda attrs: lambda a, out: torch.ops.aten.gelu.out(a[0], approximate="tanh", out=out),
    "nn.silu": lambda attrs: lambda a, out: torch.ops.aten.silu.out(a[0], out=out),
    "nn.relu": lambda attrs: lambda a, out: torch.clamp_min(a[0], 0, out=out),
    **_each_into(**_PLAIN, **_BINARY),
    "sum": lambda attrs: lambda a, out: torch.sum(a[0], *_reduced(attrs, a), out=out),
    "mean": lambda attrs: lambda a, out: torch.mean(a[0], *_reduced(attrs, a), out=out),
    "max": lambda attrs: lambda a, out: torch.amax(a[0], *_reduced(attrs, a), out=out),
    "min": lambda attrs: lambda a, out: torch.amin(a[0], *_reduced(attrs, a), out=out),
    "take": lambda attrs: (
        lambda a, out: torch.index_select(a[0], 0, _rows_of(attrs, a).reshape(-1), out=out.view(-1, out.shape[-1]))
    ),
    "concat": lambda attrs: lambda a, out: torch.cat(list(a), _axis(attrs), out=out),
    "scatter_nd": lambda attrs: lambda a, out: torch.index_add(a[0], 0, a[1].reshape(-1), a[2], out=out),
}
