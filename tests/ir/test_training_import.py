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
from tvmhet.emit.lower import lower_stage
from tvmhet.errors import BadInput
from tvmhet.ir import training_import
from tvmhet.ir.rewrite import bindings_of, op_name, shape_of
from tvmhet.ir.training_functions import StageFunction
from tvmhet.ir.training_loss import run_in
from tvmhet.ir.training_step import read_step
from tvmhet.ir.training_trace import trace_joint
from tvmhet.training_deploy import plan_kernels

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


def relax_results(trained, batch, scheduled=False):
    """Loss, gradients and new buffers by torch's names, as plain TVM or as our own CPU kernels compute them."""
    target = tvm.target.Target(TARGET)
    if scheduled:
        kernels, _ = plan_kernels(StageFunction(read_step(trained).prepared.mod, (), ()), ("tvm",))
        compiled, _ = lower_stage(kernels, TARGET)
    else:
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
    state = dict(double.named_parameters(remove_duplicate=False)) | dict(double.named_buffers(remove_duplicate=False))
    state = {k: v.detach().clone() for k, v in state.items()}
    results = joint.graph(*as_double, *(state[n] for n in (*joint.parameters, *joint.buffers)), *joint.constants)
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


def check(model, inputs, loss, tolerance=1e-4, scheduled=False):
    trained = tvmhet.from_torch(model, inputs, loss=loss, mode="training")
    batch = random_batch(trained.step, inputs)
    ours, theirs = relax_results(trained, batch, scheduled), torch_results(model, loss, inputs, batch)
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
        nn.Sequential(nn.AdaptiveAvgPool2d((4, 5)), nn.AdaptiveMaxPool2d((2, 5)), nn.AdaptiveAvgPool2d((1, 2))),
    ],
    ids=repr,
)
def test_transposed_convolutions_and_uneven_pools_have_torchs_gradients(layer):
    check(small(layer), (torch.randn(2, 3, 6, 8),), lambda y: (y * y).mean())


@pytest.mark.parametrize(
    ("layer", "image"),
    [
        (nn.MaxPool2d(3, 2, 1), (9, 8)),
        (nn.MaxPool2d((1, 3), (1, 2), (0, 1), dilation=(1, 2)), (2, 16)),
        (nn.MaxPool2d(2, 3, ceil_mode=True), (8, 9)),
        (nn.Sequential(nn.ReLU(), nn.MaxPool2d(3, 2, 1)), (9, 8)),  # windows of zeros: the first place takes it all
    ],
    ids=repr,
)
def test_our_kernels_scatter_the_gradients_of_maxima(layer, image):
    check(small(layer), (torch.randn(2, 3, *image),), lambda y: (y * y).mean(), scheduled=True)


def test_volumes_have_torchs_gradients():
    torch.manual_seed(0)
    pools = nn.MaxPool3d(2), nn.AvgPool3d((1, 2, 2), stride=1)
    model = nn.Sequential(nn.Conv3d(2, 3, 1), pools[0], nn.ConvTranspose3d(3, 2, 2, stride=2, bias=False), pools[1])
    check(model, (torch.randn(2, 2, 4, 4, 4),), lambda y: (y * y).mean())


class ChannelsLast(nn.Module):
    """A norm over channels leaves a memory order that autograd restores; a table is no part of the state."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.table = nn.Conv2d(3, 4, 1), nn.LayerNorm(4), torch.arange(4.0)

    def forward(self, x):
        y = self.norm(self.conv(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return nn.functional.adaptive_avg_pool2d(y, 1).flatten(1) * self.table


def test_memory_orders_and_tensors_outside_the_state_are_followed():
    trained = check(ChannelsLast(), (torch.randn(2, 3, 4, 5),), lambda y: (y * y).mean())
    (held,) = [n for n in trained.params if n not in trained.torch_names and n.startswith("fixed")]
    np.testing.assert_array_equal(np.asarray(trained.params[held].numpy()), np.arange(4.0, dtype=np.float32))


@pytest.mark.slow
def test_tied_embedding_and_attention_have_torchs_gradients():
    trained = check(Tokens(), (torch.randint(0, 11, (2, 5)),), "cross_entropy")
    assert len(trained.trained) == len(dict(Tokens().named_parameters()))


class Counted(nn.Linear):
    """Outputs weighed by how many rows choose each, with an operator that has no conversion of its own."""

    def forward(self, x):
        y = super().forward(x)
        return y * torch.histc(y.detach().argmax(1).to(y.dtype), bins=5, min=0, max=4)


def test_operators_without_a_conversion_are_written_out():
    torch.manual_seed(0)
    check(Counted(4, 5), (torch.randn(8, 4),), "cross_entropy")


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


class Probe(nn.Module):
    """A head that is trained on one token of a body that is not."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)), nn.Linear(8, 3)
        self.body.requires_grad_(False)

    def forward(self, x):
        return self.head((x + self.body(x))[:, 0])


def test_of_what_is_frozen_a_step_computes_what_is_read():
    torch.manual_seed(0)
    trained = check(Probe(), (torch.randn(1, 6, 8),), "cross_entropy", scheduled=True)
    rows = [shape_of(b.var)[0] for b in bindings_of(trained.mod["main"]) if op_name(b.value) == "matmul"]
    assert rows[:2] == [1, 1]  # of six tokens


