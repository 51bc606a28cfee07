"""Model -> what planning and compiling share: the named module, its operator graph, a key that binds plans to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tvm

from tvmhet import _tvm
from tvmhet.errors import NotSupported
from tvmhet.graph.kernel_key import graph_key
from tvmhet.graph.opgraph import OpGraph
from tvmhet.ir.bindings import Bindings
from tvmhet.ir.extract import NotAGraph, extract
from tvmhet.ir.model import Model
from tvmhet.ir.transform.name_operators import NameOperators


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model ready to be planned.

    `graph` is None where `whole_reason` says why the model cannot be cut. `key` identifies the module: names,
    operators and wiring for a graph, the structural hash otherwise.
    """

    model: Model
    mod: tvm.IRModule
    graph: OpGraph | None
    whole_reason: str
    key: str

    @property
    def operator_graph(self) -> OpGraph:
        """`graph`, where there is one. Raises NotSupported with the reason for a model that cannot be cut."""
        if self.graph is None:
            raise NotSupported(f"the model has no operator graph: {self.whole_reason}", "bind its shapes: bind_shapes=")
        return self.graph

    @property
    def params(self) -> Mapping[str, Any]:
        """Parameter values by name."""
        return self.model.params


def prepare(model: Model) -> Prepared:
    """Name the operators of a normalised model and extract its graph."""
    if model.whole_reason:
        return _whole(model, model.whole_reason)
    try:
        Bindings(model.mod["main"])
    except NotSupported as error:
        return _whole(model, error.problem)
    mod = tvm.transform.Sequential([NameOperators()])(model.mod)
    graph = extract(mod)
    if isinstance(graph, NotAGraph):
        return _whole(model, graph.reason)
    if not graph.operators:
        return _whole(model, "the module computes nothing")
    return Prepared(model, mod, graph, "", graph_key(graph))


def _whole(model: Model, reason: str) -> Prepared:
    digest = _tvm.structural_hash(model.mod) & (2**64 - 1)
    return Prepared(model, model.mod, None, reason, f"whole-{digest:016x}")
