"""CUDA source is C++ that a compiler takes: names are identifiers, shared memory fits, and NVRTC agrees."""

import re

import pytest
import tvm
import tvm_ffi
from tvm import relax
from tvm_ffi.registry import remove_global_func

import tvmhet
from tvmhet._tvm import PrimFunc, dlight
from tvmhet.emit import nvrtc
from tvmhet.emit.c_names import NameInC, c_name
from tvmhet.emit.lower import kernel_passes, lower_plain, lower_stage, make_target
from tvmhet.emit.nvrtc import KernelResources, compile_cubin, cuda_sources, kernel_resources
from tvmhet.emit.nvrtc_headers import STANDARD_HEADERS
from tvmhet.emit.schedule import ScheduleReport, schedule_kernels
from tvmhet.emit.shared_memory import shared_bytes
from tvmhet.errors import BadInput, MissingPackage, UnsupportedOperator
from tvmhet.ir.attrs import NUM_INPUT_ATTR

CUDA = {"kind": "cuda", "arch": "sm_80", "max_threads_per_block": 1024, "max_shared_memory_per_block": 49152}
TARGET = make_target(CUDA)


def product(x_shape, w_shape, names=("x", "w")):
    """main(x, w): their product and its exponential."""
    builder = relax.BlockBuilder()
    x, w = (relax.Var(n, relax.TensorType(s, "float32")) for n, s in zip(names, (x_shape, w_shape), strict=True))
    with builder.function("main", [x, w], attrs={NUM_INPUT_ATTR: 1}):
        with builder.dataflow():
            made = builder.emit(relax.op.matmul(x, w), "2.product")
            out = builder.emit_output(relax.Tuple([builder.emit(relax.op.exp(made), "3.exp")]))
        builder.emit_func_output(out)
    return builder.get()


def kernels(mod):
    with TARGET:
        return tvm.transform.Sequential(kernel_passes())(mod)


def prims(mod):
    return {g.name_hint: f for g, f in mod.functions_items() if isinstance(f, PrimFunc)}


@pytest.mark.parametrize(
    ("name", "wanted"), [("0.norm1", "v0_norm1"), ("weight", "weight"), ("größe", "gr__e"), ("7", "v7"), ("", "")]
)
def test_names_become_identifiers(name, wanted):
    assert c_name(name) == wanted


def test_naming_changes_nothing_but_names():
    mod = kernels(product((8, 8), (8, 8), ("0.x", "0_x")))
    before = mod.script()
    named = NameInC()(mod)
    tvm.ir.assert_structural_equal(named, mod)
    assert mod.script() == before
    assert "v0_x" in str(prims(named)["matmul"]) and any("v2_product" in str(f) for f in prims(named).values())


def test_no_parameter_of_a_kernel_begins_with_a_digit():
    executable, _ = lower_stage(product((64, 64), (64, 64), ("0.x", "0_x")), CUDA)
    (source,) = cuda_sources(executable.mod)
    parameters = re.findall(r"__restrict__ (\w+)", source)
    assert parameters and not [p for p in parameters if p[0].isdigit()]
    for head in re.findall(r"void __launch_bounds__.*?\((.*?)\)", source):
        own = re.findall(r"__restrict__ (\w+)", head)
        assert len(set(own)) == len(own)


@pytest.mark.parametrize("lower", [lambda mod: lower_stage(mod, CUDA)[0], lambda mod: lower_plain(mod, CUDA)])
def test_with_a_driver_too_source_is_made_and_not_compiled(lower):
    """Where TVM has its CUDA runtime, it makes modules by this function, which compiles them."""
    name, tried = "ffi.Module.create.cuda", []
    before = tvm_ffi.get_global_func(name, allow_missing=True)
    tvm_ffi.register_global_func(name, lambda *args: tried.append(args), override=True)
    try:
        executable = lower(product((8, 8), (8, 8)))
        assert not tried and len(cuda_sources(executable.mod)) == 1
        tvm_ffi.get_global_func(name)(1)
        assert len(tried) == 1  # it is there again
    finally:
        remove_global_func(name)
        if before is not None:
            tvm_ffi.register_global_func(name, before)


def test_a_rule_that_asks_for_too_much_shared_memory_falls_through():
    mod = kernels(product((4, 16, 1024), (4, 1024, 1)))
    alone = tvm.IRModule({"main": prims(mod)["matmul"]})
    with TARGET:
        too_large = dlight.ApplyDefaultSchedule(dlight.gpu.GEMV())(alone)["main"]
    assert shared_bytes(too_large) >= 65536  # 16 rows of 1024 floats
    report = ScheduleReport()
    scheduled = schedule_kernels(mod, TARGET, report)
    assert report.raised["GEMV"] == 1 and not report.unscheduled
    assert all(shared_bytes(f) <= 49152 for f in prims(scheduled).values())


