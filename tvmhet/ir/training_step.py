"""Read a training step as two halves: what the loss and the new buffers need is forward, the rest is backward.

conv ─► relu ─► matmul ─► loss            forward
conv' ◄ relu' ◄ matmul' ◄──┘              backward: also reads what the forward half made
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import tvm
from tvm import relax

from tvmhet.errors import BadGraph
from tvmhet.graph.kernel_key import graph_key
from tvmhet.ir.attrs import NUM_INPUT_ATTR
from tvmhet.ir.bindings import Bindings, outline
from tvmhet.ir.extract import NotAGraph, extract
from tvmhet.ir.prepare import Prepared, prepare
from tvmhet.ir.training_model import TrainingModel


@dataclass(frozen=True)
class Step:
    """A named training step. Tensors, calls and weights go by name; `gradients` by parameter, `buffers` by buffer."""

    model: TrainingModel
    prepared: Prepared
    bindings: Bindings
    forward: tuple[str, ...]
    backward: tuple[str, ...]
    loss: str
    gradients: Mapping[str, str]
    buffers: Mapping[str, str]

    @cached_property
    def forward_set(self) -> frozenset[str]:
        """The forward calls."""
        return frozenset(self.forward)

    @cached_property
    def weights(self) -> frozenset[str]:
        """Names of parameters, buffers and constants."""
        return frozenset(self.bindings.param_names[self.bindings.num_input :])

    @property
    def batch(self) -> tuple[str, ...]:
        """Names of the micro-batch's tensors: inputs, then targets."""
        return self.bindings.param_names[: self.model.num_batch]

    @property
    def noise(self) -> tuple[str, ...]:
        """Names of the noise inputs."""
        return self.bindings.param_names[self.model.num_batch : self.bindings.num_input]


def read_step(model: TrainingModel) -> Step:
    """Name the step's operators and tell forward from backward."""
    prepared = prepare(model.step)
    if prepared.graph is None:
        raise BadGraph(f"the training step cannot be cut: {prepared.whole_reason}", "give inputs of fixed shapes")
    bindings = Bindings(prepared.mod["main"])
    assert isinstance(bindings.output, tuple)
    results = [str(r) for r in bindings.output]
    first = 1 + len(model.trained)
    gradients = dict(zip(model.trained, results[1:first], strict=True))
    buffers = dict(zip(model.updated, results[first:], strict=True))
    ahead = _ancestors(bindings, [results[0], *buffers.values()])
    return Step(
        model,
        prepared,
        bindings,
        tuple(c for c in bindings.calls if c in ahead),
        tuple(c for c in bindings.calls if c not in ahead),
        results[0],
        gradients,
        buffers,
    )


def _ancestors(bindings: Bindings, tensors: Sequence[str]) -> frozenset[str]:
    """Return the calls that make `tensors`, and what those read, and so on."""
    found: set[str] = set()
    ahead = [bindings.producer[t] for t in tensors if t in bindings.producer]
    while ahead:
        call = ahead.pop()
        if call not in found:
            found.add(call)
            ahead.extend(bindings.producer[t] for t in bindings.reads(call) if t in bindings.producer)
    return frozenset(found)


def forward_prepared(step: Step) -> Prepared:
    """Return the forward half as a module to be planned: the same names; results are the loss and the new buffers."""
    bindings, model = step.bindings, step.model.step
    results = tuple(dict.fromkeys((step.loss, *step.buffers.values())))
    func = outline(bindings, step.forward, bindings.param_names, results, always_tuple=True)
    func = func.with_attr(NUM_INPUT_ATTR, bindings.num_input).with_attr("global_symbol", "main")
    mod = tvm.IRModule({g: f for g, f in step.prepared.mod.functions_items() if not isinstance(f, relax.Function)})
    mod["main"] = func
    graph = extract(mod)
    assert not isinstance(graph, NotAGraph), graph
    return Prepared(replace(model, mod=mod), mod, graph, "", graph_key(graph))
