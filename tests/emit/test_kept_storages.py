"""Stages whose memory the caller holds: the same results, in the same places, whatever runs in between."""

import numpy as np
import pytest
import tvm
from tvm import relax

from tests import emulated_cuda
from tests.emit.test_cuda_kernels import f32, inputs_of, stage
from tvmhet._functions import STEADY, STORAGES, TENSOR_AT
from tvmhet.emit.kept_storages import KeepStorages
from tvmhet.emit.lower import lower_stage
from tvmhet.runtime import vm

op = relax.op


def squares(x):
    """Two results that are alive when a third, which leaves, is made."""
    y = op.matmul(x, x)
    return op.matmul(y, op.matmul(x, y))


CASES = {
    False: ([f32(3, 5), f32(5, 4)], lambda x, w: op.nn.softmax(op.nn.relu(op.matmul(x, w)))),
    True: ([f32(4, 4)], squares),
}


def host(tensor):
    out = np.zeros(tuple(tensor.shape), str(tensor.dtype))
    vm.copy(tensor, vm.host_view(out))
    return out


@pytest.mark.parametrize("side_by_side", CASES)
def test_a_steady_run_computes_what_main_does_in_memory_of_its_own(tmp_path, side_by_side):
    emulated_cuda.install()
    library, case = tmp_path / "stage.so", CASES[side_by_side]
    lower_stage(stage([case], fused=False), emulated_cuda.A100)[0].export_library(str(library))
    assert (TENSOR_AT.encode() in library.read_bytes()) == side_by_side
    main, steady, storages = vm.load_functions(library, ("main", STEADY, STORAGES), "cuda", 0)
    one, other = ([emulated_cuda.on_device(a * k)[0] for a in inputs_of([case])] for k in (1, 2))
    want, want_other = (host(main(*given)[0]) for given in (one, other))
    kept = storages()
    (result,) = steady(*one, kept)
    np.testing.assert_array_equal(host(result), want)
    main(*other)
    np.testing.assert_array_equal(host(result), want)  # `main` has other memory
    steady(*other, kept)
    np.testing.assert_array_equal(host(result), want_other)  # and a steady run the same again


def test_a_module_without_main_or_of_unknown_sizes_stays_as_it_is():
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2,), "float32"))
    with builder.function("k0", [x]):
        builder.emit_func_output(x)
    mod = builder.get()
    assert KeepStorages()(mod).same_as(mod)
    n = tvm.tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType((n,), "float32"))
    with builder.function("main", [x]):
        storage = builder.emit(op.memory.alloc_storage(relax.ShapeExpr([n]), 0, "global", "float32"))
        builder.emit_func_output(storage)
    assert STEADY not in KeepStorages()(builder.get())