def test_two_traces_are_the_same_module():
    made = [
        tvmhet.from_torch(Tokens(), (torch.zeros(2, 5, dtype=torch.int64),), loss="cross_entropy", mode="training")
        for _ in range(2)
    ]
    tvm.ir.assert_structural_equal(made[0].mod, made[1].mod)


class Pairs(nn.Module):
    """Products of pairs of features, chosen by a mask: a buffer's, and one made on the way."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(12, 1)
        self.register_buffer("mask", torch.ones(4, 4).triu(1).bool())

    def forward(self, x):
        y = self.first(x)
        products = y[:, :, None] * y[:, None, :]
        below = products.masked_select(torch.ones(4, 4).tril(-1) > 0).reshape(len(x), 6)
        return self.last(torch.cat([products[:, self.mask], below.tanh()], 1)).square().mean()


def test_what_constants_choose_has_torchs_gradients():
    check(Pairs(), (torch.randn(3, 4),), "output")


class Noisy(nn.Linear):
    """Random operators that are arithmetic on uniform and normal noise."""

    def forward(self, x):
        y = super().forward(x)
        kept = y * torch.empty_like(y).bernoulli_(0.7) * torch.empty_like(y).uniform_(0.5, 2.0)
        return nn.functional.gumbel_softmax(kept + torch.empty_like(y).normal_(0.0, 0.1))


def test_random_arithmetic_has_torchs_gradients():
    trained = check(Noisy(4, 4), (torch.randn(3, 4),), "mse")
    assert sorted(trained.noise) == ["normal", "uniform", "uniform", "uniform"]


class Spread(nn.Module):
    """Variances and deviations over one dim, several and all, of the sample and of the population."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        y = self.linear(x)
        variance, mean = torch.var_mean(y, (0, 2), keepdim=True, correction=0)
        deviation, middle = torch.std_mean(y, 1)
        z = (y - mean) / torch.sqrt(variance + 0.1) * y.std((1, 2), keepdim=True) + y.var(
            -1, unbiased=False, keepdim=True
        )
        return z + y.var() + y.std() + (deviation * middle).unsqueeze(1)


def test_variances_have_torchs_gradients():
    check(Spread(), (torch.randn(3, 4, 6),), "mse")


class Looks(nn.Module):
    """Looks at values unless it is being exported, as published language models do with their masks."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        if not torch.compiler.is_exporting() and not (x == x).all():
            return x
        return self.linear(x)


def test_models_know_that_they_are_being_exported():
    assert len(tvmhet.from_torch(Looks(), (torch.randn(3, 4),), loss="mse", mode="training").trained) == 2


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


class Unused(nn.Module):
    """A branch whose result the loss does not take, and a parameter that nothing reads."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.idle = nn.Linear(4, 4), nn.Linear(4, 4), nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.first(x), self.second(x)


def test_parameters_that_the_loss_does_not_read_have_no_gradient():
    model = Unused()
    trained = tvmhet.from_torch(model, (torch.randn(3, 4),), loss=lambda y: y[0].mean(), mode="training")
    assert [trained.torch_names[n] for n in trained.trained] == ["first.weight", "first.bias"]
    assert {"idle", "second.weight"} <= set(trained.torch_names.values())
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("scheduled", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    ("make", "inputs"),
    [(Tokens, lambda: (torch.randint(0, 11, (2, 5)),)), (Conv, lambda: (torch.randn(2, 3, 7, 7),))],
    ids=["tokens", "conv"],
)
def test_steps_in_bfloat16_keep_float32_parameters_and_gradients(make, inputs, scheduled):
    """As far from the gradients in float64 as torch's own in bfloat16 are, within a factor of two.

    Of one draw: where a rounding changes which element a max-pool takes, either may be off by more.
    """
    torch.manual_seed(0)
    model, inputs = make(), inputs()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    trained = tvmhet.from_torch(model, inputs, loss="cross_entropy", mode="training", dtype="bfloat16")
    batch = random_batch(trained.step, inputs)
    ours = relax_results(trained, batch, scheduled)
    inputs, targets = batch[: len(inputs)], batch[len(inputs) : trained.num_batch]
    function, _ = training_import.resolve_loss("cross_entropy", model, inputs, targets)

    def gradients(module, given, dtype):
        module = copy.deepcopy(module).train()
        result = module(*given) if dtype is None else run_in(dtype, module, given, {})
        loss = function(result, *targets)
        loss.backward()
        return float(loss.detach()), {n: p.grad.double() for n, p in module.named_parameters()}

    loss, theirs = gradients(model, inputs, torch.bfloat16)
    double = [x.double() if x.is_floating_point() else x for x in inputs]
    exact_loss, exact = gradients(model.double(), double, None)
    largest = max(float(g.norm()) for g in exact.values())
    assert abs(float(ours["loss"]) - exact_loss) <= 2 * abs(loss - exact_loss) + 1e-2
    for name, want in exact.items():
        assert ours[name].dtype == torch.float32, name
        error, allowed = (float((g - want).norm()) for g in (ours[name].double(), theirs[name]))
        assert error <= 2 * allowed + 1e-2 * float(want.norm()) + 2e-3 * largest, name


def test_a_step_computes_in_float32_or_bfloat16():
    with pytest.raises(BadInput, match="float16"):
        tvmhet.from_torch(nn.Linear(2, 2), (torch.randn(1, 2),), loss="mse", mode="training", dtype="float16")
    with pytest.raises(BadInput, match="dtype was given"):
        tvmhet.from_torch(nn.Linear(2, 2), (torch.randn(1, 2),), dtype="bfloat16")
