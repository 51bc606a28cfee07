"""Equal kernels become one: the same calls, the same numbers, less to compile."""

import numpy as np
import tvm
from tvm import relax

from tests.emit.modules import chain
from tvmhet._tvm import PrimFunc
from tvmhet.emit.lower import kernel_passes
from tvmhet.emit.share_kernels import ShareKernels
from tvmhet.graph.placement import KernelPlacement
from tvmhet.ir.transform.fuse_by_plan import FuseByPlan

OPS = ("exp", "tanh", "exp", "tanh", "tanh", "exp")


def fused():
    """Two equal kernels of exp and tanh, one of tanh and exp; not shared yet."""
    names = [f"{op}{i}" for i, op in enumerate(OPS)]
    kernels = [KernelPlacement(names[i + 1], (names[i], names[i + 1]), "tvm") for i in (0, 2, 4)]
    with tvm.target.Target("llvm"):
        return tvm.transform.Sequential([FuseByPlan(kernels), *kernel_passes()[:-1]])(chain(*OPS, side=4))


def called(mod):
    calls = [b.value for block in mod["main"].body.blocks for b in block.bindings]
    return [str(c.args[0].name_hint) for c in calls if isinstance(c, relax.Call)]


def kernels_of(mod):
    return sorted(str(g.name_hint) for g, f in mod.functions_items() if isinstance(f, PrimFunc))


def test_equal_kernels_become_the_first_of_them():
    before = fused()
    after = ShareKernels()(before)
    assert called(before) == ["fused_exp_tanh", "fused_exp_tanh1", "fused_tanh_exp"]
    assert called(after) == ["fused_exp_tanh", "fused_exp_tanh", "fused_tanh_exp"]
    assert kernels_of(after) == ["fused_exp_tanh", "fused_tanh_exp"]
    relax.analysis.well_formed(after)  # raises if it is not


def test_idempotent_and_input_unchanged():
    before = fused()
    after = ShareKernels()(before)
    tvm.ir.assert_structural_equal(before, fused())
    assert ShareKernels()(after).same_as(after)


def test_kernels_of_other_attributes_are_not_equal():
    mod = fused()
    gvar = mod.get_global_var("fused_exp_tanh1")
    mod.update_func(gvar, mod[gvar].with_attr("mine", 1))
    assert called(ShareKernels()(mod)) == ["fused_exp_tanh", "fused_exp_tanh1", "fused_tanh_exp"]


def test_the_numbers_stay():
    x = np.random.default_rng(0).standard_normal((4, 4)).astype("float32")
    results = []
    for mod in (fused(), ShareKernels()(fused())):
        vm = relax.VirtualMachine(tvm.compile(mod, target="llvm"), tvm.cpu())
        result = vm["main"](*[tvm.runtime.tensor(x)] * len(mod["main"].params))
        results.append((result[0] if not hasattr(result, "numpy") else result).numpy())
    np.testing.assert_array_equal(*results)
    want = x
    for op in OPS:
        want = getattr(np, op)(want)
    np.testing.assert_allclose(results[1], want, rtol=1e-5)
