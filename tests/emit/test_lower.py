"""Lowering: one PrimFunc per planned kernel, and code for every target on a machine that need not have it."""

import re

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.emit.modules import chain
from tvmhet._passes import load_passes
from tvmhet._tvm import PrimFunc
from tvmhet.emit import schedule
from tvmhet.emit.lower import kernel_passes, lower_plain, lower_stage, make_target
from tvmhet.graph.placement import KernelPlacement
from tvmhet.ir.stages import stage_modules
from tvmhet.ir.transform.fuse_by_plan import FuseByPlan
from tvmhet.ir.transform.split_by_stage import SplitByStage

OPS = ("matmul", "exp", "tanh", "matmul", "sigmoid")
NAMES = tuple(f"{op}{i}" for i, op in enumerate(OPS))
PARTITIONS = {
    "one by one": ([n] for n in NAMES),
    "as planned": ([NAMES[0], NAMES[1]], [NAMES[2]], [NAMES[3], NAMES[4]]),
    "products alone": ([NAMES[0]], [NAMES[1], NAMES[2]], [NAMES[3]], [NAMES[4]]),
}
PARTITIONS = {name: tuple(map(tuple, groups)) for name, groups in PARTITIONS.items()}
CUDA = {"kind": "cuda", "max_threads_per_block": 1024, "max_shared_memory_per_block": 49152}


def returning_one_tensor(*ops):
    """`chain`, but main returns the tensor itself, as a model does before it is split."""
    mod = chain(*ops)
    builder = relax.BlockBuilder()
    params = [relax.Var(p.name, p.ty) for p in mod["main"].params]
    with builder.function("main", params, attrs={"num_input": 1}):
        with builder.dataflow():
            value = params[0]
            for name, op in zip(NAMES, ops, strict=True):
                call = relax.op.matmul(value, params[1]) if op == "matmul" else getattr(relax.op, op)(value)
                value = builder.emit_output(call, name) if name == NAMES[-1] else builder.emit(call, name)
        builder.emit_func_output(value)
    return builder.get()


def stage_of(partition):
    kernels = [KernelPlacement(g[-1], g, "tvm") for g in partition]
    stages = [[k.name for k in kernels]]
    (stage,) = stage_modules(
        tvm.transform.Sequential([FuseByPlan(kernels), SplitByStage(stages)])(returning_one_tensor(*OPS))
    )
    return stage


@pytest.mark.parametrize("name", PARTITIONS)
def test_one_prim_func_per_distinct_planned_kernel_and_one_call_each(name):
    stage = stage_of(PARTITIONS[name])
    with tvm.target.Target("llvm"):
        lowered = tvm.transform.Sequential(kernel_passes())(stage)
    calls = [b.value for block in lowered["main"].body.blocks for b in block.bindings]
    called = [str(c.args[0].name_hint) for c in calls if isinstance(c, relax.Call)]
    assert len(called) == len(PARTITIONS[name])
    prims = {g.name_hint for g, f in lowered.functions_items() if isinstance(f, PrimFunc)}
    assert prims == set(called)  # nothing else is compiled


def main_of(executable, device=None):
    load_passes()  # TensorAt, which stages call
    return relax.VirtualMachine(executable, device or tvm.cpu())["main"]


@pytest.mark.parametrize("name", PARTITIONS)
def test_every_partition_computes_the_same(name):
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal((8, 8)).astype("float32") for _ in range(2))
    executable, _ = lower_stage(stage_of(PARTITIONS[name]), {"kind": "llvm"})
    (got,) = main_of(executable)(tvm.runtime.tensor(x), tvm.runtime.tensor(w))
    want = 1 / (1 + np.exp(-(np.tanh(np.exp(x @ w)) @ w)))
    np.testing.assert_allclose(got.numpy(), want, rtol=0, atol=1e-5)


SSE, AVX2, AVX512 = r"%xmm\d", r"vfmadd.*%ymm\d", r"%zmm\d|%[xy]mm(1[6-9]|2\d|3[01])|%k[0-7]"


@pytest.mark.parametrize(("level", "has", "lacks"), [("v2", SSE, AVX2), ("v3", AVX2, AVX512), ("v4", AVX512, "none")])
def test_each_cpu_level_uses_its_own_instructions(level, has, lacks):
    executable, report = lower_stage(chain("matmul", "exp", side=32), {"kind": "llvm", "mcpu": f"x86-64-{level}"})
    assembly = executable.mod.imports[0].inspect_source("asm")
    assert re.search(has, assembly) and not re.search(lacks, assembly)
    assert sum(report.applied.values()) == 2  # by our own rules


