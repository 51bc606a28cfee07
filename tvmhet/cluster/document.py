"""A YAML text as plain values plus the line of every key, and pydantic's complaints as ours, with that line.

nodes:                        values: {"nodes": [{"count": 2}]}
  - count: 2                  lines:  {("nodes",): 1, ("nodes", 0): 2, ("nodes", 0, "count"): 2}
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from tvmhet.errors import BadClusterFile, HetError

Path = tuple["str | int", ...]
KEY = "\0"  # stands in an error text of a validator for the key, whose name only `validate` knows

_TAG = "tag:yaml.org,2002:"
_TAGS = frozenset({"map", "seq", "str", "int", "float", "bool", "null", "timestamp", "merge"})
_MAX_VALUES = 100_000


class _UnknownKeyError(HetError):
    """A key that a model does not have; `problem` is the key."""


class StrictModel(BaseModel):
    """A mapping whose keys are all known: a misspelt key is an error that names the nearest one."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            keys = ", ".join(f"{name}: ..." for name in list(cls.model_fields)[:2])
            raise BadClusterFile(f"{KEY} is {shown(value)}; it must be a mapping", f"write keys, for example {keys}")
        for key in value:
            if key not in cls.model_fields:
                raise _UnknownKeyError(key, suggest(key, cls.model_fields))
        return value


@dataclass(frozen=True, slots=True)
class Document:
    """A parsed text. `source` names it in errors (a file name, or "<text>")."""

    source: str
    values: Any
    lines: Mapping[Path, int]

    def at(self, path: Path) -> str:
        """Return "file:line" of `path`, or of the nearest key around it."""
        while path and path not in self.lines:
            path = path[:-1]
        return f"{self.source}:{self.lines[path]}" if path in self.lines else self.source

    def error(self, error: HetError, path: Path) -> HetError:
        """Return `error` with its place put in front: the same type, code and remedy."""
        inside = f"in {dotted(path)}: " if path else ""
        return type(error)(f"{self.at(path)}: {inside}{error.problem}", error.remedy)


Model = TypeVar("Model", bound=BaseModel)


def read_yaml(text: str, source: str) -> Document:
    """Parse `text` with YAML's safe types only. Raises BadClusterFile for broken YAML and for a key given twice."""
    lines: dict[Path, int] = {}
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        values = None if root is None else _value(root, (), lines, source)
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        problem = ", ".join(p for p in (e.context, e.problem) if p)
        raise BadClusterFile(
            f"{source}:{mark.line + 1 if mark else 1}: not YAML: {problem}",
            "mend the indentation, close what is open, or quote the text",
        ) from e
    except yaml.YAMLError as e:
        raise BadClusterFile(f"{source}: not YAML: {e}", "the file must be UTF-8 text") from e
    except RecursionError as e:
        raise BadClusterFile(
            f"{source}: nested too deeply", "write the values out; an alias may not hold itself"
        ) from e
    return Document(source, values, lines)


def _value(node: yaml.Node, path: Path, lines: dict[Path, int], source: str) -> Any:
    line = node.start_mark.line + 1
    lines.setdefault(path, line)
    if len(lines) > _MAX_VALUES:
        raise BadClusterFile(f"{source}: more than {_MAX_VALUES} values", "do not expand large aliases many times")
    if node.tag.removeprefix(_TAG) not in _TAGS:
        raise BadClusterFile(f"{source}:{line}: the YAML tag {node.tag!r} is not supported", "write plain values")
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, (*path, i), lines, source) for i, item in enumerate(node.value)]
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, path, lines, source)
    if node.tag == _TAG + "timestamp":
        return node.value
    try:
        return yaml.SafeLoader("").construct_object(node)
    except ValueError as e:
        raise BadClusterFile(f"{source}:{line}: {node.value!r} is not a value: {e}", "quote it if it is text") from e


