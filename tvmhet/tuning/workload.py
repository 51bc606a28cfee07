"""One kernel to tune on one device type: its module to compile, the function to schedule, the arguments to time it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tvm

from tvmhet._tvm import PrimFunc
from tvmhet.cluster.device import DeviceType
from tvmhet.cost.measure import ArgSpec
from tvmhet.cost.measured import KernelKey
from tvmhet.emit.cpu.panels import panel_columns
from tvmhet.emit.lower import kernel_passes, make_target
from tvmhet.emit.tuned import function_hash
from tvmhet.graph.library import place_kernel
from tvmhet.ir.kernel_module import kernels_module
from tvmhet.ir.prepare import Prepared
from tvmhet.kernel_keys import measured_key
from tvmhet.profiling import kernel_args
from tvmhet.times import Candidates

#: How far results may be from the rule's kernel, relative to their largest value: sums are taken in another order.
_TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}


class NotTunable(Exception):
    """A kernel that is left as it is, and why."""


@dataclass(frozen=True, slots=True)
class Workload:
    """`module` holds the kernel as the Relax function `k0`; `function` is its only PrimFunc, not scheduled."""

    name: str
    key: KernelKey  # of the kernel as the rules make it
    device: DeviceType
    module: tvm.IRModule
    function: PrimFunc
    function_hash: str
    args: tuple[ArgSpec, ...]
    tolerance: float


def make_workload(prepared: Prepared, candidates: Candidates, index: int, device: DeviceType) -> Workload:
    """Return the workload of a candidate kernel on a device type. Raises NotTunable."""
    kernel, graph = candidates.kernels[index], prepared.operator_graph
    panels = panel_columns(graph, candidates.panels, device.target)
    module = kernels_module(prepared.mod, [place_kernel(graph, kernel)], panels)
    with make_target(device.target):
        lowered = tvm.transform.Sequential(kernel_passes())(module)
    functions = [f for _, f in lowered.functions_items() if isinstance(f, PrimFunc)]
    if len(functions) != 1:
        raise NotTunable(f"TVM makes it of {len(functions)} functions, and one is what a search schedules")
    results = {graph.tensors[t].dtype for i in kernel.ops for t in graph.operators[i].outputs}
    return Workload(
        name="+".join(graph.operators[o].name for o in kernel.ops),
        key=measured_key(candidates.keys[index], kernel.maker, device),
        device=device,
        module=module,
        function=functions[0],
        function_hash=function_hash(functions[0]),
        args=kernel_args(graph, kernel, panels),
        tolerance=_tolerance(sorted(results)),
    )


def _tolerance(dtypes: Sequence[str]) -> float:
    return max((_TOLERANCE.get(d, 0.0) for d in dtypes), default=0.0)
