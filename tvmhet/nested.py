"""Values in tuples of tuples: the nested arguments of a call as a flat list of tensors, and flat results nested."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

Nesting = tuple["Nesting | None", ...]  # of a tuple: None for a value, a nesting for a tuple


def flat(values: Sequence[Any]) -> tuple[Any, ...]:
    """Return the values with those of nested tuples and lists in their places. What holds numbers stays one value.

    >>> flat(["a", ("b", ["c"]), (2, 3)])
    ('a', 'b', 'c', (2, 3))
    """
    return tuple(leaf for value in values for leaf in (flat(value) if _is_nested(value) else (value,)))


def nested(values: Iterator[Any], nesting: Nesting) -> tuple[Any, ...]:
    """Return the next of `values` in tuples as `nesting` says.

    >>> nested(iter("abc"), (None, (None, None)))
    ('a', ('b', 'c'))
    """
    return tuple(next(values) if part is None else nested(values, part) for part in nesting)


def num_values(nesting: Nesting) -> int:
    """Return how many values stand in a nesting."""
    return sum(1 if part is None else num_values(part) for part in nesting)


def _is_nested(value: object) -> bool:
    return isinstance(value, tuple | list) and not any(isinstance(part, int | float) for part in value)
