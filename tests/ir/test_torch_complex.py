"""Complex tensors become real ones of one more axis: rule by rule against torch, and whole models."""

import pytest
import torch
from torch import nn

import tvmhet
from tests.placed import assert_same, cpus, plain
from tvmhet.errors import BadModel, HetError
from tvmhet.ir.torch_complex import with_real_pairs


class Of(nn.Module):
    """A function as a module."""

    def __init__(self, f):
        super().__init__()
        self.f = f
        self.register_buffer("held", torch.polar(torch.rand(3, 4) + 0.5, torch.rand(3, 4)), persistent=False)

    def forward(self, x, r):
        return self.f(torch.view_as_complex(x), r, self)


def pair(z):
    return torch.view_as_real(z.resolve_conj())


def written(z, r):
    out = torch.zeros(4, 6, dtype=z.dtype)
    out[:3, 1:5] = z
    out[-1:, 2:] = r[:1]
    return out


RULES = {
    "polar": lambda z, r, m: pair(torch.polar(r, r * 2)),
    "complex": lambda z, r, m: pair(torch.complex(r, r + 1)),
    "complex with broadcast": lambda z, r, m: pair(torch.complex(r, r[0] + 1)),
    "product": lambda z, r, m: pair(z * z),
    "product with broadcast": lambda z, r, m: pair(z[:, None] * z[0]),
    "by a real tensor": lambda z, r, m: pair(z * r),
    "of a real tensor": lambda z, r, m: pair(r * z),
    "by a number": lambda z, r, m: pair(z * 0.5),
    "sum": lambda z, r, m: pair(z + z[0]),
    "sum with a real tensor": lambda z, r, m: pair(z + r),
    "sum with a number": lambda z, r, m: pair(z - 2.0),
    "negative": lambda z, r, m: pair(-z),
    "conjugate": lambda z, r, m: pair(z * z.conj()),
    "parts": lambda z, r, m: z.real + 3 * z.imag,
    "abs": lambda z, r, m: z.abs(),
    "angle": lambda z, r, m: torch.angle(z),
    "reshape": lambda z, r, m: pair(z.reshape(2, 6)),
    "expand": lambda z, r, m: pair(z[None].expand(2, 3, 4)),
    "transpose": lambda z, r, m: pair(z.transpose(-2, -1)),
    "permute": lambda z, r, m: pair(z[None].permute(-1, 0, 1)),
    "unsqueeze from the end": lambda z, r, m: pair(z.unsqueeze(-1)),
    "squeeze": lambda z, r, m: pair(z[None, :, :1].squeeze()),
    "select from the end": lambda z, r, m: pair(z.select(-1, 2)),
    "slice": lambda z, r, m: pair(z[1:, ::2]),
    "index": lambda z, r, m: pair(z[torch.tensor([2, 0, 2])]),
    "index along the last": lambda z, r, m: pair(z.index_select(-1, torch.tensor([3, 1]))),
    "cat": lambda z, r, m: pair(torch.cat([z, z * 2], -1)),
    "stack": lambda z, r, m: pair(torch.stack([z, z], 1)),
    "total": lambda z, r, m: pair((z * 2).sum(-1, keepdim=True)),
    "total of all": lambda z, r, m: pair(z.sum()),
    "constant": lambda z, r, m: pair(z * m.held),
    "times a complex number": lambda z, r, m: pair(z * (2 - 3j)),
    "a real value times a complex number": lambda z, r, m: pair(r * 2j),
    "chosen": lambda z, r, m: pair(torch.where(r > 0.5, z, torch.scalar_tensor(3.0, dtype=z.dtype))),
    "sign": lambda z, r, m: pair(torch.sgn(torch.where(r > 0.5, z, torch.zeros_like(z)))),
    "is a number": lambda z, r, m: torch.where(r > 0.5, z, z.real.to(z.dtype) * 0 + 2) == 2,
    "quotient": lambda z, r, m: pair(z / (z + 2)),
    "by a real divisor": lambda z, r, m: pair(z / r),
    "by a number divided": lambda z, r, m: pair(z / 3),
    "a number's quotient": lambda z, r, m: pair(r / (z + 2)),
    "exponential": lambda z, r, m: pair(torch.exp(z)),
    "matrix product": lambda z, r, m: pair(z @ z.T),
    "batched product with a real matrix": lambda z, r, m: pair(z[None] @ r.T[None].to(z.dtype)),
    "converted": lambda z, r, m: pair(z.to(torch.complex128) + r.to(torch.complex128)),
    "filled": lambda z, r, m: pair(torch.full((3, 4), 2, dtype=torch.complex64) - z),
    "filled like": lambda z, r, m: pair(torch.ones_like(z) - z + torch.zeros_like(z)),
    "padded with a number": lambda z, r, m: pair(nn.functional.pad(z, (1, 2, 0, 1), value=3.0)),
    "padded": lambda z, r, m: pair(nn.functional.pad(z, (1, 2, 0, 1))),
    "flipped and rolled": lambda z, r, m: pair(z.flip(-1).roll((1, 2), (0, -1))),
    "rolled as one row": lambda z, r, m: pair(z.roll(2)),
    "written into": lambda z, r, m: pair(written(z, r)),
    "a view of what lies otherwise": lambda z, r, m: pair(z.T.contiguous().view(2, 6)),
}