def cuda_source(executable):
    modules = [executable.mod]
    for module in modules:
        modules.extend(module.imports)
    (source,) = (m.inspect_source() for m in modules if m.kind == "cuda")
    return source


@pytest.mark.parametrize("arch", [60, 70, 75, 80, 86, 89, 90, 100])
def test_cuda_source_without_a_gpu(arch):
    executable, report = lower_stage(stage_of(PARTITIONS["as planned"]), {**CUDA, "arch": f"sm_{arch}"})
    kernels = set(re.findall(r"__global__ void __launch_bounds__\(\d+\) (\w+)\(", cuda_source(executable)))
    assert len(kernels) == 3
    assert sum(report.applied.values()) == 3 and not report.unscheduled
    assert report.applied["Matmul"] == 2


def test_a_target_keeps_its_description_and_cuda_gets_a_host():
    cpu = make_target({"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 2})
    assert (cpu.kind.name, str(cpu.attrs["mcpu"]), int(cpu.attrs["num-cores"])) == ("llvm", "x86-64-v3", 2)
    gpu = make_target({**CUDA, "arch": "sm_80"})
    assert (gpu.kind.name, str(gpu.attrs["arch"])) == ("cuda", "sm_80")
    assert gpu.host.kind.name == "llvm"


def test_single_operator_kernels_that_have_one_order_of_arithmetic_give_plain_tvms_bits():
    rng = np.random.default_rng(1)
    args = [tvm.runtime.tensor(rng.standard_normal((8, 8)).astype("float32")) for _ in range(2)]
    mod = chain("negative", "square", "floor", "abs", "sqrt")
    ours, _ = lower_stage(mod, {"kind": "llvm"})
    plain = lower_plain(mod, {"kind": "llvm"})
    np.testing.assert_array_equal(main_of(ours)(*args)[0].numpy(), main_of(plain)(*args)[0].numpy())


def test_lowering_does_not_change_the_stage():
    stage = stage_of(PARTITIONS["as planned"])
    before = tvm.ir.save_json(stage)
    lower_stage(stage, {"kind": "llvm"})
    assert tvm.ir.save_json(stage) == before


def binds_to_threads(func, cpu):
    """A rule whose schedule looks fine and cannot be lowered for a CPU; it takes kernels without a reduction."""
    sch = tvm.s_tir.Schedule(func)
    (block,) = sch.get_child_blocks(sch.get_sblock("root"))
    if any(int(v.iter_type) for v in sch.get(block).iter_vars):
        return None
    sch.bind(sch.get_loops(block)[0], "threadIdx.x")
    return sch


def test_a_kernel_whose_schedule_cannot_be_lowered_is_put_back_alone(monkeypatch):
    monkeypatch.setattr(schedule, "RULES", (("Binds", binds_to_threads), *schedule.RULES))
    executable, report = lower_stage(chain("matmul", "exp", side=32), {"kind": "llvm"})
    assert report.applied["Binds"] == 1 and report.applied["contraction"] == 1
    assert report.raised == {"lowering": 1}
    assert report.unscheduled == ["tir_exp"]
    assert str(report) == "2 kernels: 1 Binds, 1 contraction; raised: 1 lowering; without a schedule: tir_exp"
    rng = np.random.default_rng(0)
    x, w = (rng.uniform(-0.2, 0.2, (32, 32)).astype("float32") for _ in range(2))
    (got,) = main_of(executable)(tvm.runtime.tensor(x), tvm.runtime.tensor(w))
    np.testing.assert_allclose(got.numpy(), np.exp(x @ w), rtol=1e-5)


def test_what_the_pipeline_that_fuses_refuses_is_compiled_without_fusion(caplog):
    """FuseTIR refuses to join a PrimFunc of int32 sizes with its neighbour."""
    a = tvm.te.placeholder((8,), "float32")
    func = tvm.te.create_prim_func([a, tvm.te.compute((8,), lambda i: a[i] + 1.0)])
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((8,), "float32"))
    short = builder.add_func(func.with_attr("global_symbol", "short"), "short")
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit(relax.op.exp(x))
            z = builder.emit_output(relax.call_tir(short, [y], x.ty))
        builder.emit_func_output(z)
    with caplog.at_level("INFO", logger="tvmhet.emit"):
        machine = relax.VirtualMachine(lower_plain(builder.get(), {"kind": "llvm"}), tvm.cpu())
    assert "compiled without fusion" in caplog.text and "Inconsistent buffers" in caplog.text
    given = np.linspace(-1, 1, 8, dtype="float32")
    np.testing.assert_allclose(machine["main"](tvm.runtime.tensor(given)).numpy(), np.exp(given) + 1, rtol=1e-6)
