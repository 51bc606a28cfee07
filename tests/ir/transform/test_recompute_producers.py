"""RecomputeProducers: a copy for some readers, nothing else changed."""

import random

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
from tvmhet.graph.copies import cheap_producers
from tvmhet.graph.rewrites import Recompute
from tvmhet.ir.bindings import Bindings
from tvmhet.ir.prepare import prepare
from tvmhet.ir.rewritten import rewritten
from tvmhet.ir.transform.recompute_producers import RecomputeProducers, check_recomputes


@I.ir_module
class Before:
    @R.function
    def main(x: R.Tensor((8,), "float32")):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            r = R.nn.relu(x)
            a = R.exp(r)
            b = R.add(r, a)
            c = R.tanh(r)
            gv = R.add(b, c)
            R.output(gv)
        return gv


@I.ir_module
class Expected:
    @R.function
    def main(x: R.Tensor((8,), "float32")):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            r = R.nn.relu(x)
            a = R.exp(r)
            r_again = R.nn.relu(x)
            b = R.add(r_again, a)
            c = R.tanh(r)
            gv = R.add(b, c)
            R.output(gv)
        return gv


def test_some_readers_get_a_copy():
    rewrite = Recompute("r", (("a", "c"), ("b",)))
    given = Before.clone()
    tvm.ir.assert_structural_equal(RecomputeProducers([rewrite])(given), Expected)
    tvm.ir.assert_structural_equal(given, Before)  # the input is left as it was


def test_a_copy_of_a_reader_reads_what_the_reader_reads():
    """Both are computed again: `a` for `gv`; of `r`, `a` and its copy read the same one."""

    @I.ir_module
    class Chain:
        @R.function
        def main(x: R.Tensor((8,), "float32")):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                r = R.nn.relu(x)
                a = R.exp(r)
                b = R.tanh(a)
                c = R.add(r, a)
                gv = R.add(b, c)
                R.output(gv)
            return gv

    @I.ir_module
    class Wanted:
        @R.function
        def main(x: R.Tensor((8,), "float32")):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                r = R.nn.relu(x)
                r_again = R.nn.relu(x)
                a = R.exp(r_again)
                b = R.tanh(a)
                a_again = R.exp(r_again)
                c = R.add(r, a_again)
                gv = R.add(b, c)
                R.output(gv)
            return gv

    batch = [Recompute("r", (("c",), ("a",))), Recompute("a", (("b",), ("c",)))]
    tvm.ir.assert_structural_equal(RecomputeProducers(batch)(Chain), Wanted)


def test_names_that_are_taken_are_not_used_again():
    batch = RecomputeProducers([Recompute("r", (("a",), ("b",), ("c",)))])
    again = batch(Before)
    names = [str(b.var.name) for b in again["main"].body.blocks[0].bindings]
    assert names == ["r", "a", "r_again", "b", "r_again_1", "c", "gv"]


@pytest.mark.parametrize(
    ("rewrite", "text"),
    [
        (Recompute("no", (("a",), ("b",))), "no operator 'no' with one result"),
        (Recompute("r", (("a",), ("b",))), r"'r' is read by \['a', 'b', 'c'\], the plan says by \['a', 'b'\]"),
    ],
)
def test_a_rewrite_of_another_module_is_refused(rewrite, text):
    with pytest.raises(BadGraph, match=text):
        check_recomputes(Bindings(Before["main"]), [rewrite])


@pytest.mark.parametrize("readers", [(("a", "b"),), (("a",), ()), (("a",), ("a",))])
def test_groups_are_two_at_least_and_disjoint(readers):
    with pytest.raises(BadGraph, match="two groups or more"):
        Recompute("r", readers)


class Web(nn.Module):
    """Element-wise operators, broadcasts and reshapes that read each other, as dice say; reductions at the end."""

    def __init__(self, seed, n):
        super().__init__()
        rng = random.Random(seed)
        self.steps = [(rng.choice("rtabs"), rng.randrange(i + 1), rng.randrange(i + 1)) for i in range(n)]

    def forward(self, x):
        values = [x]
        for kind, i, j in self.steps:
            a, b = values[i], values[j]
            made = {"r": torch.relu, "t": torch.tanh, "s": lambda v: v.reshape(-1).reshape(v.shape)}.get(kind)
            values.append(made(a) if made else a + b if kind == "a" else a * b[:1])
        return tuple(v.sum(-1) for v in values[1:])


@settings(max_examples=4, deadline=None)
@given(st.integers(0, 1000), st.integers(2, 7), st.tuples(st.integers(1, 4), st.integers(1, 5)))
def test_computed_again_equals_computed_once_on_random_programs_and_shapes(seed, n, shape):
    torch.manual_seed(seed)
    x = torch.randn(shape)
    model = tvmhet.from_torch(Web(seed, n), (x,))
    prepared = prepare(model)
    graph, rng = prepared.graph, random.Random(seed)
    batch = []
    for i in cheap_producers(graph):
        names = [graph.operators[r].name for r in graph.successors(i)]
        rng.shuffle(names)
        cut = rng.randrange(1, len(names))
        batch.append(Recompute(graph.operators[i].name, (tuple(names[:cut]), tuple(names[cut:]))))
    again = rewritten(prepared, [tuple(batch)] if batch else [])
    assert len(again.graph.operators) == len(graph.operators) + len(batch)
    assert_same(plain(again.model, x), plain(model, x))
