"""compile_stages: equal stages once, known ones not at all, many in processes; a failure is named, nothing is torn."""

import logging

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.emit.modules import chain, unsupported
from tvmhet.emit import build
from tvmhet.emit.build import StageSource, compile_stages, compile_to
from tvmhet.emit.cache import StageCache
from tvmhet.emit.compiler import CompilerProcess
from tvmhet.errors import MissingPackage, UnsupportedOperator

LLVM = {"kind": "llvm"}
V2 = {"kind": "llvm", "mcpu": "x86-64-v2"}


@pytest.fixture
def cache(tmp_path):
    return StageCache(tmp_path / "cache")


@pytest.fixture
def compiled(monkeypatch):
    """The names of stages that are compiled in this process."""
    names = []
    real = build._compile_here
    monkeypatch.setattr(build, "_compile_here", lambda s, path: (names.append(s.name), real(s, path))[1])
    return names


def source(name, *ops, target=LLVM, plain=False):
    return StageSource(name, chain(*ops), target, plain)


def run(library, x, w):
    machine = relax.VirtualMachine(tvm.runtime.load_module(str(library)), tvm.cpu())
    return machine["main"](tvm.runtime.tensor(x), tvm.runtime.tensor(w))[0].numpy()


def entries(cache):
    return sorted(p.name for p in (cache.root / "stages").iterdir()) if (cache.root / "stages").exists() else []


def test_equal_stages_compile_once_and_libraries_come_in_order(cache, compiled):
    sources = [source("a", "exp"), source("b", "tanh"), source("c", "exp"), source("d", "exp", target=V2)]
    libraries = compile_stages(sources, cache)
    assert compiled == ["a", "b", "d"]
    assert libraries[0] == libraries[2] and len(set(libraries)) == 3
    x = np.linspace(-1, 1, 64, dtype="float32").reshape(8, 8)
    for library, want in zip(libraries, (np.exp(x), np.tanh(x), np.exp(x), np.exp(x)), strict=True):
        np.testing.assert_allclose(run(library, x, x), want, atol=1e-6)


def test_a_second_build_compiles_nothing(cache, compiled):
    sources = [source("a", "exp"), source("b", "tanh", "matmul")]
    first = compile_stages(sources, cache)
    compiled.clear()
    assert compile_stages(sources, cache) == first
    assert compiled == []


def test_a_planned_and_a_plain_build_are_different_entries(cache, compiled):
    libraries = compile_stages([source("a", "exp"), source("b", "exp", plain=True)], cache)
    assert compiled == ["a", "b"] and len(set(libraries)) == 2


def test_progress_counts_distinct_stages(cache):
    told = []
    sources = [source("a", "exp"), source("b", "tanh"), source("c", "exp")]
    compile_stages(sources[:1], cache)
    compile_stages(sources, cache, on_progress=lambda *report: told.append(report))
    assert told == [(1, 2, "from the cache"), (2, 2, "b")]


def test_an_operator_that_tvm_cannot_compile_is_named_with_its_stage_and_target(cache):
    broken = StageSource("stage 1 (cpu-x)", unsupported(), V2)
    with pytest.raises(UnsupportedOperator) as error:
        compile_stages([source("stage 0 (cpu-x)", "exp"), broken], cache)
    text = str(error.value)
    assert "[TVMHET-E005] TVM cannot compile operator 'shuffled' of stage 1 (cpu-x) for" in text
    assert "x86-64-v2" in text and "tvm_warp_shuffle" in text and "pin its operators" in text
    assert len(entries(cache)) == 1  # stage 0, whole; of stage 1 nothing, not even a temporary folder
    assert cache.find(chain("exp"), LLVM) is not None


# ---- in processes


@pytest.fixture
def in_workers(monkeypatch):
    """Make any two stages worth processes; count those started."""
    started = []

    class Counted(CompilerProcess):
        def start(self):
            if not self.is_running:
                started.append(self)
            super().start()

    monkeypatch.setattr(build, "_MIN_KERNELS_FOR_WORKERS", 1)
    monkeypatch.setattr(build, "CompilerProcess", Counted)
    return started


def test_big_jobs_go_to_worker_processes(cache, compiled, in_workers, caplog):
    caplog.set_level(logging.INFO, "tvmhet.emit")
    sources = [source("a", "exp"), source("b", "tanh"), source("c", "exp", "matmul")]
    libraries = compile_stages(sources, cache, num_workers=2)
    assert compiled == [] and len(in_workers) == 2
    assert "kernels: 1 injective" in caplog.text  # what the rules did is told, also from another process
    x = np.linspace(-1, 1, 64, dtype="float32").reshape(8, 8)
    np.testing.assert_allclose(run(libraries[1], x, x), np.tanh(x), atol=1e-6)
    np.testing.assert_allclose(run(libraries[2], x, x), np.exp(x) @ x, atol=1e-5)
    assert not any(w.is_running for w in in_workers)  # none is left running


def test_a_failure_in_a_worker_reads_the_same_and_ends_all(cache, in_workers):
    broken = StageSource("stage 1 (cpu-x)", unsupported(), V2)
    with pytest.raises(UnsupportedOperator, match="operator 'shuffled' of stage 1"):
        compile_stages([source("a", "exp"), broken], cache, num_workers=2)
    assert not any(w.is_running for w in in_workers)
    assert len(entries(cache)) <= 1


def test_a_worker_that_dies_is_an_error_that_names_the_stage(cache, in_workers, monkeypatch):
    def dying(worker, *args, **options):
        worker._process.kill()
        worker._process.wait()
        return CompilerProcess.compile(worker, *args, **options)

    monkeypatch.setattr(build.CompilerProcess, "compile", dying)
    with pytest.raises(UnsupportedOperator, match=r"cannot compile a for .*: the compiler process died"):
        compile_stages([source("a", "exp"), source("b", "tanh")], cache, num_workers=2)
    assert entries(cache) == []


def test_small_jobs_stay_in_this_process(cache, compiled, monkeypatch):
    monkeypatch.setattr(build, "CompilerProcess", lambda: pytest.fail("a worker was started"))
    compile_stages([source("a", "exp"), source("b", "tanh")], cache, num_workers=2)
    assert compiled == ["a", "b"]


@pytest.mark.parametrize(
    ("variable", "words"),
    [("PATH", r"no C\+\+ compiler"), ("CXX", "the C\\+\\+ compiler '.*no-such-compiler' does not")],
)
def test_without_a_compiler_to_link_with_the_package_is_named(tmp_path, monkeypatch, variable, words):
    for name in ("CXX", "CC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path / "no-such-compiler"))
    with pytest.raises(MissingPackage, match=words):
        compile_to(chain("exp"), LLVM, tmp_path / "out.so")
    assert list(tmp_path.glob("*.so")) == []
