"""Put what other Relax functions compute into `main`, where they stand for nothing but their text.

Before:  @R.function                                    After:  main(x): a = R.nn.relu(x)
         def block(x): return R.nn.relu(x)                               b = R.nn.relu(a)
         main(x):  a = block(x); b = block(a)

A function that comes to call itself is no text to put anywhere and stays; so does one that is compiled by another code
generator (the attribute "Codegen"). Runs first, since a call of a function would keep `main` in one piece.
"""

from __future__ import annotations

import tvm
from tvm import relax

from tvmhet.ir.model import ENTRY


@tvm.transform.module_pass(opt_level=0, name="tvmhet.InlineFunctions")
class InlineFunctions:
    """Inline the functions that `main` calls, and those that they call."""

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        reached = _reached(mod)
        if len(reached) == 1:
            return mod
        texts: dict[str, relax.Function] = {}
        for name in _callees_first(reached):
            known = {
                mod.get_global_var(n): texts[n] for n in reached[name] if n in texts and not _is_external(texts[n])
            }
            texts[name] = mod[name].inline_functions(known) if known else mod[name]
        if ENTRY not in texts or texts[ENTRY].same_as(mod[ENTRY]):
            return mod
        out = mod.clone()
        out.update_func(out.get_global_var(ENTRY), texts[ENTRY])
        return out


def _reached(mod: tvm.IRModule) -> dict[str, tuple[str, ...]]:
    """Return which Relax functions each calls, of those that `main` comes to call."""
    relaxed = {g.name_hint: f for g, f in mod.functions_items() if isinstance(f, relax.Function)}
    found: dict[str, tuple[str, ...]] = {}
    ready = [ENTRY]
    while ready:
        caller = ready.pop()
        if caller not in found:
            found[caller] = tuple(n for n in dict.fromkeys(callees(relaxed[caller])) if n in relaxed)
            ready += found[caller]
    return found


def _callees_first(reached: dict[str, tuple[str, ...]]) -> list[str]:
    """Return functions with those that they call before them, without those that come to call themselves."""
    import networkx as nx  # 0.2 s, and modules of several functions are rare

    calls = nx.DiGraph(reached)
    rings = [c for c in nx.strongly_connected_components(calls) if len(c) > 1]
    calls.remove_nodes_from({n for ring in rings for n in ring} | {n for n in calls if calls.has_edge(n, n)})
    return list(reversed(list(nx.topological_sort(calls))))


def callees(func: relax.Function) -> list[str]:
    """Return the names of the functions that `func` calls, in order, as often as it does."""
    found: list[str] = []

    def visit(expr: relax.Expr) -> None:
        if isinstance(expr, relax.Call) and isinstance(expr.op, tvm.ir.GlobalVar):
            found.append(expr.op.name_hint)

    relax.analysis.post_order_visit(func, visit)
    return found


def _is_external(func: relax.Function) -> bool:
    return bool(func.attrs and "Codegen" in func.attrs)
