"""A sequence of calls with states of its own: a text that is continued, a stream of frames."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tvmhet.nested import one_call

if TYPE_CHECKING:
    from tvmhet.runtime.local import HetRuntime
    from tvmhet.runtime.whole import WholeRuntime


class Session:
    """One session of a model with states, such as a cache of keys and values.

    Calls of a session follow one another, each with the states that the one before left; calls of several sessions
    overlap. A call that fails leaves the states as they were; the end of a worker, or `close`, loses them.
    """

    def __init__(self, runtime: HetRuntime | WholeRuntime, index: int) -> None:
        self._runtime = runtime
        self.index = index

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Run one input, as `HetModule` does."""
        return self._runtime.call(one_call(inputs, named), self.index)

    def map(self, inputs: Iterable[Any]) -> Iterator[Any]:
        """Run many inputs one after another; yield their results."""
        return self._runtime.map(inputs, sessions=(self.index,))

    def state(self) -> dict[str, Any]:
        """Return copies of the states, numpy arrays by the names that the model has for them."""
        return self._runtime.states(self.index)

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Replace the states that are named, as after another module's `state()`.

        Raises BadInput for a name that is none, or another shape or dtype.
        """
        self._runtime.set_states(self.index, state)

    def reset(self) -> None:
        """Begin anew, with the states that the model had when it was imported."""
        self._runtime.set_states(self.index, None)
