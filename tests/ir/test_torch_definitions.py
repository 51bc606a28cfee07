"""Each of our definitions equals the torch operator it stands for; an import uses them where TVM has no operator."""

import pytest
import torch
from torch import nn

from tests.ir.test_importers import Function, run
from tvmhet.errors import UnsupportedOperator
from tvmhet.ir.importers import from_torch
from tvmhet.ir.torch_definitions import definition_of

aten = torch.ops.aten


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


X = drawn(3, 4, 5)
PLACES = torch.randint(0, 4, (3, 4, 5), generator=torch.Generator().manual_seed(1))
ROWS = torch.tensor([1, 5, 2, 2, 0, 7])

CASES = {
    "layer_norm": (aten.layer_norm.default, (X, [4, 5], drawn(4, 5), drawn(4, 5))),
    "group_norm": (aten.group_norm.default, (drawn(2, 6, 3, 2), 3, drawn(6), drawn(6), 1e-3)),
    "trilinear": (aten._trilinear.default, (drawn(2, 4), drawn(3, 4, 5), drawn(2, 5), [1, 3], [0], [1, 2], [2, 3])),
    "cdist": (aten._cdist_forward.default, (X, drawn(3, 2, 5), 2.0, None)),
    "cdist of p 1": (aten._cdist_forward.default, (X, drawn(3, 2, 5), 1.0, None)),
    "pdist": (aten._pdist_forward.default, (drawn(4, 3),)),
    "cummax": (aten.cummax.default, (torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, -1.0, 0.0, 5.0]]), 1)),
    "cummax of NaN and infinities": (
        aten.cummax.default,
        (torch.tensor([[-torch.inf, -torch.inf, 1.0, torch.nan, 3.0, torch.nan, 0.0]]), 1),
    ),
    "cummin of ints": (aten.cummin.default, (PLACES, 1)),
    "logcumsumexp": (aten.logcumsumexp.default, (X * 100, 1)),
    "logcumsumexp of infinities": (
        aten.logcumsumexp.default,
        (torch.tensor([[-torch.inf, -torch.inf, 2.0, torch.inf, 1.0]]), 1),
    ),
    "kthvalue": (aten.kthvalue.default, (X, 2, 1, True)),
    "median of a dim": (aten.median.dim, (X, 1)),
    "median": (aten.median.default, (X,)),
    "masked_scatter": (aten.masked_scatter.default, (X, X > 0, drawn(60))),
    "index_put of a mask": (aten.index_put.default, (X, [X[:, :, 0] > 0], torch.tensor(7.0))),
    "index_put adds": (aten.index_put.default, (X, [X > 0], torch.tensor(7.0), True)),
    "unfold": (aten.unfold.default, (X, 1, 2, 2)),
    "unfold from the end": (aten.unfold.default, (X, -2, 2, 2)),
    "as_strided": (aten.as_strided.default, (X, [3, 2], [2, 1], 4)),
    "as_strided of permuted dims": (aten.as_strided.default, (X.permute(2, 0, 1), [2, 4, 3], [5, 2, 1], 3)),
    "max_pool with indices": (aten.max_pool2d_with_indices.default, (drawn(2, 3, 7, 8), [3, 2], [2, 2], [1, 1])),
    "max_pool, ceil": (aten.max_pool2d_with_indices.default, (drawn(2, 3, 7, 8), [3], [2], [1], [1], True)),
    "max_pool, dilated": (aten.max_pool2d_with_indices.default, (drawn(2, 3, 9, 8), [2, 2], [1, 1], [0], [2, 3])),
    "adaptive_max_pool2d": (aten.adaptive_max_pool2d.default, (drawn(2, 3, 7, 9), [3, 4])),
    "adaptive_max_pool3d": (aten.adaptive_max_pool3d.default, (drawn(1, 2, 5, 4, 7), [2, 3, 2])),
    "bucketize": (aten.bucketize.Tensor, (X.round(), torch.tensor([-1.0, 0.0, 1.0]))),
    "histc": (aten.histc.default, (X, 5, -2, 2)),
    "fmax": (aten.fmax.default, (X, torch.where(X > 1, torch.nan, drawn(3, 4, 5) - 1))),
    "fmin": (aten.fmin.default, (torch.where(X > 1, torch.nan, X), drawn(5))),
    "hypot": (aten.hypot.default, (X * 1e30, drawn(3, 4, 5) * 1e30)),
    "hypot of zeros and infinities": (
        aten.hypot.default,
        (torch.tensor([0.0, torch.inf, -torch.inf, torch.inf]), torch.tensor([0.0, torch.inf, 3.0, -torch.inf])),
    ),
    "lgamma": (aten.lgamma.default, (torch.cat([torch.linspace(-9.3, 40, 200), torch.tensor([1.0, 2.0, 0.0, -3.0])]),)),
    "lgamma of infinities": (aten.lgamma.default, (torch.tensor([torch.inf, -torch.inf, torch.nan, 1e-30, 1e30]),)),
    "digamma": (aten.digamma.default, (torch.linspace(-9.3, 40, 200, dtype=torch.float64),)),
    "digamma at poles": (aten.digamma.default, (torch.tensor([0.0, -0.0, -1.0, torch.inf, -torch.inf, torch.nan]),)),
    "signbit": (torch.ops.prims.signbit.default, (torch.tensor([-0.0, 0.0, -2.0, 3.0, -torch.inf]),)),
    "negated view": (aten._neg_view.default, (X,)),
    "heaviside": (aten.heaviside.default, (X.round(), drawn(5))),
    "logaddexp": (aten.logaddexp.default, (torch.tensor([1e4, -1e4, torch.inf]), torch.tensor([1e4, 3.0, torch.inf]))),
    "logaddexp2": (aten.logaddexp2.default, (X, drawn(5))),
    "power of integers": (aten.pow.Tensor_Scalar, (PLACES, 5)),
    "fake quantize": (aten.fake_quantize_per_tensor_affine_cachemask.default, (X, 0.02, 3, -8, 7)),
    "exp2": (aten.exp2.default, (X,)),
    "erfc": (aten.erfc.default, (X,)),
    "addmv": (aten.addmv.default, (drawn(3), drawn(3, 4), drawn(4)), {"beta": 0.5, "alpha": 2}),
    "addbmm": (aten.addbmm.default, (drawn(3, 5), drawn(2, 3, 4), drawn(2, 4, 5)), {"alpha": 2}),
    "dist": (aten.dist.default, (X, drawn(5), 3)),
    **{
        f"searchsorted {right}": (aten.searchsorted.Tensor, (torch.tensor([-1.0, 0.0, 1.0]), X.round()), options)
        for right, options in (("left", {}), ("right", {"right": True, "out_int32": True}))
    },
    **{
        f"scatter_reduce {how} {itself}": (
            aten.scatter_reduce.two,
            (X, 1, PLACES[:, :3], drawn(3, 4, 5), how),
            {"include_self": itself},
        )
        for how, itself in (("sum", True), ("mean", True), ("mean", False), ("amax", False), ("prod", False))
    },
    **{
        f"embedding_bag {mode} {options}": (
            aten.embedding_bag.padding_idx,
            (drawn(8, 3), ROWS, torch.tensor([0, 2, 2, 5]), False, mode, False, None, *options),
        )
        for mode in (0, 1, 2)
        for options in ((False, None), (True, 2))
    },
    "embedding_bag weighted": (
        aten.embedding_bag.padding_idx,
        (drawn(8, 3), ROWS, torch.tensor([0, 2, 5]), False, 0, False, drawn(6), False, None),
    ),
}


