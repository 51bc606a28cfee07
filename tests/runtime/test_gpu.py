"""On an NVIDIA GPU: generated kernels, a program over CPU and GPU, models, training steps. Skipped without one.

The same kernels and programs run emulated where there is none (tests/emit/test_cuda_kernels.py, test_cuda.py).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import tvm

from benchmarks import gpu
from tests.emit.test_cuda_kernels import GROUPS, SINGLE, WHOLE, inputs_of, stage
from tests.emulated_cuda.kernels import compare_with_cpu
from tests.runtime.programs import add_scale_module, full, specs, two_cpus
from tvmhet import zoo
from tvmhet.cluster.local import cuda_ordinals
from tvmhet.emit.lower import lower_stage
from tvmhet.runtime import DeviceBinding, HetRuntime, PipelineProgram, StageProgram, vm
from tvmhet.runtime.cuda import architecture

pytestmark = pytest.mark.gpu


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