def inputs():
    generator = torch.Generator().manual_seed(3)
    return torch.randn(3, 4, 2, generator=generator), torch.rand(3, 4, generator=generator) + 0.1


def exported(f):
    return torch.export.export(Of(f).eval(), inputs()).run_decompositions()


@pytest.mark.parametrize("rule", RULES)
def test_pairs_compute_what_complex_numbers_do(rule):
    program = exported(RULES[rule])
    want = program.module()(*inputs())
    with_real_pairs(program)
    values = [n.meta["val"] for n in program.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    assert not any(v.is_complex() for v in values)
    torch.testing.assert_close(program.module()(*inputs()), want)


def test_a_program_of_real_numbers_stays_as_it_is():
    program = torch.export.export(nn.Linear(4, 4), (torch.randn(2, 4),))
    before = [(n.op, n.target, n.args) for n in program.graph.nodes]
    with_real_pairs(program)
    assert [(n.op, n.target, n.args) for n in program.graph.nodes] == before


def test_the_users_program_is_left_as_it_is():
    program = torch.export.export(Of(RULES["constant"]).eval(), inputs())
    want = program.module()(*inputs())
    for _ in range(2):
        model = tvmhet.from_exported(program)
        assert_same(plain(model, *inputs()), [want])
    torch.testing.assert_close(program.module()(*inputs()), want)


class Rotary(nn.Module):
    """Queries turned by their positions, as Llama 4's are: by a table, or by angles of the call."""

    def __init__(self, held):
        super().__init__()
        self.held, self.query = held, nn.Linear(32, 32)
        angles = torch.outer(torch.arange(8).float(), self._speeds())
        self.register_buffer("table", torch.polar(torch.ones_like(angles), angles), persistent=False)

    @staticmethod
    def _speeds():
        return 1 / 10_000 ** (torch.arange(0, 16, 2) / 16)

    def forward(self, x, places):
        batch, length, _ = x.shape
        angles = places[..., None].float() * self._speeds()
        turn = self.table[places] if self.held else torch.polar(torch.ones_like(angles), angles) * 1.0
        queries = torch.view_as_complex(self.query(x).reshape(batch, length, 2, 8, 2).float())
        return torch.view_as_real(queries * turn[:, :, None, :]).flatten(3).type_as(x)


@pytest.mark.parametrize("held", [True, False], ids=["table", "angles"])
def test_rotary_embeddings_are_imported(held):
    torch.manual_seed(0)
    module, given = Rotary(held).eval(), (torch.randn(2, 8, 32), torch.arange(8)[None].repeat(2, 1))
    model = tvmhet.from_torch(module, given)
    assert_same(plain(model, *given), [module(*given).detach()])


def test_rotary_embeddings_are_trained():
    torch.manual_seed(0)
    module, places = Rotary(held=False), torch.arange(8)[None].repeat(2, 1)
    del module.table
    given, target = (torch.randn(2, 8, 32), places), torch.randn(2, 8, 2, 16)
    step = tvmhet.from_torch(module, given, loss="mse", optimizer="sgd", lr=0.5, mode="training")
    cluster = cpus(v3=1)
    plan = tvmhet.plan(step, cluster=cluster, mode="training", global_batch=2)
    with tvmhet.build(step, cluster=cluster, plan=plan, mode="training", global_batch=2) as trainer:
        loss = trainer.train_step((*given, target))
        found = trainer.state_dict()
    want = nn.functional.mse_loss(module(*given), target)
    want.backward()
    torch.testing.assert_close(torch.as_tensor(loss), want.detach(), rtol=1e-5, atol=1e-6)
    for name, p in module.named_parameters():
        torch.testing.assert_close(torch.as_tensor(found[name]), p.detach() - 0.5 * p.grad, rtol=1e-4, atol=1e-5)


REFUSED = {
    r"operator aten.tanh.default \(node 'tanh'\).*complex": lambda z, r, m: pair(torch.tanh(z)),
    r"operator aten.add.Tensor .*complex": lambda z, r, m: pair(torch.add(z, z, alpha=2)),
    r"operator aten._to_copy.default .*complex numbers: their imaginary parts are dropped": lambda z, r, m: z.to(
        r.dtype
    ),
    r"a result of the model is complex": lambda z, r, m: z,
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_stays_complex_is_named(said):
    with pytest.raises(HetError, match=said):
        tvmhet.from_torch(Of(REFUSED[said]).eval(), inputs())


def test_a_complex_input_is_named():
    with pytest.raises(BadModel, match=r"'input'.* is complex"):
        tvmhet.from_torch(nn.Identity(), (torch.zeros(2, dtype=torch.complex64),))


def test_a_complex_buffer_is_named_in_training():
    given = torch.randn(2, 8, 32), torch.arange(8)[None].repeat(2, 1)
    with pytest.raises(BadModel, match="'table' is complex"):
        tvmhet.from_torch(Rotary(held=True), given, loss="mse", optimizer="sgd", mode="training")
