"""The Relax function that updates parameters, each by the rule of its group.

    update(parameters, sums, state, scale, scalars) -> (parameters, state)

`scale` multiplies the sums of gradients first; the scalars are those of the groups that the parameters are of
(`scalar_names`). Arguments and results go by name, as in `training_functions`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from tvm import relax

from tvmhet.ir.optimizers import Adagrad, Adam, AdamW, Lion, Optimizer, RmsProp, Rule, Sgd, group_of, rules_of
from tvmhet.ir.training_functions import StageFunction, sum_name
from tvmhet.ir.training_step import Step

op = relax.op
Expr: TypeAlias = relax.Expr
Emit = Callable[..., relax.Expr]

SCALE = "scale"


def update_function(step: Step, parameters: Sequence[str], optimizer: Optimizer) -> StageFunction:
    """Return the update of `parameters`."""
    builder = relax.BlockBuilder()
    group = {p: group_of(optimizer, step.model.torch_names[p]) for p in parameters}
    of_group = _scalars_of_groups(optimizer)
    used = (SCALE, *(name for g in sorted(set(group.values())) for name in of_group[g]))
    scalars = {name: relax.Var(name, relax.TensorType([], "float32")) for name in used}
    names, variables, results, made = [], [], [], []
    own = [(p, [p, sum_name(p), *(f"{p}.{s}" for s in optimizer.state)]) for p in parameters]
    for p, tensors in own:
        variables += [relax.Var(t, step.bindings.types[p]) for t in tensors]
        names += tensors
    by_name = dict(zip(names, variables, strict=True))
    with builder.function("main", [*variables, *scalars.values()]):
        with builder.dataflow():
            for p, tensors in own:
                numbers = [scalars[name] for name in (SCALE, *of_group[group[p]])]
                new = _updated(builder, rules_of(optimizer)[group[p]], [by_name[t] for t in tensors], numbers)
                results += [builder.emit_output(value) for value in new]
                made += [p, *tensors[2:]]
        builder.emit_func_output(relax.Tuple(results))
    return StageFunction(builder.get(), (*names, *used), tuple(made))


def scalar_names(optimizer: Optimizer) -> tuple[str, ...]:
    """Names of the numbers of a step: what scales the sums, then what the rule of each group needs."""
    return (SCALE, *(name for names in _scalars_of_groups(optimizer) for name in names))


def _scalars_of_groups(optimizer: Optimizer) -> list[tuple[str, ...]]:
    found, first = [], 0
    for rule in rules_of(optimizer):
        count = len(rule.scalars(1, 0.0))
        found.append(tuple(f"scalar{first + i}" for i in range(count)))
        first += count
    return found


def _updated(builder: relax.BlockBuilder, rule: Rule, tensors: Sequence[Expr], scalars: Sequence[Expr]) -> list[Expr]:
    """Return the new parameter and the new state, computed in float32 where theirs is narrower, then rounded."""
    dtype = str(tensors[0].ty.dtype)
    wide = "float64" if dtype == "float64" else "float32"

    def cast(value: Expr, to: str) -> Expr:
        return value if str(value.ty.dtype) == to else builder.emit(op.astype(value, to))

    def emit(function: Callable[..., Expr], a: Expr, *rest: Expr | float) -> Expr:
        dtype = str(a.ty.dtype)
        return builder.emit(function(a, *(relax.const(b, dtype) if isinstance(b, int | float) else b for b in rest)))

    parameter, total, *state = (cast(t, wide) for t in tensors)
    scale, *numbers = (cast(s, wide) for s in scalars)
    gradient = emit(op.multiply, total, scale)
    if rule.weight_decay and not isinstance(rule, AdamW | Lion):
        gradient = emit(op.add, gradient, emit(op.multiply, parameter, rule.weight_decay))
    new = _RULES[type(rule)](emit, rule, parameter, gradient, state, numbers)
    return [cast(value, dtype) for value in new]


def _sgd(emit: Emit, rule: Sgd, p: Expr, g: Expr, state: Sequence[Expr], scalars: Sequence[Expr]) -> list[Expr]:
    """Momentum as torch's, whose first value is the first gradient: the same as starting from zero."""
    new = []
    for momentum in state:
        new = [emit(op.add, emit(op.multiply, momentum, rule.momentum), g)]
        g = emit(op.add, g, emit(op.multiply, new[0], rule.momentum)) if rule.nesterov else new[0]
    return [emit(op.subtract, p, emit(op.multiply, g, scalars[0])), *new]


