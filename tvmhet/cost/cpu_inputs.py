"""Rows for the model that learns a CPU type's kernels: what a core notices of a kernel, one row per description.

Sizes stay, because one device type is learned at a time and its measured kernels span the sizes in use; the scale
comes from `least_s`. Remainders count in vectors of 16 float32 values, the widest of any x86 core.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from tvmhet.cluster.device import DeviceType
from tvmhet.cost.columns import Floats
from tvmhet.cost.model import SIZES, KernelDesc, OpDesc
from tvmhet.cost.roofline import peak_flop_per_s

_FAMILIES = tuple(SIZES)
_VECTOR = 16
_MAX_SIZES = 10
#: Operators whose number in a kernel is an input; an operator in no list is counted by its family alone.
_COUNTED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "exponential": ("exp", "sigmoid", "silu", "tanh", "gelu", "gelu_tanh", "erf", "softplus", "log"),
        "erf": ("erf", "gelu"),
        "power": ("power", "power_scalar", "sin", "cos"),
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
    "inside", "tvm", "family", "num_ops", "log_least", "log_compute_share", "log_flop", "log_read", "log_write",
    "log_bytes_over_cache", "log_intensity", "log_m", "log_n", "log_k", "tail_m", "tail_n", "tail_k", "stride",
    "is_depthwise", "row_tail", "width_bytes",
    *(f"num_{word}" for word in _COUNTED), *(f"num_{family}" for family in _FAMILIES),
    *(f"log_size_{i}" for i in range(_MAX_SIZES)),
)  # fmt: skip


def least_s(device: DeviceType, descs: Sequence[KernelDesc]) -> Floats:
    """Return a call and the sum of arithmetic and traffic at the data sheet's rates, seconds: the scale of a kernel."""
    rates = np.array([peak_flop_per_s(device, d.root.family, d.root.dtype) for d in descs])
    flop = np.array([d.flop for d in descs])
    moved = np.array([d.read_bytes + d.write_bytes for d in descs])
    out: Floats = device.launch_s + flop / rates + moved / device.dram_byte_per_s
    return out


def rows(device: DeviceType, descs: Sequence[KernelDesc], inside: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Return one row of `INPUTS` per kernel; `inside` says which are to be seen inside a model rather than alone."""
    scale = least_s(device, descs)
    rates = [peak_flop_per_s(device, d.root.family, d.root.dtype) for d in descs]
    made = [
        [float(i), *_row(device, d, s, rate)]
        for d, i, s, rate in zip(descs, inside, scale.tolist(), rates, strict=True)
    ]
    return np.array(made, dtype=np.float32).reshape(len(descs), len(INPUTS))


def _row(device: DeviceType, desc: KernelDesc, scale_s: float, rate: float) -> list[float]:
    root = desc.root
    moved = desc.read_bytes + desc.write_bytes
    names = [op.name for op in desc.ops]
    families = [op.family for op in desc.ops]
    m, n, k, stride, depthwise = _product(root)
    sizes = [math.log(max(s, 0.5)) for s in root.sizes]
    return [
        float(desc.maker == "tvm"), float(_FAMILIES.index(root.family)), float(len(desc.ops)), math.log(scale_s),
        math.log(max(desc.flop, 1.0) / rate / scale_s), math.log(max(desc.flop, 1.0)),
        math.log(max(desc.read_bytes, 1.0)), math.log(max(desc.write_bytes, 1.0)),
        math.log(max(moved, 1.0) / device.l2_bytes), math.log(max(desc.flop, 1.0) / max(moved, 1.0)),
        math.log(m), math.log(n), math.log(k), _tail(m), _tail(n), _tail(k), stride, depthwise,
        _tail(root.sizes[-1]) if root.sizes else math.nan, float(_width(desc)),
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
