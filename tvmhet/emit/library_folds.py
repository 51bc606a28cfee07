"""Join the steps of a library program that torch computes in one call.

    matmul, bias                                   ==>  matmul of three arguments (addmm)
    convolution, [bias,] relu                      ==>  convolution_relu
    convolution, [bias,] add(residual) [, relu]    ==>  convolution_residual
    matmul, [scale,] [mask,] softmax, matmul       ==>  attention
    multiply, sum, multiply, subtract              ==>  softmax_backward
    conv2d, [strided_slice,] permute_dims          ==>  conv2d_weight_gradient

Whatever does not fit stays as it is: a program without folds computes the same, step by step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tvmhet.graph.library_rows import CONVOLUTIONS


@dataclass(frozen=True, slots=True)
class ProgramStep:
    """One call: the name of its result ("o<k>"), its family, attributes and arguments."""

    result: str
    family: str
    attrs: Mapping[str, Any]
    arguments: tuple[Any, ...]


def fold(program: Sequence[Sequence[Any]]) -> list[ProgramStep]:
    """Return the steps of a JSON program, joined. ValueError if a bias has no product before it."""
    steps = [ProgramStep(f"o{k}", family, attrs, tuple(args)) for k, (family, attrs, args) in enumerate(program)]
    return _fold_weight_gradient(
        _fold_softmax_backward(_fold_attention(_fold_relu(_fold_residual(_fold_biases(steps)))))
    )


def _maker(steps: Sequence[ProgramStep], argument: Any) -> int | None:
    """The position of the step that makes an argument; None for a live-in or a number."""
    return next((i for i, s in enumerate(steps) if s.result == argument), None)


def _fold_biases(steps: list[ProgramStep]) -> list[ProgramStep]:
    out: list[ProgramStep] = []
    for step in steps:
        if step.family != "bias":
            out.append(step)
            continue
        product, bias = step.arguments
        place = _maker(out, product)
        if place is None:
            raise ValueError(f"bias of {product!r}, which no step makes")
        made = out.pop(place)
        out.append(replace(made, result=step.result, arguments=(*made.arguments, bias)))
    return out


def _fold_residual(steps: list[ProgramStep]) -> list[ProgramStep]:
    place = next((i for i, s in enumerate(steps) if s.family in CONVOLUTIONS), None)
    if place is None or len(steps) < place + 2 or steps[place + 1].family != "add":
        return steps
    conv, add, *after = steps[place:]
    others = [a for a in add.arguments if a != conv.result]
    if len(others) != 1 or not isinstance(others[0], str):
        return steps
    relu = bool(after) and after[0].family == "nn.relu"
    x, w, *bias = conv.arguments
    joined = ProgramStep(
        (after[0] if relu else add).result,
        "convolution_residual",
        {**conv.attrs, "relu": relu},
        (x, w, bias[0] if bias else None, others[0]),
    )
    return [*steps[:place], joined, *after[1 if relu else 0 :]]


def _fold_relu(steps: list[ProgramStep]) -> list[ProgramStep]:
    place = next((i for i, s in enumerate(steps) if s.family in CONVOLUTIONS), None)
    if place is None or len(steps) < place + 2 or steps[place + 1].family != "nn.relu":
        return steps
    conv, relu, *after = steps[place:]
    if relu.arguments != (conv.result,) or any(conv.result in s.arguments for s in after):
        return steps
    return [*steps[:place], replace(conv, result=relu.result, family="convolution_relu"), *after]


def _fold_attention(steps: list[ProgramStep]) -> list[ProgramStep]:
    softmax = next((i for i, s in enumerate(steps) if s.family == "nn.softmax"), None)
    last = steps[-1]
    if softmax is None or last.family != "matmul" or last.arguments[0] != steps[softmax].result:
        return steps
    inside, scale, mask = {softmax, len(steps) - 1}, 1.0, None
    place = _maker(steps, steps[softmax].arguments[0])
    while place is not None and steps[place].family != "matmul":
        step = steps[place]
        inside.add(place)
        if step.family in ("multiply", "divide"):
            number = float(step.arguments[1]["value"])
            scale *= number if step.family == "multiply" else 1.0 / number
            made = step.arguments[0]
        elif step.family == "where":
            mask, made = step.arguments[:2]
        else:
            made = next(a for a in step.arguments if _maker(steps, a) is not None)
            mask = next(a for a in step.arguments if a != made)
        place = _maker(steps, made)
    if place is None or len(steps[place].arguments) != 2:
        return steps
    inside.add(place)
    arguments = (*steps[place].arguments, last.arguments[1], *(() if mask is None else (mask,)))
    rest = [s for i, s in enumerate(steps) if i not in inside]
    return [*rest, ProgramStep(last.result, "attention", {"scale": scale}, arguments)]


def _fold_softmax_backward(steps: list[ProgramStep]) -> list[ProgramStep]:
    """g * y - y * sum(g * y), the gradient towards the operand of y = softmax(x)."""
    if [s.family for s in steps] != ["multiply", "sum", "multiply", "subtract"]:
        return steps
    both, total, shared, last = steps
    y = next((a for a in shared.arguments if a in both.arguments), None)
    chained = total.arguments == (both.result,) and set(shared.arguments) == {y, total.result}
    axes = total.attrs["axis"]
    if y is None or not chained or last.arguments != (both.result, shared.result) or not total.attrs["keepdims"]:
        return steps
    if axes is None or len(axes) != 1:
        return steps
    g = next((a for a in both.arguments if a != y), y)
    return [ProgramStep(last.result, "softmax_backward", {"axis": axes[0]}, (g, y))]


def _fold_weight_gradient(steps: list[ProgramStep]) -> list[ProgramStep]:
    """A convolution of exchanged operands, its result exchanged back: the gradient of a convolution's weight."""
    place = next((i for i, s in enumerate(steps) if s.family == "nn.conv2d"), len(steps))
    families = [s.family for s in steps[place + 1 :]]
    if families not in (["permute_dims"], ["strided_slice", "permute_dims"]):
        return steps
    conv, *cut, last = steps[place:]
    arguments = (*conv.arguments, *(cut[0].arguments[1:] if cut else ()))
    return [*steps[:place], ProgramStep(last.result, "conv2d_weight_gradient", conv.attrs, arguments)]
