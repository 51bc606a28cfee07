"""Buffers and attributes that calls change: five calls of what is imported, by TVM alone, equal five of the module."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import torch
import tvm
from torch import nn

import tvmhet
from tests.stateful import Decoder, step
from tvmhet.errors import BadModel
from tvmhet.ir.importers import from_exported, from_torch
from tvmhet.ir.model import to_torch
from tvmhet.results import Fixed, Parts, without


class Stateful(nn.Module):
    """One layer and two buffers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("n", torch.zeros((), dtype=torch.long))
        self.register_buffer("c", torch.zeros(8, 4), persistent=False)
        self.l = nn.Linear(4, 4)


class Written(Stateful):
    def forward(self, x):
        self.c.index_copy_(0, self.n.view(1), self.l(x)[None])
        self.n.add_(1)
        return self.c.sum(0)


class Shifted(Stateful):
    def forward(self, x):
        self.c.copy_(torch.cat([self.c[1:], self.l(x)[None]]))
        return self.c.mean(0)


class Reassigned(Stateful):
    """torch.export sees it of the outermost module alone."""

    def forward(self, x):
        before = self.c
        self.c = torch.cat([self.c[1:], self.l(x)[None]])
        return self.c.mean(0) + before.sum(0)


class Plain(nn.Module):
    """An attribute that is no buffer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.l, self.h = nn.Linear(4, 4), torch.zeros(4)

    def forward(self, x):
        self.h = self.h * 0.5 + self.l(x)
        return self.h * 2


class PlainInPlace(Plain):
    def forward(self, x):
        self.h.mul_(0.5).add_(self.l(x))
        return self.h * 2


class Nested(nn.Module):
    """Several, one of them called twice in a call."""

    def __init__(self):
        super().__init__()
        self.a, self.many, self.c = Plain(), nn.ModuleList([Plain(), PlainInPlace()]), Reassigned()

    def forward(self, x):
        return self.a(x) * self.a(x + 1) + self.many[0](x) * self.many[1](x) + self.c(x)


class Window(Stateful):
    """Slices of the old value and the new one at once."""

    def forward(self, x):
        old = self.c.clone()
        self.c[1:] = old[:-1]
        self.c[0] = x
        return self.c @ self.l.weight


class Memory(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.register_buffer("hx", torch.zeros(1, 1, 4))
        self.register_buffer("cx", torch.zeros(1, 1, 4))

    def forward(self, x):
        y, (h, c) = self.lstm(x.view(1, 1, 4), (self.hx, self.cx))
        self.hx.copy_(h)
        self.cx.copy_(c)
        return y


class Lists(Plain):
    """Tensors in a list, changed in place; one object also under a buffer's name, as caches of transformers are."""

    def __init__(self):
        super().__init__()
        self.held = [torch.zeros(4), torch.ones(4)]
        self.register_buffer("second", self.held[1], persistent=False)

    def forward(self, x):
        for tensor in self.held:
            tensor.mul_(0.5).add_(x)
        return self.held[0] + self.held[1]


class Half(nn.Module):
    """A cache of 16 bits, written at several places at once."""

    def __init__(self):
        super().__init__()
        self.register_buffer("c", torch.zeros(1, 2, 8, 4, dtype=torch.bfloat16))

    def forward(self, x):
        rows = torch.stack([x, 2 * x, 3 * x]).to(torch.bfloat16).expand(1, 2, 3, 4)
        self.c[:, :, torch.tensor([5, 0, -1])] = rows
        self.c += 1
        return self.c.float().sum((0, 1))


