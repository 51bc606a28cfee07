"""SplitTensors: each device of a team on its part, sums and wholes between, the same results as before."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import tvm
from torch import nn
from tvm.script import ir as I
from tvm.script import relax as R

import tvmhet
from tests.graph.test_cutting import Block, Experts, Flattened, Gated, Interleaved, Merged, Rotary, Sliced
from tests.placed import assert_same, plain
from tvmhet.errors import BadGraph
from tvmhet.graph.cutting import part_of
from tvmhet.ir.bindings import Bindings
from tvmhet.ir.extract import extract
from tvmhet.ir.model import from_torch_tensor, to_torch
from tvmhet.ir.prepare import prepare
from tvmhet.ir.transform.split_tensors import SplitTensors, TeamStage, check_names, share_of, shares_of


@I.ir_module
class Before:
    @R.function
    def main(
        x: R.Tensor((2, 3), "float32"), w1: R.Tensor((3, 8), "float32"), w2: R.Tensor((8, 3), "float32")
    ) -> R.Tensor((2, 3), "float32"):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            h = R.matmul(x, w1)
            r = R.nn.relu(h)
            y = R.matmul(r, w2)
            z = R.add(y, x)
            R.output(z)
        return z


@I.ir_module
class Expected:
    @R.function
    def main(
        x: R.Tensor((2, 3), "float32"),
        w1_stage0_rank0: R.Tensor((3, 4), "float32"),
        w1_stage0_rank1: R.Tensor((3, 4), "float32"),
        w2_stage0_rank0: R.Tensor((4, 3), "float32"),
        w2_stage0_rank1: R.Tensor((4, 3), "float32"),
    ) -> R.Tensor((2, 3), "float32"):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            h_stage0_rank0 = R.matmul(x, w1_stage0_rank0)
            r_stage0_rank0 = R.nn.relu(h_stage0_rank0)
            y_stage0_rank0 = R.matmul(r_stage0_rank0, w2_stage0_rank0)
            h_stage0_rank1 = R.matmul(x, w1_stage0_rank1)
            r_stage0_rank1 = R.nn.relu(h_stage0_rank1)
            y_stage0_rank1 = R.matmul(r_stage0_rank1, w2_stage0_rank1)
            y_sum_stage0_rank0 = R.add(y_stage0_rank0, y_stage0_rank1)
            z_stage0_rank0 = R.add(y_sum_stage0_rank0, x)
            R.output(z_stage0_rank0)
        return z_stage0_rank0


@I.ir_module
class ExpectedBetween:
    """The relu alone on a team: it takes its part of h, and the parts are joined for the product that reads them."""

    @R.function
    def main(
        x: R.Tensor((2, 3), "float32"), w1: R.Tensor((3, 8), "float32"), w2: R.Tensor((8, 3), "float32")
    ) -> R.Tensor((2, 3), "float32"):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            h = R.matmul(x, w1)
            h_part_stage1_rank0 = R.strided_slice(h, axes=[1], begin=[0], end=[4])
            r_stage1_rank0 = R.nn.relu(h_part_stage1_rank0)
            h_part_stage1_rank1 = R.strided_slice(h, axes=[1], begin=[4], end=[8])
            r_stage1_rank1 = R.nn.relu(h_part_stage1_rank1)
            r_whole_stage1_rank0 = R.concat((r_stage1_rank0, r_stage1_rank1), axis=-1)
            y = R.matmul(r_whole_stage1_rank0, w2)
            z = R.add(y, x)
            R.output(z)
        return z


def stages_of(graph, cuts, degrees, joins=False):
    """Stages of one operator a kernel, cut at `cuts`."""
    parts = {d: part_of(graph, d, joins=joins) for d in set(degrees) - {1}}
    ends = [0, *cuts, len(graph.operators)]
    spans = [tuple((i,) for i in range(a, b)) for a, b in pairwise(ends)]
    return [
        TeamStage(k, graph, kernels, parts.get(d)) for k, (kernels, d) in enumerate(zip(spans, degrees, strict=True))
    ]


def split(mod, stages):
    return tvm.transform.Sequential([SplitTensors(stages)])(mod)


def test_two_products_on_a_team():
    after = split(Before, stages_of(extract(Before), [], [2]))
    tvm.ir.assert_structural_equal(after, Expected)
    assert list(Bindings(after["main"]).calls) == list(Bindings(Expected["main"]).calls)
    assert [p.name for p in after["main"].params] == [p.name for p in Expected["main"].params]


def test_one_operator_between_whole_ones():
    after = split(Before, stages_of(extract(Before), [1, 2], [1, 2, 1]))
    tvm.ir.assert_structural_equal(after, ExpectedBetween)


def test_without_teams_nothing_changes():
    tvm.ir.assert_structural_equal(split(Before, stages_of(extract(Before), [2], [1, 1])), Before)


def test_a_name_that_is_taken_is_refused():
    taken = "y_sum_stage0_rank0"
    text = Before.script().replace("r: R.Tensor", f"{taken}: R.Tensor").replace("R.matmul(r,", f"R.matmul({taken},")
    clash = tvm.script.from_source(text)
    with pytest.raises(BadGraph, match="has an operator 'y_sum_stage0_rank0'"):
        check_names(Bindings(clash["main"]), stages_of(extract(clash), [], [2]))
    check_names(Bindings(Before["main"]), stages_of(extract(Before), [], [2]))


class Tuples(nn.Module):
    """Pieces that a split makes of a product's columns, and of a whole tensor; one piece is read by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = torch.relu(self.qkv(x)).split([8, 8, 8], -1)
        a, b, _ = (x * 2).chunk(4, -1)[:3]
        return self.o(q * k + v) + torch.cat((a, b, a, b), -1), b


