"""One device's part of a model: all devices' parts together compute what the whole does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import tvmhet
from tvmhet.graph.cutting import Cut, part_of
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


class Rotary(nn.Module):
    """Attention with rotated queries and keys, fewer heads of keys than of queries; `merged`: one product makes all."""

    def __init__(self, width: int, heads: int, kv_heads: int, merged: bool) -> None:
        super().__init__()
        self.head, self.sizes = width // heads, [width, *(width // heads * kv_heads,) * 2]
        if merged:
            self.qkv = nn.Linear(width, sum(self.sizes))
        else:
            self.q, self.k, self.v = (nn.Linear(width, n) for n in self.sizes)
        self.o, self.repeats = nn.Linear(width, width), heads // kv_heads
        self.angle = nn.Parameter(torch.linspace(0.0, 1.0, 6 * self.head).reshape(6, self.head))

    def qkv_of(self, x):
        return self.qkv(x).split(self.sizes, -1) if hasattr(self, "qkv") else (self.q(x), self.k(x), self.v(x))

    def forward(self, x):
        b, t, h = x.shape
        q, k, v = (p.unflatten(-1, (-1, self.head)).transpose(1, 2) for p in self.qkv_of(x))
        half = self.head // 2
        q, k = (p * self.angle + torch.cat((-p[..., half:], p[..., :half]), -1) for p in (q, k))
        k, v = (p.repeat_interleave(self.repeats, dim=1) for p in (k, v))
        a = torch.softmax(q @ k.transpose(-2, -1), -1) @ v
        return x + self.o(a.transpose(1, 2).reshape(b, t, h))


class Sliced(Rotary):
    """The same; its pieces are slices."""

    def qkv_of(self, x):
        y, (q, k, _) = self.qkv(x), self.sizes
        return y[..., :q], y[..., q : q + k], y[..., q + k :]


class Flattened(Sliced):
    """The same; its product reads rows of all samples, as GPT-2's do."""

    def qkv_of(self, x):
        y, (q, k, _) = self.qkv(x.flatten(0, 1)).unflatten(0, x.shape[:2]), self.sizes
        return y[..., :q], y[..., q : q + k], y[..., q + k :]


class Interleaved(Rotary):
    """The same; each head's query, key and value stand side by side, as BLOOM's do, and there are as many of each."""

    def qkv_of(self, x):
        y = self.qkv(x).unflatten(-1, (-1, 3, self.head))
        return tuple(y[..., i, :].flatten(2) for i in range(3))


class Experts(nn.Module):
    """Gated perceptrons whose weights are one tensor, on each row those that its mask says."""

    def __init__(self, width: int, experts: int, hidden: int) -> None:
        super().__init__()
        self.sizes = [hidden, hidden]
        self.gate_up = nn.Parameter(torch.randn(experts, width, 2 * hidden))
        self.down = nn.Parameter(torch.randn(experts, hidden, width))
        self.mask = nn.Parameter(torch.rand(experts, 5, 1))

    def forward(self, x):
        y = (torch.matmul(x, self.gate_up) * self.mask).sum(0)
        half = self.sizes[0]
        y = nn.functional.silu(y[..., :half]) * y[..., half:]
        return x + (torch.matmul(y, self.down) * self.mask).sum(0)


class Overlapping(nn.Module):
    """Two pieces of a product's columns with some in both: no device has its part of each."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 16), nn.Linear(8, 8)

    def forward(self, x):
        y = self.one(x)
        return self.two(y[..., :8] * y[..., 4:12])


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


def piece(op, shape, a):
    """A slice; of a part's columns, those that it has of the piece."""
    axes, begin, end, strides = (op.attrs.get(f"arg{i}") for i in (1, 2, 3, 4))
    assert len(axes) == 1 and strides in (None, [1])
    (axis,), first, last = axes, begin[0], min(end[0], WHOLE[op.name])
    part = shape[axis] / (last - first)
    return a.take(range(int(first * part), int(last * part)), axis)


