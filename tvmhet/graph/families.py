"""Families of operators that more than one layer asks for, by name."""

from __future__ import annotations

#: Operators that compute each element of their result from one element of each operand, spread where it has fewer.
ELEMENTWISE = (
    "add", "subtract", "multiply", "divide", "floor_divide", "power", "mod", "floor_mod", "maximum", "minimum",
    "equal", "not_equal", "less", "less_equal", "greater", "greater_equal", "logical_and", "logical_or",
    "logical_xor", "logical_not", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "left_shift",
    "right_shift", "abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "atan2", "ceil", "cos", "cosh", "erf",
    "exp", "floor", "log", "log2", "log10", "log_add_exp", "negative", "round", "rsqrt", "sigmoid", "sign", "sin",
    "sinh", "sqrt", "square", "tan", "tanh", "trunc", "clip", "isfinite", "isinf", "isnan", "where", "ewise_fma",
    "astype", "nn.relu", "nn.gelu", "nn.gelu_tanh", "nn.silu", "nn.leakyrelu", "nn.relu6", "nn.selu", "nn.softplus",
    "nn.hardswish", "nn.hardsigmoid", "nn.mish",
)  # fmt: skip
