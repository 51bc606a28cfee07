"""The comparison with torch of full-size steps, on a small model: it passes, and a wrong gradient does not."""

from dataclasses import replace

import pytest
import torch

from benchmarks import training_full_size as full
from tests.zoo.test_zoo import SMALL


@pytest.mark.slow
def test_a_step_with_torchs_gradients_passes(monkeypatch):
    monkeypatch.setitem(full.MODELS, "dlrm", replace(full.MODELS["dlrm"], sizes=SMALL["dlrm"]))
    row = full.measured("dlrm")
    assert row.passes and row.worst_error < 1e-5 and row.tensors == len(row.errors) > 10
    assert row.loss == pytest.approx(row.torch_loss, rel=1e-5)
    assert not replace(row, worst_error=2e-4).passes
    assert replace(row, worst_error=2e-4, torch_float32_error=1.4e-4).passes
    assert replace(row, worst_error=2e-4, one_rounding_error=1.4e-4).passes


def test_an_error_is_measured_by_the_gradients_own_norm_or_by_a_part_of_the_largest():
    exact = {"a": torch.tensor([10.0]), "b": torch.tensor([0.1]), "c": torch.tensor([0.0])}
    found = {"a": torch.tensor([10.1]), "b": torch.tensor([0.2]), "c": torch.tensor([0.001])}
    errors = full._errors(found, exact)
    assert errors == {"a": pytest.approx(0.01, rel=1e-3), "b": pytest.approx(1.0), "c": pytest.approx(1.0)}


def test_parameters_are_moved_to_their_neighbours_at_most():
    model = torch.nn.Linear(64, 64)
    near = full._one_rounding_away(model, 1)
    for p, q in zip(model.parameters(), near.parameters(), strict=True):
        up, down = (torch.nextafter(p, torch.full_like(p, sign * torch.inf)) for sign in (1, -1))
        parts = [(q == x).float().mean() for x in (down, p, up)]
        assert sum(parts) == pytest.approx(1.0) and min(parts) > 0.15
