"""Kernels are measured on a GPU of this machine (emulated here): one by one, and those that decide a plan."""

import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import tvmhet
from tests import emulated_cuda
from tests.emit.test_cuda_kernels import f32, stage
from tests.emulated_cuda.place import ORDINAL
from tvmhet import profiling
from tvmhet.cluster import local
from tvmhet.cluster.local import ordinal_of
from tvmhet.cost.measure import ArgSpec, KernelJob, KernelTimer, TimerLimits
from tvmhet.emit.lower import lower_stage
from tvmhet.errors import NotSupported
from tvmhet.profiling import local_timer, local_types
from tvmhet.runtime.cuda_times import turn

PLACE = "tests.emulated_cuda.place"
A100 = "a100-sxm-80gb"


@pytest.fixture
def a_gpu(monkeypatch):
    """One emulated GPU, the second of this machine's."""
    emulated_cuda.install()  # skips where nothing can be emulated
    monkeypatch.setattr(local, "cuda_ordinals", lambda: {"local/t4:0": 0, f"local/{A100}:0": 1})
    monkeypatch.setattr(profiling, "_GPU_PLACE", PLACE)


def test_a_type_is_here_if_the_machine_has_one(a_gpu):
    types = [tvmhet.device_type(name) for name in (A100, "v100-pcie-16gb", "cpu-x86-64-v2")]
    assert [t.name for t in local_types(types)] == [A100, "cpu-x86-64-v2"]
    assert [ordinal_of(t) for t in types[:2]] == [1, None]
    with pytest.raises(NotSupported, match="no 'v100-pcie-16gb'"):
        local_timer(types[1])


def test_waiting_for_a_turn_is_no_time_of_the_kernel(a_gpu, tmp_path: Path):
    from tvm import relax

    library = tmp_path / "a.so"
    lower_stage(stage([([f32(3, 5)], relax.op.exp)], fused=False), emulated_cuda.A100)[0].export_library(str(library))
    job, found = KernelJob(library, (ArgSpec((3, 5), "float32"),)), []
    with KernelTimer(gpu=(PLACE, 0), limits=TimerLimits(time_limit_s=6.0)) as timer:
        assert timer.measure(job).status == "ok"  # loaded within the limit
        thread = threading.Thread(target=lambda: found.append(timer.measure(job)))
        with turn(ORDINAL):
            thread.start()
            thread.join(7.0)
            assert thread.is_alive()
        thread.join()
    assert found[0].status == "ok"


def test_a_kernel_is_timed_and_compared_on_a_gpu(a_gpu, tmp_path: Path):
    from tvm import relax

    library, other = tmp_path / "a.so", tmp_path / "b.so"
    for path, function in ((library, relax.op.exp), (other, relax.op.negative)):
        lower_stage(stage([([f32(3, 5)], function)], fused=False), emulated_cuda.A100)[0].export_library(str(path))
    args = (ArgSpec((3, 5), "float32"),)
    with KernelTimer(gpu=(PLACE, 0), limits=TimerLimits(repeats=4)) as timer:
        run = timer.measure(KernelJob(library, args))
        assert (run.status, len(run.times_s)) == ("ok", 4) and "emulated" in run.note and run.median_s > 0
        assert timer.measure(KernelJob(library, args, reference=library)).status == "ok"
        assert timer.measure(KernelJob(library, args, reference=other)).status == "wrong"
        assert timer.measure(KernelJob(library, (ArgSpec((3, 6), "float32"),))).status == "crash"


@pytest.mark.slow
def test_the_kernels_of_a_plan_are_measured_on_a_gpu(a_gpu, tmp_path: Path):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), nn.Softmax(-1)).eval()
    imported = tvmhet.from_torch(model, (torch.zeros(2, 8),))
    cluster, database = tvmhet.ClusterSpec.of({A100: 1}), tmp_path / "measured.db"
    report = tvmhet.profile(imported, cluster=cluster, budget_s=60, makers=("tvm",), database=database)
    assert report.measured[A100] >= 2 and report.complete and not report.failed and not report.unreachable
    plan = tvmhet.plan(imported, cluster=cluster, makers=("tvm",), database=database)
    assert {p.source for p in plan.stages[0].predictions} == {"measured"}
