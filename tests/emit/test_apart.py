"""CUDA kernels whose loops must not be fused: run as serial loops they give the unscheduled kernel's result."""

import re

import numpy as np
import pytest
import tvm
from tvm.relax import op

from tests.emit.cpu.kernels import kernel, run
from tests.emit.cpu.test_injective import rolled
from tvmhet._tvm import dlight
from tvmhet.emit.lower import make_target
from tvmhet.emit.schedule import ScheduleReport, _apply_dlight, schedule_kernels

CUDA = make_target(
    {"kind": "cuda", "arch": "sm_80", "max_threads_per_block": 1024, "max_shared_memory_per_block": 49152}
)
MAKES = {
    "rolled": rolled,
    "padded": lambda x: op.strided_slice(op.nn.pad(op.repeat(x, 2, 2), [0, 0, 0, 0, 1, 1]), [2], [0], [16]),
    "softmax": lambda x: op.nn.softmax(rolled(x)),
    "sum": lambda x: op.sum(rolled(x), [1, 2]),
    "sum of all": lambda x: op.sum(rolled(x)),
    "five axes": lambda x: op.expand_dims(op.expand_dims(rolled(x), 0), 2),
}


def scheduled(func):
    report = ScheduleReport()
    mod = schedule_kernels(tvm.IRModule({"main": func.with_attr("global_symbol", "main")}), CUDA, report)
    return mod["main"], report


def serial(func):
    """The kernel with every thread and block index as a loop, as a CPU can run it."""
    text = re.sub(r'T\.thread_binding\(([^,]+), thread="[^"]+"\)', r"T.serial(\1)", func.script())
    assert "thread" not in text.replace("tirx.noalias", "")
    return tvm.script.from_source(text)


@pytest.mark.parametrize("name", list(MAKES))
def test_indices_are_those_of_the_kernel(name):
    func = kernel(MAKES[name], (4, 4, 8))
    fast, report = scheduled(func)
    assert report.applied == {"apart": 1}
    x = np.random.default_rng(0).uniform(-1, 1, (4, 4, 8)).astype("float32")
    np.testing.assert_allclose(run(serial(fast), [x]), run(func, [x]), rtol=1e-6)
    tvm.compile(tvm.IRModule({"main": fast}), target=CUDA)


def test_fused_loops_would_read_elsewhere():
    """What dlight makes of the same kernel; when TVM mends this, the rule can go."""
    func = kernel(rolled, (4, 4, 8)).with_attr("global_symbol", "main")
    with CUDA:
        fused = _apply_dlight(dlight.gpu.Fallback(), 49152, func)
    source = tvm.compile(tvm.IRModule({"main": fused}), target=CUDA).mod.imports[0].inspect_source("cuda")
    assert "+ 1) >> 1) - 9" in source


def test_other_kernels_are_dlights():
    assert scheduled(kernel(op.exp, (4, 4, 8)))[1].applied == {"Fallback": 1}
