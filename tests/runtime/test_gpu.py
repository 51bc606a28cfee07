"""A stage on a GPU between stages on the CPU. Without a GPU this skips; the loop itself is tested on CPU threads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.runtime.programs import add_scale_module, full, specs, two_cpus
from tvmhet.runtime import DeviceBinding, HetRuntime, PipelineProgram, StageProgram


@pytest.mark.gpu
def test_cpu_gpu_cpu(add_scale: object, tmp_path: Path) -> None:
    if not tvm.cuda(0).exist:
        pytest.skip("no CUDA device")
    library = tmp_path / "cuda.so"
    target = tvm.target.Target.from_device(tvm.cuda(0))
    with target:
        pipeline = relax.get_default_pipeline(target)
        tvm.compile(add_scale_module(2, 2, "float32"), target, relax_pipeline=pipeline).export_library(str(library))
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
