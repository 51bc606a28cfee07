"""Models whose inputs go by name: imported with a mapping, called, streamed and trained with one."""

from __future__ import annotations

import copy
from collections import UserDict

import numpy as np
import pytest
import torch
from torch import nn

import tvmhet
from tests.placed import BEST, cpus
from tvmhet.errors import BadInput, BadLoss, BadModel
from tvmhet.nested import call_arguments, named_leaves


class Classifier(nn.Module):
    """As transformers have it: everything by name, much of it optional, a loss of its own, a result with names."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.first, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, ids=None, mask=None, scale=1.0, pair=None, labels=None, *, add=None, with_hidden=False):
        x = self.first(self.embed(ids)).tanh()
        if mask is not None:
            x = x * mask.unsqueeze(-1)
        if add is not None:
            x = x + add
        if pair is not None:
            x = x * pair[0] + pair[1]["shift"]
        found = {"logits": scale * self.head(x.mean(1))}
        if labels is not None:
            found["loss"] = nn.functional.cross_entropy(found["logits"], labels)
        return found | ({"hidden": x} if with_hidden else {})


def batch(samples=4, **more):
    g = torch.Generator().manual_seed(samples)
    ids, mask = torch.randint(0, 11, (samples, 5), generator=g), torch.rand(samples, 5, generator=g)
    return {"mask": mask, "ids": ids} | more


def assert_logits(got, model, given, **how):
    got = got["logits"] if isinstance(got, dict) else got
    np.testing.assert_allclose(np.asarray(got), model(**given, **how)["logits"].detach().numpy(), rtol=1e-5, atol=1e-6)


def test_calls_by_name_in_order_and_by_a_mapping(tmp_path):
    """A mapping of any kind, as tokenizers return; the order is that of the example."""
    model, given, other = Classifier().eval(), batch(), batch(4, mask=torch.rand(4, 5))
    imported = tvmhet.from_torch(model, UserDict(given))
    assert [str(v.name) for v in imported.inputs] == ["mask", "ids"]
    with tvmhet.build(imported, cluster=cpus(v2=1), makers=("tvm",), inline=True) as lib:
        assert_logits(lib(**given), model, given)
        assert_logits(lib(ids=given["ids"], mask=given["mask"]), model, given)
        assert_logits(lib(UserDict(given)), model, given)
        assert_logits(lib(given["mask"], given["ids"]), model, given)
        for got, want in zip(lib.map([given, other, tuple(given.values())]), (given, other, given), strict=True):
            assert_logits(got, model, want)
        assert lib.benchmark(given, num_inputs=2, warmup=0).throughput_per_s > 0
        lib.export(tmp_path / "bundle")
    with tvmhet.load(tmp_path / "bundle") as lib:
        assert_logits(lib(**given), model, given)


def test_what_is_no_tensor_stays_what_it_was():
    model, given = Classifier().eval(), batch()
    imported = tvmhet.from_torch(model, given | {"scale": 2.0, "with_hidden": True, "labels": None})
    with tvmhet.build(imported, cluster=cpus(v2=1), makers=("tvm",), inline=True) as lib:
        got = lib(**given)
        assert_logits(got, model, given, scale=2.0)
        assert got["hidden"].shape == (4, 5, 8)


def test_nested_arguments_go_by_their_path():
    model = Classifier().eval()
    given = batch(pair=(torch.rand(4, 5, 8), {"shift": torch.rand(8)}), add=torch.rand(8))
    imported = tvmhet.from_torch(model, given)
    with tvmhet.build(imported, cluster=cpus(v2=1), makers=("tvm",), inline=True) as lib:
        assert_logits(lib(**given), model, given)
        assert_logits(lib(given), model, given)


class OfOneMapping(nn.Module):
    """Takes its whole batch as one argument."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = Classifier()

    def forward(self, features):
        return self.inner(ids=features["ids"], mask=features["mask"])["logits"]


def test_a_module_that_takes_one_mapping():
    model, given = OfOneMapping().eval(), batch()
    with tvmhet.build(tvmhet.from_torch(model, (given,)), cluster=cpus(v2=1), makers=("tvm",), inline=True) as lib:
        for got in (lib(given), lib(features=given), *lib.map([given])):
            assert_logits(got, model.inner, given)


def test_a_model_that_is_placed_whole_takes_names(tmp_path):
    model, samples = Classifier().eval(), torch.export.Dim("n", max=64)
    imported = tvmhet.from_torch(model, batch(), dynamic_shapes={"ids": {0: samples}, "mask": {0: samples}})
    assert imported.whole_reason and "n" in imported.whole_reason
    with tvmhet.build(imported, cluster=cpus(v2=1)) as lib:
        for given in (batch(), batch(7)):
            assert_logits(lib(**given), model, given)
        lib.export(tmp_path / "bundle")
    with tvmhet.load(tmp_path / "bundle") as lib:
        assert_logits(lib(batch(3)), model, batch(3))
    fixed = tvmhet.from_torch(
        model, batch(), dynamic_shapes={"ids": {0: samples}, "mask": {0: samples}}, bind_shapes={"n": 2}
    )
    assert fixed.whole_reason is None


