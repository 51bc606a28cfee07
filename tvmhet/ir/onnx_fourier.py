"""Discrete Fourier transforms of ONNX models as products with cosines and sines.

    DFT(x[.., n, 2])  ──►  x[.., 0] @ C - x[.., 1] @ S  and  x[.., 0] @ S + x[.., 1] @ C
    STFT(x[b, n, 1])  ──►  a convolution by steps of a frame, whose channels are C and S times the window

C + iS is e^(-2 pi i j k / N), where N is the length of the transform.
Lengths, steps and axes have to be known, and the dims of what is transformed; else the operator is left.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tvmhet.ir.onnx_nodes import Nodes

_AXIS_AS_INPUT = 20


def define_dft(made: Nodes, node: Any, attributes: Mapping[str, Any]) -> bool:
    """Write out a DFT of real or complex numbers along one axis; return False where its sizes are not known."""
    x, length_name, axis_name = (*node.input, "", "")[:3]
    shape, dtype = made.known.shape(x), made.known.dtype(x)
    length, axis = _known_integer(made, length_name), _known_integer(made, axis_name)
    unknown = (length_name and length is None) or (axis_name and axis is None)
    if shape is None or dtype is None or unknown or shape[-1] not in (1, 2):
        return False
    if axis is None:
        axis = -2 if made.opset >= _AXIS_AS_INPUT else int(attributes.get("axis", 1))
    axis %= len(shape)
    is_inverse, is_half = (bool(attributes.get(a, 0)) for a in ("inverse", "onesided"))
    to_real = is_inverse and is_half
    if to_real and shape[-1] == 1:
        return False
    size = length or (2 * (shape[axis] - 1) if to_real else shape[axis])
    matrix = (
        _half_to_real(size) if to_real else _exponentials(size, is_inverse=is_inverse) / (size if is_inverse else 1)
    )
    if is_half and not is_inverse:
        matrix = matrix[:, : size // 2 + 1]
    taken = min(len(matrix), shape[axis])
    cosines, sines = (made.constant(m[:taken], dtype) for m in (matrix.real, matrix.imag))
    order = [a for a in range(len(shape) - 1) if a != axis] + [axis]

    def part(index: int) -> str:
        value = made.add("Gather", x, made.constant(index, "int64"), axis=len(shape) - 1)
        value = made.add("Transpose", value, perm=order)
        if taken < shape[axis]:
            value = made.add("Gather", value, made.constant(range(taken), "int64"), axis=len(order) - 1)
        return value

    def back(value: str) -> str:
        value = made.add("Transpose", value, perm=[order.index(a) for a in range(len(order))])
        return made.on_axes("Unsqueeze", value, [len(order)])

    real = part(0)
    results = [made.add("MatMul", real, m) for m in (cosines, sines)]
    if shape[-1] == 2:
        imaginary = part(1)
        crossed = [made.add("MatMul", imaginary, m) for m in (sines, cosines)]
        results = [made.add("Sub", results[0], crossed[0]), made.add("Add", results[1], crossed[1])]
    if to_real:
        results = results[:1]
    made.add("Concat", *map(back, results), result=node.output[0], axis=len(order))
    return True


def define_stft(made: Nodes, node: Any, attributes: Mapping[str, Any]) -> bool:
    """Write out a short-time transform; return False where its sizes are not known."""
    x, step_name, window, length_name = (*node.input, "", "")[:4]
    shape, dtype, step = made.known.shape(x), made.known.dtype(x), _known_integer(made, step_name)
    length = _known_integer(made, length_name)
    if not length_name and window:
        window_shape = made.known.shape(window)
        length = window_shape[0] if window_shape else None
    if shape is None or dtype is None or step is None or length is None or shape[-1] not in (1, 2):
        return False
    bins = length // 2 + 1 if attributes.get("onesided", 1) else length
    matrix = _exponentials(length)[:bins]
    filters = np.concatenate([matrix.real, matrix.imag])[:, None]
    if shape[-1] == 2:
        turned = np.concatenate([-matrix.imag, matrix.real])[:, None]
        filters = np.concatenate([filters, turned], axis=1)
    weight = made.constant(filters, dtype)
    if window:
        weight = made.add("Mul", weight, window)
    frames = made.add("Conv", made.add("Transpose", x, perm=[0, 2, 1]), weight, strides=[step])
    pairs = made.add("Reshape", frames, made.constant([shape[0], 2, bins, -1], "int64"))
    made.add("Transpose", pairs, result=node.output[0], perm=[0, 3, 2, 1])
    return True


def _exponentials(size: int, *, is_inverse: bool = False) -> np.ndarray:
    """Return e^(-2 pi i j k / size), or its conjugate, [size, size]; exact turns, however large j k is."""
    turns = np.outer(np.arange(size), np.arange(size)) % size
    exponentials: np.ndarray = np.exp((2j if is_inverse else -2j) * np.pi * turns / size)
    return exponentials


def _half_to_real(size: int) -> np.ndarray:
    """Return what multiplies the first half of a transform so that the real part is the signal, [size // 2 + 1, size].

    The other half is its conjugate, so that each counts twice but those that are their own.
    """
    half = _exponentials(size, is_inverse=True)[: size // 2 + 1] / size
    own = [0, *([size // 2] if size % 2 == 0 else [])]
    twice = np.full((len(half), 1), 2.0)
    twice[own] = 1.0
    matrix: np.ndarray = half * twice
    return matrix


def _known_integer(made: Nodes, name: str) -> int | None:
    value = made.known.values.get(name)
    return None if value is None or value.size != 1 else int(value.reshape(()))
