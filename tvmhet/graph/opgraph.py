"""The operator graph every later layer works on: operators, the tensors between them, parameters apart.

        x ──► conv ──t0──► add ──t1──► relu ──t2──► (output)
               ▲            ▲
               w (param)    b (param)

Operators are in a topological order and named uniquely. Nothing here knows about Relax.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tvmhet.errors import BadGraph

if TYPE_CHECKING:
    import networkx as nx


class PatternKind(enum.IntEnum):
    """TVM's fusion pattern kinds (relay/relax OpPatternKind), in its own numbering."""

    ELEM_WISE = 0
    BROADCAST = 1
    INJECTIVE = 2
    COMM_REDUCE = 3
    OUT_EWISE_FUSABLE = 4
    TUPLE = 7
    OPAQUE = 8


@dataclass(frozen=True, slots=True)
class Tensor:
    """One value of fixed shape. `producer` is an operator index, or -1 for a model input, a parameter or a constant."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    producer: int
    consumers: tuple[int, ...]  # operator indices, ascending, each once
    is_param: bool = False
    is_output: bool = False


@dataclass(frozen=True, slots=True)
class Operator:
    """One Relax operator call.

    `inputs` and `outputs` are tensor indices in argument order. `flop` counts arithmetic of the legalised operator;
    `read_bytes` and `write_bytes` its tensors, each once. `family` is the operator's Relax name without prefix.
    Operators with equal, non-empty `signature` compute the same on tensors of the same shapes and dtypes.
    """

    name: str
    family: str
    attrs: Mapping[str, Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    flop: float
    read_bytes: int
    write_bytes: int
    pattern: PatternKind
    signature: str = ""


@dataclass(frozen=True, slots=True)
class OpGraph:
    """Operators in topological order and the tensors between them."""

    operators: tuple[Operator, ...]
    tensors: tuple[Tensor, ...]
    inputs: tuple[int, ...]  # tensor indices of the model's inputs, in call order
    outputs: tuple[int, ...]  # tensor indices of the results, in order; one may be listed twice
    num_states: int = 0  # so many inputs and results, the last ones, are what one call hands on to the next
    num_sessions: int = 1  # how many sequences of calls have states of their own
    _index: dict[str, int] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        for i, op in enumerate(self.operators):
            if op.name in self._index:
                raise BadGraph(f"two operators are named {op.name!r}", "give every operator its own name")
            self._index[op.name] = i
            for t in op.inputs:
                if self.tensors[t].producer >= i:
                    raise BadGraph(
                        f"operator {op.name!r} reads tensor {self.tensors[t].name!r}, which is made later",
                        "list operators in topological order; a cycle cannot be placed",
                    )

    def index(self, name: str) -> int:
        """Return the position of the operator called `name`; KeyError if there is none."""
        return self._index[name]

    @property
    def given(self) -> tuple[int, ...]:
        """Tensor indices of what the caller gives: the inputs that are no states."""
        return self.inputs[: len(self.inputs) - self.num_states]

    @property
    def returned(self) -> tuple[int, ...]:
        """Tensor indices of what the caller gets: the results that are no states."""
        return self.outputs[: len(self.outputs) - self.num_states]

    @property
    def states(self) -> tuple[tuple[int, int], ...]:
        """Tensor indices of each state: what it is in a call, and what it is in the next."""
        n = self.num_states
        return tuple(zip(self.inputs[-n:], self.outputs[-n:], strict=True)) if n else ()

    def predecessors(self, op: int) -> tuple[int, ...]:
        """Operators whose results `op` reads, ascending, each once."""
        return tuple(sorted({p for t in self.operators[op].inputs if (p := self.tensors[t].producer) >= 0}))

    def successors(self, op: int) -> tuple[int, ...]:
        """Operators that read a result of `op`, ascending, each once."""
        return tuple(sorted({c for t in self.operators[op].outputs for c in self.tensors[t].consumers}))

    def param_bytes(self, ops: frozenset[int] | set[int]) -> int:
        """Bytes of the parameters that `ops` read, each counted once."""
        params = {t for o in ops for t in self.operators[o].inputs if self.tensors[t].is_param}
        return sum(self.tensors[t].size_bytes for t in params)

    def to_networkx(self) -> nx.DiGraph:
        """Return a DiGraph: one node per operator name, one edge per producer-consumer pair with `size_bytes`."""
        import networkx as nx  # 0.2 s, and for users only

        g = nx.DiGraph()
        for op in self.operators:
            g.add_node(
                op.name,
                family=op.family,
                attrs=dict(op.attrs),
                flop=op.flop,
                read_bytes=op.read_bytes,
                write_bytes=op.write_bytes,
                pattern=op.pattern.name,
            )
        for t in self.tensors:
            if t.producer < 0:
                continue
            for c in t.consumers:
                u, v = self.operators[t.producer].name, self.operators[c].name
                known = g.get_edge_data(u, v, {"size_bytes": 0, "tensors": ()})
                g.add_edge(u, v, size_bytes=known["size_bytes"] + t.size_bytes, tensors=(*known["tensors"], t.name))
        return g
