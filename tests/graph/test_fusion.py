"""graph/fusion: the legal kernels, checked against TVM's own FuseOps on invented graphs."""

import itertools
import random
import time

import pytest

from tvmhet.errors import BadGraph
from tvmhet.graph.fusion import LegalKernel, fuse_ops_groups, legal_kernels
from tvmhet.graph.opgraph import Operator, OpGraph, PatternKind, Tensor

E, B, I, R, M, O = (  # noqa: E741
    PatternKind.ELEM_WISE,
    PatternKind.BROADCAST,
    PatternKind.INJECTIVE,
    PatternKind.COMM_REDUCE,
    PatternKind.OUT_EWISE_FUSABLE,
    PatternKind.OPAQUE,
)


def make_graph(kinds, reads, outputs=None):
    """Build a graph of one-result operators: operator i reads those in reads[i], or the model input if none."""
    n = len(kinds)
    consumers = [tuple(v for v in range(n) if u in reads[v]) for u in range(n)]
    returned = set(u for u in range(n) if not consumers[u]) | set(outputs or ())
    tensors = [Tensor("x", (4,), "float32", 16, -1, tuple(v for v in range(n) if not reads[v]))]
    tensors += [Tensor(f"t{u}", (4,), "float32", 16, u, consumers[u], is_output=u in returned) for u in range(n)]
    operators = [
        Operator(
            f"op{u}", "op", {}, tuple(1 + r for r in reads[u]) or (0,), (1 + u,), 4.0, 16, 16, PatternKind(kinds[u])
        )
        for u in range(n)
    ]
    return OpGraph(tuple(operators), tuple(tensors), (0,), tuple(1 + u for u in sorted(returned)))


def random_graph(rng, n, kinds):
    """Almost every operator is read by one to three of the next three, so that fusable sets abound."""
    reads = [set() for _ in range(n)]
    for u in range(n - 1):
        for _ in range(rng.choice((1, 1, 1, 2, 2, 3))):
            reads[rng.randint(u + 1, min(n - 1, u + 3))].add(u)
    outputs = [u for u in range(n) if rng.random() < 0.03]
    return make_graph([rng.choice(kinds) for _ in range(n)], [tuple(sorted(r)) for r in reads], outputs)


def escaping(graph, ops):
    """Return the members of `ops` whose result is read outside of it or returned."""
    tensors, inside = graph.tensors, set(ops)
    return [
        u
        for u in ops
        if any(tensors[t].is_output for t in graph.operators[u].outputs)
        or not graph.successors(u)
        or set(graph.successors(u)) - inside
    ]


def fuse_ops(graph, ops):
    """Return the groups that TVM's FuseOps makes of `ops` alone, as a set of sets of operator indices.

    FuseOps looks at each PrimFunc's `op_pattern` only, so a stand-in PrimFunc per pattern and arity will do.
    """
    from tvm import IRModule, relax
    from tvm.relax.transform import FuseOps

    shape, inside, bb = (4,), set(ops), relax.BlockBuilder()
    type_ = relax.TensorType(shape, "float32")
    outside = sorted({p for u in ops for p in graph.predecessors(u)} - inside)
    value = {p: relax.Var(f"in{p}", type_) for p in outside}
    x = relax.Var("x", type_)
    with bb.function("main", [x, *value.values()]):
        with bb.dataflow():
            for u in ops:
                args = [value[p] for p in graph.predecessors(u)] or [x]
                gvar = bb.add_func(stand_in(len(args), graph.operators[u].pattern, u), f"op{u}")
                value[u] = bb.emit(relax.call_tir(gvar, args, out_ty=type_), f"v{u}")
            outs = [bb.emit_output(value[u]) for u in escaping(graph, ops)]
        bb.emit_func_output(relax.Tuple(outs))
    fused = FuseOps()(IRModule(dict(bb.get().functions_items())))
    return groups_in(fused, set(ops))


def stand_in(num_args, pattern, op):
    """Return a PrimFunc that adds its arguments and claims to be of the given pattern."""
    from tvm import te

    args = [te.placeholder((4,), "float32") for _ in range(num_args)]
    total = te.compute((4,), lambda i: sum((a[i] for a in args[1:]), args[0][i]))
    return te.create_prim_func([*args, total]).with_attr({"op_pattern": int(pattern), "tvmhet.op": op})


def groups_in(mod, ops):
    """Return the sets of `tvmhet.op` inside each Primitive function of `mod`; the rest of `ops` are alone."""
    from tvm import relax

    found = set()
    for _, func in mod.functions_items():
        if isinstance(func, relax.Function) and func.attrs and "Primitive" in func.attrs:
            bindings = [b for block in func.body.blocks for b in block.bindings]
            found.add(frozenset(int(mod[b.value.args[0]].attrs["tvmhet.op"]) for b in bindings))
    return found | {frozenset({u}) for u in ops - set().union(*found)}


MIXES = {
    "any": (E, E, E, B, I, I, R, M),
    "matmul": (E, E, E, E, M, I),
    "reduce": (E, B, I, R),
    "injective": (E, I),
    "opaque": (E, E, M, O),
}


@pytest.mark.parametrize("mix", MIXES)
def test_every_subset_that_fuse_ops_would_fuse_and_no_other(mix):
    """The oracle is TVM itself: FuseOps on each subset alone, for all subsets of small random graphs."""
    rng, num_fused = random.Random(mix), 0
    for _ in range(20):
        graph = random_graph(rng, 7, MIXES[mix])
        ours = {frozenset(k.ops) for k in legal_kernels(graph)}
        for size in range(2, 8):
            for ops in itertools.combinations(range(7), size):
                legal = len(escaping(graph, ops)) == 1 and fuse_ops(graph, ops) == {frozenset(ops)}
                assert (frozenset(ops) in ours) == legal, (ops, graph)
                num_fused += legal
    assert num_fused > 20


