"""Every distinct legal kernel of a model, compiled as one kernel, computes what its operators compute one by one."""

import numpy as np
import pytest
import tvm
from tvm import relax

from tvmhet import zoo
from tvmhet.candidates import candidate_kernels
from tvmhet.emit.build import compile_to
from tvmhet.graph.kernel_key import kernel_key
from tvmhet.graph.placement import KernelPlacement
from tvmhet.ir.bindings import Bindings, live_ins, live_outs, outline, readers_of
from tvmhet.ir.extract import extract
from tvmhet.ir.importers import from_torch
from tvmhet.ir.kernel_module import kernels_module
from tvmhet.ir.transform.name_operators import NameOperators

SMALL = {
    "resnet50": {"image": 32, "blocks": (1, 1), "base_width": 8, "num_classes": 10},
    "bert_base": {"length": 16, "layers": 1, "dim": 32, "heads": 4, "vocab": 50, "max_len": 16},
    "mobilenet_v3": {"image": 32, "width": 0.25, "num_classes": 10},
}


def distinct_fused(graph):
    """Return one placement of each distinct fused kernel."""
    first = {}
    for kernel in candidate_kernels(graph, ("tvm",)):
        if len(kernel.ops) > 1:
            first.setdefault(kernel_key(graph, kernel.ops, kernel.maker), kernel)
    names = [op.name for op in graph.operators]
    return [KernelPlacement(f"k{i}", tuple(names[o] for o in k.ops), "tvm") for i, k in enumerate(first.values())]


def compile_unfused(mod, kernels, path):
    """Compile functions k0, k1, ... that run the kernels' operators one by one: plain TVM does not fuse on llvm."""
    bindings = Bindings(mod["main"])
    readers = readers_of(bindings)
    plain = tvm.IRModule({g: f for g, f in mod.functions_items() if g.name_hint != "main"})
    for k in kernels:
        outs = live_outs(bindings, k.ops, readers)
        func = outline(bindings, k.ops, live_ins(bindings, k.ops), outs, always_tuple=True)
        plain[k.name] = func.with_attr("global_symbol", k.name)
    tvm.compile(plain, target=tvm.target.Target("llvm")).export_library(str(path))


def arguments(mod, kernel):
    """Return random arguments: floats in [0.1, 1), integers 0 or 1, which are valid indices everywhere here."""
    bindings, rng = Bindings(mod["main"]), np.random.default_rng(0)
    types = [bindings.types[t] for t in live_ins(bindings, kernel.ops)]
    shapes = [([int(d) for d in t.shape], str(t.dtype)) for t in types]
    return [
        tvm.runtime.tensor((rng.uniform(0.1, 1.0, s) if d.startswith("float") else rng.integers(0, 2, s)).astype(d))
        for s, d in shapes
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_fused_equals_unfused(name, tmp_path):
    mod = NameOperators()(from_torch(*zoo.get(name, **SMALL[name])).mod)
    kernels = distinct_fused(extract(mod))
    assert len(kernels) > 15
    compile_to(kernels_module(mod, kernels), {"kind": "llvm"}, tmp_path / "fused.so")
    compile_unfused(mod, kernels, tmp_path / "plain.so")
    fused, plain = (
        relax.VirtualMachine(tvm.runtime.load_module(str(tmp_path / f)), tvm.cpu()) for f in ("fused.so", "plain.so")
    )
    for k in kernels:
        args = arguments(mod, k)
        for ours, theirs in zip(fused[k.name](*args), plain[k.name](*args), strict=True):
            largest = float(np.abs(theirs.numpy()).max())
            np.testing.assert_allclose(ours.numpy(), theirs.numpy(), atol=1e-5 * largest, err_msg=str(k.ops))
