"""Bundles for GPUs carry machine code for their source, and TVM's loader takes it where the device suits."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
import tvm
import tvm_ffi
from torch import nn

import tvmhet
from tvmhet import bundle as bundle_module
from tvmhet.bundle import read_bundle
from tvmhet.emit import nvrtc
from tvmhet.emit.nvrtc import Cubin
from tvmhet.errors import BadBundle, MissingPackage
from tvmhet.runtime import cubins as cubins_module
from tvmhet.runtime.cubins import Cubins, compiled_for, write_cubins

CALLBACK = "tvm_callback_cuda_compile"
STUB = """int cuInit(int n) { return 100; }
#define NONE(name) int name() { return 100; }
NONE(cuDeviceGetName) NONE(cuFuncSetAttribute) NONE(cuLaunchKernelEx) NONE(cuModuleGetFunction) NONE(cuModuleLoadData)
NONE(cuModuleUnload) NONE(cuTensorMapEncodeTiled) NONE(cuGetProcAddress) NONE(cuGetProcAddress_v2)
NONE(cuDriverGetVersion)
int cuGetErrorName(int e, const char** p) { *p = "stub"; return 0; }
int cuGetErrorString(int e, const char** p) { *p = "stub"; return 0; }
"""
LOAD = """
import sys
from pathlib import Path
import tvm, tvm_ffi
from tvmhet.runtime.cubins import Cubins, compiled_for

compiled = []
def compiler(source):
    compiled.append(source)
    return b"compiled here"
tvm_ffi.register_global_func("tvm_callback_cuda_compile", compiler, override=True)
library, cubins = sys.argv[1:]
for arch in ("sm_80", "sm_90"):
    with compiled_for(arch, Cubins.read(Path(cubins))):
        tvm_ffi.load_module(library)
    print(arch, len(compiled))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A small model for an A100, made by TVM."""
    patch = pytest.MonkeyPatch()
    patch.setenv("TVMHET_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU()).eval()
    imported = tvmhet.from_torch(model, (torch.randn(4, 16),))
    yield tvmhet.build(imported, cluster=tvmhet.ClusterSpec.of({"a100": 1}), makers=("tvm",))
    patch.undo()


@pytest.fixture(scope="module")
def bundle(built, tmp_path_factory):
    """Its bundle."""
    return built.export(tmp_path_factory.mktemp("bundles") / "bundle")


def test_a_bundle_carries_cubins_and_what_ptxas_says_of_their_kernels(bundle):
    manifest = json.loads((bundle / "manifest.json").read_text())
    assert manifest["stages"][0]["cubins"] == "stage0.cubins" in manifest["sha256"]
    cubins = Cubins.read(bundle / "stage0.cubins")
    assert cubins.arch == "sm_80" and all(code[:4] == b"\x7fELF" for code in cubins.code.values())
    kernels = cubins.kernels
    assert kernels and all(0 < k["registers"] <= 255 and k["threads"] > 0 and k["spill_bytes"] == 0 for k in kernels)


def test_the_bundle_of_a_bundle_has_the_same_cubins(bundle, tmp_path):
    plan, program = read_bundle(bundle)
    again = bundle_module.export_bundle(plan, program, tmp_path / "again")
    assert (again / "stage0.cubins").read_bytes() == (bundle / "stage0.cubins").read_bytes()


def test_changed_cubins_are_refused(bundle, tmp_path):
    copy = shutil.copytree(bundle, tmp_path / "bundle")
    write_cubins(copy / "stage0.cubins", "sm_80", {}, [])
    with pytest.raises(BadBundle, match=r"stage0\.cubins"):
        read_bundle(copy)


def test_without_nvrtc_a_bundle_carries_its_source_alone(built, tmp_path, monkeypatch):
    def missing(library):
        raise MissingPackage("no NVRTC", "install it")

    monkeypatch.setattr(bundle_module, "make_cubins", missing)
    folder = built.export(tmp_path / "bundle")
    assert not list(folder.glob("*.cubins"))
    assert read_bundle(folder)[1].stages[0].cubins is None


@pytest.fixture
def compiler(monkeypatch):
    """In place of TVM's compiler, one that says so."""
    before = tvm_ffi.get_global_func(CALLBACK)
    tvm_ffi.register_global_func(CALLBACK, lambda source: f"compiled {source}", override=True)
    monkeypatch.setattr(cubins_module, "_installed", [])
    monkeypatch.setenv("TVM_CUDA_COMPILE_MODE", "nvcc")  # asks for TVM's compiler rather than for NVRTC
    yield
    tvm_ffi.register_global_func(CALLBACK, before, override=True)


