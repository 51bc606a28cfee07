"""One device's part of a model: all devices' parts together compute what the whole does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import tvmhet
from tvmhet.graph.cutting import part_of
from tvmhet.ir.training_step import forward_prepared, read_step


class Block(nn.Module):
    """A transformer's layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, h = x.shape
        y = self.n1(x)
        q, k, v = (f(y).view(b, t, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        a = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, h)
        x = x + self.o(a)
        return x + self.fc2(nn.functional.gelu(self.fc1(self.n2(x))))


class Gated(nn.Module):
    """Two products whose results are multiplied; then one whose result the model returns."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down, self.head = (
            nn.Linear(8, 24),
            nn.Linear(8, 24),
            nn.Linear(24, 8),
            nn.Linear(8, 16),
        )

    def forward(self, x):
        return self.head(self.down(nn.functional.silu(self.gate(x)) * self.up(x)))


class Merged(Block):
    """Attention whose samples and heads are one axis; its softmax is written out, but for the exponential."""

    def forward(self, x):
        b, t, h = x.shape
        q, k, v = (
            f(x).view(b, t, self.heads, -1).transpose(1, 2).reshape(b * self.heads, t, -1)
            for f in (self.q, self.k, self.v)
        )
        a = q @ k.transpose(1, 2)
        a = (a - a.amax(-1, keepdim=True)) * a.sum(-1, keepdim=True)
        a = (a @ v).view(b, self.heads, t, -1).transpose(1, 2).reshape(b, t, h)
        return x + self.o(a)


class Normed(nn.Module):
    """A product whose result is normalised along its columns: they cannot be parted."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        return self.two(self.norm(self.one(x)))


class Tied(nn.Module):
    """One weight in two layers, which would cut it along unlike axes."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        return self.one(torch.relu(self.one(x)))


def graph_of(module, *inputs):
    return tvmhet.extract_graph(tvmhet.from_torch(module.eval(), inputs))


def number(op):
    """The operand that is a number."""
    return op.attrs["arg1"]["value"]


NUMPY = {
    "matmul": lambda op, shape, a, b: a @ b,
    "add": lambda op, shape, a, b: a + b,
    "multiply": lambda op, shape, a, *b: a * (b[0] if b else number(op)),
    "subtract": lambda op, shape, a, b: a - b,
    "max": lambda op, shape, a: a.max(tuple(int(x) for x in op.attrs["axis"]), keepdims=True),
    "sum": lambda op, shape, a: a.sum(tuple(int(x) for x in op.attrs["axis"]), keepdims=True),
    "reshape": lambda op, shape, a: a.reshape(shape),
    "permute_dims": lambda op, shape, a: a.transpose([int(x) for x in op.attrs["axes"]]),
    "nn.softmax": lambda op, shape, a: np.exp(a) / np.exp(a).sum(axis=int(op.attrs["axis"]), keepdims=True),
    "nn.gelu": lambda op, shape, a: nn.functional.gelu(torch.from_numpy(a)).numpy(),
    "nn.silu": lambda op, shape, a: nn.functional.silu(torch.from_numpy(a)).numpy(),
    "nn.relu": lambda op, shape, a: np.maximum(a, 0),
    "nn.layer_norm": lambda op, shape, a, w, b: (
        (a - a.mean(-1, keepdims=True)) / np.sqrt(a.var(-1, keepdims=True) + op.attrs["epsilon"]) * w + b
    ),
}


def run(graph, values, summed=frozenset(), team=1):
    """Each device's values of all tensors; `values[device]` are those of inputs and parameters."""
    for i, op in enumerate(graph.operators):
        (out,) = op.outputs
        made = [NUMPY[op.family](op, graph.tensors[out].shape, *(v[t] for t in op.inputs)) for v in values]
        if i in summed:
            made = [sum(made)] * team
        for v, result in zip(values, made, strict=True):
            assert result.shape == graph.tensors[out].shape, op.name
            v[out] = result
    return values


def share(whole, shape, device):
    """One device's share of an array."""
    if whole.shape == shape:
        return whole
    (axis,) = (a for a, (n, m) in enumerate(zip(whole.shape, shape, strict=True)) if n != m)
    return np.array_split(whole, whole.shape[axis] // shape[axis], axis)[device]


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize(
    ("make", "shape", "num_summed"),
    [
        (lambda: Block(32, 4), (2, 6, 32), 2),
        (Gated, (3, 8), 1),
        (lambda: nn.Sequential(*(Block(16, 4),) * 2), (1, 4, 16), 4),
        (lambda: Merged(32, 4), (3, 6, 32), 1),
    ],
)
def test_the_parts_of_all_devices_make_the_whole(make, shape, num_summed, degree):
    graph = graph_of(make(), torch.randn(shape))
    part = part_of(graph, degree)
    assert len(part.summed) == num_summed
    rng = np.random.default_rng(0)
    made = {t for op in graph.operators for t in op.outputs}
    values = {i: rng.standard_normal(t.shape) for i, t in enumerate(graph.tensors) if i not in made}
    (whole,) = run(graph, [dict(values)])
    devices = [{i: share(v, part.graph.tensors[i].shape, d) for i, v in values.items()} for d in range(degree)]
    for done in run(part.graph, devices, part.summed, degree):
        for t in graph.outputs:
            np.testing.assert_allclose(done[t], whole[t], rtol=1e-9)


def test_a_part_has_its_share_of_work_and_parameters():
    graph = graph_of(Block(64, 8), torch.randn(4, 16, 64))
    part = part_of(graph, 8)
    products = [i for i, op in enumerate(graph.operators) if op.family == "matmul"]
    assert [part.graph.operators[i].flop * 8 for i in products] == [graph.operators[i].flop for i in products]
    params = [i for i, t in enumerate(graph.tensors) if t.is_param]
    for i in params:
        times = 1 if i in part.whole else 8
        assert part.graph.tensors[i].size_bytes * times == graph.tensors[i].size_bytes
    names = {graph.tensors[i].name for i in part.whole.intersection(params)}
    assert names == {f"p_{n}" for n in ("n1_weight", "n1_bias", "n2_weight", "n2_bias", "o_bias", "fc2_bias")}


def test_a_training_step_is_cut_as_its_model_is():
    """Its graph transposes parameters and merges samples with heads."""
    module = nn.Sequential(Block(64, 8), nn.Flatten(), nn.Linear(16 * 64, 10, bias=False))
    step = tvmhet.from_torch(
        module, (torch.randn(4, 16, 64),), loss="cross_entropy", optimizer="adamw", mode="training"
    )
    graph = forward_prepared(read_step(step)).graph
    part = part_of(graph, 4)
    params = {t.name: i for i, t in enumerate(graph.tensors) if t.is_param}
    shapes = {name: part.graph.tensors[i].shape for name, i in params.items()}
    assert shapes["p_0_q_weight"] == (16, 64) and shapes["p_0_fc1_weight"] == (64, 64)
    assert shapes["p_0_o_weight"] == (64, 16) and shapes["p_0_fc2_weight"] == (64, 64)
    assert shapes["p_0_q_bias"] == (16,) and shapes["p_0_o_bias"] == shapes["p_0_n1_weight"] == (64,)
    assert len(part.summed) == 2 and part.flowing_back_bytes(range(len(graph.operators))) == (4 * 16 * 64 * 4,) * 2


def test_no_kernel_reads_sums_that_are_still_to_be_added():
    graph = graph_of(Block(32, 4), torch.randn(2, 6, 32))
    part, at = part_of(graph, 2), graph.index
    assert part.can_run([at("fc1"), at("fc1_add"), at("gelu")]) and part.can_run([at("fc2")])
    assert not part.can_run([at("fc2"), at("fc2_add")])
    assert part.summed_bytes([at("fc2")]) == (2 * 6 * 32 * 4,) and part.summed_bytes([at("fc1")]) == ()


@pytest.mark.parametrize(
    ("make", "shape", "degree"),
    [(Normed, (3, 8), 2), (Gated, (3, 8), 16), (lambda: nn.Conv2d(4, 4, 3), (1, 4, 8, 8), 2), (Tied, (3, 8), 2)],
)
def test_what_cannot_be_cut_stays_whole(make, shape, degree):
    assert part_of(graph_of(make(), torch.randn(shape)), degree) is None


def test_heads_that_a_team_cannot_share_stay_whole():
    graph = graph_of(Block(32, 2), torch.randn(2, 6, 32))
    part = part_of(graph, 4)
    assert [graph.operators[i].name for i in part.summed] == ["fc2"]