def _mapping(node: yaml.MappingNode, path: Path, lines: dict[Path, int], source: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if key_node.tag == _TAG + "merge":
            raise BadClusterFile(
                f"{source}:{line}: the merge key '<<' is not supported",
                "write the keys out, or use `like:` for device types",
            )
        if not isinstance(key_node, yaml.ScalarNode):
            raise BadClusterFile(f"{source}:{line}: a key is not a plain name", "write keys as names")
        key = key_node.value  # keys are names: `200: 1` and `on: 1` mean the texts "200" and "on"
        if key in result:
            raise BadClusterFile(
                f"{source}:{line}: {key!r} is given twice, first on line {lines[(*path, key)]}", "keep one of the two"
            )
        lines[(*path, key)] = line
        result[key] = _value(value_node, (*path, key), lines, source)
    return result


def validate(document: Document, model: type[Model], values: Any = None, under: Path = ()) -> Model:
    """Return `document` as a `model`. The first complaint, by line, is raised as BadClusterFile or BadQuantity."""
    try:
        return model.model_validate(document.values if values is None else values)
    except ValidationError as e:
        found = [_complaint(document, dict(d), under) for d in e.errors()]
        raise min(found, key=lambda pair: pair[0])[1] from None


def _complaint(document: Document, detail: dict[str, Any], under: Path) -> tuple[int, HetError]:
    path: Path = (*under, *detail["loc"])
    error = (detail.get("ctx") or {}).get("error")
    if not isinstance(error, HetError):
        return _line(document, path), _schema_error(document, path, detail)
    if isinstance(error, _UnknownKeyError):
        inside = f" in {dotted(path)}" if path else ""
        path = (*path, error.problem)
        problem = f"{document.at(path)}: unknown key {error.problem!r}{inside}"
        return _line(document, path), BadClusterFile(problem, error.remedy)
    problem = error.problem.replace(KEY, dotted(path) or "the file")
    remedy = error.remedy.replace(KEY, str(path[-1]) if path else "")
    return _line(document, path), type(error)(f"{document.at(path)}: {problem}", remedy)


def _schema_error(document: Document, path: Path, detail: dict[str, Any]) -> BadClusterFile:
    kind, ctx, place = detail["type"], detail.get("ctx") or {}, document.at(path)
    if kind == "missing":
        return BadClusterFile(f"{place}: {dotted(path[:-1]) or 'the file'} has no {path[-1]!r}", f"add {path[-1]}: ...")
    needs = {
        "int_type": "a whole number",
        "float_type": "a number",
        "bool_type": "true or false",
        "string_type": "text (put it in quotes)",
        "list_type": "a list",
        "dict_type": "a mapping",
        "greater_than_equal": f"{ctx.get('ge')} or more",
        "too_long": f"at most {ctx.get('max_length')} entries",
        "too_short": f"at least {ctx.get('min_length')} entries",
        "string_too_short": "longer",
        "string_pattern_mismatch": "made of letters, digits, '.', '_' and '-'",
        "literal_error": f"{ctx.get('expected')}",
    }.get(kind, detail["msg"])
    problem = f"{place}: {dotted(path)} is {shown(detail['input'])}; it must be {needs}"
    return BadClusterFile(problem, f"change {path[-1]}: it must be {needs}")


def _line(document: Document, path: Path) -> int:
    while path and path not in document.lines:
        path = path[:-1]
    return document.lines.get(path, 0)


def dotted(path: Path) -> str:
    """Return a path as people write it: nodes[0].link.bandwidth."""
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).lstrip(".")


def shown(value: Any) -> str:
    """Return a value shortened for an error text."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def suggest(word: str, known: Iterable[str]) -> str:
    """Return a remedy: the nearest of `known`, and the whole list when it is short."""
    names = sorted(known)
    near = difflib.get_close_matches(str(word), names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(repr(n) for n in near)}?" if near else ""
    listing = f"known: {', '.join(names)}" if len(names) <= 25 else ""
    return " ".join(p for p in (hint, listing) if p) or f"there are {len(names)} known names; none is like {word!r}"
