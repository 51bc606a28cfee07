"""Models of which a call may return something else after another call: refused if it does, else as torch has them."""

import pytest
import torch
from torch import nn

import tvmhet
from tests.placed import cpus
from tvmhet.errors import BadModel

X = torch.tensor([[1.0, -4.0, 2.0], [0.5, 3.0, -1.0]])


class Scale(nn.Module):
    """Divides by the largest number of the first input."""

    def __init__(self):
        super().__init__()
        self.scale = None

    def forward(self, x):
        if self.scale is None:
            self.scale = x.abs().max()
        return x / self.scale


class Flagged(nn.Module):
    """The same, with a place for the number from the start."""

    def __init__(self):
        super().__init__()
        self.scale, self.is_ready = torch.zeros(()), False

    def forward(self, x):
        if not self.is_ready:
            self.scale, self.is_ready = x.abs().max(), True
        return x / self.scale


class Counts(nn.Module):
    def __init__(self, is_used):
        super().__init__()
        self.calls, self.is_used = 0, is_used

    def forward(self, x):
        self.calls += 1
        return x * self.calls if self.is_used else x * 2


class Collects(nn.Module):
    """Adds up what it has seen, in a list."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append(x.sum())
        return x + len(self.seen)


class Table(nn.Module):
    """Makes a table of positions where it has none of the right length: an attribute or a buffer of another length."""

    def __init__(self, how):
        super().__init__()
        if how == "buffer":
            self.register_buffer("places", torch.zeros(1), persistent=False)
        else:
            self.places = None if how == "none" else torch.zeros(1)

    def forward(self, x):
        if self.places is None or self.places.shape[0] != x.shape[1]:
            self.places = torch.arange(x.shape[1]) * 0.5
        return x + self.places


class Attends(nn.Module):
    """Keeps what it paid attention to, for whoever draws it, and the size of its input."""

    def __init__(self):
        super().__init__()
        self.product, self.map, self.size = nn.Linear(3, 3), None, None
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x):
        self.map, self.size = self.product(x).softmax(-1), x.shape
        self.total += x.sum(0)
        return x * self.map + self.total


class Words(nn.Module):
    """Embeds words, in the order of the first text."""

    def __init__(self):
        super().__init__()
        self.table, self.order = nn.Embedding(9, 4), None

    def forward(self, words):
        if self.order is None:
            self.order = words.argsort()
        return self.table(words)[self.order]


def attributes(model):
    return {
        (path, name): repr(value)
        for path, module in model.named_modules()
        for name, value in [*vars(module).items(), *module._buffers.items()]
    }


@pytest.mark.parametrize(
    ("make", "inputs", "name"),
    [
        (Scale, X, "0.scale"),
        (Flagged, X, "0.is_ready"),
        (lambda: Counts(True), X, "0.calls"),
        (Collects, X, "0.seen"),
        (Words, torch.tensor([3, 1, 4, 8]), "0.order"),
    ],
)
def test_what_the_first_call_decides_is_refused(make, inputs, name):
    model = nn.Sequential(make()).eval()
    before = attributes(model)
    with pytest.raises(BadModel, match=rf"a call of Sequential returns depends on .*'{name}'[\s\S]*before the import"):
        tvmhet.from_torch(model, (inputs,))
    assert attributes(model) == before


@pytest.mark.parametrize("make", [Scale, Flagged])
def test_what_a_call_before_the_import_has_set_stays(make):
    model = make().eval()
    model(X * 3)
    lib = tvmhet.build(tvmhet.from_torch(model, (X,)), cluster=cpus(v2=1), makers=("tvm",), inline=True)
    torch.testing.assert_close(lib(X * 5), model(X * 5))


@pytest.mark.parametrize(
    ("how", "is_inside"),
    [("none", False), ("none", True), ("attribute", False), ("attribute", True), ("buffer", True)],
)
def test_a_table_that_the_first_call_makes(how, is_inside):
    model = nn.Sequential(Table(how)).eval() if is_inside else Table(how).eval()
    before = attributes(model)
    imported = tvmhet.from_torch(model, (X,))
    assert attributes(model) == before and not imported.states
    lib = tvmhet.build(imported, cluster=cpus(v2=1), makers=("tvm",), inline=True)
    for x in (X, X + 1):
        torch.testing.assert_close(lib(x), x + torch.tensor([0.0, 0.5, 1.0]))


def test_what_is_only_noted_is_no_reason():
    model = Counts(False).eval()
    tvmhet.from_torch(model, (X,))
    assert model.calls == 0


def test_states_are_no_reason_beside_what_is_noted():
    torch.manual_seed(0)
    model = Attends().eval()
    before = attributes(model)
    imported = tvmhet.from_torch(model, (X,))
    assert attributes(model) == before and [s.name for s in imported.states] == ["total"]
    lib = tvmhet.build(imported, cluster=cpus(v2=1), makers=("tvm",), inline=True)
    with torch.no_grad():
        for x in (X, X + 1, X):
            torch.testing.assert_close(lib(x), model(x))


def test_a_call_that_changes_its_input_or_makes_a_module_is_no_reason():
    class Inner(Counts):
        def forward(self, x):
            if not hasattr(self, "table"):
                self.table = Table("none")
            return self.table(super().forward(x.mul_(2)))

    model = Inner(False).eval()
    imported = tvmhet.from_torch(model, (X.clone(),))
    assert not hasattr(model, "table")
    lib = tvmhet.build(imported, cluster=cpus(v2=1), makers=("tvm",), inline=True)
    torch.testing.assert_close(lib(X), Inner(False)(X.clone()))


def test_a_module_that_takes_no_other_values_is_tried_with_its_own():
    class Asserts(Counts):
        def forward(self, x):
            torch._assert(bool((x == X).all()), "other values") if not torch.compiler.is_compiling() else None
            return super().forward(x)

    with pytest.raises(BadModel, match="'calls'"):
        tvmhet.from_torch(Asserts(True).eval(), (X,))
    tvmhet.from_torch(Asserts(False).eval(), (X,))


def test_a_module_that_can_be_called_once_is_refused():
    class Once(nn.Module):
        def __init__(self):
            super().__init__()
            self.is_over = False

        def forward(self, x):
            if self.is_over:
                raise RuntimeError("over")
            self.is_over = True
            return x * 2

    with pytest.raises(BadModel, match="'is_over'"):
        tvmhet.from_torch(Once().eval(), (X,))


class Trained(nn.Module):
    """A product before one of the modules above."""

    def __init__(self, inside):
        super().__init__()
        torch.manual_seed(0)
        self.product, self.inside = nn.Linear(3, 3), inside

    def forward(self, x):
        return self.inside(self.product(x))


def square(y):
    return y.square().mean()


def test_training_refuses_what_the_first_step_decides():
    model = Trained(Scale())
    before = attributes(model)
    with pytest.raises(BadModel, match=r"a call of Trained returns depends on .*'inside\.scale'"):
        tvmhet.from_torch(model, (X,), mode="training", loss=square, example_targets=())
    assert attributes(model) == before


@pytest.mark.parametrize("how", ["none", "buffer"])
def test_training_with_a_table_that_the_first_call_makes(how):
    model = Trained(Table(how))
    step = tvmhet.from_torch(model, (X,), mode="training", loss=square, example_targets=(), lr=0.1)
    with tvmhet.build(step, cluster=cpus(v2=1), mode="training", global_batch=2, makers=("tvm",)) as trainer:
        losses = [trainer.train_step(X) for _ in range(3)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for got in losses:
        optimizer.zero_grad()
        loss = square(model(X))
        loss.backward()
        optimizer.step()
        assert got == pytest.approx(loss.item(), rel=1e-5)


class Grows(nn.Module):
    """Keeps all that it saw: a buffer that becomes longer with each call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1, 3))

    def forward(self, x):
        self.seen = torch.cat([self.seen, x.detach()])
        return x + self.seen.sum(0)


def test_training_refuses_a_buffer_that_grows():
    with pytest.raises(BadModel, match=r"depends on .*'inside\.seen'[\s\S]*a buffer"):
        tvmhet.from_torch(Trained(Grows()), (X,), mode="training", loss=square, example_targets=())
