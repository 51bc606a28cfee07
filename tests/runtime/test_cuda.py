"""What a machine lacks for CUDA is said by name, and a placed program runs over two GPUs, emulated."""

import ctypes
import dataclasses
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

import tvmhet
from benchmarks import gpu
from tests import emulated_cuda
from tests.graph.test_cutting import Block
from tests.runtime.programs import add_scale_module, full, specs, two_cpus
from tests.test_bundle_cubins import STUB
from tests.zoo.test_zoo import SMALL
from tvmhet import zoo
from tvmhet.cluster import local
from tvmhet.cluster.cpu import read_cpu
from tvmhet.cluster.local import cluster_of
from tvmhet.cluster.nvml import Gpu, NvmlReport
from tvmhet.emit.float32 import in_float32
from tvmhet.emit.lower import lower_stage
from tvmhet.errors import MissingPackage, NotSupported, OutOfMemory
from tvmhet.runtime import DeviceBinding, HetRuntime, PipelineProgram, StageProgram, cuda, fleet, vm

WITHOUT_DRIVER = """
import tvmhet.runtime.cuda as cuda
from tvmhet.errors import HetError
try:
    print(cuda.architecture(3))
except HetError as error:
    print(type(error).__name__, error)
"""


def said(environment):
    """What a fresh process says of a GPU that is not there."""
    command = [sys.executable, "-c", WITHOUT_DRIVER]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=True).stdout


def no_driver():
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    pytest.skip("this machine has an NVIDIA driver")


def test_a_machine_without_a_driver_is_told_to_install_one(monkeypatch):
    no_driver()
    monkeypatch.setattr(cuda, "_registered", lambda tvm_ffi: False)
    with pytest.raises(NotSupported, match=r"(?s)no NVIDIA driver: libcuda\.so\.1.*580"):
        cuda.load_cuda()


@pytest.mark.slow
def test_with_a_driver_that_has_no_device_cudas_own_words_are_given(tmp_path):
    no_driver()
    assert shutil.which("cc") is not None, "no C compiler for the stub of a driver: building tvmhet needs one, too"
    (tmp_path / "stub.c").write_text(STUB)
    compiler = ["cc", "-shared", "-fPIC", "-w", "-o", str(tmp_path / "libcuda.so.1")]
    subprocess.run([*compiler, str(tmp_path / "stub.c")], check=True)
    text = said({"LD_LIBRARY_PATH": str(tmp_path)})
    assert "NotSupported" in text and "CUDA sees no GPU 3: " in text and "CUDA_VISIBLE_DEVICES" in text


def test_without_cudas_runtime_library_the_error_names_the_package(monkeypatch):
    def load(name, mode=0):
        raise OSError("libcudart.so.13: cannot open shared object file: No such file or directory")

    monkeypatch.setattr(cuda, "_registered", lambda tvm_ffi: False)
    monkeypatch.setattr(cuda.ctypes, "CDLL", load)
    with pytest.raises(MissingPackage, match=r"(?s)libcudart\.so\.13.*tvmhet\[nvrtc\]"):
        cuda.load_cuda()


def test_torch_without_cuda_is_refused_before_a_library_kernel_runs():
    if torch.cuda.is_available():
        pytest.skip("torch has CUDA here")
    with pytest.raises(MissingPackage, match=r"(?s)sees no GPU.*makers"):
        cuda.torch_stream(0)


def test_only_convolutions_on_a_gpu_change_torchs_setting(monkeypatch):
    seen = []

    class OnGpu:
        device = torch.device("cuda", 0)

    in_float32(lambda a: seen.append(torch.backends.cudnn.allow_tf32))([OnGpu()])
    in_float32(lambda a: seen.append(torch.backends.cudnn.allow_tf32))([torch.zeros(1)])
    assert seen == [False, torch.backends.cudnn.allow_tf32] and torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize("text", ["CUDA Error: out of memory", "CUDA out of memory. Tried to allocate 2 GiB"])
def test_memory_of_a_gpu_is_told_from_other_errors(text):
    assert vm.is_out_of_memory(RuntimeError(text)) and issubclass(OutOfMemory, Exception)
    assert not vm.is_out_of_memory(RuntimeError("misaligned address"))


@pytest.fixture
def two_gpus(monkeypatch):
    """Two emulated GPUs, as this machine's."""
    emulated_cuda.install()
    found = {"local/a100-sxm-80gb:0": 0, "local/a100-sxm-80gb:1": 1}
    monkeypatch.setattr(fleet, "cuda_ordinals", lambda: found)
    monkeypatch.setattr(local, "cuda_ordinals", lambda: found)


def test_cpu_gpu_gpu_cpu(two_gpus, add_scale, tmp_path):
    executable, _ = lower_stage(add_scale_module(2, 2, "float32"), emulated_cuda.A100)
    library = tmp_path / "cuda.so"
    executable.export_library(str(library))
    cpu = add_scale(2, 1)
    stages = (
        StageProgram(0, "a", cpu, ("x", "x"), ("h",), ("cpu0",), ("w",)),
        StageProgram(1, "b", library, ("h", "x"), ("g", "g2"), ("gpu0", "gpu1"), ("w",)),
        StageProgram(2, "c", cpu, ("g", "g2"), ("y",), ("cpu1",), ("w",)),
    )
    gpus = {f"gpu{i}": DeviceBinding(f"gpu{i}", "cuda", ordinal=i) for i in range(2)}
    program = PipelineProgram(
        specs("x", "h", "g", "g2", "y"), ("x",), ("y", "g"), stages, {"w": full(1)}, two_cpus() | gpus
    )
    with HetRuntime(program) as runtime:
        for i, (y, g) in enumerate(runtime.map(full(i) for i in range(20))):
            np.testing.assert_array_equal(g, full(3 * i + 2))
            np.testing.assert_array_equal(y, full(3 * (3 * i + 2) + 1))


