"""Memory that the parent and its workers share: frames of tensors, and the parameters.

A frame holds one input's journey: a place for every value, and a row of times for every stage. A value that everybody
has read before another is made gives that its place.

    frames:  | frame 0: times, x h y | frame 1: times, x h y | ...        params:  | w1 | w2 | ...

The memory is an anonymous file, inherited by descriptor: it has no name in /dev/shm, is not bound by its size, and is
freed with the last process that maps it, however that process ends.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tvmhet.runtime.program import Array, ValueSpec, numpy_dtype

ALIGNMENT_BYTES = 64  # what TVM's kernels assume of a tensor's first byte
#: Whether two values, by name, may be needed at the same time.
Clash = Callable[[str, str], bool]
ROW = 5  # start, inputs loaded, computed, outputs stored (seconds of CLOCK_MONOTONIC), and the worker's number


def aligned(num_bytes: int) -> int:
    """Return `num_bytes` rounded up to the alignment of tensors."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each value lies: byte offset from the start of its frame (or of the parameter segment)."""

    specs: tuple[ValueSpec, ...]
    offsets: tuple[int, ...]
    size_bytes: int

    @classmethod
    def of(cls, specs: Iterable[ValueSpec], reserved_bytes: int = 0) -> Layout:
        """Lay the values out one after another, each aligned, after `reserved_bytes`."""
        specs = tuple(specs)
        offsets, cursor = [], aligned(reserved_bytes)
        for spec in specs:
            offsets.append(cursor)
            cursor += aligned(spec.size_bytes)
        return cls(specs, tuple(offsets), max(cursor, ALIGNMENT_BYTES))

    @classmethod
    def sharing(cls, specs: Iterable[ValueSpec], clash: Clash, reserved_bytes: int = 0) -> Layout:
        """Lay the values out so that those which `clash` do not overlap: largest first, each as low as it fits."""
        specs, begin = tuple(specs), aligned(reserved_bytes)
        offsets: dict[int, int] = {}
        for i in sorted(range(len(specs)), key=lambda i: (-specs[i].size_bytes, i)):
            size, cursor = aligned(specs[i].size_bytes), begin
            others = sorted((offsets[j], j) for j in offsets if clash(specs[i].name, specs[j].name))
            for offset, j in others:
                if cursor + size <= offset:
                    break
                cursor = max(cursor, offset + aligned(specs[j].size_bytes))
            offsets[i] = cursor
        ends = (offsets[i] + aligned(spec.size_bytes) for i, spec in enumerate(specs))
        return cls(specs, tuple(offsets[i] for i in range(len(specs))), max([begin, ALIGNMENT_BYTES, *ends]))

    def views(self, memory: memoryview, base: int) -> dict[str, Array]:
        """Return each value as an array over `memory`, whose copy of the layout starts at byte `base`."""
        return {
            spec.name: np.ndarray(spec.shape, numpy_dtype(spec.dtype), memory, base + offset)
            for spec, offset in zip(self.specs, self.offsets, strict=True)
        }


@dataclass(frozen=True, slots=True)
class FrameLayout:
    """The frame of a program with `num_stages` stages, repeated `num_frames` times, and one line per worker.

    A worker's line holds the stage and the input it is busy with (or -1, -1), read after its death, and to see
    whether it goes on.
    """

    values: Layout
    num_stages: int
    num_frames: int
    num_workers: int

    @classmethod
    def of(
        cls, specs: Sequence[ValueSpec], clash: Clash, num_stages: int, num_frames: int, num_workers: int
    ) -> FrameLayout:
        """Lay out frames for `specs`, of which those that `clash` are apart; the times come first in each frame."""
        return cls(Layout.sharing(specs, clash, num_stages * ROW * 8), num_stages, num_frames, num_workers)

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole segment."""
        return self.num_frames * self.values.size_bytes + self.num_workers * ALIGNMENT_BYTES

    def frame(self, memory: memoryview, index: int) -> dict[str, Array]:
        """Return the values of one frame."""
        return self.values.views(memory, index * self.values.size_bytes)

    def times(self, memory: memoryview, index: int) -> NDArray[np.float64]:
        """Return the rows of times of one frame, shape (num_stages, ROW)."""
        return np.ndarray((self.num_stages, ROW), np.float64, memory, index * self.values.size_bytes)

    def busy(self, memory: memoryview, worker: int) -> NDArray[np.int64]:
        """Return the line of one worker: stage, input."""
        return np.ndarray((2,), np.int64, memory, self.num_frames * self.values.size_bytes + worker * ALIGNMENT_BYTES)


class Segment:
    """An anonymous shared file and this process's map of it. Pass `fd` to a child, which opens it with `attach`."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        self.fd = fd
        self.size_bytes = size_bytes
        self._map = mmap.mmap(fd, size_bytes)
        self.memory = memoryview(self._map)

    @classmethod
    def create(cls, name: str, size_bytes: int) -> Segment:
        """Make a segment of zeros. `name` shows in /proc only. Pages are taken when first written."""
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        os.ftruncate(fd, size_bytes)
        return cls(fd, size_bytes)

    @classmethod
    def attach(cls, fd: int, size_bytes: int) -> Segment:
        """Map a segment that the parent made."""
        return cls(fd, size_bytes)

    def close(self) -> None:
        """Give the descriptor back. The map itself goes when the last array over it does."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class StoredParams(Mapping[str, Array]):
    """Parameters in one segment, aligned, which nobody else writes: kernels read them where they lie, in any process.

    A program whose parameters are stored already is run without another copy of them.
    """

    def __init__(self, specs: Iterable[ValueSpec]) -> None:
        self.layout = Layout.of(specs)
        self.segment = Segment.create("tvmhet-params", self.layout.size_bytes)
        self._views = self.layout.views(self.segment.memory, 0)

    @classmethod
    def of(cls, params: Mapping[str, Array], names: Iterable[str]) -> StoredParams:
        """Return the named parameters: `params` itself if it is stored, else copies."""
        if isinstance(params, StoredParams):
            return params
        stored = cls(ValueSpec.of(n, params[n].shape, params[n].dtype.name) for n in names)
        for name, view in stored.items():
            np.copyto(view, params[name])
        return stored

    def memory(self) -> dict[str, memoryview]:
        """Return the bytes of each parameter, to be filled."""
        placed = zip(self.layout.specs, self.layout.offsets, strict=True)
        return {spec.name: self.segment.memory[offset : offset + spec.size_bytes] for spec, offset in placed}

    def __getitem__(self, name: str) -> Array:
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)

    def __del__(self) -> None:
        self.segment.close()