@pytest.mark.parametrize("mix", MIXES)
def test_fuse_ops_groups_are_tvms(mix):
    rng = random.Random(mix)
    for _ in range(10):
        graph = random_graph(rng, 25, MIXES[mix])
        groups = {frozenset(k.ops) for k in fuse_ops_groups(graph)}
        assert groups == fuse_ops(graph, range(25))
        assert groups <= {frozenset(k.ops) for k in legal_kernels(graph, limit=1, max_ops=2)}


def test_the_picture_in_the_docstring():
    graph = make_graph([M, E, E, E, M], [(), (), (0, 1), (2,), (3,)])
    fused = {k.ops for k in legal_kernels(graph) if len(k.ops) > 1}
    assert fused == {(0, 2), (0, 2, 3), (0, 1, 2), (0, 1, 2, 3), (1, 2), (1, 2, 3), (2, 3)}


@pytest.mark.parametrize(
    ("kinds", "reads", "fuses"),
    [
        ((M, E), [(), (0,)], True),
        ((M, B), [(), (0,)], False),
        ((E, M), [(), (0,)], False),
        ((M, R), [(), (0,)], False),
        ((M, M, E), [(), (), (0, 1)], False),
        ((E, R), [(), (0,)], True),
        ((B, R), [(), (0,)], True),
        ((I, R), [(), (0,)], False),
        ((R, E), [(), (0,)], False),
        ((I, I), [(), (0,)], True),
        ((I, E, M, E), [(), (0,), (), (1, 2)], False),
        ((E, I, M, E), [(), (0,), (), (0, 1, 2)], True),
        ((O, E), [(), (0,)], False),
        ((E, O), [(), (0,)], False),
        ((E, E, E), [(), (0,), (0, 1)], True),
    ],
)
def test_one_rule_each(kinds, reads, fuses):
    whole = tuple(range(len(kinds)))
    assert (whole in {k.ops for k in legal_kernels(make_graph(kinds, reads))}) == fuses


def test_a_result_read_outside_keeps_an_operator_out():
    graph = make_graph([E, E, E], [(), (0,), (0,)])
    assert [k.ops for k in legal_kernels(graph)] == [(0,), (1,), (2,)]
    graph = make_graph([E, E], [(), (0,)], outputs=[0])
    assert [k.ops for k in legal_kernels(graph)] == [(0,), (1,)]


def test_limits_count_what_they_drop_and_keep_fuse_ops_choice():
    n = 40
    chain = make_graph([E] * n, [() if u == 0 else (u - 1,) for u in range(n)])
    cut = legal_kernels(chain, max_ops=5, limit=1)
    assert max(len(k.ops) for k in cut if len(k.ops) < n) == 5
    assert tuple(range(n)) in {k.ops for k in cut}
    assert cut.truncated == 0  # a chain of 5 has fewer than 16 suffixes
    comb = make_graph([E] * 21, [()] * 20 + [tuple(range(20))])
    cut = legal_kernels(comb, limit=1)
    assert cut.truncated > 0
    assert tuple(range(21)) in {k.ops for k in cut}
    assert len(cut) <= 21 + 16 + 1
    assert cut == legal_kernels(comb, limit=1)


@pytest.mark.parametrize("kwargs", [{"max_ops": 0}, {"limit": 0}])
def test_bad_limits(kwargs):
    with pytest.raises(BadGraph, match="must be positive"):
        legal_kernels(make_graph([E], [()]), **kwargs)


def test_a_kernel_is_ascending():
    with pytest.raises(BadGraph, match="not ascending"):
        LegalKernel((1, 1))
    assert LegalKernel((3, 5)).sink == 5


def test_a_sequence_of_kernels():
    kernels = legal_kernels(make_graph([E, E], [(), (0,)]))
    assert len(kernels) == 3 and kernels[1].ops == (0, 1) and [k.ops for k in kernels[1:]] == [(0, 1), (1,)]


def test_five_hundred_operators_in_time():
    """The shape of BERT-base: per layer matmuls with bias, reshapes, transposes, gelu and layer norm."""
    kinds, reads = [], []
    for _ in range(16):
        first = len(kinds)
        kinds += [M, E, I, I, M, E, I, I, M, E, I, I, M, E, M, M, I, I, M, E, E, M, M, E, E, E, E, E, M, E, E, M]
        local = [(-1,), (0,), (1,), (2,), (-1,), (4,), (5,), (6,), (-1,), (8,), (9,), (10,), (3, 7), (12,), (13,)]
        local += [(14, 11), (15,), (16,), (17,), (18,), (19, -1), (20,), (21,), (22,), (23,), (24,), (23, 25)]
        local += [(26,), (27,), (28,), (29, 21), (30,)]
        reads += [tuple(sorted(first + r for r in rs if first + r >= 0)) for rs in local]
    graph = make_graph(kinds, reads)
    took_s = []
    for _ in range(3):
        began = time.perf_counter()
        kernels = legal_kernels(graph)
        took_s.append(time.perf_counter() - began)
    assert kernels.truncated == 0 and len(kernels) > 1.5 * len(kinds) > 750
    assert min(took_s) < 0.3
