"""How many times longer a kernel takes by its maker than the library's estimate, where none was measured.

    ratios of this processor's vendor at the type's instruction set  >  ratios of the device kind

CPU types are kinds of cores of the machine that plans, as measured times are, so its processor's vendor decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from tvmhet._data import data_path
from tvmhet.cluster.cpu import processor_vendor
from tvmhet.cluster.device import DeviceType
from tvmhet.cost.columns import window_of
from tvmhet.cost.model import KernelDesc, OpDesc
from tvmhet.errors import BadModel

#: Rows of a product, by device kind, below which it has a ratio of its own: on CPUs the matrix is read for little
#: arithmetic, on GPUs too few blocks are left to fill them.
_FEW_ROWS: Mapping[str, int] = MappingProxyType({"llvm": 32, "cuda": 256})

#: What a kernel of a GPU's library takes beyond a generated one where there is little to do. In a graph on an H100
#: torch's take 2.2 to 3.4 us, but element-wise ones and copies 0.8 to 1.8, much as generated ones (1.0 to 1.4).
_LIBRARY_START_S = 0.8e-6
_START_AT_ONCE = ("elementwise", "movement")
#: Clocks in which a thread of the library's maximum pool takes in a value, one after another of its window: 196 to 405
#: on an H200 (torch 2.11; 30 windows of 8 x 8 to 106 x 106, which take 0.7 to 1.4 of what is predicted with this).
_POOLED_VALUE_CLOCKS = 280.0

Floats = NDArray[np.float64]
Ratios = Mapping[str, float]


def maker_ratio(device: DeviceType, desc: KernelDesc, vendor: str | None = None) -> float:
    """Return the ratio for the root operator of `desc` on `device`; 1 for library kernels but some of attention.

    `vendor` (as /proc/cpuinfo names it) defaults to this machine's processor. The ratios and what is assumed in them:
    `cost_models/generated.yaml`. Raises BadModel if the device's kind is not there.
    """
    if desc.maker == "library":
        is_attention = sum(op.family == "matmul" for op in desc.ops) > 1
        return _of_processor(device, vendor).get("library_attention", 1.0) if is_attention else 1.0
    kinds: Ratios | None = _file()["ratio"].get(device.kind)
    if kinds is None:
        raise BadModel(f"generated.yaml has no ratios for device kind {device.kind!r}", "add them")
    for ratios in (_of_processor(device, vendor), kinds):
        for name in (_special(desc.root, device.kind), desc.root.family):
            if name in ratios:
                return ratios[name]
    return kinds["default"]


def library_start_s(device: DeviceType, ops: Sequence[OpDesc]) -> Floats:
    """Return what library kernels of a GPU, by their main operators, take beyond launch and work."""
    windows = np.array([window_of(op) for op in ops], dtype=np.float64)
    return start_s(device, np.array([op.family for op in ops], dtype=np.str_), windows)


def start_s(device: DeviceType, families: NDArray[np.str_], windows: Floats) -> Floats:
    """As `library_start_s`, of columns: `windows` are the values that each result of a pooling takes in."""
    in_turn_s = np.where(families == "pooling", windows * _POOLED_VALUE_CLOCKS / device.clock_hz, 0.0)
    return np.where(np.isin(families, _START_AT_ONCE), 0.0, np.maximum(_LIBRARY_START_S, in_turn_s))


def generated_s(device: DeviceType, library_s: Floats, ratio: Floats | float, start_s: Floats | float) -> Floats:
    """Return seconds of generated kernels inside a module on a GPU, from the library's there: its work times `ratio`.

    The launch is the same whoever made the kernel. `start_s`: what the library's take beyond launch and work.
    """
    work_s = np.maximum(library_s - device.launch_s - start_s, 0.0)
    return np.asarray(device.launch_s + work_s * ratio, dtype=np.float64)


def _of_processor(device: DeviceType, vendor: str | None) -> Ratios:
    if not device.is_cpu:
        return {}
    levels = _file()["processors"].get(processor_vendor() if vendor is None else vendor, {})
    found: Ratios = levels.get(str(device.target.get("mcpu", "")), {})
    return found


def _special(root: OpDesc, kind: str) -> str:
    """The part of a family that has a ratio of its own, else the family."""
    if root.family == "conv2d":
        if root.size("groups") > 1 and root.size("groups") == root.size("c"):
            return "conv2d_depthwise"
        if root.size("kh") == root.size("kw") == 1:
            return "conv2d_pointwise"
    if root.family == "linear" and 1 < root.size("b") * root.size("m") < _FEW_ROWS[kind]:
        return "linear_few_rows"
    return root.family


@lru_cache(maxsize=1)
def _file() -> Mapping[str, Any]:
    tree: dict[str, Any] = yaml.safe_load(data_path("generated.yaml").read_text())
    return tree
