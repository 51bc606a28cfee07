"""What of an exported program is no arithmetic on tensors: left out where it has no effect, refused where it has.

inputs that are numbers or None   ──►  left out: the program holds the example's values
results that are None or numbers  ──►  left out: `torch_results` has them
random numbers, no results        ──►  one error
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.utils._pytree import tree_structure

from tvmhet.errors import BadModel, UnsupportedOperator
from tvmhet.ir.fx_node import describe

_RANDOM = ("rand", "randn", "randint", "randperm", "bernoulli", "multinomial", "normal", "uniform", "exponential")


def with_tensors_only(program: torch.export.ExportedProgram) -> None:
    """Leave tensors as the program's only inputs and results, in place. Raises BadModel and UnsupportedOperator."""
    _check_calls(program)
    _drop_constant_inputs(program)
    _drop_constant_results(program)
    _call_by_name(program)


def _check_calls(program: torch.export.ExportedProgram) -> None:
    for node in program.graph.nodes:
        packet = getattr(node.target, "overloadpacket", None)
        name = str(getattr(packet, "__name__", ""))
        if name.removesuffix("_like") in _RANDOM and any(True for _ in node.users):
            raise UnsupportedOperator(
                f"operator {describe(node)} draws random numbers at every call",
                "draw them outside and make them an input, or put the model into eval mode",
            )


def _drop_constant_inputs(program: torch.export.ExportedProgram) -> None:
    signature, graph = program.graph_signature, program.graph
    kept = []
    for spec in signature.input_specs:
        constant = spec.kind is InputKind.USER_INPUT and isinstance(spec.arg, ConstantArgument)
        nodes = [n for n in graph.find_nodes(op="placeholder") if n.name == spec.arg.name] if constant else []
        if not constant or any(n.users for n in nodes):
            kept.append(spec)
        for node in nodes:
            if not node.users:
                graph.erase_node(node)
    signature.input_specs[:] = kept


def _call_by_name(program: torch.export.ExportedProgram) -> None:
    """Make the program's own account of a call that of the inputs and results it has now, by name and side by side.

    torch reads it where the program is written out once more.
    """
    entry = program.module_call_graph[0]
    assert entry.signature is not None
    given = [n for n in program.graph.find_nodes(op="placeholder") if n.name in program.graph_signature.user_inputs]
    program._example_inputs = (), {node.name: node.meta["val"] for node in given}
    entry.signature = replace(
        entry.signature,
        in_spec=tree_structure(program._example_inputs),
        out_spec=tree_structure((0,) * len(program.graph_signature.user_outputs)),
        forward_arg_names=None,
    )


def _drop_constant_results(program: torch.export.ExportedProgram) -> None:
    signature, output = program.graph_signature, program.graph.output_node()
    results: list[Any] = list(output.args[0])
    pairs = [(r, s) for r, s in zip(results, signature.output_specs, strict=True) if isinstance(r, fx.Node)]
    if not pairs:
        raise BadModel("the model returns no tensor", "return at least one")
    output.args = (tuple(r for r, _ in pairs),)
    signature.output_specs[:] = [s for _, s in pairs]
