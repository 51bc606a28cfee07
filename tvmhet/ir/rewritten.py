"""A prepared model with a plan's rewrites applied: what the plan's kernels and stages speak of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import tvm

from tvmhet.errors import BadGraph
from tvmhet.graph.rewrites import Batch, Merge, Recompute
from tvmhet.ir.bindings import Bindings
from tvmhet.ir.extract import NotAGraph, extract
from tvmhet.ir.prepare import Prepared
from tvmhet.ir.transform.fold_parameters import fold_parameters
from tvmhet.ir.transform.merge_products import MergeProducts, check_merges
from tvmhet.ir.transform.recompute_producers import RecomputeProducers, check_recomputes


def rewritten(prepared: Prepared, batches: Sequence[Batch]) -> Prepared:
    """Return the model with batches of rewrites applied in order; its key stays that of the module that was given.

    Raises BadGraph where a rewrite does not fit the module.
    """
    if not batches:
        return prepared
    model = replace(prepared.model, mod=prepared.mod)
    for batch in batches:
        merges = tuple(r for r in batch if isinstance(r, Merge))
        again = tuple(r for r in batch if isinstance(r, Recompute))
        bindings = Bindings(model.mod["main"])  # checked here: what a pass raises reaches the caller as a RuntimeError
        if merges:
            check_merges(bindings, merges)
            model = fold_parameters(replace(model, mod=_apply(MergeProducts(merges), model.mod)))
        else:
            check_recomputes(bindings, again)
            model = replace(model, mod=_apply(RecomputeProducers(again), model.mod))
    graph = extract(model.mod, like=prepared.graph)
    if isinstance(graph, NotAGraph):
        raise BadGraph(f"the rewritten module is no graph: {graph.reason}", "this is a defect of a rewrite")
    return Prepared(model, model.mod, graph, "", prepared.key)


def _apply(rewrite: object, mod: tvm.IRModule) -> tvm.IRModule:
    return tvm.transform.Sequential([rewrite])(mod)
