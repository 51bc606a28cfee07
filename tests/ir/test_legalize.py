"""The kernels are those of TVM's own legalisation; nothing is printed."""

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import relax

from tvmhet.ir.legalize import legalize_ops

DATA = {"rows": (10, 4), "vector": (7,), "deep": (2, 10, 3)}
INDICES = {"many": (3, 2), "one": (), "some": (5,)}


def taking(data, indices, axis, mode):
    builder = relax.BlockBuilder()
    x, i = relax.Var("x", relax.TensorType(data, "float32")), relax.Var("i", relax.TensorType(indices, "int64"))
    with builder.function("main", [x, i]):
        with builder.dataflow():
            out = builder.emit_output(relax.op.take(x, i, axis=axis, mode=mode))
        builder.emit_func_output(out)
    return builder.get()


@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize("indices", INDICES)
@pytest.mark.parametrize("data", DATA)
def test_take_is_tvms_without_its_warning(data, indices, axis, capfd):
    mod = taking(DATA[data], INDICES[indices], axis, "fast")
    theirs = relax.transform.LegalizeOps()(mod)
    assert "Fast mode segfaults" in capfd.readouterr().err
    ours = legalize_ops()(mod)
    assert capfd.readouterr().err == ""
    tvm.ir.assert_structural_equal(ours, theirs)


@pytest.mark.parametrize(("axis", "mode"), [(None, "fast"), (0, "clip")])
def test_other_takes_are_left_to_tvm(axis, mode):
    mod = taking((7,), (3,), axis, mode)
    tvm.ir.assert_structural_equal(legalize_ops()(mod), relax.transform.LegalizeOps()(mod))


def filled(value):
    builder = relax.BlockBuilder()
    with builder.function("main", []):
        with builder.dataflow():
            shape = relax.ShapeExpr((3, 4))
            out = builder.emit_output(relax.op.full(shape, relax.const(value, "float32"), "float32"))
        builder.emit_func_output(out)
    return builder.get()


@pytest.mark.parametrize("value", [float("-inf"), float("inf"), float("nan")])
def test_a_tensor_full_of_what_is_not_finite_is_compiled(value):
    """TVM's own legalisation raises TypeError."""
    library = tvm.compile(legalize_ops()(filled(value)), target="llvm")
    found = relax.VirtualMachine(library, tvm.cpu())["main"]().numpy()
    np.testing.assert_array_equal(found, np.full((3, 4), value, np.float32))


def test_other_fills_are_left_to_tvm():
    tvm.ir.assert_structural_equal(legalize_ops()(filled(2.5)), relax.transform.LegalizeOps()(filled(2.5)))


def compared(function, dtype, same):
    builder = relax.BlockBuilder()
    x, y = (relax.Var(name, relax.TensorType((4,), dtype)) for name in "xy")
    with builder.function("main", [x, y]):
        with builder.dataflow():
            out = builder.emit_output(function(x, x if same else y))
        builder.emit_func_output(out)
    return builder.get()


VALUES = np.array([1, np.nan, np.inf, -0.0])
TESTS = {
    "equal": (lambda x, y: relax.op.equal(x, y), VALUES == VALUES),
    "not_equal": (lambda x, y: relax.op.not_equal(x, y), VALUES != VALUES),
    "isnan": (lambda x, _: relax.op.isnan(x), np.isnan(VALUES)),
    "isinf": (lambda x, _: relax.op.isinf(x), np.isinf(VALUES)),
    "isfinite": (lambda x, _: relax.op.isfinite(x), np.isfinite(VALUES)),
}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("name", TESTS)
def test_what_is_no_number(name, dtype):
    """TVM's own kernels say that NaN is equal to itself; bfloat16 has no isnan."""
    function, want = TESTS[name]
    x = tvm.runtime.tensor(VALUES.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype))
    library = tvm.compile(legalize_ops()(compared(function, dtype, True)), target="llvm")
    np.testing.assert_array_equal(relax.VirtualMachine(library, tvm.cpu())["main"](x, x).numpy(), want)


@pytest.mark.parametrize(("dtype", "same"), [("float32", False), ("int32", True)])
def test_other_comparisons_are_left_to_tvm(dtype, same):
    mod = compared(relax.op.equal, dtype, same)
    tvm.ir.assert_structural_equal(legalize_ops()(mod), relax.transform.LegalizeOps()(mod))


def normalised(shape, dtype, norm):
    builder = relax.BlockBuilder()
    x, *affine = (
        relax.Var(name, relax.TensorType(s, dtype)) for name, s in zip("xgb", (shape, (6,), (6,)), strict=True)
    )
    with builder.function("main", [x, *affine]):
        with builder.dataflow():
            out = builder.emit_output(norm(x, *affine))
        builder.emit_func_output(out)
    return builder.get()


NORMS = {
    "groups": (2, lambda x, g, b: relax.op.nn.group_norm(x, g, b, 2, 1, [2, 3])),
    "one group": (1, lambda x, g, b: relax.op.nn.group_norm(x, g, b, 1, 1, [2, 3])),
    "instances": (6, lambda x, g, b: relax.op.nn.instance_norm(x, g, b, 1, [2, 3])),
}


