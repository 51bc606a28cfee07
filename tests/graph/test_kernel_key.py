"""Kernel keys: equal for kernels that compute the same, whatever their names; graph keys: for one module only."""

import dataclasses

import pytest

from tvmhet.errors import BadGraph
from tvmhet.graph.kernel_key import graph_key, kernel_key
from tvmhet.graph.opgraph import Operator, OpGraph, PatternKind, Tensor


def graph(signatures=("a", "b", "a", "b"), prefix="op", skip=False):
    """Two equal chains one after the other: x -> s0 -> s1 -> s2 -> s3; `skip` lets s3 read the result of s0 too."""
    n = len(signatures)
    reads = [(i, *((1,) if skip and i == n - 1 else ())) for i in range(n)]
    readers = [tuple(u for u in range(n) if t in reads[u]) for t in range(n + 1)]
    tensors = tuple(
        Tensor(f"{prefix}_t{t}", (4,), "float32", 16, t - 1, readers[t], is_output=t == n) for t in range(n + 1)
    )
    operators = tuple(
        Operator(f"{prefix}{i}", "exp", {}, reads[i], (i + 1,), 1.0, 16, 16, PatternKind.ELEM_WISE, s)
        for i, s in enumerate(signatures)
    )
    return OpGraph(operators, tensors, (0,), (n,))


def test_equal_kernels_have_one_key_in_any_place_and_any_model():
    g, other = graph(), graph(prefix="elsewhere")
    assert kernel_key(g, (0, 1), "tvm") == kernel_key(g, (2, 3), "tvm") == kernel_key(other, (0, 1), "tvm")
    assert len(kernel_key(g, (0,), "tvm")) == 32


def test_maker_signature_and_extent_tell_kernels_apart():
    g = graph()
    keys = [
        kernel_key(g, (0, 1), "tvm"), kernel_key(g, (0, 1), "library"), kernel_key(g, (0,), "tvm"),
        kernel_key(g, (1, 2), "tvm"), kernel_key(graph(("a", "c", "a", "b")), (0, 1), "tvm"),
    ]  # fmt: skip
    assert len(set(keys)) == len(keys)


def test_wiring_and_live_outs_tell_kernels_apart():
    plain, skip = graph(), graph(skip=True)
    assert kernel_key(plain, (0, 1), "tvm") != kernel_key(skip, (0, 1), "tvm")  # s0's result leaves the kernel
    assert kernel_key(plain, (2, 3), "tvm") != kernel_key(skip, (2, 3), "tvm")  # s3 reads one tensor more
    assert kernel_key(plain, (1,), "tvm") == kernel_key(skip, (1,), "tvm")


def test_an_operator_without_a_signature_has_no_key():
    with pytest.raises(BadGraph, match="operator 'op1' has no signature"):
        kernel_key(graph(("a", "", "a", "b")), (0, 1), "tvm")


def test_a_graphs_key_is_of_names_signatures_wiring_and_shapes():
    g = graph()
    assert graph_key(g) == graph_key(graph())
    tensors = (*g.tensors[:-1], dataclasses.replace(g.tensors[-1], shape=(5,)))
    others = [
        graph(prefix="other"), graph(("a", "b", "a", "c")), graph(skip=True),
        OpGraph(g.operators, tensors, g.inputs, g.outputs),
        OpGraph(g.operators, g.tensors, g.inputs, (*g.outputs, 1)),
    ]  # fmt: skip
    assert len({graph_key(x) for x in (g, *others)}) == 6
