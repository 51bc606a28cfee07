"""The Relax functions of a stage: forward, backward, sum over replicas, norm of the gradients.

    forward(reads, weights)                    -> (outputs, new buffers, what is saved)
    backward(saved, received, weights, sums)   -> (sent, sums + gradients)
    reduce(gradients of replica 0, of 1, ...)  -> sums
    norm(sums)                                 -> sum of squares

The gradient of a table of which some rows were read is those rows, added to zeros. They are added to the sum itself.

A recomputing backward takes `reads` instead of what the forward half made, and runs what it needs of that half again.
Arguments and results go by name; `sum.<p>` is the running sum of p's gradients, `<p>.<s>` the optimiser's tensor s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import tvm
from tvm import relax

from tvmhet._tvm import Constant, structural_equal
from tvmhet.ir.attrs import NUM_INPUT_ATTR
from tvmhet.ir.bindings import Emitter
from tvmhet.ir.rewrite import op_name
from tvmhet.ir.stages import standalone
from tvmhet.ir.training_stages import StageParts
from tvmhet.ir.training_step import Step

op = relax.op


@dataclass(frozen=True, slots=True)
class StageFunction:
    """A module whose `main` takes `inputs` and returns a tuple of `outputs`; both by name.

    `calls` are the operators of the step in it, in order; sums of gradients come after them.
    """

    module: tvm.IRModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    calls: tuple[str, ...] = ()


def sum_name(parameter: str) -> str:
    """Name of the running sum of a parameter's gradients."""
    return f"sum.{parameter}"


def forward_function(step: Step, stage: StageParts, *, recompute: bool) -> StageFunction:
    """Return the forward half; what it saves is left out where it is recomputed."""
    made = {t for t in stage.saved if step.bindings.producer.get(t) in set(stage.forward)}
    buffers = tuple(t for _, t in stage.buffers)
    outs = (*stage.outputs, *buffers, *(() if recompute else (t for t in stage.saved if t in made)))
    return _outlined(step, stage.forward, tuple(dict.fromkeys(outs)), ())


def backward_function(step: Step, stage: StageParts, *, recompute: bool) -> StageFunction:
    """Return the backward half, which adds the gradients of the stage's parameters to their sums."""
    calls = (*stage.recomputed(step), *stage.backward) if recompute else stage.backward
    return _outlined(step, calls, stage.sent, stage.gradients)


def _outlined(
    step: Step, calls: Sequence[str], outs: Sequence[str], gradients: Sequence[tuple[str, str]]
) -> StageFunction:
    bindings = step.bindings
    zeros = _zeros_for_rows(step, calls, outs, gradients)
    calls = [c for c in calls if bindings.results[c] not in zeros]
    made = {t for t, maker in bindings.producer.items() if maker in set(calls)}
    reads = dict.fromkeys(t for c in calls for t in bindings.reads(c) if t not in made and t not in zeros)
    reads |= dict.fromkeys(t for t in (*outs, *(g for _, g in gradients)) if t not in made)
    weights = [t for t in reads if t in step.weights]
    ins = [*(t for t in reads if t not in step.weights), *weights]
    sums = [sum_name(p) for p, _ in gradients]
    params = [relax.Var(t, bindings.types[t]) for t in ins]
    params += [relax.Var(s, bindings.types[p]) for s, (p, _) in zip(sums, gradients, strict=True)]
    env: dict[str, relax.Expr] = dict(zip(ins, params, strict=False))
    own = dict(zip((p for p, _ in gradients), params[len(ins) :], strict=True))
    env |= {t: own[p] for t, p in zeros.items()}
    added = set(zeros.values())
    builder = relax.BlockBuilder()
    used = frozenset(t for c in calls for t in bindings.reads(c)) | {g for _, g in gradients}
    emitter = Emitter(builder, used, frozenset(outs) | {g for p, g in gradients if p in added})
    with builder.function("main", params):
        with builder.dataflow():
            for call in calls:
                env |= emitter.emit(bindings.rebuild(call, env), bindings.results[call], call)
            totals = [
                env[g] if p in added else builder.emit_output(op.add(own[p], env[g]), name_hint=f"{p}_sum")
                for p, g in gradients
            ]
        builder.emit_func_output(relax.Tuple([*(env[t] for t in outs), *totals]))
    func = builder.get()["main"].with_attr(NUM_INPUT_ATTR, len(ins) - len(weights))
    mod = standalone(step.prepared.mod, func)
    return StageFunction(mod, (*ins, *sums), (*outs, *sums), tuple(calls))


