"""Put the nodes of an ONNX If whose condition is known into the graph.

Before:  c = true;  y = If(c) { z = Squeeze(x); z } else { x }          After:  y/z = Squeeze(x);  y = Identity(y/z)

Exporters of scripted models leave such branches on the rank of a tensor. Names that the branch makes get a prefix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx


def chosen_branch(node: onnx.NodeProto, condition: bool) -> list[onnx.NodeProto]:
    """Return the nodes of the branch that `condition` takes; its initializers come as Constant nodes."""
    import onnx

    wanted = "then_branch" if condition else "else_branch"
    branch = next(a.g for a in node.attribute if a.name == wanted)
    prefix = f"{next(filter(None, node.output))}/"
    constants = [onnx.helper.make_node("Constant", [], [i.name], value=i) for i in branch.initializer]
    inner = [*constants, *branch.node]
    made = {name for n in inner for name in n.output if name}
    nodes = [renamed(n, {name: prefix + name for name in made}) for n in inner]
    for result, name in zip(branch.output, node.output, strict=True):
        if not name:
            continue
        source = prefix + result.name if result.name in made else result.name
        nodes.append(onnx.helper.make_node("Identity", [source], [name]))
    return nodes


def renamed(node: Any, names: dict[str, str]) -> onnx.NodeProto:
    """Return a copy that reads and makes what `names` calls otherwise, inside its own branches and bodies too.

    What these call the same themselves keeps its name inside.
    """
    import onnx

    out = onnx.NodeProto()
    out.CopyFrom(node)
    out.input[:] = [names.get(i, i) for i in node.input]
    out.output[:] = [names.get(o, o) for o in node.output]
    for attribute in out.attribute:
        for graph in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])):
            own = {v.name for v in (*graph.input, *graph.initializer)} | {o for n in graph.node for o in n.output}
            outer = {old: new for old, new in names.items() if old not in own}
            inner = [renamed(n, outer) for n in graph.node]
            del graph.node[:]
            graph.node.extend(inner)
            for result in graph.output:
                result.name = outer.get(result.name, result.name)
    return out