class Masked(nn.Module):
    """Attention under a causal mask: its scores are one kernel with a mask of bools."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.out = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(8, 3)
        self.register_buffer("mask", torch.ones(8, 8).tril().bool())

    def forward(self, x):
        scores = self.query(x) @ self.key(x).transpose(1, 2) * 0.25
        return self.out(torch.softmax(scores.masked_fill(~self.mask, -1e9), -1))


@pytest.mark.slow
def test_a_model_of_the_zoo_gives_torchs_answer(two_gpus, monkeypatch, tmp_path):
    monkeypatch.setenv("TVMHET_CACHE_DIR", str(tmp_path))
    model, inputs = zoo.get("gpt2_small", **SMALL["gpt2_small"])
    with torch.no_grad():
        want = model(*inputs).numpy()
    cluster = tvmhet.ClusterSpec.of({"a100": 1})
    with tvmhet.build(tvmhet.from_torch(model, inputs), cluster=cluster, makers=("tvm",)) as built:
        for order in (nullcontext, emulated_cuda.backwards):
            with order():
                np.testing.assert_allclose(built(*inputs).numpy(), want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_a_stage_is_split_over_two_gpus(two_gpus, monkeypatch, tmp_path):
    monkeypatch.setenv("TVMHET_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    module, x = Block(32, 4).eval(), torch.randn(2, 6, 32)
    cluster = tvmhet.ClusterSpec.of({"a100": 2})
    splits = [{"degree": 2, "times_s": {"*": 1e-9}}]
    with torch.no_grad():
        want = module(x).numpy()
    with tvmhet.build(
        tvmhet.from_torch(module, (x,)), cluster=cluster, makers=("tvm",), objective="latency", splits=splits
    ) as built:
        assert built.plan.stages[0].degree == 2 and len(built.program.bindings) == 2
        for got in built.map([x] * 4):
            np.testing.assert_allclose(got.numpy(), want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_no_more_gpus_are_used_than_there_are(two_gpus):
    with pytest.raises(NotSupported, match="only 2"):
        fleet.check_gpus([DeviceBinding("gpu2", "cuda", ordinal=2)])


@pytest.mark.slow
def test_the_check_of_a_machines_gpus_says_what_it_found(two_gpus, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("TVMHET_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    said = gpu.check_model(Masked().eval(), (torch.randn(2, 8, 16),), tvmhet.ClusterSpec.of({"a100": 1}), "tvm", 2)
    assert float(said.removeprefix("error ").partition(",")[0]) < 1e-4 and "kernels" in said
    assert not gpu.checked("a step", lambda: 1 // 0) and "ZeroDivisionError" in capsys.readouterr().out
    assert gpu.checked("software", gpu.versions) and "TVM 0.27" in capsys.readouterr().out


def test_the_check_looks_at_every_type_alone_and_at_all_gpus_together(two_gpus, monkeypatch):
    card = Gpu(0, "NVIDIA A100-SXM4-80GB", 80 << 30, (8, 0), *[None] * (len(dataclasses.fields(Gpu)) - 4))
    other = dataclasses.replace(card, index=2, name="Tesla T4", memory_bytes=15 << 30, compute_capability=(7, 5))
    here = cluster_of(read_cpu(), NvmlReport((card, dataclasses.replace(card, index=1), other)))
    monkeypatch.setattr(gpu, "detect", lambda: here)
    found = gpu.clusters()
    assert list(found) == ["1 x a100-sxm-80gb", "1 x t4", "2 x a100-sxm-80gb + 1 x t4"]
    ids = [d for group in found["2 x a100-sxm-80gb + 1 x t4"].groups() for d in group.device_ids]
    assert ids == ["local/a100-sxm-80gb:0", "local/a100-sxm-80gb:1", "local/t4:0"]
    assert gpu.check_gpu("local/a100-sxm-80gb:1", 1) == "CUDA device 1 is sm_80"
    assert "its type says sm_75" in gpu.check_gpu("local/t4:0", 2)


def test_a_stage_inline_on_a_gpu(two_gpus, tmp_path):
    library = tmp_path / "cuda.so"
    lower_stage(add_scale_module(1, 1, "float32"), emulated_cuda.A100)[0].export_library(str(library))
    stages = (StageProgram(0, "a", library, ("x",), ("y",), ("gpu0",), ("w",)),)
    bindings = {"gpu0": DeviceBinding("gpu0", "cuda", ordinal=0)}
    program = PipelineProgram(specs("x", "y"), ("x",), ("y",), stages, {"w": full(1)}, bindings)
    with HetRuntime(program, inline=True) as runtime:
        for i in range(3):
            (y,) = runtime(full(i))
            np.testing.assert_array_equal(y, full(i + 1))
