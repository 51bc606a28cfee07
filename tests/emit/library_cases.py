"""Modules of a few operators, run as one library kernel and as TVM's kernels one by one."""

import itertools

import numpy as np
import torch
import tvm
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from tvm import relax

from tvmhet.emit.build import compile_to
from tvmhet.graph.fusion import LegalKernel
from tvmhet.graph.library import library_kernels, place_kernel
from tvmhet.graph.placement import KernelPlacement
from tvmhet.ir.extract import extract
from tvmhet.ir.kernel_module import kernels_module
from tvmhet.ir.model import from_torch_tensor
from tvmhet.ir.transform.name_operators import NameOperators

TOLERANCE = {"float64": 1e-12, "float32": 2e-5, "float16": 2e-2, "bfloat16": 8e-2}
FEW = settings(
    max_examples=4,
    phases=[Phase.explicit, Phase.generate],
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
_count = itertools.count()
sizes = st.integers(1, 7)
dtypes = st.sampled_from(["float32", "float32", "float64", "float16"])


def model(shapes, dtypes_of, num_inputs, build):
    """A module whose main(args..) returns `build(emit, *args)`; the arguments after `num_inputs` are weights."""
    builder = relax.BlockBuilder()
    types = [relax.TensorType(s, d) for s, d in zip(shapes, dtypes_of, strict=True)]
    params = [relax.Var(f"p{i}_weight", t) for i, t in enumerate(types)]
    with builder.function("main", params, attrs={"num_input": num_inputs}):
        with builder.dataflow():
            out = builder.emit_output(build(builder.emit, *params))
        builder.emit_func_output(out)
    return NameOperators()(builder.get())


def arguments(mod, high, positive=False):
    """Random arguments: normal floats, or their absolute values; integers below `high`; coins."""
    rng = np.random.default_rng(0)
    out = []
    for p in mod["main"].params:
        shape, dtype = tuple(int(d) for d in p.ty.shape.values), str(p.ty.dtype)
        if dtype.startswith("int"):
            out.append(tvm.runtime.tensor(rng.integers(0, high, shape).astype(dtype)))
        elif dtype == "bool":
            out.append(tvm.runtime.tensor(rng.integers(0, 2, shape).astype(bool)))
        else:
            normal = rng.standard_normal(shape)
            values = torch.from_numpy(np.abs(normal) + 0.1 if positive else normal).to(getattr(torch, dtype))
            out.append(from_torch_tensor(values))
    return out


def compare(mod, tmp_path, high=1, positive=False):
    """Run `mod` as one library kernel and as TVM's kernels one by one; compare, scaled to the output."""
    library = tmp_path / f"{next(_count)}.so"  # a path loads once: each example has its own
    graph = extract(mod)
    ops = tuple(range(len(graph.operators)))
    assert LegalKernel(ops, "library") in library_kernels(graph), [(o.family, o.attrs) for o in graph.operators]
    ours = place_kernel(graph, LegalKernel(ops, "library"))
    names = tuple(o.name for o in graph.operators)
    theirs = [KernelPlacement(n, (n,), "tvm") for n in names]
    compile_to(kernels_module(mod, [ours, *theirs]), {"kind": "llvm"}, library)
    machine = relax.VirtualMachine(tvm.runtime.load_module(str(library)), tvm.cpu())
    args = arguments(mod, high, positive)
    by_name = {p.name: a for p, a in zip(mod["main"].params, args, strict=True)}
    (got,) = machine["k0"](*args)
    for i, o in enumerate(graph.operators):
        reads = dict.fromkeys(graph.tensors[t].name for t in o.inputs)
        (by_name[o.name],) = machine[f"k{i + 1}"](*[by_name[r] for r in reads])
    got, want = (torch.from_dlpack(t).double().numpy() for t in (got, by_name[names[-1]]))
    dtype = graph.tensors[graph.outputs[0]].dtype
    scale = max(1.0, float(np.abs(np.nan_to_num(want, posinf=0, neginf=0)).max()))
    assert np.array_equal(np.isfinite(got), np.isfinite(want))
    known = np.isfinite(want)
    np.testing.assert_allclose(got[known], want[known], rtol=0, atol=TOLERANCE[dtype] * scale)