def _adam(emit: Emit, rule: Adam, p: Expr, g: Expr, state: Sequence[Expr], scalars: Sequence[Expr]) -> list[Expr]:
    """Scalars: 1 - lr * decay (Adam: 1), lr / (1 - b1^t), sqrt(1 - b2^t)."""
    first, second = rule.betas
    shrink, rate, correction = scalars
    mean = _mean(emit, state[0], g, first)
    square = _mean_square(emit, state[1], g, second)
    largest = [emit(op.maximum, before, square) for before in state[2:]]
    root = emit(op.add, emit(op.divide, emit(op.sqrt, (largest or [square])[0]), correction), rule.eps)
    moved = emit(op.subtract, emit(op.multiply, p, shrink), emit(op.multiply, emit(op.divide, mean, root), rate))
    return [moved, mean, square, *largest]


def _rms_prop(
    emit: Emit, rule: RmsProp, p: Expr, g: Expr, state: Sequence[Expr], scalars: Sequence[Expr]
) -> list[Expr]:
    before = dict(zip(rule.state, state, strict=True))
    square = _mean_square(emit, before["square_avg"], g, rule.alpha)
    new, spread = [square], square
    if rule.centered:
        mean = _mean(emit, before["grad_avg"], g, rule.alpha)
        new.append(mean)
        spread = emit(op.subtract, square, emit(op.multiply, mean, mean))
    moved = emit(op.divide, g, emit(op.add, emit(op.sqrt, spread), rule.eps))
    if rule.momentum:
        moved = emit(op.add, emit(op.multiply, before["momentum_buffer"], rule.momentum), moved)
        new.append(moved)
    return [emit(op.subtract, p, emit(op.multiply, moved, scalars[0])), *new]


def _adagrad(emit: Emit, rule: Adagrad, p: Expr, g: Expr, state: Sequence[Expr], scalars: Sequence[Expr]) -> list[Expr]:
    total = emit(op.add, state[0], emit(op.multiply, g, g))
    moved = emit(op.divide, g, emit(op.add, emit(op.sqrt, total), rule.eps))
    return [emit(op.subtract, p, emit(op.multiply, moved, scalars[0])), total]


def _lion(emit: Emit, rule: Lion, p: Expr, g: Expr, state: Sequence[Expr], scalars: Sequence[Expr]) -> list[Expr]:
    """Scalars: 1 - lr * decay, lr."""
    first, second = rule.betas
    shrink, rate = scalars
    moved = emit(op.multiply, emit(op.sign, _mean(emit, state[0], g, first)), rate)
    return [emit(op.subtract, emit(op.multiply, p, shrink), moved), _mean(emit, state[0], g, second)]


def _mean(emit: Emit, before: Expr, g: Expr, keep: float) -> Expr:
    """Return the running mean of `g`, as torch adds it."""
    return emit(op.add, before, emit(op.multiply, emit(op.subtract, g, before), 1.0 - keep))


def _mean_square(emit: Emit, before: Expr, g: Expr, keep: float) -> Expr:
    return emit(op.add, emit(op.multiply, before, keep), emit(op.multiply, emit(op.multiply, g, g), 1.0 - keep))


_RULES: dict[type[Rule], Callable[..., list[Expr]]] = {
    Sgd: _sgd,
    Adam: _adam,
    AdamW: _adam,
    RmsProp: _rms_prop,
    Adagrad: _adagrad,
    Lion: _lion,
}
