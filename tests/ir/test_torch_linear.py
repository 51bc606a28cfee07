"""Linear algebra that is written out equals LAPACK's, pivots and signs included; models with it are trained."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._library.simple_registry import singleton

import tvmhet
from tests.placed import cpus
from tvmhet.errors import UnsupportedOperator
from tvmhet.ir.torch_defined_linear import MOST, without_checks
from tvmhet.ir.torch_definitions import definition_of

aten, linalg = torch.ops.aten, torch.linalg
SHAPES = [(1, 1), (4, 4), (2, 3, 5, 5)]


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def positive(a):
    return a @ a.mT + torch.eye(a.shape[-1], dtype=a.dtype)


def cases(shape):
    """Operators with arguments: by position, then by name."""
    a, b = drawn(*shape), drawn(*shape[:-1], 3)
    factors, pivots, _ = aten.linalg_lu_factor_ex(a)
    spd, wide, none = positive(a), (a - a.mT) * 99, a * 0
    yield aten.linalg_inv_ex.default, (a,), {}
    yield aten._linalg_solve_ex.default, (a, b), {}
    yield aten._linalg_solve_ex.default, (a, b[..., 0]), {}
    yield aten._linalg_solve_ex.default, (a, b.mT), {"left": False}
    yield aten._linalg_solve_ex.default, (a.reshape(-1, *shape[-2:])[0], b), {}
    for x in (a, a.mT, none):
        yield aten._linalg_det.default, (x,), {}
        yield aten._linalg_slogdet.default, (x,), {}
    yield aten.linalg_lu.default, (a,), {}
    yield aten.lu_unpack.default, (factors, pivots, True, False), {}
    yield aten.lu_unpack.default, (factors, pivots, False, True), {}
    yield aten.linalg_cholesky_ex.default, (spd,), {}
    for x in (a, wide, none):
        yield aten.linalg_matrix_exp.default, (x,), {}
    for one in (True, False):
        factor = aten.linalg_cholesky_ex(spd, upper=one)[0]
        yield aten.linalg_cholesky_ex.default, (spd,), {"upper": one}
        yield aten.cholesky_solve.default, (b, factor, one), {}
        yield aten.cholesky_inverse.default, (factor, one), {}
        for other in (True, False):
            side = b if other else b.mT
            yield aten.linalg_lu_solve.default, (factors, pivots, side), {"left": other, "adjoint": one}
            yield aten.triangular_solve.default, (b, a, one, other), {}
            for third in (True, False):
                how = {"upper": one, "left": other, "unitriangular": third}
                yield aten.linalg_solve_triangular.default, (a, side), how


def assert_equal(got, want):
    for g, w in zip(*([x] if isinstance(x, torch.Tensor) else list(x) for x in (got, want)), strict=True):
        assert g.shape == w.shape and g.dtype == w.dtype
        torch.testing.assert_close(g, w, rtol=1e-8, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_definitions_equal_torchs_operators(shape):
    for operator, args, kwargs in cases(shape):
        assert_equal(definition_of(operator)(*args, **kwargs), operator(*args, **kwargs))


@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (2, 4, 4), (1, 3), (3, 1)], ids=str)
def test_matrices_that_are_not_square(shape):
    """Also one whose columns are zero below the diagonal: LAPACK does not reflect there."""
    for a in (drawn(*shape), drawn(*shape).triu()):
        for mode in ("reduced", "complete"):
            assert_equal(definition_of(aten.linalg_qr.default)(a, mode), tuple(linalg.qr(a, mode)))
        assert_equal(definition_of(aten.linalg_qr.default)(a, "r")[1], linalg.qr(a, "r")[1])
        assert_equal(definition_of(aten.linalg_lu_factor_ex.default)(a), aten.linalg_lu_factor_ex(a))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.integers(0, 999))
def test_an_inverse_is_one(size, seed):
    a = drawn(size, size, seed=seed)
    inverse, _ = definition_of(aten.linalg_inv_ex.default)(a)
    residual = (a @ inverse - torch.eye(size, dtype=a.dtype)).abs().max()
    assert residual <= 1e-13 * linalg.cond(a)


class Model(nn.Module):
    """A product, then a function of square matrices and of a right side."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.product, self.function = nn.Linear(4, 4), function

    def forward(self, a, b):
        return self.function(self.product(a) + 3 * torch.eye(4), b)


MODELS = {
    "inverse": lambda a, b: torch.inverse(a) @ b,
    "solve": lambda a, b: linalg.solve(a, b),
    "determinant": lambda a, b: linalg.det(a / 3),
    "log determinant": lambda a, b: linalg.slogdet(a)[1],
    "Cholesky": lambda a, b: torch.cholesky_solve(b, linalg.cholesky(positive(a))),
    "QR": lambda a, b: linalg.qr(a)[1],
    "exponential": lambda a, b: torch.matrix_exp(a / 9) @ b,
}
FAST = ("inverse", "log determinant")


@pytest.mark.parametrize("case", [pytest.param(c, marks=[] if c in FAST else pytest.mark.slow) for c in MODELS])
def test_models_are_built_and_trained(case):
    model, a, b = Model(MODELS[case]), drawn(3, 4, 4).float(), drawn(3, 4, 2).float()
    double = copy.deepcopy(model).double()
    with tvmhet.build(tvmhet.from_torch(model.eval(), (a, b)), cluster=cpus(v2=1), makers=("tvm",), inline=True) as lib:
        want = double(a.double(), b.double()).detach().numpy()
        np.testing.assert_allclose(lib(a, b).numpy(), want, rtol=1e-4, atol=1e-5 * np.abs(want).max())
    step = tvmhet.from_torch(model, (a, b), loss=lambda y: y.square().mean(), lr=0.01, mode="training")
    optimizer, losses = torch.optim.SGD(double.parameters(), lr=0.01), []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(double(a.double(), b.double()).square().mean())
        losses[-1].backward()
        optimizer.step()
    with tvmhet.build(step, cluster=cpus(v2=1), global_batch=3, mode="training", makers=("tvm",)) as trainer:
        np.testing.assert_allclose(trainer.fit([(a, b)] * 3), [x.item() for x in losses], rtol=1e-4)


def test_what_torch_checks_is_left_out_of_the_graph_alone():
    """torch orders its checks among tensors by tokens; while a model is imported they have no effect."""
    holder = singleton.find("aten::_linalg_check_errors").effect
    before = holder.effect
    assert before is not None
    tvmhet.from_torch(Model(MODELS["inverse"]).eval(), (torch.zeros(1, 4, 4), torch.zeros(1, 4, 2)))
    assert holder.effect is before


def test_a_torch_that_orders_no_operators_imports_as_before(monkeypatch):
    monkeypatch.setattr("tvmhet.ir.torch_defined_linear.singleton", SimpleNamespace(find=lambda name: object()))
    with without_checks():
        assert torch.linalg.inv(torch.eye(2)).equal(torch.eye(2))
    tvmhet.from_torch(nn.Linear(4, 3), torch.zeros(2, 4))


def test_large_matrices_are_refused_with_the_limit():
    class Large(nn.Module):
        def forward(self, x):
            return torch.inverse(x)

    with pytest.raises(
        UnsupportedOperator, match=f"linalg_inv_ex[\\s\\S]*{MOST + 1} rows or columns, more than {MOST}"
    ):
        tvmhet.from_torch(Large(), (torch.eye(MOST + 1),))