def _zeros_for_rows(
    step: Step, calls: Sequence[str], outs: Sequence[str], gradients: Sequence[tuple[str, str]]
) -> dict[str, str]:
    """Return the tensors of zeros to which nothing but the rows of a gradient are added, each with its parameter.

    Before:  z = R.full(0); g = R.scatter_nd(z, places, rows, "add"); total = R.add(sum, g)
    After:   total = R.scatter_nd(sum, places, rows, "add")
    """
    bindings, inside = step.bindings, set(calls)
    readers: dict[str, list[str]] = {}
    for call in calls:
        for tensor in bindings.reads(call):
            readers.setdefault(tensor, []).append(call)
    found = {}
    several = Counter(gradient for _, gradient in gradients)  # parameters that were added up have one gradient
    for parameter, gradient in gradients:
        adds = bindings.producer.get(gradient, "")
        only = adds in inside and several[gradient] == 1 and gradient not in readers and gradient not in outs
        if not only or not _adds_rows(bindings.calls[adds]):
            continue
        zeros = bindings.reads(adds)[0]
        fills = bindings.producer.get(zeros, "")
        same = structural_equal(bindings.types[gradient], bindings.types[parameter])
        alone = readers[zeros] == [adds] and zeros not in outs
        if fills in inside and _is_zero(bindings.calls[fills]) and alone and same:
            found[zeros] = parameter
    return found


def _adds_rows(call: relax.Call) -> bool:
    return op_name(call) == "scatter_nd" and str(call.attrs.reduction) == "add" and isinstance(call.args[0], relax.Var)


def _is_zero(call: relax.Call) -> bool:
    is_constant = op_name(call) == "full" and isinstance(call.args[1], Constant)
    return is_constant and not call.args[1].value.numpy().any()


def reduce_function(step: Step, parameters: Sequence[str], replicas: int) -> StageFunction:
    """Return the sum, in the order of the replicas, of the gradients of `parameters`."""
    groups = [[relax.Var(f"{sum_name(p)}@{r}", step.bindings.types[p]) for p in parameters] for r in range(replicas)]
    builder = relax.BlockBuilder()
    with builder.function("main", [v for group in groups for v in group]):
        with builder.dataflow():
            totals = list(groups[0])
            for group in groups[1:]:
                totals = [builder.emit(op.add(a, b)) for a, b in zip(totals, group, strict=True)]
            results = [builder.emit_output(t) for t in totals]
        builder.emit_func_output(relax.Tuple(results))
    inputs = tuple(f"{sum_name(p)}@{r}" for r in range(replicas) for p in parameters)
    return StageFunction(builder.get(), inputs, tuple(sum_name(p) for p in parameters))


def norm_function(step: Step, parameters: Sequence[str]) -> StageFunction:
    """Return the sum of squares of the gradients of `parameters`, one float32."""
    params = [relax.Var(sum_name(p), step.bindings.types[p]) for p in parameters]
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            total: relax.Expr = relax.const(0.0, "float32")
            for gradient in params:
                wide = builder.emit(op.astype(gradient, "float32"))
                total = builder.emit(op.add(total, builder.emit(op.sum(builder.emit(op.multiply(wide, wide))))))
            result = builder.emit_output(total)
        builder.emit_func_output(relax.Tuple([result]))
    return StageFunction(builder.get(), tuple(sum_name(p) for p in parameters), ("norm",))
