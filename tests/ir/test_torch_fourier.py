"""Fourier transforms as products: each transform of torch.fft at several lengths, whole models, their gradients."""

import pytest
import torch
from torch import nn

import tvmhet
from tests.placed import assert_same, plain
from tvmhet.errors import UnsupportedOperator
from tvmhet.ir.prepare import prepare
from tvmhet.ir.rewrite import bindings_of, op_name, shape_of
from tvmhet.ir.torch_complex import with_real_pairs
from tvmhet.ir.training_trace import trace_joint


class Of(nn.Module):
    """A function as a module."""

    def __init__(self, f):
        super().__init__()
        self.f = f

    def forward(self, x):
        return self.f(x)


def pair(z):
    return torch.view_as_real(z.resolve_conj())


TRANSFORMS = {
    "rfft": lambda x: pair(torch.fft.rfft(x)),
    "rfft along the first axis": lambda x: pair(torch.fft.rfft(x, dim=0, norm="ortho")),
    "rfft2": lambda x: pair(torch.fft.rfft2(x)),
    "fft of real values": lambda x: pair(torch.fft.fft(x)),
    "ifft of real values": lambda x: pair(torch.fft.ifft(x)),
    "fftn of real values": lambda x: torch.fft.fftn(torch.complex(x, torch.zeros_like(x))).real,
    "real values made complex": lambda x: pair(torch.fft.fft2(x.to(torch.complex64))),
    "fft2": lambda x: pair(torch.fft.fft2(torch.complex(x, x * x), norm="forward")),
    "ifft2": lambda x: pair(torch.fft.ifft2(torch.complex(x, x * x))),
    "padded": lambda x: pair(torch.fft.fft(torch.complex(x, x * x), n=x.shape[-1] + 2)),
    "irfft": lambda x: torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(x)),
    "irfft of another length": lambda x: torch.fft.irfft(torch.fft.rfft(x) * 2, n=x.shape[-1] + 3),
    "irfft2": lambda x: torch.fft.irfft2(torch.fft.rfft2(x) + 1, s=x.shape[-2:], norm="ortho"),
    "hfft": lambda x: torch.fft.hfft(torch.complex(x, x * 2)),
    "shifted": lambda x: torch.fft.fftshift(torch.fft.fft2(x)).abs(),
    "double": lambda x: pair(torch.fft.fft(x.double())),
}


#: Even, odd, a prime, and lengths that take two steps, or are too long for one and prime.
LENGTHS = (2, 7, 12, 257, 300)


class OfEach(nn.Module):
    """A function of each input as a module."""

    def __init__(self, f):
        super().__init__()
        self.f = f

    def forward(self, *given):
        return [self.f(x) for x in given]


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_products_transform_as_torch_does(transform):
    given = tuple(torch.randn(5, n, generator=torch.Generator().manual_seed(n)) for n in LENGTHS)
    program = torch.export.export(OfEach(TRANSFORMS[transform]), given).run_decompositions()
    wanted = program.module()(*given)
    with_real_pairs(program)
    assert not any("fft" in str(node.target) for node in program.graph.nodes)
    for got, want in zip(program.module()(*given), wanted, strict=True):
        assert got.dtype == want.dtype
        near = (1e-12 if want.dtype == torch.float64 else 2e-6) * float(want.abs().max())
        assert float((got - want).abs().max()) <= near


def test_a_long_transform_takes_two_small_matrices():
    program = torch.export.export(Of(lambda x: torch.fft.rfft(x).abs()), (torch.randn(2, 4096),)).run_decompositions()
    with_real_pairs(program)
    products = [n for n in program.graph.nodes if n.target is torch.ops.aten.matmul.default]
    assert [tuple(n.args[1].meta["val"].shape) for n in products] == [(64, 128), (128, 128)]