WHOLE = {}  # by name of a slice: the size of the axis that it cuts, in the whole model

NUMPY = {
    "take": lambda op, shape, a: a.take(number(op), int(op.attrs["axis"])),
    "strided_slice": piece,
    "negative": lambda op, shape, a: -a,
    "concat": lambda op, shape, *a: np.concatenate(a, int(op.attrs["axis"])),
    "expand_dims": lambda op, shape, a: a.reshape(shape),
    "broadcast_to": lambda op, shape, a: np.broadcast_to(a, shape),
    "matmul": lambda op, shape, a, b: a @ b,
    "add": lambda op, shape, a, b: a + b,
    "multiply": lambda op, shape, a, *b: a * (b[0] if b else number(op)),
    "subtract": lambda op, shape, a, b: a - b,
    "max": lambda op, shape, a: a.max(tuple(int(x) for x in op.attrs["axis"]), keepdims=True),
    "sum": lambda op, shape, a: a.sum(tuple(int(x) for x in op.attrs["axis"])).reshape(shape),
    "reshape": lambda op, shape, a: a.reshape(shape),
    "permute_dims": lambda op, shape, a: a.transpose([int(x) for x in op.attrs["axes"]]),
    "nn.softmax": lambda op, shape, a: torch.softmax(torch.from_numpy(a), int(op.attrs["axis"])).numpy(),
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


def share(whole, shape, device, pieces=()):
    """One device's share of an array; of each of its pieces, where it has the columns of several."""
    if whole.shape == shape:
        return whole
    (axis,) = (a for a, (n, m) in enumerate(zip(whole.shape, shape, strict=True)) if n != m)
    parts = [whole] if sum(pieces) != whole.shape[axis] else np.split(whole, np.cumsum(pieces)[:-1], axis)
    return np.concatenate([np.array_split(p, whole.shape[axis] // shape[axis], axis)[device] for p in parts], axis)


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize(
    ("make", "shape", "num_summed"),
    [
        (lambda: Block(32, 4), (2, 6, 32), 2),
        (Gated, (3, 8), 1),
        (lambda: nn.Sequential(*(Block(16, 4),) * 2), (1, 4, 16), 4),
        (lambda: Merged(32, 4), (3, 6, 32), 1),
        (lambda: Rotary(32, 8, 4, False), (2, 6, 32), 1),
        (lambda: Sliced(32, 8, 4, True), (2, 6, 32), 1),
        (lambda: Flattened(32, 8, 4, True), (2, 6, 32), 1),
        (lambda: Interleaved(32, 8, 8, True), (2, 6, 32), 1),
        (lambda: Experts(16, 3, 8), (5, 16), 1),
    ],
)
def test_the_parts_of_all_devices_make_the_whole(make, shape, num_summed, degree):
    module = make()
    graph = graph_of(module, torch.randn(shape))
    part = part_of(graph, degree)
    assert len(part.summed) == num_summed
    slices = [op for op in graph.operators if op.family == "strided_slice"]
    WHOLE.update({op.name: graph.tensors[op.inputs[0]].shape[op.attrs["arg1"][0]] for op in slices})
    rng = np.random.default_rng(0)
    made = {t for op in graph.operators for t in op.outputs}
    values = {i: rng.standard_normal(t.shape) for i, t in enumerate(graph.tensors) if i not in made}
    (whole,) = run(graph, [dict(values)])
    pieces = module.sizes if isinstance(module, Sliced | Experts) else ()
    shapes = {i: part.graph.tensors[i].shape for i in values}
    devices = [{i: share(v, shapes[i], d, pieces) for i, v in values.items()} for d in range(degree)]
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
    [
        (Overlapping, (3, 8), 2),
        (Normed, (3, 8), 2),
        (Gated, (3, 8), 16),
        (lambda: nn.Conv2d(4, 4, 3), (1, 4, 8, 8), 2),
        (Tied, (3, 8), 2),
    ],
)
def test_what_cannot_be_cut_stays_whole(make, shape, degree):
    assert part_of(graph_of(make(), torch.randn(shape)), degree) is None


class Hidden(nn.Module):
    """What is between two products is returned, too."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x):
        h = torch.relu(self.up(x))
        return h, self.down(h)


def test_results_are_cut_as_the_parameters_that_they_belong_to():
    """The hidden columns are dealt out as the first weight is, along its last axis, and not as the second's rows."""
    graph = graph_of(Hidden(), torch.randn(3, 8))
    number = {t.name: i for i, t in enumerate(graph.tensors)}
    hidden, second = graph.outputs
    first, last = number["p_up_weight"], number["p_down_weight"]
    part = part_of(graph, 2, joins=True, alike={hidden: first})
    assert part.cuts[hidden] == part.cuts[first] == Cut(-1, (16,)) and part.cuts[last] == Cut(-2, (16,))
    part = part_of(graph, 2, joins=True, alike={second: last})  # the second product by its columns, the first whole
    assert part.cuts == {second: Cut(-1, (8,)), last: Cut(-1, (8,))}
    for alike in ({hidden: last}, {second: first}):
        assert part_of(graph, 2, joins=True, alike=alike) is None  # another axis, or a sum


def test_results_of_a_model_are_cut_where_they_may_be_joined():
    graph = graph_of(Gated(), torch.randn(3, 8))
    (head,) = (i for i, op in enumerate(graph.operators) if op.name == "head")
    every = range(len(graph.operators))
    for joins in (False, True):
        part = part_of(graph, 2, joins=joins)
        assert set(graph.outputs) <= (part.cut if joins else part.whole)
        assert part.graph.operators[head].flop == graph.operators[head].flop / (2 if joins else 1)
        assert part.joined_bytes(every) == ((3 * 16 * 4,) if joins else ()) and len(part.summed_bytes(every)) == 1
    assert part_of(graph_of(nn.Conv2d(4, 4, 3), torch.randn(1, 4, 8, 8)), 2, joins=True) is None


def test_a_product_is_cut_alike_whether_its_pieces_are_slices_or_split():
    x = torch.randn(2, 6, 32)
    sliced, split = (part_of(graph_of(kind(32, 8, 4, True), x), 4) for kind in (Sliced, Rotary))
    for part in (sliced, split):
        (weight,) = (t for t in part.graph.tensors if t.name == "p_qkv_weight")
        assert weight.shape == (32, 16) and len(part.summed) == 1


def test_columns_read_backwards_stay_whole():
    """Each device would read what another one has."""

    def model(step):
        nodes = [
            helper.make_node("MatMul", ["x", "w"], ["y"]),
            helper.make_node("Slice", ["y", "from", "to", "axes", "step"], ["z"]),
            helper.make_node("MatMul", ["z", "v"], ["out"]),
        ]
        ends = {1: (0, 16), -1: (15, -17)}[step]
        numbers = {"from": [ends[0]], "to": [ends[1]], "axes": [1], "step": [step]}
        weights = {"w": np.ones((8, 16), np.float32), "v": np.ones((16, 8), np.float32)}
        given = [numpy_helper.from_array(np.array(v), k) for k, v in (numbers | weights).items()]
        ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, (3, 8)) for n in ("x", "out")]
        return helper.make_model(helper.make_graph(nodes, "g", ends[:1], ends[1:], given))

    assert len(part_of(tvmhet.extract_graph(tvmhet.from_onnx(model(1))), 2).summed) == 1
    assert part_of(tvmhet.extract_graph(tvmhet.from_onnx(model(-1))), 2) is None


def test_heads_that_a_team_cannot_share_stay_whole():
    graph = graph_of(Block(32, 2), torch.randn(2, 6, 32))
    part = part_of(graph, 4)
    assert [graph.operators[i].name for i in part.summed] == ["fc2"]
