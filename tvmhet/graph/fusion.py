"""Which operators may become one kernel: every choice that TVM's fusion rules allow, not only FuseOps' own.

A set of operators is a *legal kernel* if it is a single operator, or if `relax.transform.FuseOps`, given the set
alone, makes one group of it. Spelled out, with the pattern kinds of `PatternKind`:

- one operator, the sink, is read outside; the results of all others are read inside only (so the set is convex);
- OPAQUE and TUPLE operators stay alone; OUT_EWISE_FUSABLE (matmul, convolution) is never the sink of a larger set,
  occurs once at most, takes no producers, and only ELEM_WISE operators follow it;
- COMM_REDUCE is the sink or alone, and takes ELEM_WISE and BROADCAST producers;
- ELEM_WISE and BROADCAST join any later ELEM_WISE, BROADCAST, INJECTIVE or COMM_REDUCE operator in which all their
  readers meet, also one that already closes a matmul (the other operand of a residual add);
- INJECTIVE joins such an operator only while nothing in its group is a reduction or a matmul, unless it lies between
  an ELEM_WISE or BROADCAST operator and the place where that one's readers meet.

        conv ── add ── relu ── conv     {conv} {add} {relu} {exp} {add relu} {conv add} {exp add} {conv add relu}
        exp ────┘                       {exp add relu} {conv exp add} {conv exp add relu}

A producer that is read outside its kernel is never recomputed here, as in FuseOps. Kernels beyond these rules:
`rows.py`, `operands.py`, `prologues.py`, `pooled.py`, `attention.py`, `bags.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from tvmhet._passes import passes_func
from tvmhet.errors import BadGraph
from tvmhet.graph.opgraph import OpGraph

FUSE_OPS_MAX_DEPTH = 256  # TVM's own limit (kMaxFusedOps)
"""`relax.FuseOps.max_depth`'s default: TVM's limit on operators in one group."""

_MIN_QUOTA = 16  # sets examined per last operator, however many operators there are


@dataclass(frozen=True, slots=True)
class Branch:
    """One branch of a concurrent kernel: its kernels as operators, in execution order, and its work in FLOP."""

    kernels: tuple[tuple[int, ...], ...]
    work: float


@dataclass(frozen=True, slots=True)
class LegalKernel:
    """Operators (indices, ascending) that one kernel may compute, and its maker: "tvm", "library" or "concurrent".

    `branches` are those of a concurrent kernel (`tvmhet.graph.concurrent`). Of a kernel for `cpu_only` one PrimFunc
    would become several on a GPU.
    """

    ops: tuple[int, ...]
    maker: str = "tvm"
    branches: tuple[Branch, ...] = ()
    cpu_only: bool = False

    def __post_init__(self) -> None:
        if not self.ops or any(a >= b for a, b in zip(self.ops, self.ops[1:], strict=False)):
            raise BadGraph(f"kernel operators {self.ops} are not ascending and distinct", "sort them")

    @property
    def sink(self) -> int:
        """The operator whose result is read outside."""
        return self.ops[-1]


@dataclass(frozen=True, slots=True)
class LegalKernels(Sequence[LegalKernel]):
    """The legal kernels of a graph in lexicographic order of their operators.

    `truncated` counts sets of operators that were found but not examined because of the limit (they may hold further
    legal kernels). Zero: the list is complete up to `max_ops`.
    """

    kernels: tuple[LegalKernel, ...]
    truncated: int = 0

    @overload
    def __getitem__(self, index: int) -> LegalKernel: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[LegalKernel, ...]: ...
    def __getitem__(self, index: int | slice) -> LegalKernel | tuple[LegalKernel, ...]:
        return self.kernels[index]

    def __len__(self) -> int:
        return len(self.kernels)

    def __iter__(self) -> Iterator[LegalKernel]:
        return iter(self.kernels)


def legal_kernels(graph: OpGraph, *, max_ops: int = 32, limit: int = 20_000) -> LegalKernels:
    """Return every legal kernel of at most `max_ops` operators: all single operators, and all fused sets.

    About `limit` sets are examined in all, shared evenly among the operators a set may end in (16 each at least),
    small sets first; what was left out is counted in the result. FuseOps' own groups are always among the result,
    whatever the limits. Deterministic. BadGraph if a limit is not positive.
    """
    if max_ops < 1 or limit < 1:
        raise BadGraph(f"max_ops={max_ops} and limit={limit} must be positive", "leave them at their defaults")
    quota = max(_MIN_QUOTA, limit // max(1, len(graph.operators)))
    fused, unexamined = passes_func("tvmhet.LegalKernels")(*_arrays(graph), max_ops, quota, FUSE_OPS_MAX_DEPTH)
    groups = [(i,) for i in range(len(graph.operators))] + [tuple(int(o) for o in ops) for ops in fused]
    return LegalKernels(tuple(LegalKernel(ops) for ops in sorted(groups)), truncated=int(unexamined))


def fuse_ops_groups(graph: OpGraph) -> tuple[LegalKernel, ...]:
    """Return the partition that TVM's own FuseOps chooses, in the order of the groups' first operators."""
    roots = passes_func("tvmhet.GreedyFusion")(*_arrays(graph), FUSE_OPS_MAX_DEPTH)
    members: dict[int, list[int]] = {}
    for op, root in enumerate(roots):
        members.setdefault(int(root), []).append(op)
    return tuple(LegalKernel(ops) for ops in sorted(tuple(ops) for ops in members.values()))


def _arrays(graph: OpGraph) -> tuple[list[int], list[list[int]], list[bool], list[bool]]:
    """Return kinds, consumers, whether a result leaves the model, and whether there are several results."""
    tensors = graph.tensors
    return (
        [int(op.pattern) for op in graph.operators],
        [list(graph.successors(i)) for i in range(len(graph.operators))],
        [any(tensors[t].is_output for t in op.outputs) for op in graph.operators],
        [len(op.outputs) > 1 for op in graph.operators],
    )
