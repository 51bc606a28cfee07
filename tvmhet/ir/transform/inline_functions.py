"""Put what other Relax functions compute into `main`, where they stand for nothing but their text.

Before:  @R.function                                    After:  main(x): a = R.nn.relu(x)
         def block(x): return R.nn.relu(x)                               b = R.nn.relu(a)
         main(x):  a = block(x); b = block(a)

A function that comes to call itself is no text to put anywhere and stays; so does one that is compiled by another code
generator (the attribute "Codegen"). Runs first, since a call of a function would keep `main` in one piece.
"""

from __future__ import annotations

import networkx as nx
import tvm
from tvm import relax

from tvmhet.ir.model import ENTRY


@tvm.transform.module_pass(opt_level=0, name="tvmhet.InlineFunctions")
class InlineFunctions:
    """Inline the functions that `main` calls, and those that they call."""

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        calls = _reached(mod)
        calls.remove_nodes_from(
            [n for c in nx.strongly_connected_components(calls) for n in c if _calls_itself(n, c, calls)]
        )
        if ENTRY not in calls:
            return mod
        texts: dict[str, relax.Function] = {}
        for name in reversed(list(nx.topological_sort(calls))):  # what is called comes before its callers
            known = {mod.get_global_var(n): texts[n] for n in calls.successors(name) if not _is_external(texts[n])}
            texts[name] = mod[name].inline_functions(known) if known else mod[name]
        if texts[ENTRY].same_as(mod[ENTRY]):
            return mod
        out = mod.clone()
        out.update_func(out.get_global_var(ENTRY), texts[ENTRY])
        return out


def _reached(mod: tvm.IRModule) -> nx.DiGraph[str]:
    """Return which Relax function calls which, of those that `main` comes to call."""
    relaxed = {g.name_hint: f for g, f in mod.functions_items() if isinstance(f, relax.Function)}
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_node(ENTRY)
    ready = [ENTRY]
    while ready:
        caller = ready.pop()
        for callee in dict.fromkeys(callees(relaxed[caller])):
            if callee in relaxed:
                if callee not in graph:
                    ready.append(callee)
                graph.add_edge(caller, callee)
    return graph


def callees(func: relax.Function) -> list[str]:
    """Return the names of the functions that `func` calls, in order, as often as it does."""
    found: list[str] = []

    def visit(expr: relax.Expr) -> None:
        if isinstance(expr, relax.Call) and isinstance(expr.op, tvm.ir.GlobalVar):
            found.append(expr.op.name_hint)

    relax.analysis.post_order_visit(func, visit)
    return found


def _calls_itself(name: str, group: set[str], calls: nx.DiGraph[str]) -> bool:
    return len(group) > 1 or calls.has_edge(name, name)


def _is_external(func: relax.Function) -> bool:
    return bool(func.attrs and "Codegen" in func.attrs)