@pytest.mark.parametrize(("dtype", "atol"), [("float32", 1e-4), ("float16", 2e-2)])
@pytest.mark.parametrize("name", NORMS)
def test_norms_of_groups_keep_the_digits_that_a_mean_has(name, dtype, atol):
    """TVM's own are 1e-3 off: they take the mean's square from the mean of squares."""
    groups, norm = NORMS[name]
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((3, 6, 5, 7)) + 50).astype(dtype)
    g, b = (rng.standard_normal(6).astype(dtype) for _ in range(2))
    rows = x.astype("float64").reshape(3, groups, -1)
    unit = (rows - rows.mean(-1, keepdims=True)) / np.sqrt(rows.var(-1, keepdims=True) + 1e-5)
    want = unit.reshape(x.shape) * g.astype("float64")[:, None, None] + b.astype("float64")[:, None, None]
    library = tvm.compile(legalize_ops()(normalised(x.shape, dtype, norm)), target="llvm")
    found = relax.VirtualMachine(library, tvm.cpu())["main"](*map(tvm.runtime.tensor, (x, g, b)))
    np.testing.assert_allclose(found.numpy(), want, atol=atol)


@pytest.mark.parametrize("shape", [(tvm.tirx.Var("n", "int64"), 6, 5, 7), (2, 6, tvm.tirx.Var("h", "int64"), 7)])
def test_norms_of_unknown_sizes_are_left_to_tvm(shape):
    mod = normalised(shape, "float32", NORMS["groups"][1])
    tvm.ir.assert_structural_equal(legalize_ops()(mod), relax.transform.LegalizeOps()(mod))


LOWEST = float(np.finfo("float32").min)
#: By name: an operator of a tensor (3, 4), its values, and what numpy makes of them.
ROWS = {
    "first of the lowest": (lambda x: relax.op.argmax(x, axis=1), np.full((3, 4), LOWEST), [0, 0, 0]),
    "first of -inf": (lambda x: relax.op.argmax(x, axis=1), np.full((3, 4), -np.inf), [0, 0, 0]),
    "first of inf": (lambda x: relax.op.argmin(x, axis=1), np.full((3, 4), np.inf), [0, 0, 0]),
    "place in all": (lambda x: relax.op.argmax(x), np.arange(12.0).reshape(3, 4) % 7, 6),
    "place, dims kept": (lambda x: relax.op.argmin(x, axis=0, keepdims=True), -np.eye(3, 4), [[0, 1, 2, 0]]),
    "any": (lambda x: relax.op.max(relax.op.greater(x, relax.const(0.0)), axis=1), np.eye(3, 4)[::-1] - 0.5, [1, 1, 1]),
    "all": (lambda x: relax.op.min(relax.op.less(x, relax.const(4.0))), np.arange(12.0).reshape(3, 4), 0),
    "some": (lambda x: relax.op.max(relax.op.less(x, relax.const(0.0)), axis=[0, 1]), np.eye(3, 4), 0),
}


@pytest.mark.parametrize("name", ROWS)
def test_places_and_extremes_that_tvm_has_not(name):
    """TVM's places of the lowest numbers are -1; it has no extremes of bools."""
    make, values, want = ROWS[name]
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((3, 4), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            out = builder.emit_output(builder.emit(make(x)))
        builder.emit_func_output(out)
    library = tvm.compile(legalize_ops()(builder.get()), target="llvm")
    found = relax.VirtualMachine(library, tvm.cpu())["main"](tvm.runtime.tensor(values.astype("float32"))).numpy()
    np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("axes", [[0, 1], [-1]])
def test_rms_norms_along_all_axes(axes):
    """TVM's own refuses to make one where no axis is left."""
    rng, shape = np.random.default_rng(0), (3, 4)
    values, weights = rng.standard_normal(shape), rng.standard_normal([shape[a] for a in axes])
    builder = relax.BlockBuilder()
    x, w = (relax.Var(n, relax.TensorType(v.shape, "float32")) for n, v in (("x", values), ("w", weights)))
    with builder.function("main", [x, w]):
        with builder.dataflow():
            out = builder.emit_output(relax.op.nn.rms_norm(x, w, axes, 1e-5))
        builder.emit_func_output(out)
    library = tvm.compile(legalize_ops()(builder.get()), target="llvm")
    given = [tvm.runtime.tensor(v.astype("float32")) for v in (values, weights)]
    want = values / np.sqrt((values**2).mean(tuple(axes), keepdims=True) + 1e-5) * weights
    np.testing.assert_allclose(relax.VirtualMachine(library, tvm.cpu())["main"](*given).numpy(), want, rtol=1e-5)


def writing(extent, part, begin, end, step, axis):
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((3, extent, 4), "float32"))
    y = relax.Var("y", relax.TensorType(part, "float32"))
    with builder.function("main", [x, y]):
        with builder.dataflow():
            out = builder.emit_output(relax.op.slice_scatter(x, y, begin, end, step, axis))
        builder.emit_func_output(out)
    return builder.get()


@pytest.mark.parametrize("axis", [1, -2])
@pytest.mark.parametrize(
    ("begin", "end", "step"), [(0, 10, 1), (0, 4, 1), (3, 10, 1), (2, 7, 1), (1, 10, 3), (2, 9, 2)]
)
def test_a_slice_is_written_into_a_tensor(begin, end, step, axis, capfd):
    """TVM's own legalisation takes rows of the part by a list of indices, and warns that they may be out of bounds."""
    places = range(begin, end, step)
    mod = writing(10, (3, len(places), 4), begin, end, step, axis)
    ours = legalize_ops()(mod)
    assert capfd.readouterr().err == ""
    (kernel,) = [f for f in ours.functions.values() if isinstance(f, tvm.tirx.PrimFunc)]
    assert len(kernel.params) == 3 and "idx" not in str(kernel)  # no list of indices, no mask
    x, y = (np.random.default_rng(i).random(s, np.float32) for i, s in enumerate([(3, 10, 4), (3, len(places), 4)]))
    library = tvm.compile(ours, target="llvm")
    found = relax.VirtualMachine(library, tvm.cpu())["main"](tvm.runtime.tensor(x), tvm.runtime.tensor(y)).numpy()
    x[:, begin:end:step] = y
    np.testing.assert_array_equal(found, x)
