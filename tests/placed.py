"""What the tests of whole models share: the undivided model's answer, a placed program run in this process, and
placements by dice.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import tvm
from tvm import relax

from tvmhet.cluster import ClusterSpec
from tvmhet.cluster.cpu import read_cpu
from tvmhet.graph.fusion import LegalKernel, legal_kernels
from tvmhet.graph.library import library_kernels, place_kernel
from tvmhet.graph.opgraph import OpGraph
from tvmhet.graph.placement import KernelPlacement, StagePlacement
from tvmhet.ir.bindings import Bindings
from tvmhet.ir.model import Model
from tvmhet.ir.prepare import Prepared
from tvmhet.ir.transform.split_by_stage import stage_interfaces
from tvmhet.plans import KernelPrediction, Plan, PlannedStage
from tvmhet.runtime.arena import StoredParams
from tvmhet.runtime.executor import StageExecutor
from tvmhet.runtime.program import PipelineProgram

#: Largest difference per output, as a part of the output's largest absolute value.
TOLERANCE = {"float64": 1e-11, "float32": 2e-5, "float16": 1e-2, "bfloat16": 4e-2}
#: The higher of the levels whose code this machine runs: where tests run what they plan. Below v3 they do not run.
BEST = "v4" if "x86-64-v4" in read_cpu().levels else "v3"


def cpus(**counts: int) -> ClusterSpec:
    """A cluster of one machine: cpus(v2=1, v4=1). A type with 0 devices stays in the file."""
    return ClusterSpec.from_dict({"nodes": [{"devices": {f"cpu-x86-64-{level}": n for level, n in counts.items()}}]})


#: Three unlike types whose code this machine runs.
THREE = cpus(v2=1, v3=1, **{BEST if BEST != "v3" else "v3-2core": 1})


def arrays(result: Any) -> list[np.ndarray]:
    """Every tensor of a result, left to right, as numpy; bfloat16 as the float32 of the same value."""
    if isinstance(result, np.ndarray):
        return [result.astype("float32") if result.dtype.name == "bfloat16" else result]
    if isinstance(result, torch.Tensor):
        return [(result.float() if result.dtype is torch.bfloat16 else result).detach().numpy()]
    if isinstance(result, tvm.runtime.Tensor):
        return arrays(torch.from_dlpack(result).clone())
    return [array for part in result for array in arrays(part)]


def plain(model: Model, *inputs: torch.Tensor) -> list[np.ndarray]:
    """The answer of the undivided model, compiled by `tvm.compile` alone."""
    executable = tvm.compile(model.mod, target=tvm.target.Target("llvm"))
    given = [tvm.runtime.from_dlpack(x.clone().contiguous()) for x in inputs]
    return arrays(relax.VirtualMachine(executable, tvm.cpu())["main"](*given, *model.params.values()))


def assert_same(got: Any, want: Any, dtype: str | None = None) -> None:
    """Compare results tensor by tensor, within the dtype's tolerance scaled to the output; others exactly."""
    ours, theirs = arrays(got), arrays(want)
    assert [(a.shape, a.dtype) for a in ours] == [(b.shape, b.dtype) for b in theirs]
    for a, b in zip(ours, theirs, strict=True):
        finite = b[np.isfinite(b)] if b.dtype.kind == "f" else b
        scale = float(np.abs(finite).max()) if finite.size and b.dtype.kind == "f" else 0.0
        np.testing.assert_allclose(a, b, rtol=0, atol=scale * TOLERANCE.get(dtype or b.dtype.name, 0.0))


def run_stages(program: PipelineProgram, *inputs: torch.Tensor) -> list[np.ndarray]:
    """Run a placed program stage by stage in this process: the same libraries and values, no workers.

    States have their first values.
    """
    values: dict[str, Any] = {
        name: tvm.runtime.from_dlpack(x.clone().contiguous()) for name, x in zip(program.inputs, inputs, strict=True)
    } | {name: program.params[name] for name in program.outputs if name in program.params}
    values |= {s.value: tvm.runtime.tensor(program.params[s.initial]) for s in program.states}
    params = StoredParams.of(program.params, [name for stage in program.stages for name in stage.params])
    for stage in program.stages:
        executor = StageExecutor(stage, program.bindings[stage.devices[0]], params)
        results = executor.call([values[name] for name in stage.inputs])
        values |= dict(zip(stage.outputs, results, strict=True))
    return [array for name in program.outputs for array in arrays(values[name])]


