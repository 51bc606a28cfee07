"""The edge: tensors of every maker come in uncopied where possible, and nothing is cast behind the user's back."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
import tvm

import tvmhet
from tests.placed import cpus
from tvmhet.errors import BadInput
from tvmhet.results import Parts
from tvmhet.runtime import ValueSpec
from tvmhet.runtime.arena import ALIGNMENT_BYTES, Layout, Segment
from tvmhet.runtime.tensors import check_inputs, empty_aligned, to_torch, to_user

X = ValueSpec.of("x", (2, 3), "float32")


def test_numpy_torch_and_tvm_tensors_are_taken() -> None:
    want = np.arange(6, dtype="float32").reshape(2, 3)
    for value in (want, torch.from_numpy(want), tvm.runtime.tensor(want), want.T.copy().T):
        (got,) = check_inputs((value,), [X])
        np.testing.assert_array_equal(got, want)
    (shared,) = check_inputs((torch.from_numpy(want),), [X])
    assert np.shares_memory(shared, want)


def test_gradients_and_strides_do_not_matter() -> None:
    leaf = torch.ones(3, 2, requires_grad=True).T
    np.testing.assert_array_equal(check_inputs((leaf,), [X])[0], np.ones((2, 3)))


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float16", "bool", "int64"])
def test_torch_round_trip_keeps_bits(name: str) -> None:
    tensor = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(getattr(torch, name))
    (array,) = check_inputs((tensor,), [ValueSpec.of("x", (2, 3), name)])
    back = to_torch(array.copy())
    assert back.dtype == tensor.dtype and torch.equal(back.float(), tensor.float())


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((), r"takes 1 inputs \(x\); got 0"),
        ((np.zeros((2, 3), "float32"),) * 2, "got 2"),
        ((np.zeros((3, 2), "float32"),), r"'x' must be \(2, 3\) float32; got \(3, 2\) float32"),
        ((np.zeros((2, 3)),), "must be .* float32; got .* float64"),
        ((torch.zeros(2, 3, dtype=torch.bfloat16),), "got .* bfloat16"),
        (([[0.0, 1.0]],), "'x' is a list"),
        ((torch.zeros(2, 3, device="meta"),), r"on the meta device.*\n.*dense one of \(2, 3\) float32"),
        ((torch.zeros(2, 3).to_sparse(),), "'x' is a torch tensor sparse"),
        ((None,), "'x' is a NoneType"),
        ((1.5,), "'x' is a float"),
    ],
)
def test_bad_inputs_are_named(inputs: tuple[object, ...], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        check_inputs(inputs, [X])


def test_scalars_and_structure() -> None:
    (got,) = check_inputs((np.float32(2),), [ValueSpec.of("s", (), "float32")])
    assert got.shape == () and got == 2
    assert to_user([got], False, "single") is got
    assert isinstance(to_user([got.copy(), got.copy()], True, "tuple")[1], torch.Tensor)
    assert to_user([got, got], False, Parts("tuple", (None, Parts("list", (None,))))) == (got, [got])


class Joined(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, y], 1) + x.sum(1, keepdim=True)


@pytest.mark.parametrize("inline", [True, False])
def test_tensors_without_elements_go_in(inline: bool) -> None:
    """numpy's strides of one are not those that TVM's kernels ask for."""
    x, y = np.zeros((2, 0, 4), "float32"), np.ones((2, 3, 4), "float32")
    model = tvmhet.from_torch(Joined(), (torch.from_numpy(x), torch.from_numpy(y)))
    with tvmhet.build(model, cluster=cpus(v3=1), makers=("tvm",), inline=inline) as lib:
        np.testing.assert_array_equal(lib(x, y), y)


def test_aligned_memory() -> None:
    for dtype in ("float32", "bfloat16", "bool"):
        array = empty_aligned(ValueSpec.of("x", (3, 5), dtype))
        assert array.ctypes.data % ALIGNMENT_BYTES == 0 and array.shape == (3, 5) and array.dtype.name == dtype
        array[...] = np.ones((3, 5), array.dtype)


def test_layout_keeps_values_apart_and_aligned() -> None:
    layout = Layout.of([ValueSpec.of(n, (k,), "bfloat16") for k, n in enumerate("abcde", 31)], reserved_bytes=8)
    segment = Segment.create("tvmhet-test", 2 * layout.size_bytes)
    frames = [layout.views(segment.memory, base) for base in (0, layout.size_bytes)]
    for number, frame in enumerate(frames):
        for name, view in frame.items():
            assert view.ctypes.data % ALIGNMENT_BYTES == 0
            view[:] = np.full(view.shape, ord(name) + 10 * number).astype(ml_dtypes.bfloat16)
    for number, frame in enumerate(frames):
        for name, view in frame.items():
            assert (view.astype(int) == ord(name) + 10 * number).all()
    segment.close()
    segment.close()
