"""Rows for the model that learns a CPU type's kernels: what a core notices of a kernel, one row per description.

Sizes stay, because one device type is learned at a time and its measured kernels span the sizes in use; the scale
comes from `usual_s`. Remainders count in vectors of 16 float32 values, the widest of any x86 core.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from tvmhet.cluster.device import DeviceType
from tvmhet.cost.columns import Floats, window_of
from tvmhet.cost.model import SIZES, KernelDesc, OpDesc, dilation_of
from tvmhet.cost.roofline import peak_flop_per_s

_FAMILIES = tuple(SIZES)
_VECTOR = 16
_MAX_SIZES = 10
#: What a call takes by maker, seconds: the shortest kernels inside models, of one core of an AMD EPYC.
_CALL_S: Mapping[str, float] = MappingProxyType({"tvm": 0.5e-6, "library": 5e-6})
# Weights are read as fast as the cache that holds them until the next run. A vector times a matrix, GB/s, on the same
# core: 135 in a model of 1.4 MiB, 70 to 85 of 2 to 12 MiB, 35 to 50 from 15 MiB on. Its type's data sheet says 12.
_COLD_BYTES = 64 << 20
_COLD_RATE = 3.0  # of the data sheet's
_RATE_FALL = 1 / 3  # as a power of the bytes that are read in between
#: What the library takes for each value of a pooling's windows: 0.7 to 2.7 ns on AMD's family 26, 1.6 to 6 on Intel.
_WINDOW_VALUE_S = 2e-9
#: Operators whose number in a kernel is an input; an operator in no list is counted by its family alone.
_COUNTED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "exponential": (
            "exp", "sigmoid", "silu", "tanh", "gelu", "gelu_tanh", "erf", "softplus", "log", "log2", "log10", "mish",
            "sin", "cos", "tan",
        ),
        "erf": ("erf", "gelu"),
        "power": ("power", "power_scalar"),
        "division": ("divide", "divide_scalar", "sqrt", "rsqrt", "floor_divide"),
        "choice": ("where", "relu", "relu6", "clip", "leakyrelu", "hardswish", "hardsigmoid", "maximum", "minimum"),
        "permuting": ("permute_dims", "transpose", "layout_transform"),
        "joining": ("concat", "stack", "split", "pad"),
        "slicing": ("strided_slice", "take", "gather_elements", "gather_nd", "index_tensor", "flip"),
        "spreading": ("broadcast_to", "repeat", "tile", "full", "zeros", "ones", "arange", "one_hot"),
        "resizing": ("resize2d", "pixel_shuffle"),
        "scanning": ("cumsum", "topk", "sort", "argsort", "argmax"),
        "casting": ("astype",),
        "transposed": ("transpose",),
    }
)  # fmt: skip

INPUTS = (
    "inside", "log_around_over_cache", "tvm", "family", "num_ops", "log_usual", "log_compute_share", "log_flop",
    "log_read", "log_write", "log_weights",
    "log_bytes_over_cache", "log_intensity", "log_m", "log_n", "log_k", "tail_m", "tail_n", "tail_k", "stride",
    "is_depthwise", "row_tail", "width_bytes", "panels", "dilation",
    *(f"num_{word}" for word in _COUNTED), *(f"num_{family}" for family in _FAMILIES),
    *(f"log_size_{i}" for i in range(_MAX_SIZES)),
)  # fmt: skip


def usual_s(device: DeviceType, descs: Sequence[KernelDesc], inside_bytes: Floats) -> Floats:
    """Return the scale of kernels, seconds: a call, arithmetic at the data sheet's rate, and traffic from some cache.

    The library's pooling has a rate of its own. `inside_bytes` are the parameters of the model that each kernel runs
    inside, 0 of a kernel alone.
    """
    rates = np.array([peak_flop_per_s(device, d.root.family, d.root.dtype) for d in descs])
    flop = np.array([d.flop for d in descs])
    moved = np.array([d.read_bytes + d.write_bytes for d in descs])
    weights = np.minimum([_weight_bytes(d.root) for d in descs], moved)
    traffic_s = weights / _byte_per_s(device, np.maximum(inside_bytes, moved))
    traffic_s += (moved - weights) / _byte_per_s(device, moved)
    calls_s = np.array([_CALL_S[d.maker] + _windows_s(d) for d in descs])
    out: Floats = calls_s + flop / rates + traffic_s
    return out


def _windows_s(desc: KernelDesc) -> float:
    """Seconds of the library's walk through the windows of a pooling; 0 of other kernels, as means of images."""
    num_values = window_of(desc.root)
    if desc.maker != "library" or num_values == 1.0:
        return 0.0
    n, c, _, _, _, _, oh, ow = desc.root.sizes
    return _WINDOW_VALUE_S * num_values * n * c * oh * ow


