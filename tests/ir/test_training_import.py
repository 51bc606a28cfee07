"""Training steps from torch: every gradient, not the loss alone, against torch's own in double precision."""

import copy

import numpy as np
import pytest
import torch
import tvm
from torch import nn
from tvm import relax

import tvmhet
from tvmhet import zoo
from tvmhet.errors import BadInput, BadLoss, NoGradient, UnsupportedOperator
from tvmhet.ir import training_import
from tvmhet.ir.training_trace import trace_joint

TARGET = {"kind": "llvm", "mcpu": "x86-64-v3"}


def random_batch(step, inputs):
    """The example inputs, then targets and noise that `step` takes, from a fixed seed."""
    generator = torch.Generator().manual_seed(1)
    out = [x.clone() for x in inputs]
    for var in step.inputs[len(inputs) :]:
        shape = [int(d) for d in var.ty.shape.values]
        whole = str(var.ty.dtype).startswith("int")
        out.append(torch.randint(0, 2, shape, generator=generator) if whole else torch.rand(shape, generator=generator))
    return out


def relax_results(trained, batch):
    """Loss, gradients and new buffers by torch's names, as plain TVM computes them."""
    target = tvm.target.Target(TARGET)
    compiled = tvm.compile(trained.mod, target=target, relax_pipeline=relax.get_default_pipeline(target))
    main = relax.VirtualMachine(compiled, tvm.cpu())["main"]
    results = main(*[tvm.runtime.tensor(x.numpy()) for x in batch], *trained.params.values())
    names = ["loss", *(trained.torch_names[n] for n in (*trained.trained, *trained.updated))]
    return {n: torch.from_numpy(r.numpy()) for n, r in zip(names, results, strict=True)}


def torch_results(model, loss, inputs, batch):
    """The same from torch's autograd in float64; noise is taken as the traced graph takes it."""
    double = copy.deepcopy(model).double().train()
    as_double = [x.double() if x.is_floating_point() else x for x in batch]
    function, targets = training_import.resolve_loss(loss, double, as_double[: len(inputs)], None)
    joint = trace_joint(double, as_double[: len(inputs)], targets, function)
    state = {k: v.detach().clone() for k, v in double.state_dict(keep_vars=True).items()}
    results = joint.graph(*as_double, *(state[n] for n in (*joint.parameters, *joint.buffers)))
    names = ["loss", *joint.trained, *joint.updated]
    out = dict(zip(names, (r.detach() for r in results), strict=True))
    if not joint.noise:  # then torch's own backward must say the same
        value = function(double(*as_double[: len(inputs)]), *as_double[len(inputs) :])
        value.backward()
        own = {n: p.grad for n, p in double.named_parameters() if p.grad is not None}
        assert own.keys() == set(joint.trained)
        scale = max(float(g.abs().max()) for g in own.values())
        for name, gradient in own.items():
            torch.testing.assert_close(out[name], gradient, rtol=1e-9, atol=1e-11 * scale)
    return out


def check(model, inputs, loss, tolerance=1e-4):
    trained = tvmhet.from_torch(model, inputs, loss=loss, mode="training")
    batch = random_batch(trained.step, inputs)
    ours, theirs = relax_results(trained, batch), torch_results(model, loss, inputs, batch)
    assert ours.keys() == theirs.keys()
    largest = max(float(t.norm()) for n, t in theirs.items() if n in dict(model.named_parameters()))
    for name, want in theirs.items():
        if not want.is_floating_point():
            assert torch.equal(ours[name], want), name
            continue
        error, scale = float((ours[name].double() - want).norm()), float(want.norm())
        assert error <= tolerance * max(scale, 1e-3 * largest), f"{name}: error {error:.2e} of {scale:.2e}"
    return trained


class Conv(nn.Module):
    """A strided, a grouped and a dilated convolution, batch norm, both pools, dropout, a residual."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.c1, self.bn = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8)
        self.c2, self.c3 = nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.Conv2d(8, 8, 3, padding=2, dilation=2)
        self.pool, self.average = nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(3, 2, 1, count_include_pad=False)
        self.drop, self.fc = nn.Dropout(0.3), nn.Linear(16 * 4, 5)

    def forward(self, x):
        x = torch.relu(self.bn(self.c1(x)))
        x = self.c2(x) + self.c3(x)
        return self.fc(self.drop(torch.cat([self.pool(x), self.average(x)], 1).flatten(1)))


class Tokens(nn.Module):
    """Embedding tied to the classifier, attention, layer norm, gelu."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.attention, self.mlp = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 8)

    def forward(self, tokens):
        x = self.norm(self.embed(tokens))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return nn.functional.gelu(self.mlp(x)) @ self.embed.weight.T


def test_convolutions_pools_and_batch_norm_have_torchs_gradients():
    trained = check(Conv(), (torch.randn(2, 3, 7, 7),), "cross_entropy")
    assert trained.noise == ("uniform",)
    assert [trained.torch_names[n] for n in trained.updated] == [
        "bn.running_mean",
        "bn.running_var",
        "bn.num_batches_tracked",
    ]
    assert trained.batch_size == 2


def small(*layers):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 1), *layers)