def five_calls(model, imported):
    """Call both five times; what the module has afterwards is what the last call left."""
    executable = tvm.compile(imported.mod, target=tvm.target.Target("llvm"))
    main = tvm.relax.VirtualMachine(executable, tvm.cpu())["main"]
    states = [s.initial for s in imported.states]
    for seed in range(5):
        x = torch.randn(4, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            want = model(x)
        got = list(main(tvm.runtime.tensor(x.numpy()), *states, *imported.params.values()))
        result, states = got[0], got[1:]
        np.testing.assert_allclose(result.numpy(), want.numpy(), rtol=1e-5, atol=1e-5)
    return {s.name: to_torch(v) for s, v in zip(imported.states, states, strict=True)}


@pytest.mark.parametrize(
    "kind", [Written, Shifted, Reassigned, Plain, PlainInPlace, Nested, Window, Memory, Lists, Half]
)
def test_calls_change_what_the_module_changes(kind):
    model = kind().eval()
    before = copy.deepcopy(model)
    imported = from_torch(model, (torch.zeros(4),))
    assert imported.states and imported.input_names == ("x",)
    with torch.no_grad():  # the import has moved nothing
        assert torch.equal(copy.deepcopy(model)(torch.ones(4)), before(torch.ones(4)))
    left = five_calls(kind().eval(), imported)
    model = kind().eval()
    for seed in range(5):
        with torch.no_grad():
            model(torch.randn(4, generator=torch.Generator().manual_seed(seed)))
    buffers = dict(model.named_buffers())
    for name in left.keys() & buffers.keys():
        torch.testing.assert_close(left[name], buffers[name], rtol=1e-5, atol=1e-5)
    if kind is Lists:
        assert "second" in left


def test_first_values_are_those_of_the_import():
    model = Written().eval()
    with torch.no_grad():
        model(torch.ones(4))
    imported = from_torch(model, (torch.zeros(4),))
    with torch.no_grad():
        model(torch.ones(4))
    assert {s.name: to_torch(s.initial).sum().item() for s in imported.states}["n"] == 1


def test_an_exported_program_has_states(tmp_path):
    torch.export.save(torch.export.export(Decoder().eval(), step(1, 0)), tmp_path / "model.pt2")
    imported = from_exported(tmp_path / "model.pt2", num_sessions=3)
    assert len(imported.states) == 4 and imported.num_sessions == 3


def test_a_model_without_values_has_states():
    with torch.device("meta"):
        model = Decoder().eval()
    imported = from_torch(model, step(1, 0))
    assert len(imported.states) == 4 and not imported.has_values


def test_what_is_only_noted_is_no_state():
    class Notes(Plain):
        def forward(self, x):
            self.seen = x * 2
            self.h = self.l(x)
            return self.h + 1

    model = Notes().eval()
    h = model.h
    imported = from_torch(model, (torch.zeros(4),))
    assert not imported.states and model.h is h and not hasattr(model, "seen")


def test_an_input_that_is_changed_is_the_callers():
    imported = from_torch(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)), (torch.zeros(4),))
    assert not imported.states and imported.structure == "single"


class Asks(Stateful):
    def forward(self, x):
        self.c[int(self.n)] = self.l(x)
        self.n += 1
        return self.c.sum(0)


class AsksMask(Stateful):
    """The shape of the result depends on what calls have counted."""

    def forward(self, x):
        chosen = self.l(x)[torch.arange(4) <= self.n]
        self.n += 1
        return chosen


class InDict(Plain):
    def __init__(self):
        super().__init__()
        self.held = {"k": torch.zeros(4)}

    def forward(self, x):
        self.held["k"] = self.held["k"] + x
        return self.held["k"]


class Grows(Plain):
    def __init__(self):
        super().__init__()
        self.h = torch.zeros(0, 4)

    def forward(self, x):
        self.h = torch.cat([self.h, x[None]])
        return self.h.sum(0)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Asks, r"Asks asks for the value of its buffer 'n', which its calls change(.|\n)*index_copy_"),
        (AsksMask, r"AsksMask asks for the value of its buffer 'n', which its calls change"),
        (InDict, r"a call assigns \"held\['k'\]\", which the next call reads(.|\n)*register_buffer"),
        (Grows, r"a call assigns 'h', which the next call reads, with another shape or dtype"),
    ],
)
def test_what_tracing_would_freeze_is_refused(kind, text):
    with warnings.catch_warnings(), pytest.raises(BadModel, match=text):
        warnings.simplefilter("ignore")
        from_torch(kind().eval(), (torch.zeros(4),))


def test_values_that_no_call_changes_may_be_asked_for():
    class AsksFirst(Stateful):
        def forward(self, x):
            row = int(self.n) + 1
            self.c.add_(x)
            return self.c[row] * 2

    imported = from_torch(AsksFirst().eval(), (torch.zeros(4),))
    assert [s.name for s in imported.states] == ["c"]
    five_calls(AsksFirst().eval(), imported)


def test_structures_without_what_is_a_state():
    named = Parts("named", (None, Parts("tuple", (Parts("tuple", (None, None)),)), Fixed(3)), ("y", "past", "k"))
    assert without(named, {1, 2}, 3) == Parts("named", (None, Fixed(3)), ("y", "k"))
    assert without(Parts("tuple", (None, Parts("list", (None,)))), {1}, 2) == "single"
    assert without("tuple", {0}, 3) == "tuple"
    assert without(named, {2}, 3) == Parts(
        "named", (None, Parts("tuple", (Parts("tuple", (None,)),)), Fixed(3)), ("y", "past", "k")
    )


def test_an_operator_is_written_out_in_a_model_with_states():
    class Defined(Plain):
        def forward(self, x):
            self.h.add_(torch.logcumsumexp(x, 0))
            return torch.logcumsumexp(self.h, 0)

    five_calls(Defined().eval(), from_torch(Defined().eval(), (torch.zeros(4),)))


def test_a_cache_is_written_in_one_pass():
    """No scatter, and no transposed copy of the cache."""
    imported = tvmhet.from_torch(Decoder(layers=1).eval(), step(1, 0))
    assert "scatter" not in imported.mod.script()
