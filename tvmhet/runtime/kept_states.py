"""The states that one stage alone reads and renews, in its device's own memory: they cross no link between calls.

    a CPU    a call at slot s reads tensor s, and its result is tensor s ^ 1: nothing is copied
    a GPU    the stage reads and writes at the same addresses every time (a graph was captured so): what it made is
             copied to where it reads, and what other sessions need is copied away before

A slot is half a session (`states.py`): what was at s ^ 1 before a call at s is of no use once that begins. A call that
fails elsewhere is begun again at the same slot, so what was at s is kept until the session goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tvmhet.runtime import vm
from tvmhet.runtime.program import Array, StageProgram


class KeptStates:
    """The states of a stage on one CPU device, each with the result that it becomes, `renewed`."""

    def __init__(self, stage: StageProgram, renewed: Mapping[str, str]) -> None:
        self._read = [(i, name) for i, name in enumerate(stage.inputs) if name in renewed]
        self._made = [(stage.outputs.index(after), name) for name, after in renewed.items()]
        self._tensors: dict[tuple[int, str], Any] = {}

    @property
    def results(self) -> frozenset[int]:
        """The places of the results that stay here."""
        return frozenset(place for place, _ in self._made)

    def begin(self, slot: int, arguments: Sequence[Any], staging: Sequence[Any]) -> list[Any]:
        """Return the arguments of a call, with the states that are here; others are where the caller has them.

        None is what lies in `staging` already, where a GPU reads.
        """
        self._drop(slot ^ 1)
        given = list(arguments)
        for place, name in self._read:
            given[place] = self._tensors.get((slot, name), given[place])
        return given

    def end(self, slot: int, results: Sequence[Any], arguments: Sequence[Any]) -> None:
        """Keep what a call at `slot` made; copied, where it lies in memory of the caller's `arguments`."""
        inside = [vm.span(a) for a in arguments] if self._made else []
        for place, name in self._made:
            result = results[place]
            if any(_overlap(vm.span(result), other) for other in inside):
                result = _copied(result, "llvm", 0)
            self._tensors[slot ^ 1, name] = result

    def store(self, slot: int, views: Mapping[str, Array], staging: Sequence[Any]) -> None:
        """Copy what is here of a slot to the host."""
        for _, name in self._made:
            if (tensor := self._tensors.get((slot, name))) is not None:
                vm.copy(tensor, vm.host_view(views[name]))

    def forget(self, slot: int) -> None:
        """Drop both slots of a session: the host has others."""
        self._drop(slot, slot ^ 1)

    def _drop(self, *slots: int) -> None:
        for key in [(slot, name) for slot in slots for _, name in self._made]:
            self._tensors.pop(key, None)


class GpuStates(KeptStates):
    """The same on a GPU, whose calls read in `staging` and leave results where the next one writes."""

    def __init__(self, stage: StageProgram, renewed: Mapping[str, str], ordinal: int) -> None:
        super().__init__(stage, renewed)
        self._place = "cuda", ordinal
        self._staged = self._last = -1  # the slots that staging and the results hold
        self._is_only_one = False  # what staging holds is nowhere else
        self._results: dict[str, Any] = {}

    def begin(self, slot: int, arguments: Sequence[Any], staging: Sequence[Any]) -> list[Any]:
        if self._staged >> 1 != slot >> 1:
            self._put_away(staging)
        given = list(arguments)
        if self._last == slot:
            self._drop(slot, slot ^ 1)
            here, self._is_only_one = self._results, True
        elif self._staged == slot:
            here = dict.fromkeys(self._results)
        else:
            self._drop(slot ^ 1)
            here = {name: t for _, name in self._made if (t := self._tensors.get((slot, name))) is not None}
            self._is_only_one = False
        for place, name in self._read:
            given[place] = here.get(name, given[place])
        self._staged, self._last = slot, -1
        return given

    def end(self, slot: int, results: Sequence[Any], arguments: Sequence[Any]) -> None:
        self._results = {name: results[place] for place, name in self._made}
        self._last = slot ^ 1

    def store(self, slot: int, views: Mapping[str, Array], staging: Sequence[Any]) -> None:
        if slot == self._last:
            for name, tensor in self._results.items():
                vm.copy(tensor, vm.host_view(views[name]))
        elif slot == self._staged:
            for place, name in self._read:
                vm.copy(staging[place], vm.host_view(views[name]))
        else:
            super().store(slot, views, staging)
        vm.wait_for(*self._place)

    def forget(self, slot: int) -> None:
        super().forget(slot)
        if self._staged >> 1 == slot >> 1:
            self._staged = self._last = -1

    def _put_away(self, staging: Sequence[Any]) -> None:
        """Copy what another session will need: what it made, and, if its call fails yet, what it read."""
        if self._last >= 0:
            self._tensors |= {(self._last, name): _copied(t, *self._place) for name, t in self._results.items()}
        if self._staged >= 0 and self._is_only_one:
            self._tensors |= {(self._staged, name): _copied(staging[place], *self._place) for place, name in self._read}
        self._staged = self._last = -1


def _copied(tensor: Any, kind: str, ordinal: int) -> Any:
    fresh = vm.empty_on(kind, ordinal, tensor)
    vm.copy(tensor, fresh)
    return fresh


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a[0] < b[1] and b[0] < a[1]