def test_product_of_groups():
    """Rows sorted by expert; the second expert has none."""
    x, weight, ends = drawn(5, 3), drawn(4, 3, 2), torch.tensor([2, 2, 4, 5])
    want = torch.cat([x[:2] @ weight[0], x[2:4] @ weight[2], x[4:] @ weight[3]])
    product = definition_of("transformers.grouped_mm_fallback.default")
    torch.testing.assert_close(product(x, weight, ends), want)
    x, weight, gradient = x.requires_grad_(), weight.requires_grad_(), torch.randn(5, 2)
    own = torch.autograd.grad(product(x, weight, ends), (x, weight), gradient)
    backward = definition_of("transformers.grouped_mm_fallback_backward.default")
    torch.testing.assert_close(backward(x, weight, ends, gradient), own)


def test_product_of_groups_of_few_rows():
    """Fewer rows than experts: each reads its own weight; behind the last expert's there is none."""
    x, weight = drawn(3, 4), drawn(9, 4, 2)
    product = definition_of("aten._grouped_mm.default")
    for ends, experts in (([0, 1, 1, 1, 1, 1, 2, 2, 3], (1, 6, 8)), ([1] * 8 + [2], (0, 8))):
        got = product(x, weight, torch.tensor(ends))
        want = torch.stack([x[i] @ weight[e] for i, e in enumerate(experts)])
        torch.testing.assert_close(got[: len(want)], want)
        assert not got[len(want) :].any()