SOURCE = """
extern "C" __global__ void __launch_bounds__(256) b_kernel(float* __restrict__ x) {}
extern "C" __global__ void __launch_bounds__(64) a_kernel(float* __restrict__ x) {}
"""
LOG = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'a_kernel' for 'sm_80'
ptxas info    : Function properties for a_kernel
ptxas         .     16 bytes stack frame, 24 bytes spill stores, 40 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 6912 bytes smem, 376 bytes cmem[0], 8 bytes cmem[2]
ptxas info    : Compile time = 15.394 ms
ptxas info    : Compiling entry function 'b_kernel' for 'sm_80'
ptxas info    : Function properties for b_kernel
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers, used 0 barriers, 376 bytes cmem[0]
"""


def test_what_ptxas_says_is_read_in_the_order_of_the_source():
    assert kernel_resources(SOURCE, LOG) == (
        KernelResources("b_kernel", 256, 12, 0, 0, 0),
        KernelResources("a_kernel", 64, 255, 64, 16, 6912),
    )


def test_occupancy_by_hand():
    a100 = tvmhet.device_type("a100")  # 2048 threads, 164 KiB of shared memory and 65536 registers of an SM
    assert KernelResources("full", 256, 32, 0, 0, 0).occupancy(a100) == 1.0
    assert KernelResources("registers", 256, 128, 0, 0, 0).occupancy(a100) == 2 * 256 / 2048
    assert KernelResources("shared", 128, 16, 0, 0, 48 << 10).occupancy(a100) == 3 * 128 / 2048
    assert KernelResources("too many", 1024, 255, 0, 0, 0).occupancy(a100) == 0.0


def test_an_architecture_that_is_none_is_refused():
    with pytest.raises(BadInput, match="'ampere'"):
        compile_cubin(SOURCE, "ampere")


def test_without_nvrtc_the_error_says_what_to_install(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(nvrtc.ctypes, "CDLL", missing)
    nvrtc._nvrtc.cache_clear()
    with pytest.raises(MissingPackage, match=r"tvmhet\[nvrtc\]"):
        compile_cubin(SOURCE, "sm_80")


@pytest.mark.parametrize("arch", ["sm_60", "sm_70", "sm_80", "sm_90", "sm_100"])
def test_every_generation_compiles_what_is_generated(arch):
    executable, _ = lower_stage(product((4, 16, 1024), (4, 1024, 1), ("0.x", "1.w")), {**CUDA, "arch": arch})
    (source,) = cuda_sources(executable.mod)
    made = compile_cubin(source, arch)
    assert made.code[:4] == b"\x7fELF"
    assert {k.name for k in made.kernels} == set(re.findall(r"\) (\w+_kernel\w*)\(", source))
    assert all(0 < k.registers <= 255 and k.threads > 0 and k.shared_bytes <= 49152 for k in made.kernels)


def test_source_that_is_wrong_is_refused_with_the_compilers_words():
    with pytest.raises(UnsupportedOperator, match=r"sm_80.*error"):
        compile_cubin('extern "C" __global__ void __launch_bounds__(1) f(float* 0_x) {}', "sm_80")


def test_traits_of_the_headers_in_memory_are_those_of_cpp():
    def holds(what, *types):
        return "".join(f"static_assert(cuda::std::{what}<{t}>::value);" for t in types)

    def never(what, *types):
        return "".join(f"static_assert(!cuda::std::{what}<{t}>::value);" for t in types)

    checks = (
        holds("is_same", "int, int") + never("is_same", "int, unsigned", "int, const int", "float, half"),
        "static_assert(cuda::std::is_same_v<half, half> && !cuda::std::is_same_v<half, float>);",
        holds("is_integral", "bool", "char", "const short", "volatile int", "unsigned long long"),
        never("is_integral", "float", "half", "int*", "void"),
        holds("is_floating_point", "float", "const double") + never("is_floating_point", "half", "int", "float&"),
        holds("is_signed", "signed char", "const long", "float") + never("is_signed", "unsigned", "bool", "half"),
        holds("is_unsigned", "bool", "unsigned char", "const unsigned long") + never("is_unsigned", "int", "double"),
        "template <class T> typename cuda::std::enable_if<(sizeof(T) > 4), int>::type size(T) { return 8; }",
        "template <class T> typename cuda::std::enable_if<(sizeof(T) <= 4), char>::type size(T) { return 4; }",
        "static_assert(sizeof(size(1.0)) == sizeof(int) && sizeof(size(1.0f)) == sizeof(char));",
        "static_assert(sizeof(cuda::std::conditional<true, char, int>::type) == 1);",
        "static_assert(sizeof(cuda::std::conditional<false, char, int>::type) == 4);",
        *(
            f'static_assert(sizeof(cuda::std::{sign}int{n}_t) * 8 == {n}, "");'
            f"static_assert({'!' * bool(sign)}(cuda::std::{sign}int{n}_t(-1) < 0));"
            for sign in ("", "u")
            for n in (8, 16, 32, 64)
        ),
    )
    source = "\n".join(
        ("#include <cuda_fp16.h>", *(f"#include <{name}>" for name in STANDARD_HEADERS), *checks, SOURCE)
    )
    assert len(compile_cubin(source, "sm_80").kernels) == 2


def test_what_the_headers_in_memory_lack_is_named():
    source = "#include <cuda/std/type_traits>\nstatic_assert(cuda::std::is_enum<int>::value);" + SOURCE
    with pytest.raises(UnsupportedOperator, match="is_enum"):
        compile_cubin(source, "sm_80")