def _byte_per_s(device: DeviceType, between_bytes: Floats) -> Floats:
    """How fast data are read again after so many bytes of others."""
    share = np.clip(between_bytes, device.l2_bytes, _COLD_BYTES) / _COLD_BYTES
    out: Floats = _COLD_RATE * device.dram_byte_per_s * share**-_RATE_FALL
    return out


def _weight_bytes(root: OpDesc) -> float:
    """Bytes of the operand that a model holds, of a product or a convolution; 0 of others."""
    if root.family == "linear":
        _, _, n, k = root.sizes
        return 4.0 * n * k
    if root.family == "conv2d":
        _, c, _, _, oc, kh, kw, _, _, groups = root.sizes
        return 4.0 * oc * max(c // groups, 1) * kh * kw
    return 0.0


def rows(device: DeviceType, descs: Sequence[KernelDesc], inside_bytes: Floats) -> NDArray[np.float32]:
    """Return one row of `INPUTS` per kernel.

    `inside_bytes` are the parameters of the model that it runs inside, 0 of a kernel alone: what is read between two
    runs of a kernel decides which cache still holds its own operands.
    """
    scale = usual_s(device, descs, inside_bytes)
    rates = [peak_flop_per_s(device, d.root.family, d.root.dtype) for d in descs]
    made = [_row(device, *each) for each in zip(descs, scale.tolist(), rates, inside_bytes.tolist(), strict=True)]
    return np.array(made, dtype=np.float32).reshape(len(descs), len(INPUTS))


def _row(device: DeviceType, desc: KernelDesc, scale_s: float, rate: float, inside_bytes: float) -> list[float]:
    root = desc.root
    moved = desc.read_bytes + desc.write_bytes
    names = [op.name for op in desc.ops]
    families = [op.family for op in desc.ops]
    m, n, k, stride, depthwise = _product(root)
    sizes = [math.log(max(s, 0.5)) for s in root.sizes]
    return [
        float(inside_bytes > 0), math.log(max(moved, inside_bytes, 1.0) / device.l2_bytes),
        float(desc.maker == "tvm"), float(_FAMILIES.index(root.family)), float(len(desc.ops)), math.log(scale_s),
        math.log(max(desc.flop, 1.0) / rate / scale_s), math.log(max(desc.flop, 1.0)),
        math.log(max(desc.read_bytes, 1.0)), math.log(max(desc.write_bytes, 1.0)),
        math.log(max(_weight_bytes(root), 1.0)),
        math.log(max(moved, 1.0) / device.l2_bytes), math.log(max(desc.flop, 1.0) / max(moved, 1.0)),
        math.log(m), math.log(n), math.log(k), _tail(m), _tail(n), _tail(k), stride, depthwise,
        _tail(root.sizes[-1]) if root.sizes else math.nan, float(_width(desc)), float(desc.panels),
        float(dilation_of(root.name)),
        *(float(sum(name in words for name in names)) for words in _COUNTED.values()),
        *(float(families.count(family)) for family in _FAMILIES),
        *sizes, *[math.nan] * (_MAX_SIZES - len(sizes)),
    ]  # fmt: skip


def _product(root: OpDesc) -> tuple[float, float, float, float, float]:
    """Return (m, n, k, stride, whether depthwise) of a product or a convolution seen as one; NaN of others."""
    if root.family in ("matmul", "linear"):
        b, m, n, k = root.sizes
        return (float(m) if root.family == "matmul" else float(b * m)), float(n), float(k), math.nan, math.nan
    if root.family != "conv2d":
        return (math.nan,) * 5
    n, c, h, _, oc, kh, kw, oh, ow, groups = root.sizes
    depth = max(c // groups, 1) * kh * kw
    return float(n * oh * ow), float(max(oc // groups, 1)), float(depth), h / oh, float(groups > 1 and groups == c)


def _tail(size: float) -> float:
    """How much of the last vector is wasted, as a factor; NaN stays."""
    return size if math.isnan(size) else math.ceil(size / _VECTOR) * _VECTOR / max(size, 1.0)


def _width(desc: KernelDesc) -> int:
    return {"float64": 8, "int64": 8, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1, "bool": 1}.get(desc.dtype, 4)