# ---- placements by dice


def random_kernels(graph: OpGraph, rng: random.Random, makers: Sequence[str]) -> list[LegalKernel]:
    """A random partition of the operators into kernels that the makers can make, in a random execution order."""
    fused = [k for k in legal_kernels(graph) if len(k.ops) > 1] if "tvm" in makers else []
    pool = [*fused, *(library_kernels(graph) if "library" in makers else ())]
    rng.shuffle(pool)
    chosen: list[LegalKernel] = []
    free = set(range(len(graph.operators)))
    for kernel in pool:
        if free.issuperset(kernel.ops) and rng.random() < 0.7 and _order(graph, [*chosen, kernel], rng) is not None:
            chosen.append(kernel)
            free -= set(kernel.ops)
    order = _order(graph, chosen, rng)
    assert order is not None
    return order


def _order(graph: OpGraph, chosen: Sequence[LegalKernel], rng: random.Random) -> list[LegalKernel] | None:
    """The kernels and the left-over operators in a random topological order; None if they wait for each other."""
    of = {o: k for k in chosen for o in k.ops}
    kernels = list(dict.fromkeys(of.get(o, LegalKernel((o,))) for o in range(len(graph.operators))))
    of |= {k.ops[0]: k for k in kernels if len(k.ops) == 1 and k.ops[0] not in of}
    waits = {k: {of[p] for o in k.ops for p in graph.predecessors(o)} - {k} for k in kernels}
    order: list[LegalKernel] = []
    while waits:
        ready = [k for k in kernels if k in waits and not waits[k]]
        if not ready:
            return None
        order.append(rng.choice(ready))
        del waits[order[-1]]
        for needs in waits.values():
            needs.discard(order[-1])
    return order


def random_plan(
    prepared: Prepared, cluster: ClusterSpec, seed: int, makers: Sequence[str] = ("tvm", "library")
) -> Plan:
    """A valid plan by dice: random kernels in a random order, cut into random stages on random devices."""
    rng = random.Random(seed)
    graph = prepared.graph
    assert graph is not None
    kernels = [place_kernel(graph, k) for k in random_kernels(graph, rng, makers)]
    num_cuts = rng.randint(0, min(5, len(kernels) - 1))
    cuts = [0, *sorted(rng.sample(range(1, len(kernels)), num_cuts)), len(kernels)]
    groups = [g for g in cluster.groups() if g.num_devices]
    placed = []
    for i, (a, b) in enumerate(itertools.pairwise(cuts)):
        group = rng.choice(groups)
        devices = tuple(rng.sample(group.device_ids, rng.randint(1, group.num_devices)))
        placed.append(StagePlacement(i, tuple(kernels[a:b]), group.device.name, devices))
    return plan_of(prepared, cluster, placed)


def plan_of(prepared: Prepared, cluster: ClusterSpec, placed: Sequence[StagePlacement]) -> Plan:
    """The plan of a placement, with no prediction worth reading."""
    bindings = Bindings(prepared.mod["main"])
    operators = [[o for k in s.kernels for o in k.ops] for s in placed]
    nothing = KernelPrediction(0.0, 0.0, 0.0, "dice")
    stages = tuple(
        PlannedStage(s, (nothing,) * len(s.kernels), io.inputs, io.weights, io.outputs, 0.0, 0.0, 0.0, 0)
        for s, io in zip(placed, stage_interfaces(bindings, operators), strict=True)
    )
    return Plan(
        model="main", module_key=prepared.key, cluster_key=cluster.content_hash(), tvm_version=tvm.__version__,
        objective="throughput", objective_value=0.0, lower_bound=0.0, status="feasible", solver="dice", steps=0,
        latency_s=0.0, period_s=0.0, usd_per_h=0.0, stages=stages, timeline=(),
    )  # fmt: skip


def singles(prepared: Prepared) -> list[KernelPlacement]:
    """Every operator as a kernel of its own: what plain TVM makes on a CPU."""
    assert prepared.graph is not None
    return [KernelPlacement(o.name, (o.name,), "tvm") for o in prepared.graph.operators]