FIRST_ONLY = ("embedding_bag",)  # whose other results nobody reads


@pytest.mark.parametrize("name", CASES)
def test_equals_the_operator(name):
    operator, args, *rest = CASES[name]
    options = rest[0] if rest else {}
    want, got = operator(*args, **options), definition_of(operator)(*args, **options)
    if name.startswith(FIRST_ONLY):
        want, got = want[0], got[0]
    torch.testing.assert_close(got, want, equal_nan=True)


IMPORTED = {
    "ours": (lambda x: torch.cdist(x, x.flip(1)), X),
    "torch's": (lambda x: nn.functional.grid_sample(x[None], x[None, :2, :, :2].tanh(), align_corners=False), X),
    "two by two samples": (lambda x: nn.functional.grid_sample(x[None], x[None, :2, :2, :2], align_corners=True), X),
    "two of ours": (
        lambda x: nn.functional.max_unpool2d(*nn.MaxPool2d(2, return_indices=True)(x), 2),
        drawn(1, 2, 4, 6),
    ),
    "a view of what lies otherwise": (lambda x: x.unfold(1, 2, 1).movedim(-1, 2).flatten(2, 3), drawn(2, 5, 3, 4)),
    "TVM's lacks a dtype": (lambda x: nn.functional.layer_norm(x, (5,)), X.double()),
}


@pytest.mark.parametrize("name", IMPORTED)
def test_operators_are_written_out(name):
    function, x = IMPORTED[name]
    got = run(from_torch(Function(function), (x,)), x)
    torch.testing.assert_close(torch.from_numpy(got), function(x))


@pytest.mark.parametrize("itself", [True, False])
@pytest.mark.parametrize("how", ["sum", "mean", "prod", "amax", "amin"])
@pytest.mark.parametrize("rows", [3, 4])  # of places: all of the source, or a part of it
def test_reductions_into_places_are_imported(how, itself, rows):
    source, places = drawn(3, 4, 5), PLACES[:, :rows]
    function = Function(lambda x: x.scatter_reduce(1, places, source, how, include_self=itself))
    torch.testing.assert_close(torch.from_numpy(run(from_torch(function, (X,)), X)), function(X))


def test_what_has_no_definition_is_named():
    with pytest.raises(UnsupportedOperator, match=r"operator aten._linalg_eigh.default .* has no conversion"):
        from_torch(Function(torch.linalg.eigvalsh), (drawn(3, 3),))
    with pytest.raises(UnsupportedOperator, match=r"aten.tanh.default .* complex numbers"):
        from_torch(Function(lambda x: torch.tanh(torch.complex(x, x)).abs()), (X,))


def test_what_a_definition_does_not_take_is_said():
    """In inference and in training; with its edges given, the same operator is imported."""
    said = r"aten.histc.default .*; not supported: bins between the least and the largest value"
    with pytest.raises(UnsupportedOperator, match=said):
        from_torch(Function(lambda x: torch.histc(x, 4)), (X,))
    training = torch.nn.Sequential(
        torch.nn.Linear(4, 4), Function(lambda y: y.sum() + torch.histc(y.detach(), 4).sum())
    )
    with pytest.raises(UnsupportedOperator, match=said):
        from_torch(training, (drawn(3, 4),), loss="output", mode="training")
    with pytest.raises(UnsupportedOperator, match="not supported: strides of a tensor with gaps in its memory"):
        from_torch(Function(lambda x: torch.as_strided(x[:, :2], (2, 2), (1, 2))), (drawn(4, 4),))
    for past in (lambda x: x[1:].as_strided((2, 2), (1, 2), 0), lambda x: x[:2].as_strided((2, 2), (4, 8))):
        with pytest.raises(UnsupportedOperator, match="not supported: strides that leave the tensor"):
            from_torch(Function(past), (drawn(4, 4),))
    from_torch(Function(lambda x: torch.histc(x, 4, -1, 1)), (X,))