@pytest.mark.parametrize(("made_for", "device", "taken"), [
    ("sm_80", "sm_80", True), ("sm_90a", "sm_90", True), ("sm_80", "sm_86", False), ("sm_80", "sm_90", False),
])  # fmt: skip
def test_a_cubin_is_given_for_its_own_source_and_architecture_only(compiler, tmp_path, made_for, device, taken):
    write_cubins(tmp_path / "cubins", made_for, {"a": b"code of a"}, [])
    with compiled_for(device, Cubins.read(tmp_path / "cubins")):
        compiled = tvm_ffi.get_global_func(CALLBACK)
        assert compiled("a") == (b"code of a" if taken else "compiled a")
        assert compiled("b") == "compiled b"
    assert tvm_ffi.get_global_func(CALLBACK)("a") == "compiled a"


def test_source_is_compiled_for_the_device_that_loads_it(monkeypatch):
    """TVM alone compiles for the first GPU of the process."""
    seen = []
    monkeypatch.setattr(cubins_module, "_installed", [])
    before = tvm_ffi.get_global_func(CALLBACK)
    compiler = lambda source: seen.append(str(tvm.target.Target.current().attrs["arch"])) or "made"  # noqa: E731
    tvm_ffi.register_global_func(CALLBACK, compiler, override=True)
    try:
        with compiled_for("sm_75"):
            monkeypatch.setattr(nvrtc, "compile_cubin", lambda source, arch: Cubin(arch, arch.encode(), ()))
            assert tvm_ffi.get_global_func(CALLBACK)("a") == b"sm_75" and not seen
            monkeypatch.setattr(nvrtc, "compile_cubin", _no_nvrtc)
            assert tvm_ffi.get_global_func(CALLBACK)("a") == "made" and seen == ["sm_75"]
    finally:
        tvm_ffi.register_global_func(CALLBACK, before, override=True)


def _no_nvrtc(source, arch):
    raise MissingPackage("no NVRTC", "install it")


def test_without_any_compiler_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(nvrtc, "compile_cubin", _no_nvrtc)
    monkeypatch.setenv("CUDA_PATH", "/nowhere")
    with compiled_for("sm_75"), pytest.raises(RuntimeError, match=r"(?s)E016.*compiled for sm_75.*tvmhet\[nvrtc\]"):
        tvm_ffi.get_global_func(CALLBACK)('extern "C" __global__ void f() {}')


def test_another_file_is_no_file_of_cubins(tmp_path):
    (tmp_path / "text").write_text("text")
    with pytest.raises(ValueError, match="no file of cubins"):
        Cubins.read(tmp_path / "text")


@pytest.mark.slow
def test_tvms_loader_takes_the_cubin_instead_of_compiling(bundle, tmp_path):
    """With a driver library that has no device: TVM's CUDA module is loaded, no kernel is started."""
    (tmp_path / "stub.c").write_text(STUB)
    compiler = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-o", str(tmp_path / "libcuda.so.1")]
    subprocess.run([*compiler, str(tmp_path / "stub.c")], check=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "TVM_CUDA_COMPILE_MODE": "nvcc"}
    command = [sys.executable, "-c", LOAD, str(bundle / "stage0.so"), str(bundle / "stage0.cubins")]
    said = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    assert said.splitlines()[-2:] == ["sm_80 0", "sm_90 1"]