def test_a_model_without_values_is_imported_by_name():
    with torch.device("meta"):
        model = Classifier().eval()
    assert not tvmhet.from_torch(model, batch()).has_values


WRONG = {
    "missing": ({"ids": 0}, "input 'mask' is not given; the model takes mask, ids"),
    "strange": ({"ids": 0, "mask": 0, "labels": 0}, "'labels' is no input; the model takes mask, ids"),
    "nested": ({"ids": (0, 1), "mask": 0}, "'ids_0' is no input"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_names_are_named(case):
    given, text = WRONG[case]
    with pytest.raises(BadInput, match=text):
        call_arguments([given], ["mask", "ids"])


def test_some_in_order_and_some_by_name_are_refused():
    model, given = Classifier().eval(), batch()
    with (
        tvmhet.build(tvmhet.from_torch(model, given), cluster=cpus(v2=1), makers=("tvm",), inline=True) as lib,
        pytest.raises(BadInput, match="1 inputs are given in order and ids by name"),
    ):
        lib(given["mask"], ids=given["ids"])


def test_names_that_forward_does_not_take_are_refused_at_import():
    with pytest.raises(BadInput, match=r"does not take 2 example inputs by name \(idx, mask\)[\s\S]*keyword"):
        tvmhet.from_torch(Classifier(), {"idx": torch.zeros(1, 5), "mask": torch.zeros(1, 5)})
    with pytest.raises(BadInput, match=r"are a int[\s\S]*mapping of them by name"):
        tvmhet.from_torch(Classifier(), 3)


def test_a_result_of_a_strange_type_has_its_own_remedy():
    class Cache:
        pass

    class Model(nn.Module):
        def forward(self, x):
            return x + 1, Cache()

    with pytest.raises(BadModel, match=r"not a known type[\s\S]*use_cache=False"):
        tvmhet.from_torch(Model(), {"x": torch.zeros(1)})


def test_names_in_any_case_and_with_any_sign():
    """Unless two inputs differ by that alone."""
    assert call_arguments([{"Input.1": 1, "X": 2}], ["x", "input_1"]) == (2, 1)
    assert call_arguments([{"X": 2, "x": 1}], ["x", "X"]) == (1, 2)
    with pytest.raises(BadInput, match="two of X, x are one name"):
        call_arguments([{"X": 2, "x": 1}], ["x"])
    assert list(named_leaves({"a": [1, {"b": 2}]})) == [("a_0", 1), ("a_1_b", 2)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_by_names_with_the_models_own_loss(dtype):
    """`add` is also the name of an operator's node, and `scale` no tensor."""
    model = Classifier()
    example = batch(2, labels=torch.tensor([0, 2]), add=torch.rand(2, 5, 8), scale=2.0)
    step = tvmhet.from_torch(model, example, loss="output", optimizer="sgd", lr=0.1, mode="training", dtype=dtype)
    assert [str(v.name) for v in step.step.inputs] == ["mask", "ids", "labels", "add"]
    data = [batch(4, labels=torch.tensor([0, 1, 2, 0]), add=torch.rand(4, 5, 8)) for _ in range(3)]
    double = copy.deepcopy(model).double()
    reference, want = torch.optim.SGD(double.parameters(), lr=0.1), []
    for b in data:
        reference.zero_grad()
        halves = [{k: v[i : i + 2] for k, v in b.items()} for i in (0, 2)]
        losses = [
            double(**{k: v.double() if v.is_floating_point() else v for k, v in h.items()}, scale=2.0)["loss"]
            for h in halves
        ]
        (sum(losses) / 2).backward()
        reference.step()
        want.append(sum(loss.item() for loss in losses) / 2)
    with tvmhet.build(
        step, cluster=cpus(**{"v2": 1, BEST: 1}), global_batch=4, mode="training", makers=("tvm",)
    ) as trainer:
        got = [trainer.train_step(**data[0]), *trainer.fit([UserDict(data[1]), tuple(data[2].values())])]
        np.testing.assert_allclose(got, want, rtol=1e-5 if dtype == "float32" else 2e-2)
        with pytest.raises(BadInput, match="input 'labels' is not given; the model takes mask, ids, labels, add"):
            trainer.train_step({k: v for k, v in data[0].items() if k != "labels"})


def test_a_step_of_one_mapping_and_targets():
    model, given = OfOneMapping(), batch(2)
    step = tvmhet.from_torch(model, (given,), loss="cross_entropy", lr=0.1, mode="training")
    assert [str(v.name) for v in step.step.inputs] == ["features_mask", "features_ids", "target"]
    assert step.at_batch(3).batch_size == 3
    labels = torch.tensor([0, 2])
    want = nn.functional.cross_entropy(model(given), labels).item()
    with tvmhet.build(step, cluster=cpus(v2=1), global_batch=2, mode="training", makers=("tvm",)) as trainer:
        assert trainer.train_step(given["mask"], given["ids"], labels) == pytest.approx(want, rel=1e-5)
        by_name = {"features": given, "target": labels}
        assert trainer.train_step(by_name) < want


def test_a_result_without_a_loss_is_no_loss():
    with pytest.raises(BadLoss, match="the loss is a dict"):
        tvmhet.from_torch(Classifier(), batch(2), loss="output", mode="training")
