"""Modules that ask for values of their constants are traced; what depends on the inputs is refused as before."""

import pytest
import torch
from torch import nn

from tests.ir.test_importers import Function, run
from tvmhet.errors import BadModel, UnsupportedOperator
from tvmhet.ir import torch_known_values
from tvmhet.ir.importers import from_torch

X = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))


class Ready(nn.Module):
    """Asks a buffer which way to go."""

    def __init__(self, is_ready):
        super().__init__()
        self.register_buffer("is_ready", torch.tensor([is_ready]))
        self.register_buffer("width", torch.tensor(2))

    def forward(self, x):
        if not self.is_ready:
            return x * 3
        return x[..., : int(self.width * 2) - 1].relu()


def written(x):
    weights = torch.zeros(3)
    weights[1] = 5
    return x if weights.sum() > 4 else -x


class Counts(nn.Module):
    """Changes a buffer, which is refused, and asks it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        return x if self.calls > 1 else -x


class Remembers(nn.Module):
    """Asks a buffer after the input has changed it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.zeros(4))

    def forward(self, x):
        self.last.copy_(x[0, 0])
        return x if self.last.any() else -x


class Upper(nn.Module):
    """Chooses by a buffer: pairs of features, as factorisation machines do."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.ones(3, 3).triu(1).bool())

    def forward(self, x):
        products = x @ x.transpose(1, 2)
        return products[:, self.mask], products.masked_select(self.mask), torch.masked_select(x, self.mask[:, :1])


def rows_and_columns(x):
    row, column = torch.where(torch.ones(3, 4).tril(-1) > 0)
    return x[:, row, column], x[..., torch.arange(4) % 2 == 0] + 1


def of_places(x):
    places = (torch.ones(3, 4).triu() > 0).reshape(-1).nonzero()
    return x.reshape(2, 12)[:, places].squeeze(-1) * 2


@pytest.mark.parametrize(
    "module",
    [
        Upper(),
        Function(rows_and_columns),
        Function(of_places),
        Function(lambda x: x[:, None, torch.ones(3, 4).tril().bool()]),
        Function(lambda x: x[:, torch.tensor([True, False, True])][..., torch.tensor([False, True, True, True])]),
        Function(lambda x: x * torch.arange(10.0)[torch.arange(10) > 5]),
        Function(lambda x: x + torch.argwhere(torch.arange(4) > 1).sum()),
        Function(lambda x: torch.cat([x, x[:, torch.zeros(3, dtype=torch.bool)]], 1)),
    ],
)
def test_what_constants_choose_has_a_size(module):
    found, expected = run(from_torch(module, (X,)), X), module(X)
    both = zip(found, expected, strict=True) if isinstance(expected, tuple) else ((found, expected),)
    for a, b in both:
        torch.testing.assert_close(torch.from_numpy(a), b)


@pytest.mark.parametrize("module", [Counts(), Remembers()])
def test_buffers_that_calls_change_are_refused_and_stay_as_they_are(module):
    with pytest.raises(BadModel):
        from_torch(module, (X,))
    assert not next(module.buffers()).any()


def first_token(x):
    """As Longformer marks the token that all others see."""
    marks = torch.zeros_like(x[..., 0], dtype=torch.long)
    marks[:, 0] = 1
    seen = (x.new_ones(x.shape[:2]) * (marks + 1)) > 1
    return x if seen.flatten().any().item() and not torch.full_like(x, -1.0).sum() > 0 else -x


def scores_changed_in_place(x):
    """What is computed of the inputs changes, and lies elsewhere."""
    marks = torch.zeros_like(x[..., 0])
    marks[:, 0] = 1
    scores = x * 2
    scores[..., :1] += x[..., 1:2]
    scores.view(-1).add_(x.view(-1))
    return scores if marks.any() else -x


def global_rows(x):
    """As Longformer gathers the tokens that see all others: sizes and ends are what a mask has."""
    marks = torch.zeros_like(x[..., 0], dtype=torch.long)
    marks[:, :2] = 1
    count = (marks > 0).long().sum(1)
    most = count.max()
    rows = x.new_zeros(x.shape[0], most, x.shape[2])
    turns = (torch.arange(most) < count.unsqueeze(-1)).nonzero(as_tuple=True)
    rows[turns] = x[(marks > 0).nonzero(as_tuple=True)]
    return rows + x[:, :most].view(x.shape[0], most, -1)


ASKED = {
    "written": written,
    "shaped as the input is": first_token,
    "sizes": global_rows,
    "beside changes of others": scores_changed_in_place,
    "a mask of a long text": lambda x: x if (torch.ones(600, 600) * torch.zeros_like(x[0, 0, 0])).sum() < 1 else -x,
    "dims": lambda x: x.mean(torch.arange(1, x.dim()).tolist()),
    "a sum of constants": lambda x: x.sum(int((torch.tensor([1, 2, 3]).cumsum(0) - torch.ones(3)).sum().item()) - 6),
    "a condition": lambda x: x + 1 if (torch.linspace(0, 1, 5) < 0.6).all() else x - 1,
    "changed in place": lambda x: x if torch.zeros(3).add_(2).tolist()[1] > 1 else -x,
    "one of several": lambda x: x * float(torch.arange(6).reshape(2, 3).unbind(1)[2][1]),
}


@pytest.mark.parametrize("name", ASKED)
def test_constants_have_values(name):
    module = Function(ASKED[name])
    torch.testing.assert_close(torch.from_numpy(run(from_torch(module, (X,)), X)), module(X))


@pytest.mark.parametrize("is_ready", [False, True])
def test_buffers_have_values(is_ready):
    module = Ready(is_ready)
    torch.testing.assert_close(torch.from_numpy(run(from_torch(module, (X,)), X)), module(X))
    assert module.is_ready.tolist() == [is_ready]


def changed_by_the_input(x):
    weights = torch.zeros(4)
    weights[:2].add_(x[0, 0, :2])  # a view: what is known of the whole is not known any more
    return x if weights.any() else -x


def a_view_of_another_shape_changed_by_the_input(x):
    weights = torch.zeros(2, 4)
    torch.broadcast_tensors(weights, x[0, :2])[0].view(-1)[1:3].mul_(x[0, 0, :2])
    return x if weights.any() else -x


def dropped_in_place(x):
    weights = torch.ones(400)
    nn.functional.dropout(weights, 0.5, inplace=True)
    return x if weights.sum() > 399 else -x


def lies_in_the_input(x):
    weights = torch.ones(4)
    weights.data = x[0, 0].data
    return x if weights.any() else -x


def written_through_another(x):
    weights, other = torch.ones(4), x[0, 0].clone()
    other.data = weights
    other.mul_(x[0, 0])
    return x if weights.any() else -x


def written_by_the_input(x):
    weights = torch.zeros(4)
    weights[1] = x[0, 0, 0]
    return x if weights.any() else -x


def drawn_in_place(x):
    weights = torch.zeros(4)
    weights.normal_()
    return x if weights.any() else -x


def written_by_out(x):
    weights = torch.zeros(4)
    torch.add(x[0, 0], 1, out=weights)
    return x if weights.any() else -x


def mask_written_by_the_input(x):
    mask = torch.ones(3, dtype=torch.bool)
    mask[1] = x.sum() > 0
    return x[:, mask]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x if x.sum() > 0 else -x,
        lambda x: x if (x.sum() + torch.ones(())).item() > 0 else -x,
        changed_by_the_input,
        a_view_of_another_shape_changed_by_the_input,
        dropped_in_place,
        lies_in_the_input,
        written_through_another,
        written_by_the_input,
        drawn_in_place,
        written_by_out,
        lambda x: x if torch.rand(()) > 0.5 else -x,
        lambda x: x * torch.zeros(3).uniform_().tolist()[0],
        lambda x: x[x > 0].sum(),
        lambda x: x[:, x[0].sum(1) > 0],
        mask_written_by_the_input,
        lambda x: x if torch.zeros_like(x).add_(x).any() else -x,
        lambda x: x if torch.empty_like(x).any() else -x,
        lambda x: x if torch.rand_like(x).sum() > 1 else -x,
        lambda x: x if torch.ones(2).resize_(4).sum() > 1 else -x,
    ],
)
def test_what_depends_on_the_inputs_or_on_chance_is_refused(function):
    with pytest.raises((BadModel, UnsupportedOperator)):
        from_torch(Function(function), (X,))


def test_large_values_are_known_while_there_is_room(monkeypatch):
    function = Function(ASKED["a mask of a long text"])
    monkeypatch.setattr(torch_known_values, "_LARGE_BYTES", 600 * 600 * 4 - 1)
    with pytest.raises(BadModel):
        from_torch(function, (X,))


def test_the_error_is_that_of_the_first_trace():
    with pytest.raises(
        BadModel, match=r"torch.export cannot trace Function at test_torch_known_values.py(.|\n)*data-dep"
    ):
        from_torch(Function(lambda x: x if x.sum() > 0 else -x), (X,))


def test_sizes_that_are_not_fixed_have_no_value():
    rows = torch.export.Dim("rows", min=2, max=9)
    for function in (
        lambda x: x if torch.arange(x.shape[0]).sum() > 3 else -x,
        lambda x: x if torch.ones_like(x).sum() > 3 else -x,
    ):
        with pytest.raises((BadModel, UnsupportedOperator)):
            from_torch(Function(function), (X,), dynamic_shapes=({0: rows},), bind_shapes={"rows": 4})
