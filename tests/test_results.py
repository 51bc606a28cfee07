"""A call returns what the model returns, built, from a bundle, placed whole: nested, named, with what is no tensor."""

from __future__ import annotations

import json
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils import _pytree as pytree

import tvmhet
from tests.placed import cpus
from tvmhet.errors import BadBundle, BadModel
from tvmhet.results import Fixed, Named, Parts, read_structure, structure_tree, structured

Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Output:
    """A result with names, one of them absent."""

    logits: torch.Tensor
    loss: torch.Tensor | None = None


class ModelOutput(OrderedDict):
    """As transformers has them: entries that are attributes, and numbers."""

    def to_tuple(self):
        return tuple(self.values())


torch.export.register_dataclass(Output, serialized_type_name="tests.Output")
pytree.register_pytree_node(
    ModelOutput,
    lambda o: (list(o.values()), list(o)),
    lambda values, names: ModelOutput(zip(names, values, strict=True)),
    serialized_type_name="tests.ModelOutput",
)


class Returns(nn.Module):
    """A product, and whatever the function makes of it."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.product, self.function = nn.Linear(4, 4), function

    def forward(self, x):
        return self.function(self.product(x))


X = torch.linspace(-1, 1, 8).reshape(2, 4)
RESULTS = {
    "one": lambda y: y,
    "a tuple of one": lambda y: (y,),
    "a list": lambda y: [y, y + 1],
    "nested": lambda y: (y, [y + 1, (y * 2,)], ()),
    "a mapping": lambda y: {"b": y, "a": (y + 1, {"deep": y * 2})},
    "numbered": lambda y: {1: y, 0: y + 1},
    "beside values": lambda y: (y, None, 3, "text", 2.5, True),
    "repeated": lambda y: {"x": y, "same": y},
}


def assert_equal(got, want):
    assert type(got) is type(want) or isinstance(want, torch.Tensor)
    if isinstance(want, torch.Tensor):
        torch.testing.assert_close(got, want)
    elif isinstance(want, dict):
        assert list(got) == list(want)
        for key in want:
            assert_equal(got[key], want[key])
    elif isinstance(want, tuple | list):
        assert len(got) == len(want)
        for g, w in zip(got, want, strict=True):
            assert_equal(g, w)
    else:
        assert got == want


@pytest.mark.parametrize("case", RESULTS)
def test_a_call_returns_what_the_model_returns(case, tmp_path):
    model = Returns(RESULTS[case]).eval()
    want = model(X)
    with tvmhet.build(tvmhet.from_torch(model, X), cluster=cpus(v2=1), makers=("tvm",), inline=True) as lib:
        assert_equal(lib(X), want)
        assert_equal(list(lib.map([X])), [want])
        lib.export(tmp_path / "bundle")
    with tvmhet.load(tmp_path / "bundle") as lib:
        assert_equal(lib(X), want)


@pytest.mark.parametrize("case", ["one", "a tuple of one", "nested", "a mapping", "beside values"])
def test_so_does_a_model_that_is_placed_whole(case, tmp_path):
    model = Returns(RESULTS[case]).eval()
    imported = tvmhet.from_torch(model, X, dynamic_shapes=({0: torch.export.Dim("n", max=9)},))
    with tvmhet.build(imported, cluster=cpus(v2=1)) as lib:
        assert_equal(lib(X[:1]), model(X[:1]))
        lib.export(tmp_path / "bundle")
    with tvmhet.load(tmp_path / "bundle") as lib:
        assert_equal(lib(X), model(X))


NAMED = {
    "a dataclass": lambda y: Output(y),
    "a model's output": lambda y: ModelOutput(logits=y, loss=None),
}


@pytest.mark.parametrize("case", NAMED)
def test_results_with_names_have_them(case, tmp_path):
    """As a mapping of our own: the model's class need not be there where a bundle runs."""
    model = Returns(NAMED[case]).eval()
    with tvmhet.build(tvmhet.from_torch(model, X), cluster=cpus(v2=1), makers=("tvm",), inline=True) as lib:
        lib.export(tmp_path / "bundle")
    with tvmhet.load(tmp_path / "bundle") as lib:
        got = lib(X)
    assert type(got) is Named and list(got) == ["logits", "loss"]
    for logits in (got.logits, got["logits"], got[0], got[:1][0]):
        torch.testing.assert_close(logits, model.product(X))
    assert got.loss is got[1] is None
    with pytest.raises(AttributeError, match="hidden"):
        _ = got.hidden


def test_a_named_tuple_is_one():
    model = Returns(lambda y: Pair(y, y + 1)).eval()
    with tvmhet.build(tvmhet.from_torch(model, X), cluster=cpus(v2=1), makers=("tvm",), inline=True) as lib:
        first, second = got = lib(X)
    torch.testing.assert_close(got.second, model(X).second)
    assert got.first is first and got.second is second


def test_an_exported_file_keeps_the_structure(tmp_path):
    model = Returns(RESULTS["a mapping"]).eval()
    torch.export.save(torch.export.export(model, (X,)), tmp_path / "model.pt2")
    imported = tvmhet.from_exported(tmp_path / "model.pt2")
    with tvmhet.build(imported, cluster=cpus(v2=1), makers=("tvm",), inline=True) as lib:
        assert_equal(lib(X), model(X))


def test_what_cannot_be_kept_is_refused():
    with pytest.raises(BadModel, match="the model's result holds a float"):
        tvmhet.from_torch(Returns(lambda y: {0.5: y}).eval(), X)


STRUCTURES = st.recursive(
    st.none() | st.builds(Fixed, st.none() | st.booleans() | st.integers() | st.text()),
    lambda part: st.lists(part, max_size=3).flatmap(
        lambda parts: st.sampled_from(["tuple", "list", "dict", "named"]).map(
            lambda kind: Parts(kind, tuple(parts), tuple("abc"[: len(parts)]) if kind in ("dict", "named") else ())
        )
    ),
    max_leaves=9,
).filter(lambda s: isinstance(s, Parts))


@given(STRUCTURES)
def test_structures_are_read_as_they_were_written(structure):
    assert read_structure(json.loads(json.dumps(structure_tree(structure)))) == structure


@given(STRUCTURES)
def test_every_tensor_has_one_place_in_order(structure):
    values = iter(range(100))
    made = structured(map(np.float32, range(structure.num_tensors)), structure)

    def numbers(part):
        if isinstance(part, np.float32):
            assert part == next(values)
        for inner in part.values() if isinstance(part, dict) else part if isinstance(part, tuple | list) else ():
            numbers(inner)

    numbers(made)
    assert next(values) == structure.num_tensors


@pytest.mark.parametrize(
    "tree", [5, "x", {"set": []}, {"dict": [None]}, {"value": []}, {"value": 3}, {}, [{"a": 1, "b": 2}]]
)
def test_a_structure_that_is_none_is_refused(tree):
    with pytest.raises(BadBundle, match="structure"):
        read_structure(tree)


def test_older_bundles_have_lists_for_tuples():
    assert read_structure([None, [None, None]]) == Parts("tuple", (None, Parts("tuple", (None, None))))
