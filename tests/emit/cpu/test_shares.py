"""Parallel loops have a step for each core; what a step computes is a function of its own."""

import numpy as np
import pytest
import tvm
import tvm_ffi
from hypothesis import given
from hypothesis import strategies as st
from tvm import relax, te, tirx

from tests.emit.cpu.kernels import few, kernel, run, scheduled
from tvmhet.emit.cpu.blocks import CpuTarget
from tvmhet.emit.cpu.contraction import Tile
from tvmhet.emit.cpu.fast_math import fast_math
from tvmhet.emit.cpu.shares import in_shares
from tvmhet.emit.lower import lower_stage


def doubled(extent):
    """y[i, j] = 2 x[i, j] with a parallel loop over i."""
    x = te.placeholder((extent, 8), name="x")
    y = te.compute((extent, 8), lambda i, j: x[i, j] * 2.0, name="y")
    sch = tvm.s_tir.Schedule(te.create_prim_func([x, y]))
    sch.parallel(sch.get_loops(sch.get_sblock("y"))[0])
    return sch.mod["main"]


def loops_of(func):
    """Kind and extent of each loop, outermost first."""
    found = []

    def visit(loop):
        found.append((loop.kind, loop.extent))

    tvm_ffi.structural_walk(func.body, (tirx.For, visit))
    return found[::-1]


@pytest.mark.parametrize(
    ("extent", "cores", "shares", "each"), [(14, 4, 4, 4), (5, 4, 3, 2), (8, 2, 2, 4), (3, 16, 3, 1), (1, 2, 1, 1)]
)
def test_each_core_has_one_step_of_a_parallel_loop(extent, cores, shares, each):
    func = in_shares(doubled(extent), cores)
    (outer, num), (inner, count), *_ = loops_of(func)
    assert (outer, inner) == (tirx.ForKind.PARALLEL, tirx.ForKind.SERIAL)
    assert int(num) == shares
    assert (int(count) == each) if extent % each == 0 else not isinstance(count, tirx.IntImm)
    assert "compute_scope" in str(func)
    x = np.random.default_rng(0).random((extent, 8), np.float32)
    np.testing.assert_array_equal(run(func, [x], num_cores=cores), 2 * x)


def test_a_function_without_parallel_loops_stays_as_it_is():
    serial = kernel(lambda x: relax.op.nn.relu(x), (4, 4))
    tvm.ir.assert_structural_equal(in_shares(serial, 2), serial)


def convolution(channels, outputs, pixels, window):
    def make(x, w, b):
        return relax.op.nn.relu(relax.op.add(relax.op.nn.conv2d(x, w, padding=window // 2), b))

    return make, ((1, channels, pixels, pixels), (outputs, channels, window, window), (1, outputs, 1, 1))


@few
@given(
    st.sampled_from([convolution(160, 96, 7, 1), convolution(16, 23, 9, 3), convolution(7, 64, 14, 1)]),
    st.sampled_from([2, 3, 4, 7]),
)
def test_products_and_windows_on_cores_are_those_on_one(case, cores):
    make, shapes = case
    func = kernel(make, *shapes)
    inputs = [np.random.default_rng(i).uniform(-1, 1, s).astype(np.float32) for i, s in enumerate(shapes)]
    one, many = (fast_math(scheduled(func, num_cores=n)[1]) for n in (1, cores))
    np.testing.assert_array_equal(run(many, inputs, num_cores=cores), run(one, inputs))


def test_a_product_of_few_columns_is_cut_in_rows():
    """49 pixels are one step of columns: without shares of rows the second core would have nothing to do."""
    make, shapes = convolution(160, 960, 7, 1)
    name, func = scheduled(kernel(make, *shapes), "x86-64-v4", num_cores=2)
    assert name == "contraction"
    assert loops_of(func)[0] == (tirx.ForKind.PARALLEL, 2)


@given(st.integers(1, 40), st.integers(1, 60), st.booleans(), st.integers(1, 16))
def test_shares_are_those_that_end_first(num_panels, num_tiles, packs, cores):
    cpu = CpuTarget(512, 32, cores)
    tile = Tile(6, 64, 16)

    def ends(shares):
        share = num_tiles // shares * tile.step_cycles(cpu) + (8 if packs else 0)
        loads = [0.0] * cores
        for _ in range(num_panels * shares):  # in turn, all as long
            loads[loads.index(min(loads))] += share
        return max(loads)

    chosen = tile.num_shares(num_panels, num_tiles, packs, cpu)
    assert num_tiles % chosen == 0
    assert ends(chosen) == pytest.approx(min(ends(d) for d in range(1, cores + 1) if num_tiles % d == 0))


def test_a_single_image_is_laid_out_by_all_cores():
    make, shapes = convolution(16, 32, 56, 3)
    name, func = scheduled(kernel(make, *shapes), num_cores=2)
    assert name == "sliding"
    assert [kind for kind, _ in loops_of(func)].count(tirx.ForKind.PARALLEL) == 2


def test_stages_have_shares():
    """What a build makes of a kernel for several cores."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((512, 512), "float32"))
    with builder.function("main", [x], attrs={"num_input": 1}):
        with builder.dataflow():
            out = builder.emit_output(builder.emit(relax.op.nn.relu(x)))
        builder.emit_func_output(out)
    made, _ = lower_stage(builder.get(), {"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 2})
    library = next(m for m in made.mod.imports if m.kind == "llvm")
    assert "share_apart" in library.inspect_source("ll")
