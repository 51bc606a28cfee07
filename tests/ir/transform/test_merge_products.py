"""MergeProducts: one product of several, slices where the results were; with fold_parameters nothing to concatenate."""

import pytest
import torch
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from tvm.script import ir as I
from tvm.script import relax as R

import tvmhet
from tests.placed import assert_same, plain
from tvmhet.errors import BadGraph
from tvmhet.graph.merges import find_merges
from tvmhet.graph.rewrites import Merge
from tvmhet.ir.bindings import Bindings
from tvmhet.ir.prepare import prepare
from tvmhet.ir.rewritten import rewritten
from tvmhet.ir.transform.merge_products import MergeProducts, check_merges


@I.ir_module
class Before:
    @R.function
    def main(
        x: R.Tensor((2, 3), "float32"),
        wq: R.Tensor((3, 4), "float32"),
        wk: R.Tensor((3, 5), "float32"),
        bq: R.Tensor((4,), "float32"),
        bk: R.Tensor((5,), "float32"),
    ):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            q = R.matmul(x, wq)
            q1 = R.add(q, bq)
            e = R.exp(q1)
            k = R.matmul(x, wk)
            k1 = R.add(k, bk)
            R.output(e, k1)
        return (e, k1)


@I.ir_module
class Expected:
    @R.function
    def main(
        x: R.Tensor((2, 3), "float32"),
        wq: R.Tensor((3, 4), "float32"),
        wk: R.Tensor((3, 5), "float32"),
        bq: R.Tensor((4,), "float32"),
        bk: R.Tensor((5,), "float32"),
    ):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            w = R.concat((wq, wk), axis=1)
            q_merged = R.matmul(x, w)
            b = R.concat((bq, bk), axis=0)
            q1_merged = R.add(q_merged, b)
            q1 = R.strided_slice(q1_merged, axes=[1], begin=[0], end=[4])
            k1 = R.strided_slice(q1_merged, axes=[1], begin=[4], end=[9])
            e = R.exp(q1)
            R.output(e, k1)
        return (e, k1)


PAIR = Merge((("q", "q1"), ("k", "k1")))


def test_products_become_one_and_slices():
    given = Before.clone()
    tvm.ir.assert_structural_equal(MergeProducts([PAIR])(given), Expected)
    tvm.ir.assert_structural_equal(given, Before)  # the input is left as it was
    names = [str(b.var.name) for b in MergeProducts([PAIR])(Before)["main"].body.blocks[0].bindings]
    assert names == ["q_merged_weight", "q_merged", "q1_merged_bias", "q1_merged", "q1", "k1", "e"]


@pytest.mark.parametrize(
    ("merges", "text"),
    [
        ([Merge((("q",), ("no",)))], "'no', which main does not have"),
        ([Merge((("q",), ("e",)))], "'e' cannot be merged"),
        ([Merge((("q", "e"), ("k", "k1")))], "'q' cannot be merged: others read its weights or its result"),
        ([Merge((("q1",), ("k1",)))], "are not alike"),
        ([Merge((("q",), ("k",))), PAIR], "is in two merges"),
    ],
)
def test_what_is_not_alike_is_refused(merges, text):
    with pytest.raises(BadGraph, match=text):
        check_merges(Bindings(Before["main"]), merges)


class Linears(nn.Module):
    def __init__(self, n, k, bias, act):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(k, m, bias=bias) for m in n])
        self.act = act

    def forward(self, x):
        return tuple(self.act(layer(x)) + i for i, layer in enumerate(self.layers))


class Convs(nn.Module):
    def __init__(self, n, k, bias, act):
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(k, m, 1, bias=bias) for m in n])
        self.act = act

    def forward(self, x):
        return tuple(self.act(layer(x)) + i for i, layer in enumerate(self.layers))


@settings(max_examples=6, deadline=None)
@given(
    st.sampled_from([Linears, Convs]),
    st.lists(st.integers(1, 6), min_size=2, max_size=4),
    st.integers(1, 5),
    st.booleans(),
    st.sampled_from([nn.Identity(), nn.ReLU(), nn.GELU()]),
)
def test_merged_equals_apart_on_random_shapes(kind, n, k, bias, act):
    torch.manual_seed(0)
    x = torch.randn(2, 3, k) if kind is Linears else torch.randn(2, k, 3, 4)
    model = tvmhet.from_torch(kind(n, k, bias, act).eval(), (x,))
    prepared = prepare(model)
    whole = find_merges(prepared.graph)[0]
    assert [len(m.members) for m in whole] == [len(n)]
    merged = rewritten(prepared, [whole])
    families = [op.family for op in merged.graph.operators]
    assert families.count("matmul") + families.count("nn.conv2d") == 1
    assert "concat" not in families  # done once, on the host
    assert sum(t.is_param for t in merged.graph.tensors) == 1 + bias
    assert_same(plain(merged.model, x), plain(model, x))


def test_a_second_batch_speaks_of_the_operators_after_the_first():
    torch.manual_seed(0)
    x = torch.randn(2, 5)
    model = tvmhet.from_torch(Linears([2, 3, 4], 5, True, nn.Identity()).eval(), (x,))
    prepared = prepare(model)
    ((pair,),) = find_merges(prepared.graph)[1:]
    once = rewritten(prepared, [(pair,)])
    again = find_merges(once.graph)[0]
    both = rewritten(prepared, [(pair,), again])
    assert [op.family for op in both.graph.operators].count("matmul") == 1
    assert both.key == prepared.key
    assert_same(plain(both.model, x), plain(model, x))
