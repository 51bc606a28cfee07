"""The arguments of a call, nested or by name, as a flat list of values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tvmhet.errors import BadInput


def flat(values: Sequence[Any]) -> tuple[Any, ...]:
    """Return the values with those of nested tuples and lists in their places. What holds numbers stays one value.

    >>> flat(["a", ("b", ["c"]), (2, 3)])
    ('a', 'b', 'c', (2, 3))
    """
    return tuple(leaf for value in values for leaf in (flat(value) if _is_nested(value) else (value,)))


def call_arguments(inputs: Sequence[Any], names: Sequence[str]) -> tuple[Any, ...]:
    """Return the values of one call in the order of `names`: given in order, nested or not, or as one mapping by name.

    Raises BadInput for a name that is none of them, or is not there.

    >>> call_arguments([{"b": 2, "a": (0, 1)}], ["a_0", "a_1", "b"])
    (0, 1, 2)
    """
    if len(inputs) != 1 or not isinstance(inputs[0], Mapping):
        return flat(inputs)
    spelt = _plain if len({_plain(name) for name in names}) == len(names) else str
    leaves = list(named_leaves(inputs[0]))
    given, wanted = {spelt(name): value for name, value in leaves}, [spelt(name) for name in names]
    if len(given) < len(leaves):
        what = f"two of {', '.join(name for name, _ in leaves)} are one name"
        raise BadInput(f"{what}; the model takes {', '.join(names)}", "give each input once")
    if (argument := _argument_of(given, wanted)) is not None:
        given = {argument + name: value for name, value in given.items()}
    strange, missing = [n for n in given if n not in wanted], [n for n in wanted if n not in given]
    if strange or missing:
        what = f"{strange[0]!r} is no input" if strange else f"input {missing[0]!r} is not given"
        raise BadInput(f"{what}; the model takes {', '.join(names)}", "give one tensor for each of these names")
    return tuple(given[name] for name in wanted)


def one_call(inputs: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the inputs that were given in order or by name for `call_arguments`. Raises BadInput for both."""
    if inputs and named:
        raise BadInput(
            f"{len(inputs)} inputs are given in order and {', '.join(named)} by name", "give all in order or by name"
        )
    return (named,) if named else inputs


def named_leaves(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the values by name; what stands in a tuple, a list or a mapping by its name and its place there.

    >>> list(named_leaves({"x": 1, "pair": ("a", {"k": "b"})}))
    [('x', 1), ('pair_0', 'a'), ('pair_1_k', 'b')]
    """
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from named_leaves({f"{name}_{key}": part for key, part in value.items()})
        elif isinstance(value, tuple | list):
            yield from named_leaves({f"{name}_{i}": part for i, part in enumerate(value)})
        else:
            yield str(name), value


def _argument_of(given: Iterable[str], wanted: Sequence[str]) -> str | None:
    """Return what `wanted` have before the names given: those of the one argument that is a mapping itself."""
    starts = {w.removesuffix(g) for g in given for w in wanted if w.endswith(f"_{g}")}
    return next((s for s in sorted(starts) if {s + g for g in given} == set(wanted)), None)


def _plain(name: str) -> str:
    """Return a name as front ends have it for a variable: torch in small letters, without other characters."""
    return re.sub(r"\W", "_", name).lower()


def _is_nested(value: object) -> bool:
    return isinstance(value, tuple | list) and not any(isinstance(part, int | float) for part in value)
