"""What of an exported program is no arithmetic on tensors."""

import numpy as np
import pytest
import torch
from torch import nn

from tests.ir.test_importers import Function, run
from tvmhet.errors import BadModel, UnsupportedOperator
from tvmhet.ir.importers import from_torch

X = torch.tensor([[1.0, 2.0], [3.0, 4.0]])


def test_numbers_and_none_among_inputs_are_fixed():
    model = from_torch(Function(lambda x, k, mask: x * k if mask is None else x), (X, 3, None))
    assert model.input_names == ("args_0",)
    assert (run(model, X) == (X * 3).numpy()).all()


class Grows(nn.Module):
    """Adds to a view of a parameter, as `repeat` of one batch returns it."""

    def __init__(self):
        super().__init__()
        self.start = nn.Parameter(torch.zeros(1, 2))

    def forward(self, x):
        rows = self.start.expand(1, 2)
        rows += 1
        return x + rows


def test_an_operator_is_written_out_beside_inputs_that_are_no_tensors():
    """torch checks a program that is written out once more against the call that it was exported from."""

    class Options(nn.Module):
        def forward(self, x=None, scale=1.0, mask=None, more=None):
            y = torch.logcumsumexp(x * scale, 1) if mask is None else x
            return {"y": y if more is None else y + more[0], "scale": scale}

    given = {"x": X, "scale": 2.0, "mask": None, "more": [X + 1]}
    model = from_torch(Options(), given)
    assert model.input_names == ("x", "more_0")
    want = Options()(**given)["y"]
    np.testing.assert_allclose(run(model, X, X + 1), want.numpy(), rtol=1e-5)


def test_what_is_no_tensor_among_results_is_left_out():
    model = from_torch(Function(lambda x: (x + 1, None, x * 2, 3)), (X,))
    assert [r.tolist() for r in run(model, X)] == [(X + 1).tolist(), (X * 2).tolist()]


def test_a_result_without_tensors_is_refused():
    with pytest.raises(BadModel, match=r"returns no tensor"):
        from_torch(Function(lambda x: None), (X,))


def test_state_that_calls_change_is_refused():
    with pytest.raises(BadModel, match=r"buffer '0.running_mean' and 2 more(.|\n)*eval mode"):
        from_torch(nn.Sequential(nn.BatchNorm1d(2)).train(), (X,))
    with pytest.raises(BadModel, match=r"a call changes the model's parameter 'start'"):
        from_torch(Grows(), (X,))


@pytest.mark.parametrize("draw", [torch.randn_like, torch.bernoulli, lambda x: x + torch.rand(2)])
def test_random_numbers_are_refused(draw):
    with pytest.raises(UnsupportedOperator, match=r"draws random numbers at every call(.|\n)*eval mode"):
        from_torch(Function(lambda x: draw(x.sigmoid())), (X,))


def test_branches_are_converted_like_the_rest():
    branch = Function(lambda x: torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x @ x, (x,)))
    model = from_torch(branch, (X,))
    assert model.whole_reason == "it has control flow (if)"
    assert (run(model, X) == (X + 1).numpy()).all()
    assert (run(model, -X) == (X @ X).numpy()).all()
