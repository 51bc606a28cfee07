"""Compute an operator again for some of its readers, as a plan decided.

Before:  r = R.nn.relu(x)                 After:  r       = R.nn.relu(x)
         a = R.exp(r)                             a       = R.exp(r)
         b = R.tanh(r)                            r_again = R.nn.relu(x)
                                                  b       = R.tanh(r_again)

A copy stands right before the first operator that reads it. The function's result reads the original. Runs after
NameOperators, before FuseByPlan, which then sees ordinary operators. Everything else is untouched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tvm
from tvm import relax

from tvmhet.errors import BadGraph
from tvmhet.graph.rewrites import Recompute, copy_names
from tvmhet.ir.bindings import Bindings, Emitter, readers_of, rebuild_main


@tvm.transform.module_pass(opt_level=0, name="tvmhet.RecomputeProducers")
class RecomputeProducers:
    """Apply a batch of `Recompute`s to `main`. Raises BadGraph if their readers are not those of the operators."""

    def __init__(self, rewrites: Sequence[Recompute]) -> None:
        self.rewrites = tuple(rewrites)

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        bindings = Bindings(mod["main"])
        copies = _Copies(bindings, self.rewrites)

        def emit(emitter: Emitter, env: dict[str, relax.Expr]) -> None:
            for call in bindings.calls:
                seen = copies.emit_for(call, emitter, env)
                env |= emitter.emit(bindings.rebuild(call, seen), bindings.results[call], call)

        return rebuild_main(mod, bindings, emit)


class _Copies:
    """Which copy of each operator a call reads; copies are emitted when first read."""

    def __init__(self, bindings: Bindings, rewrites: Sequence[Recompute]) -> None:
        self._bindings = bindings
        self._made: dict[str, relax.Expr] = {}
        self._read: dict[str, dict[str, str]] = {}  # call -> operator -> its copy
        check_recomputes(bindings, rewrites)
        names = copy_names(rewrites, {*bindings.calls, *bindings.types})
        for rewrite, copies in zip(rewrites, names, strict=True):
            for copy, readers in zip(copies[1:], rewrite.readers[1:], strict=True):
                for reader in readers:
                    self._read.setdefault(reader, {})[rewrite.op] = copy

    def emit_for(self, call: str, emitter: Emitter, env: Mapping[str, relax.Expr]) -> dict[str, relax.Expr]:
        """Return the values that a call reads, its copies among them."""
        seen = dict(env)
        for op, copy in self._read.get(call, {}).items():
            if copy not in self._made:
                value = self._bindings.rebuild(op, self.emit_for(op, emitter, env))
                self._made[copy] = emitter.builder.emit(value, name_hint=copy)
            seen[op] = self._made[copy]
        return seen


def check_recomputes(bindings: Bindings, rewrites: Sequence[Recompute]) -> None:
    """Raise BadGraph unless each rewrite names an operator with one result, no other does, and exactly its readers."""
    readers = readers_of(bindings)
    if len({rewrite.op for rewrite in rewrites}) < len(rewrites):
        raise BadGraph("a batch computes one operator again twice", "put its readers into one rewrite")
    for rewrite in rewrites:
        op = rewrite.op
        if op not in bindings.calls or bindings.results[op] != op:
            raise BadGraph(f"no operator {op!r} with one result is there to compute again", "plan this module again")
        named = {r for group in rewrite.readers for r in group}
        real = readers.get(op, frozenset())
        if named != real:
            raise BadGraph(f"{op!r} is read by {sorted(real)}, the plan says by {sorted(named)}", "plan again")
