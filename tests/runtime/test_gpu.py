"""On an NVIDIA GPU: generated kernels, a program over CPU and GPU, models, training steps. Skipped without one.

The same kernels and programs run emulated where there is none (tests/emit/test_cuda_kernels.py, test_cuda.py).
"""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest
import torch
import tvm

import tvmhet
from benchmarks import gpu
from tests.emit.test_cuda_kernels import GROUPS, SINGLE, WHOLE, inputs_of, stage
from tests.emulated_cuda.kernels import compare_with_cpu
from tests.runtime.programs import add_scale_module, full, specs, two_cpus
from tvmhet import zoo
from tvmhet._functions import STEADY, STORAGES
from tvmhet.cluster.local import cuda_ordinals
from tvmhet.emit.lower import lower_stage
from tvmhet.runtime import DeviceBinding, HetRuntime, PipelineProgram, StageProgram, vm
from tvmhet.runtime.cuda import architecture
from tvmhet.runtime.cuda_graph import capture

pytestmark = pytest.mark.gpu
BATCH = torch.linspace(-1, 1, 16 * 64).reshape(16, 64)


@pytest.fixture(scope="module")
def target() -> dict[str, object]:
    """The target of the first GPU; skips where there is none. One that TVM cannot use fails, with what is missing."""
    if not cuda_ordinals():
        pytest.skip("NVML shows no GPU")
    arch = architecture(0)
    return {"kind": "cuda", "arch": arch, "max_threads_per_block": 1024, "max_shared_memory_per_block": 49152}


def on_gpu(array: np.ndarray) -> object:
    placed = vm.empty_on("cuda", 0, array)
    vm.copy(vm.host_view(array), placed)
    vm.wait_for("cuda", 0)
    return placed


def on_host(tensor: object) -> np.ndarray:
    out = np.zeros(tuple(tensor.shape), str(tensor.dtype))  # type: ignore[attr-defined]
    vm.copy(tensor, vm.host_view(out))
    vm.wait_for("cuda", 0)
    return out


CASES = {**{n: (c, False) for n, c in {**SINGLE, **WHOLE}.items()}, **{n: (c, True) for n, c in GROUPS.items()}}


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_generated_kernel(name: str, target: dict[str, object]) -> None:
    case, fused = CASES[name]
    compare_with_cpu(stage([case], fused), inputs_of([case]), target, on_gpu, 1e-4)


def test_cpu_gpu_cpu(add_scale: object, target: dict[str, object], tmp_path: Path) -> None:
    library = tmp_path / "cuda.so"
    lower_stage(add_scale_module(2, 2, "float32"), target)[0].export_library(str(library))
    cpu = add_scale(2, 1)  # type: ignore[operator]
    stages = (
        StageProgram(0, "a", cpu, ("x", "x"), ("h",), ("cpu0",), ("w",)),
        StageProgram(1, "b", library, ("h", "x"), ("g", "g2"), ("gpu0",), ("w",)),
        StageProgram(2, "c", cpu, ("g", "g2"), ("y",), ("cpu1",), ("w",)),
    )
    bindings = two_cpus() | {"gpu0": DeviceBinding("gpu0", "cuda", ordinal=0)}
    program = PipelineProgram(specs("x", "h", "g", "g2", "y"), ("x",), ("y", "g"), stages, {"w": full(1)}, bindings)
    with HetRuntime(program) as runtime:
        for i, (y, g) in enumerate(runtime.map(full(i) for i in range(50))):
            np.testing.assert_array_equal(g, full(3 * i + 2))
            np.testing.assert_array_equal(y, full(3 * (3 * i + 2) + 1))


@pytest.mark.parametrize("makers", ["tvm", "library+tvm"])
def test_a_stage_is_captured_as_a_graph(makers: str, target: dict[str, object]) -> None:
    """Its results are those of `main`, and it reads what lies in its arguments when it is launched."""
    if makers != "tvm" and not torch.cuda.is_available():
        pytest.skip("torch has no CUDA, which library kernels need")
    importlib.import_module("tvmhet.emit.library")
    imported = tvmhet.from_torch(torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.GELU()).eval(), (BATCH,))
    cluster = next(iter(gpu.clusters().values()))
    program = tvmhet.build(imported, cluster=cluster, makers=tuple(makers.split("+"))).program
    (stage,) = program.stages
    main, steady, storages = vm.load_functions(stage.library, (stage.function, STEADY, STORAGES), "cuda", 0)
    params = [on_gpu(program.params[n]) for n in stage.params]
    x = on_gpu(BATCH.numpy())
    graph = capture((steady, storages), (x, *params), 0, stage.needs_library)
    assert graph is not None
    for factor in (1, -2):
        vm.copy(vm.host_view(BATCH.numpy() * factor), x)
        vm.wait_for("cuda", 0)
        (got,) = graph.launch()
        (want,) = main(x, *params)
        vm.wait_for("cuda", 0)
        np.testing.assert_allclose(on_host(got), on_host(want), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("makers", ["tvm", "library+tvm"])
def test_kernels_are_measured(makers: str, target: dict[str, object], tmp_path: Path) -> None:
    if makers != "tvm" and not torch.cuda.is_available():
        pytest.skip("torch has no CUDA, which library kernels need")
    imported = tvmhet.from_torch(torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.GELU()).eval(), (BATCH,))
    cluster = next(iter(gpu.clusters().values()))
    database, names = tmp_path / "measured.db", tuple(makers.split("+"))
    report = tvmhet.profile(imported, cluster=cluster, budget_s=100, makers=names, database=database)
    assert report.complete and not report.failed, str(report)
    plan = tvmhet.plan(imported, cluster=cluster, makers=names, database=database)
    seconds = [p.time_s for p in plan.stages[0].predictions]
    assert {p.source for p in plan.stages[0].predictions} == {"measured"} and max(seconds) < 1e-4  # without launches


@pytest.mark.parametrize("makers", ["tvm", "library+tvm"])
def test_a_model(makers: str, target: dict[str, object]) -> None:
    if makers != "tvm" and not torch.cuda.is_available():
        pytest.skip("torch has no CUDA, which library kernels need")
    model, inputs = zoo.get("resnet50", blocks=(1, 1, 1, 1), base_width=8, image=32, num_classes=10)
    for cluster in gpu.clusters().values():
        assert gpu.check_model(model, inputs, cluster, makers, 3).startswith("error")


@pytest.mark.parametrize("name", sorted(gpu.TRAINED))
def test_a_training_step(name: str, target: dict[str, object]) -> None:
    for cluster in gpu.clusters().values():
        said = gpu.check_training(*zoo.get(name, **gpu.TRAINED[name]), cluster, "tvm", 2)
        assert said.startswith("gradients")


def test_tvm_takes_the_device(target: dict[str, object]) -> None:
    assert tvm.cuda(0).exist and str(target["arch"]).startswith("sm_")
