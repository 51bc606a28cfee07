"""A parameter that the devices of a team hold in parts: as one array for whoever saves or reads it, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tvmhet.graph.cutting import Cut
from tvmhet.runtime.program import Array


@dataclass(frozen=True, slots=True)
class Dealt:
    """A parameter or buffer that a team holds in parts: their names by device, and how it is cut (`Cut`)."""

    names: tuple[str, ...]
    axis: int
    runs: tuple[int, ...]

    def parts(self, whole: Array) -> list[Array]:
        """Return the part of each device."""
        return [
            np.concatenate([whole.take(range(a, b), self.axis) for a, b in spans], self.axis) for spans in self._spans()
        ]

    def joined(self, parts: Sequence[Array]) -> Array:
        """Return the whole of the parts."""
        shape = list(parts[0].shape)
        shape[self.axis] = sum(self.runs)
        whole = np.empty(shape, parts[0].dtype)
        along = np.moveaxis(whole, self.axis, 0)
        for part, spans in zip(parts, self._spans(), strict=True):
            at = 0
            for a, b in spans:
                along[a:b] = np.moveaxis(part, self.axis, 0)[at : at + b - a]
                at += b - a
        return whole

    def _spans(self) -> Iterator[tuple[tuple[int, int], ...]]:
        degree = len(self.names)
        return (Cut(self.axis, self.runs).share(r, degree) for r in range(degree))


class WholeState(Mapping[str, Array]):
    """What devices hold, by name, and what is dealt out as wholes, each joined when it is asked for."""

    def __init__(self, state: Mapping[str, Array], dealt: Mapping[str, Dealt]) -> None:
        self._state, self._dealt = state, dealt

    def __getitem__(self, name: str) -> Array:
        if (dealt := self._dealt.get(name)) is not None:
            return dealt.joined([self._state[own] for own in dealt.names])
        return self._state[name]

    def __iter__(self) -> Iterator[str]:
        parts = {own for dealt in self._dealt.values() for own in dealt.names}
        yield from (name for name in self._state if name not in parts)
        yield from self._dealt

    def __len__(self) -> int:
        return sum(1 for _ in self)