@pytest.mark.parametrize(
    "layer",
    [
        nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1),
        nn.ConvTranspose2d(4, 6, (2, 3), groups=2, bias=False),
        nn.ConvTranspose2d(4, 2, 3, stride=(1, 2), padding=(0, 2), dilation=2),
        nn.AvgPool2d(3, 2, 1, ceil_mode=True),
        nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False),
        nn.AvgPool2d((2, 3), (2, 4), divisor_override=5),
    ],
    ids=repr,
)
def test_transposed_convolutions_and_uneven_pools_have_torchs_gradients(layer):
    check(small(layer), (torch.randn(2, 3, 6, 8),), lambda y: (y * y).mean())


@pytest.mark.slow
def test_tied_embedding_and_attention_have_torchs_gradients():
    trained = check(Tokens(), (torch.randint(0, 11, (2, 5)),), "cross_entropy")
    assert len(trained.trained) == len(dict(Tokens().named_parameters()))


def test_the_module_keeps_its_values_mode_and_gradients():
    model = Conv().eval()
    before = copy.deepcopy(model.state_dict())
    tvmhet.from_torch(model, (torch.randn(2, 3, 7, 7),), loss="cross_entropy", mode="training")
    assert not model.training and not model.bn.training
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_frozen_parameters_have_no_gradient():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].weight.requires_grad_(False)
    trained = tvmhet.from_torch(model, (torch.randn(3, 4),), loss="mse", mode="training")
    assert [trained.torch_names[n] for n in trained.trained] == ["0.bias", "1.weight", "1.bias"]


def test_two_traces_are_the_same_module():
    made = [
        tvmhet.from_torch(Tokens(), (torch.zeros(2, 5, dtype=torch.int64),), loss="cross_entropy", mode="training")
        for _ in range(2)
    ]
    tvm.ir.assert_structural_equal(made[0].mod, made[1].mod)


class Rounded(nn.Module):
    """An operator without a gradient between the parameters and the loss."""

    def __init__(self):
        super().__init__()
        self.first, self.pick = nn.Linear(4, 4), Pick()

    def forward(self, x):
        return self.pick(self.first(x))


class Pick(nn.Module):
    def forward(self, x):
        return x.argmax(-1).float()


@pytest.mark.parametrize(
    ("make", "loss", "error", "text"),
    [
        (lambda: nn.Linear(4, 4), "output", BadLoss, r"shape \(3, 4\)"),
        (lambda: nn.Linear(4, 4), lambda y: float("nan"), BadLoss, "is a float"),
        (Rounded, lambda y: y.sum(), NoGradient, "'argmax' in module 'pick'"),
        (lambda: nn.Linear(4, 4), "hinge", BadInput, "'hinge' is unknown"),
    ],
)
def test_bad_losses_and_missing_gradients_are_named(make, loss, error, text):
    with pytest.raises(error, match=text):
        tvmhet.from_torch(make(), (torch.randn(3, 4),), loss=loss, mode="training")


def test_random_operators_without_an_input_form_are_refused():
    class Sampled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * torch.randperm(4)

    with pytest.raises(UnsupportedOperator, match="randperm"):
        tvmhet.from_torch(Sampled(4, 4), (torch.randn(3, 4),), loss="mse", mode="training")


def test_a_loss_needs_training_mode():
    with pytest.raises(BadInput, match="mode is 'inference' and loss"):
        tvmhet.from_torch(nn.Linear(4, 4), (torch.randn(3, 4),), loss="mse")


SMALL = {
    "resnet50": {"batch": 2, "image": 64, "blocks": (1, 1, 1, 1), "base_width": 8, "num_classes": 10},
    "bert_base": {"batch": 2, "length": 16, "layers": 2, "dim": 32, "heads": 2, "vocab": 50},
    "gpt2_small": {"batch": 2, "length": 16, "layers": 2, "dim": 32, "heads": 2, "vocab": 50},
    "moe": {"batch": 2, "length": 8, "layers": 1, "dim": 16, "heads": 2, "hidden": 32, "experts": 4},
    "vit_b16": {"batch": 2, "image": 32, "layers": 1, "dim": 32, "heads": 2, "num_classes": 10},
    "lstm": {"batch": 2, "source_length": 4, "target_length": 4, "vocab": 50, "dim": 16, "layers": 2},
    "t5_small": {"batch": 2, "source_length": 8, "target_length": 6, "layers": 1, "dim": 16, "heads": 2, "head_dim": 8,
                 "hidden": 32, "vocab": 40},
    "dlrm": {"batch": 4, "tables": 3, "rows": 50, "hot": 3, "dim": 8, "bottom": (16,), "top": (16,)},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SMALL))
def test_small_zoo_models_have_torchs_gradients(name):
    model, inputs = zoo.get(name, **SMALL[name])
    check(model, inputs, "mse" if name == "dlrm" else "cross_entropy")


def test_noise_decides_what_dropout_drops():
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 1, bias=False))
    trained = tvmhet.from_torch(model, (torch.ones(2, 6),), loss="mse", mode="training")
    kept = np.array([[1, 1, 0, 0, 1, 0], [0, 0, 0, 1, 1, 1]], np.float32)
    batch = [torch.ones(2, 6), torch.zeros(2, 1), torch.from_numpy(np.where(kept, 0.9, 0.1).astype(np.float32))]
    gradient = relax_results(trained, batch)["1.weight"]
    y = (torch.from_numpy(kept) * 2) @ model[1].weight.detach().T
    torch.testing.assert_close(gradient, (y * torch.from_numpy(kept) * 2).sum(0, keepdim=True))