class SideBySide(nn.Module):
    """Columns of two products side by side, of unlike widths, read by one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.down = nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(24, 8)

    def forward(self, x):
        return self.down(torch.relu(torch.cat((torch.tanh(self.a(x)), self.b(x)), -1)))


class Unlike(SideBySide):
    """The same, added to the columns of one product, which would be dealt out otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Linear(8, 24)

    def forward(self, x):
        return self.down(torch.cat((torch.tanh(self.a(x)), self.b(x)), -1) + self.c(x))


class Masked(nn.Module):
    """An input that is used element by element, beside a tensor of one number, on what a team has in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x, mask):
        y = torch.relu(self.up(x))
        return self.down(torch.where(mask > 0, y * (mask + 1), torch.full((3, 16), 0.5)))


CASES = {
    "side by side": (SideBySide, (3, 8)),
    "unlike runs": (lambda: nn.Sequential(Unlike(), Gated()), (3, 8)),
    "block": (lambda: Block(32, 4), (2, 6, 32)),
    "gated": (Gated, (3, 8)),
    "two layers": (lambda: nn.Sequential(*(Block(16, 4) for _ in range(2))), (1, 4, 16)),
    "merged": (lambda: Merged(32, 4), (3, 6, 32)),
    "rotary": (lambda: Rotary(32, 8, 4, False), (2, 6, 32)),
    "rotary, one product": (lambda: Rotary(32, 8, 4, True), (2, 6, 32)),
    "sliced": (lambda: Sliced(32, 8, 4, True), (2, 6, 32)),
    "flattened": (lambda: Flattened(32, 8, 4, True), (2, 6, 32)),
    "interleaved": (lambda: Interleaved(32, 8, 8, True), (2, 6, 32)),
    "experts": (lambda: Experts(16, 3, 8), (5, 16)),
    "tuples": (Tuples, (3, 8)),
}


@pytest.mark.parametrize("degrees", [(2, 2), (2, 4), (4, 1), (1, 2)])
def test_pieces_that_are_dealt_out_cross_stages_as_wholes(degrees):
    """Behind q, k and v of one product: each team joins its shares of all three, and takes its own of each."""
    torch.manual_seed(0)
    x = torch.randn(2, 6, 32)
    prepared = prepare(tvmhet.from_torch(Sliced(32, 8, 4, True).eval(), (x,)))
    graph = prepared.operator_graph
    stages = stages_of(graph, [graph.index("qkv_add") + 1], degrees)
    names = {name for stage in stages for task in stage.tasks for name in stage.operators_of(task)}
    assert ("qkv_add_piece5_stage0_rank0" in names) == (degrees[0] > 1)
    assert ("qkv_add_part2_stage1_rank1" in names) == (degrees[1] > 1)
    assert_same(plain(shared(prepared, stages), x), plain(prepared.model, x))


def test_parts_are_taken_of_inputs_that_are_used_element_by_element():
    torch.manual_seed(0)
    inputs = torch.randn(3, 8), torch.randn(3, 16)
    prepared = prepare(tvmhet.from_torch(Masked().eval(), inputs))
    graph, want = prepared.operator_graph, plain(prepared.model, *inputs)
    part = part_of(graph, 2)
    assert len(part.summed) == 1 and [t in part.cuts for t in graph.inputs] == [False, True]
    for cuts, degrees in (([], [2]), ([len(graph.operators) // 2], [2, 4]), ([2], [1, 2])):
        assert_same(plain(shared(prepared, stages_of(graph, cuts, degrees)), *inputs), want)


def shared(prepared, stages):
    """The model on teams."""
    values = {s.name: s for s in shares_of(stages, prepared.operator_graph)}
    params = {n: from_torch_tensor(share_of(to_torch(prepared.params[s.source.name]), s)) for n, s in values.items()}
    return replace(prepared.model, mod=split(prepared.mod, stages), params=params)


@pytest.mark.parametrize("name", CASES)
def test_any_stages_on_teams_compute_the_same(name):
    """Random cuts into stages, each on one device, two or four."""
    make, shape = CASES[name]
    torch.manual_seed(0)
    x = torch.randn(shape)
    prepared = prepare(tvmhet.from_torch(make().eval(), (x,)))
    graph, rng = prepared.operator_graph, random.Random(name)
    want = plain(prepared.model, x)
    most = len(graph.operators) - 1
    for drawn in range(3):
        cuts = sorted(rng.sample(range(1, most + 1), rng.randint(0, 4))) if drawn > 1 else []
        degrees = [rng.choice([1, 2, 2, 4]) for _ in range(len(cuts) + 1)] if drawn > 1 else [2]
        stages = stages_of(graph, cuts, degrees, joins=drawn % 2 == 0)
        model = shared(prepared, stages)
        assert_same(plain(model, x), want)
        made = [n for stage in stages for task in stage.tasks for n in stage.operators_of(task)]
        whole = [graph.operators[i].name for stage in stages if stage.part is None for k in stage.kernels for i in k]
        assert sorted([*made, *whole]) == sorted(Bindings(model.main).calls)
