"""Backward operators written out equal torch's, and steps through them are torch's."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tvmhet
from tests.placed import cpus
from tvmhet.ir.torch_definitions import definition_of

aten = torch.ops.aten


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


X = drawn(2, 3, 6, 5)
A, B = drawn(2, 4, 5), torch.cat([drawn(2, 4, 5)[:, :1], drawn(2, 2, 5)], 1)  # one row of each is the same
PADS = {1: (2, 3), 2: (2, 0, -1, 3), 3: (1, 2, 0, -3, 2, 1)}


def of_pad(rank):
    x = drawn(*(2, 3, 6, 5, 7)[: 2 + rank])
    made = getattr(aten, f"replication_pad{rank}d")(x, list(PADS[rank]))
    operator = getattr(aten, f"replication_pad{rank}d_backward").default
    return operator, (drawn(*made.shape), x, list(PADS[rank]))


def of_cdist(p):
    distance = torch.cdist(A, B, p, "donot_use_mm_for_euclid_dist")
    return aten._cdist_backward.default, (drawn(*distance.shape), A, B, p, distance)


def of_pdist(p):
    x = drawn(6, 5)
    x[3] = x[1]
    distance = F.pdist(x, p)
    return aten._pdist_backward.default, (drawn(*distance.shape), x, p, distance)


def of_weight_norm(shape, dim):
    v, g = drawn(*shape), drawn(*[n if d == dim else 1 for d, n in enumerate(shape)])
    w, norms = aten._weight_norm_interface(v, g, dim)
    return aten._weight_norm_interface_backward.default, (drawn(*w.shape), v, g, norms, dim)


def of_adaptive_pool(rank, made):
    x = drawn(*(2, 3, 7, 9, 5)[: 2 + rank])
    y, at = getattr(aten, f"adaptive_max_pool{rank}d")(x, made)
    return getattr(aten, f"adaptive_max_pool{rank}d_backward").default, (drawn(*y.shape), x, at)


def of_resize(mode, align, scales):
    made = [4, 7]
    operator = getattr(aten, f"_upsample_{mode}2d_aa_backward").default
    return operator, (drawn(2, 3, *made), made, list(X.shape), align, *scales)


def of_sampler(rank, mode, padding, align, size=None):
    x = drawn(2, 3, *(6, 5, 4)[:rank]) if size is None else drawn(2, 3, *size)
    grid = drawn(2, *(3, 4, 2)[:rank], rank) * 1.5
    mask = [True, True]
    return getattr(aten, f"grid_sampler_{rank}d_backward").default, (
        drawn(2, 3, *grid.shape[1:-1]), x, grid, mode, padding, align, mask,
    )  # fmt: skip


SAMPLES = list(itertools.product((2, 3), (0, 1), (0, 1, 2), (False, True)))
CASES = {
    **{f"replication_pad{rank}d": of_pad(rank) for rank in (1, 2, 3)},
    **{f"cdist of p {p}": of_cdist(p) for p in (0.0, 0.5, 1.0, 2.0, 3.0, math.inf)},
    **{f"pdist of p {p}": of_pdist(p) for p in (1.0, 2.0, 3.0)},
    "weight norm of rows": of_weight_norm((4, 3, 2), 0),
    "weight norm of columns": of_weight_norm((4, 3, 2), 2),
    "masked_scatter": (aten.masked_scatter_backward.default, (X, X > 0, [X.numel()])),
    "adaptive_max_pool2d": of_adaptive_pool(2, [3, 4]),
    "adaptive_max_pool3d": of_adaptive_pool(3, [2, 3, 2]),
    "bilinear, antialiased": of_resize("bilinear", False, (None, None)),
    "bilinear, antialiased, scaled": of_resize("bilinear", False, (0.7, 1.4)),
    "bicubic, antialiased": of_resize("bicubic", True, (None, None)),
    **{f"grid_sampler {case}": of_sampler(*case) for case in SAMPLES},
    "grid_sampler of one row": of_sampler(2, 0, 2, True, (1, 5)),
}
FORWARD = {
    **{
        f"grid_sampler_{rank}d {mode} {padding} {align}": (
            getattr(aten, f"grid_sampler_{rank}d").default,
            (drawn(2, 3, *(6, 5, 4)[:rank]), drawn(2, *(3, 4, 2)[:rank], rank) * 1.5, mode, padding, align),
        )
        for rank, mode, padding, align in SAMPLES
    },
    "grid_sampler_2d, cubic": (aten.grid_sampler_2d.default, (X, drawn(2, 3, 4, 2) * 1.5, 2, 0, False)),
    "diagonal_scatter": (aten.diagonal_scatter.default, (X, drawn(2, 3, 4), 1, 2, 3)),
    "diagonal_scatter below": (aten.diagonal_scatter.default, (X, drawn(6, 5, 1), -1, 0, 1)),
    "put": (aten.put.default, (X, torch.tensor([0, -1, 7]), drawn(3))),
    "put adds": (aten.put.default, (X, torch.tensor([[0, 0], [7, 7]]), drawn(2, 2), True)),
    "index_reduce": (aten.index_reduce.default, (X, 2, torch.tensor([0, 0, 3]), drawn(2, 3, 3, 5), "amax")),
    "index_reduce alone": (
        aten.index_reduce.default,
        (X, -1, torch.tensor([1, 1]), drawn(2, 3, 6, 2), "prod"),
        {"include_self": False},
    ),
}


@pytest.mark.parametrize("name", CASES | FORWARD)
def test_equals_the_operator(name):
    operator, args, *rest = (CASES | FORWARD)[name]
    options = rest[0] if rest else {}
    torch.testing.assert_close(definition_of(operator)(*args, **options), operator(*args, **options))


def test_places_that_are_infinite_or_no_numbers_read_no_memory_outside():
    x, grid = drawn(1, 2, 4, 5), drawn(1, 3, 2, 2)
    grid[0, 0, 0, 0], grid[0, 1, 0, 1], grid[0, 2, 1, 0] = math.inf, -math.inf, math.nan
    args = (x, grid, 0, 0, False)
    got, want = definition_of(aten.grid_sampler_2d.default)(*args), aten.grid_sampler_2d(*args)
    torch.testing.assert_close(got, want, equal_nan=True)


def test_cubic_samples_are_refused():
    operator, args = of_sampler(2, 2, 0, False)
    with pytest.raises(NotImplementedError, match="cubic"):
        definition_of(operator)(*args)


def test_a_gradient_that_nobody_asks_for_is_not_made():
    operator, args = of_sampler(2, 0, 0, False)
    only_grid = definition_of(operator)(*args[:-1], [False, True])
    assert only_grid[0] is None
    torch.testing.assert_close(only_grid[1], operator(*args)[1])


class Scaled(nn.Module):
    """A function of the input times a parameter, and what a loss makes of it."""

    def __init__(self, function, shape):
        super().__init__()
        self.scale, self.function = nn.Parameter(drawn(*shape).float()), function

    def forward(self, x):
        y = self.function(x * self.scale)
        return (y * y * torch.linspace(0.5, 1, y.shape[-1])).mean()


def sampled(x):
    return F.grid_sample(x, x[:, :2, :3, :4].permute(0, 2, 3, 1).tanh(), align_corners=False)


def unpooled(x):
    return F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2, output_size=x.shape[-2:])


STEPS = {
    "replicated": lambda x: F.pad(x, (2, 1, 0, 3), mode="replicate"),
    "sampled": sampled,
    "sampled 3d": lambda x: F.grid_sample(x[:, None], x[:, None, :, :3].permute(0, 3, 2, 1, 4)[..., :3].tanh(),
                                          align_corners=True),
    "distances": lambda x: torch.cdist(x[:, 0], x[:, 1] + 1),
    "unpooled": unpooled,
    "adaptive maxima": lambda x: F.adaptive_max_pool2d(x, (4, 3)),
    "antialiased": lambda x: F.interpolate(x, size=(3, 4), mode="bilinear", antialias=True),
    "taken": lambda x: x.take(torch.tensor([[0, 3], [3, 7]])),
    "masked": lambda x: x.masked_scatter(x > 0, x.flip(0)),
    "cumprod": lambda x: x.cumprod(1),
    "Student's t": lambda x: torch.lgamma(x.abs() + 0.5) - torch.lgamma(x.abs() + 1) - x.square().log1p(),
    "signs copied": lambda x: torch.copysign(x, x.flip(0)),
    "normed weights": lambda x: F.linear(x, torch._weight_norm(x[0, 0], x[0, 0, :, :1], 0)),
}  # fmt: skip


def waves_mixed(x):
    """As global filters (GFNet) and Fourier operators (FNO) do: some waves are multiplied, others are left out."""
    waves = torch.fft.rfft2(x)
    kept = torch.zeros_like(waves)
    kept[..., :3, :2] = waves[..., :3, :2] * torch.complex(waves[..., :3, :2].real, waves[..., 3:, :2].imag)
    return torch.fft.irfft2(kept, s=x.shape[-2:])


FOURIER = {
    "sizes of waves": lambda x: torch.fft.rfft(x).abs(),
    "logarithms of a spectrum": lambda x: torch.stft(
        x.flatten(1), 8, 4, window=torch.hann_window(8, dtype=x.dtype), return_complex=True
    ).abs().add(0.1).log(),
    "waves mixed": waves_mixed,
    "angles": lambda x: torch.fft.rfft(x)[..., 1:3].angle(),
    "there and back": lambda x: torch.fft.ifftn(torch.fft.fftn(x) * 2).real,
    "of conjugates": lambda x: torch.fft.hfft(torch.complex(x, x * 2), n=8),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS | FOURIER)
def test_a_step_is_torchs(name, tmp_path, monkeypatch):
    monkeypatch.setenv("TVMHET_CACHE_DIR", str(tmp_path))
    function = (STEPS | FOURIER)[name]
    model, x = Scaled(function, X.shape[1:]), X.float()
    want = Scaled(function, X.shape[1:]).double()
    step = tvmhet.from_torch(model, (x,), mode="training", loss="output", optimizer="sgd", lr=0.5)
    with tvmhet.build(step, cluster=cpus(v2=1), global_batch=2) as trainer:
        loss = trainer.train_step(x)
        got = torch.as_tensor(trainer.state_dict()["scale"])
    expected = want(X)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    moved = (want.scale - 0.5 * want.scale.grad).detach().float()
    torch.testing.assert_close(got, moved, rtol=1e-4, atol=1e-6)
    assert want.scale.grad.abs().max() > 1e-3
