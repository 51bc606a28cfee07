"""What a call returns: tensors in tuples, lists and mappings, as the model has them, beside values that stay."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

from tvmhet.errors import BadBundle

Kind = Literal["tuple", "list", "dict", "named", "namedtuple"]


@dataclass(frozen=True, slots=True)
class Fixed:
    """A part of a result that is no tensor: it is what it was for the example."""

    value: bool | int | float | str | None


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts of a result side by side, None for a tensor, and what holds them; all but tuples and lists have `names`."""

    kind: Kind
    parts: tuple[Parts | Fixed | None, ...]
    names: tuple[str | int, ...] = ()

    @property
    def num_tensors(self) -> int:
        """How many tensors stand in it."""
        return sum(1 if p is None else p.num_tensors if isinstance(p, Parts) else 0 for p in self.parts)


#: One tensor, a tuple of all tensors, or parts.
Structure = Literal["single", "tuple"] | Parts


class Named(dict[str | int, Any]):
    """A mapping whose entries are attributes, too, and are counted by whole numbers: as models with named results have.

    >>> out = Named(loss=0.5, logits=[1, 2])
    >>> out["loss"], out.loss, out[1]
    (0.5, 0.5, [1, 2])
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else tuple(self.values())[key]


def structured(values: Iterator[Any], structure: Structure) -> Any:
    """Return the tensors of a call as its result.

    >>> structured(iter("abc"), Parts("tuple", (None, Parts("dict", (None, Fixed(3), None), ("x", "y", "z")))))
    ('a', {'x': 'b', 'y': 3, 'z': 'c'})
    """
    if structure == "single":
        return next(values)
    return tuple(values) if structure == "tuple" else _joined(values, structure)


def _joined(values: Iterator[Any], result: Parts | Fixed | None) -> Any:
    if result is None:
        return next(values)
    if isinstance(result, Fixed):
        return result.value
    parts = [_joined(values, part) for part in result.parts]
    match result.kind:
        case "tuple":
            return tuple(parts)
        case "list":
            return parts
        case "namedtuple":
            return namedtuple("Result", [str(name) for name in result.names])(*parts)
    return (Named if result.kind == "named" else dict)(zip(result.names, parts, strict=True))


def structure_tree(structure: Structure) -> Any:
    """Return plain data for `read_structure`: null for a tensor, {"value": v}, {kind: parts}, {kind: [name, part]}."""
    return structure if isinstance(structure, str) else _tree(structure)


def _tree(result: Parts | Fixed | None) -> Any:
    if isinstance(result, Parts):
        parts = [_tree(part) for part in result.parts]
        return {result.kind: [list(p) for p in zip(result.names, parts, strict=True)] if result.names else parts}
    return None if result is None else {"value": result.value}


def read_structure(tree: Any) -> Structure:
    """Return what `structure_tree` wrote; lists in lists are tuples, as older bundles have them. Raises BadBundle."""
    match tree:
        case "single":
            return "single"
        case "tuple":
            return "tuple"
    found = _read(tree)
    if not isinstance(found, Parts):
        raise _broken(tree)
    return found


def _read(tree: Any) -> Parts | Fixed | None:
    if tree is None:
        return None
    kind: Any
    kind, content = ("tuple", tree) if isinstance(tree, list) else _only_entry(tree)
    if kind == "value" and isinstance(content, bool | int | float | str | None):
        return Fixed(content)
    if not isinstance(content, list) or kind not in get_args(Kind):
        raise _broken(tree)
    if kind in ("tuple", "list"):
        return Parts(kind, tuple(map(_read, content)))
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in content):
        raise _broken(tree)
    return Parts(kind, tuple(_read(part) for _, part in content), tuple(name for name, _ in content))


def _only_entry(tree: Any) -> tuple[Any, Any]:
    if not isinstance(tree, dict) or len(tree) != 1:
        raise _broken(tree)
    ((kind, content),) = tree.items()
    return kind, content


def _broken(tree: Any) -> BadBundle:
    return BadBundle(f"the bundle's results have the structure {tree!r}", "build it again")


def without(structure: Structure, gone: Collection[int], count: int) -> Structure:
    """Return the structure of `count` tensors without those at the places `gone`. A tuple that keeps one is that one.

    >>> without("tuple", {1}, 2)
    'single'
    >>> without(Parts("dict", (None, Parts("list", (None, None))), ("y", "caches")), {1, 2}, 3)
    Parts(kind='dict', parts=(None,), names=('y',))
    """
    if not isinstance(structure, Parts):
        return "single" if count - len(gone) == 1 else structure
    left = _without(structure, iter(i in gone for i in range(count)))
    if left is None:
        return "tuple"
    return "single" if left.kind == "tuple" and left.parts == (None,) else left


def _without(result: Parts, is_gone: Iterator[bool]) -> Parts | None:
    """Return a part without tensors that are gone, and without parts that they were all of."""
    kept: list[tuple[Parts | Fixed | None, str | int]] = []
    for i, part in enumerate(result.parts):
        name = result.names[i] if result.names else i
        if isinstance(part, Parts):
            if (left := _without(part, is_gone)) is not None or not part.parts:
                kept.append((left or part, name))
        elif isinstance(part, Fixed) or not next(is_gone):
            kept.append((part, name))
    if not kept and result.parts:
        return None
    return Parts(result.kind, tuple(p for p, _ in kept), tuple(n for _, n in kept) if result.names else ())
