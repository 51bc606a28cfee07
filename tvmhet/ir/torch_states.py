"""Buffers that a call changes, of an exported program: inputs and results, which later calls hand on to each other.

    self.cache.index_copy_(2, at, k)         main(x, cache) -> (y, index_copy(cache, 2, at, k))
    return attend(x, self.cache)      ──►         ╰─ the last inputs are states, the last results what they become

A cache of keys and values, a count of calls, the last frame of a video. What batch norm notes of its batches while it
trains is refused: who meant to train would ask for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import InputKind, OutputKind

from tvmhet.errors import BadModel
from tvmhet.ir.model import State, from_torch_tensor


def states_as_inputs(program: torch.export.ExportedProgram) -> tuple[State, ...]:
    """Make them inputs and results, in place, and return them in that order. Raises BadModel for what is no buffer."""
    signature, graph = program.graph_signature, program.graph
    results = list(zip(graph.output_node().args[0], signature.output_specs, strict=True))
    for _, spec in results:
        if spec.kind is OutputKind.PARAMETER_MUTATION:
            raise BadModel(f"a call changes the model's parameter {spec.target!r}", "make it a buffer")
    changed = [(node, spec) for node, spec in results if spec.kind is OutputKind.BUFFER_MUTATION]
    if not changed:
        return ()
    if noted := [spec.target for node, spec in changed if _is_of_batch_norm(node)]:
        raise BadModel(
            f"a call changes the model's buffer {noted[0]!r}" + f" and {len(changed) - 1} more" * (len(changed) > 1),
            "batch norm notes what it sees while it trains: put the model into eval mode",
        )
    # the program that this one was written out from has the same dicts
    program._state_dict, program._constants = dict(program.state_dict), dict(program.constants)
    states = []
    for node, out in changed:
        (given,) = (s for s in signature.input_specs if s.kind is InputKind.BUFFER and s.target == out.target)
        states.append(State(str(out.target), from_torch_tensor(_taken(program, str(out.target)).clone())))
        _move_last(graph, given.arg.name)
        signature.input_specs.remove(given)
        given.kind, given.target, given.persistent = InputKind.USER_INPUT, None, None
        signature.input_specs.append(given)
        results.remove((node, out))
        out.kind, out.target = OutputKind.USER_OUTPUT, None
        results.append((node, out))
    graph.output_node().args = (tuple(node for node, _ in results),)
    signature.output_specs[:] = [spec for _, spec in results]
    program.graph_module.recompile()
    return tuple(states)


def _is_of_batch_norm(node: object) -> bool:
    """Whether a value is a part of what a batch norm returns."""
    maker = node.args[0] if isinstance(node, fx.Node) and node.args else None
    return isinstance(maker, fx.Node) and "batch_norm" in str(maker.target)


def _taken(program: torch.export.ExportedProgram, name: str) -> torch.Tensor:
    """Take the value of a buffer out of the program."""
    value = _value_of(program, name).detach()
    (program.state_dict if name in program.state_dict else program.constants).pop(name)
    return value


def _value_of(program: torch.export.ExportedProgram, name: str | None) -> torch.Tensor:
    found = program.state_dict[str(name)] if name in program.state_dict else program.constants[str(name)]
    assert isinstance(found, torch.Tensor)
    return found


def _move_last(graph: fx.Graph, name: str) -> None:
    """Put a placeholder behind all others."""
    placeholders = graph.find_nodes(op="placeholder")
    (node,) = (p for p in placeholders if p.name == name)
    if node is not placeholders[-1]:
        placeholders[-1].append(node)


def changed_buffers(program: torch.export.ExportedProgram) -> set[str]:
    """Return the names of the buffers that a call changes, of a program as torch.export returns it."""
    specs = {s.arg.name: s for s in program.graph_signature.input_specs if s.kind is InputKind.BUFFER}
    changed = {root.name for node in program.graph.nodes for root in _changed_by(node)}
    return {str(specs[name].target) for name in changed & specs.keys()}


def changed_constants_as_buffers(program: torch.export.ExportedProgram) -> None:
    """Make buffers of the tensors that a call changes and that are attributes of some object, in place.

    One that is a buffer of the module as well, under another name, becomes that buffer.
    """
    signature, graph = program.graph_signature, program.graph
    specs = {s.arg.name: s for s in signature.input_specs}
    nodes = {n.name: n for n in graph.find_nodes(op="placeholder")}
    changed = {root.name for node in graph.nodes for root in _changed_by(node)}
    changed = {name for name in changed if specs[name].kind is InputKind.CONSTANT_TENSOR}
    if not changed:
        return
    program._state_dict, program._constants = dict(program.state_dict), dict(program.constants)
    buffers = {place_of_tensor(_value_of(program, s.target)): s for s in specs.values() if s.kind is InputKind.BUFFER}
    for spec in [s for s in signature.input_specs if s.arg.name in changed]:
        value = program.constants.pop(str(spec.target))
        if (buffer := buffers.get(place_of_tensor(value))) is None:
            program.constants[str(spec.target)] = value
            spec.kind, spec.persistent = InputKind.BUFFER, False
            continue
        nodes[spec.arg.name].replace_all_uses_with(nodes[buffer.arg.name])
        graph.erase_node(nodes[spec.arg.name])
        signature.input_specs.remove(spec)
    program.graph_module.recompile()


def place_of_tensor(value: torch.Tensor) -> tuple[Any, ...]:
    """Where a tensor lies, also one of the meta device."""
    return value.untyped_storage()._cdata, value.storage_offset(), tuple(value.shape), value.dtype


def _changed_by(node: fx.Node) -> list[fx.Node]:
    """Return the inputs of the program that a call writes into, directly or through views."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or node.target is torch.ops.aten.detach_.default:
        return []
    written = [a for a, s in zip(node.args, schema.arguments, strict=False) if s.alias_info and s.alias_info.is_write]
    return [root for a in written if isinstance(a, fx.Node) and (root := _seen(a)).op == "placeholder"]


def _seen(node: fx.Node) -> fx.Node:
    """Return what a value is a view of."""
    while node.op == "call_function":
        schema = getattr(node.target, "_schema", None)
        first = node.args[0] if node.args else None
        if (
            schema is None
            or not schema.arguments
            or not schema.arguments[0].alias_info
            or not isinstance(first, fx.Node)
        ):
            break
        node = first
    return node