@pytest.mark.parametrize("length", [256, 250, 4096])
def test_matrices_are_made_once_and_not_at_every_call(length):
    model = tvmhet.from_torch(
        Of(lambda x: torch.fft.fft(torch.fft.rfft(x)[..., : x.shape[-1] // 2]).abs()), (torch.randn(2, length),)
    )
    families = {o.family for o in prepare(model).operator_graph.operators}
    assert "matmul" in families and not families & {"cos", "sin", "arange"}


def test_layers_share_a_matrix():
    def twice(x):
        return torch.fft.rfft(torch.fft.rfft(x).abs(), n=16).abs()

    program = torch.export.export(Of(twice), (torch.randn(2, 16),)).run_decompositions()
    with_real_pairs(program)
    products = [n for n in program.graph.nodes if n.target is torch.ops.aten.matmul.default]
    assert len(products) == 2 and products[0].args[1] is products[1].args[1]


class Spectral(nn.Module):
    """A layer of a Fourier neural operator (Li et al. 2021): low modes are mixed by complex weights."""

    def __init__(self, width=4, modes=3):
        super().__init__()
        self.modes = modes
        self.low, self.high = (
            nn.Parameter(torch.randn(width, width, modes, modes, dtype=torch.cfloat) / width) for _ in range(2)
        )
        self.beside = nn.Conv2d(width, width, 1)

    def forward(self, x):
        m, (batch, width, rows, columns) = self.modes, x.shape
        waves = torch.fft.rfft2(x)
        out = torch.zeros(batch, width, rows, columns // 2 + 1, dtype=torch.cfloat)
        out[:, :, :m, :m] = torch.einsum("bixy,ioxy->boxy", waves[:, :, :m, :m], self.low)
        out[:, :, -m:, :m] = torch.einsum("bixy,ioxy->boxy", waves[:, :, -m:, :m], self.high)
        return nn.functional.gelu(torch.fft.irfft2(out, s=(rows, columns)) + self.beside(x))


class Filtered(nn.Module):
    """A global filter (Rao et al. 2021): waves of tokens times learned pairs."""

    def __init__(self, width=8, side=6):
        super().__init__()
        self.side, self.norm = side, nn.LayerNorm(width)
        self.weight = nn.Parameter(torch.randn(side, side // 2 + 1, width, 2) * 0.1)

    def forward(self, x):
        waves = torch.fft.rfft2(self.norm(x), dim=(1, 2), norm="ortho") * torch.view_as_complex(self.weight)
        return x + torch.fft.irfft2(waves, s=(self.side, self.side), dim=(1, 2), norm="ortho")


class Spectrogram(nn.Module):
    """Logarithms of a short-time Fourier transform, and the sound made of it again."""

    def __init__(self):
        super().__init__()
        self.register_buffer("window", torch.hann_window(32))

    def forward(self, sound):
        waves = torch.stft(sound, 32, 8, window=self.window, return_complex=True)
        return waves.abs().clamp(min=1e-3).log(), torch.istft(waves * 0.5, 32, 8, window=self.window)


class Mixed(nn.Module):
    """Tokens mixed by the real part of a transform along both axes (FNet, Lee-Thorp et al. 2021)."""

    def forward(self, x):
        return torch.fft.fftn(x, dim=(1, 2)).real


MODELS = {
    "Fourier neural operator": (lambda: nn.Sequential(Spectral(), Spectral()), (2, 4, 8, 12)),
    "global filter": (Filtered, (2, 6, 6, 8)),
    "spectrogram and back": (Spectrogram, (2, 128)),
    "FNet": (Mixed, (2, 6, 8)),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_with_transforms_are_imported(name):
    torch.manual_seed(0)
    make, shape = MODELS[name]
    module, given = make().eval(), torch.randn(*shape)
    want = module(given)
    want = want if isinstance(want, tuple) else (want,)
    assert_same(plain(tvmhet.from_torch(module, (given,)), given), [w.detach() for w in want])


def test_a_neural_operator_computes_the_waves_it_keeps_and_stores_its_weights_once():
    """Of 33 waves of a row 12, which saves a third of all products; the complex weights are turned when imported."""
    torch.manual_seed(0)
    module = nn.Sequential(Spectral(16, 12)).eval()
    model = tvmhet.from_torch(module, (torch.randn(1, 16, 64, 64),))
    products = [b.value for b in bindings_of(model.main) if op_name(b.value) == "matmul"]
    assert [shape_of(p)[1:] for p in products[:2]] == [(16, 64, 24), (16, 12, 128)]
    mixed = [str(p.args[1].name) for p in products if shape_of(p.args[1]) == (144, 16, 32)]
    assert sorted(mixed) == ["p_0_high", "p_0_low"]
    stored = sum(v.numpy().nbytes for n, v in model.params.items() if n in mixed)
    assert stored == module[0].low.nbytes + module[0].high.nbytes


def test_what_mixes_tokens_is_trained():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), Mixed(), nn.Linear(8, 8))
    given, target = torch.randn(2, 6, 8), torch.randn(2, 6, 8)
    joint = trace_joint(module, (given,), (target,), nn.functional.mse_loss)
    assert not any("fft" in str(node.target) for node in joint.graph.graph.nodes)
    for node in joint.graph.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default  # what is imported has no strides
    joint.graph.recompile()
    held = dict(module.named_parameters())
    loss, *gradients = joint.graph(given, target, *(held[n].detach() for n in joint.parameters), *joint.constants)
    want = nn.functional.mse_loss(module(given), target)
    want.backward()
    torch.testing.assert_close(loss, want.detach())
    for name, gradient in zip(joint.trained, gradients, strict=True):
        torch.testing.assert_close(gradient, held[name].grad, rtol=1e-4, atol=1e-5)


class Batched(nn.Module):
    """A transform, a product of matrices and a tensor that is written into, whatever the size of the batch."""

    def forward(self, x):
        waves = torch.fft.rfft(x)
        out = torch.zeros_like(waves)
        out[..., :3] = waves[..., 1:4]
        return (waves @ out.transpose(-1, -2)).abs()


def test_a_batch_may_be_of_any_size():
    dim = torch.export.Dim("batch", min=2, max=8)
    model = tvmhet.from_torch(Batched(), (torch.randn(4, 6, 8),), dynamic_shapes=({0: dim},), bind_shapes={"batch": 3})
    x = torch.randn(3, 6, 8)
    assert_same(plain(model, x), [Batched()(x)])


def test_an_axis_of_any_length_is_named():
    dim = torch.export.Dim("length", min=4, max=64)
    with pytest.raises(UnsupportedOperator, match=r"aten._fft_r2c.* whose length is not fixed"):
        tvmhet.from_torch(Of(lambda x: torch.fft.rfft(x).abs()), (torch.randn(2, 16),), dynamic_shapes=({1: dim},))


def test_a_long_prime_is_named():
    with pytest.raises(UnsupportedOperator, match=r"aten._fft_r2c.* 4099 values, a prime above 4096"):
        tvmhet.from_torch(Of(lambda x: torch.fft.rfft(x).abs()), (torch.randn(1, 4099),))
