"""The fields of operators that are written as JSON: what a field may hold, and how it is read.

Field(Kind.COUNT).read("linear", "m", {"m": 0}) ──► BadInput: linear: m is 0; give a whole number of 1 or more
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from tvmhet.cluster.document import suggest
from tvmhet.cost.model import DTYPE_BYTES
from tvmhet.errors import BadInput

DTYPE = tuple(DTYPE_BYTES)
#: No device holds a tensor with a longer side; products of sizes stay exact in 64 bits or finite in a float.
MAX_SIZE = 2**40


class Kind(Enum):
    """What a field holds; the text is what people are told to give."""

    COUNT = "a whole number of 1 or more"
    SIZE = "a whole number of 0 or more"
    PAIR = "a whole number or a list of two"
    PADDING = 'a whole number, a list of two, "same" or "valid"'
    SHAPE = "a list of whole numbers of 1 or more"
    FLAG = "true or false"
    NAME = "a name"


@dataclass(frozen=True, slots=True)
class Field:
    """One field of an operator: `default` None means that it must be given; a name is one of `choices`."""

    kind: Kind
    meaning: str = ""
    default: int | str | bool | None = None
    choices: Collection[str] = ()

    def read(self, op: str, name: str, record: Mapping[str, Any]) -> Any:
        """Return the field's value in `record`, or its default. Raises BadInput with field, value and limit."""
        value = record.get(name, self.default)
        if type(value) is int and 1 <= value <= MAX_SIZE and (self.kind is Kind.COUNT or self.kind is Kind.SIZE):
            return value  # the common case, at once: there are millions
        if value is None:
            if name in record:
                raise BadInput(f"{op}: {name} is null", f"give {self.kind.value}")
            raise BadInput(f"{op}: field {name!r} is missing", f"give {self._wanted()}")
        return self._check(op, name, value)

    def _check(self, op: str, name: str, value: Any) -> Any:
        if self.kind is Kind.NAME:
            if value not in self.choices:
                raise BadInput(f"{op}: {name} is {value!r}", suggest(str(value), self.choices))
            return value
        if self.kind is Kind.FLAG:
            if type(value) is not bool:
                raise BadInput(f"{op}: {name} is {value!r}", f"give {self.kind.value}")
            return value
        if self.kind is Kind.SHAPE:
            if not isinstance(value, list) or not value:
                raise BadInput(f"{op}: {name} is {value!r}", f"give {self.kind.value}")
            return [self._whole(op, name, v, 1, value) for v in value]
        if self.kind is Kind.PAIR or self.kind is Kind.PADDING:
            return self._pair(op, name, value)
        return self._whole(op, name, value, int(self.kind is Kind.COUNT), value)

    def _pair(self, op: str, name: str, value: Any) -> tuple[int, int] | str:
        if self.kind is Kind.PADDING and value == "same":
            return "same"
        if self.kind is Kind.PADDING and value == "valid":
            return 0, 0
        least = int(self.kind is Kind.PAIR and self.default != 0)
        both = value if isinstance(value, list) else [value, value]
        if len(both) != 2:
            raise BadInput(f"{op}: {name} is {value!r}", f"give {self.kind.value}")
        first, second = (self._whole(op, name, v, least, value) for v in both)
        return first, second

    def _whole(self, op: str, name: str, value: Any, least: int, shown: Any) -> int:
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not int or value < least:
            wanted = self.kind.value if self.kind is not Kind.PAIR or not least else f"{self.kind.value}, 1 or more"
            raise BadInput(f"{op}: {name} is {shown!r}", f"give {wanted}")
        if value > MAX_SIZE:
            raise BadInput(f"{op}: {name} is {str(shown)[:60]}, more than 2^40", "no device holds that")
        return int(value)

    def _wanted(self) -> str:
        if self.kind is Kind.NAME:
            few = ", ".join(list(self.choices)[:8])
            return f"one of {few}" + (", ..." if len(self.choices) > 8 else "")
        return f"{self.kind.value}: {self.meaning}" if self.meaning else str(self.kind.value)
