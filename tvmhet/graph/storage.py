"""The memory that a compiled stage allocates for its kernels' results, before anything is compiled.

    kernel    k0    k1    k2    k3          storage of t3     storage of all others
    t0      ██████████                      at 0, before t3
    t1            ██████████                                  at 0
    t2                  ██████████                            behind t1
    t3                        ████          at 0

What leaves a stage has a storage of its own size, where others may lie before it is made. All others lie in one, the
largest placed first, each in the smallest gap that is free while it lives. A function of a training step, where
others free what it may take and take what it frees, has a storage for each tensor that is alive at once instead
("pooled").

This is what a stage holds once it has run, as the VM's pooled allocator gives nothing back, while `liveness` is the
least that any allocator needs. `emit/place_tensors.py` makes it so. The allocator's rounding to pages of 4 KiB, and
what a library kernel takes and frees while it runs, are not counted.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tvmhet.graph.opgraph import Operator, OpGraph, Tensor

#: What every tensor's offset is a multiple of: as CUDA allocates, and more than any vector of a CPU.
ALIGNMENT_BYTES = 256

_RESHAPES = frozenset({"reshape", "flatten", "squeeze", "expand_dims", "nn.batch_flatten"})


def stage_bytes(graph: OpGraph, kernels: Sequence[Sequence[int]], between: frozenset[int] = frozenset()) -> int:
    """Return what a device holds for a stage: its parameters, its live-ins and `storage_bytes`."""
    inside = {op for kernel in kernels for op in kernel}
    read = {t for op in inside for t in graph.operators[op].inputs if graph.tensors[t].producer not in inside}
    return sum(graph.tensors[t].size_bytes for t in read) + storage_bytes(graph, kernels, between)


def storage_bytes(graph: OpGraph, kernels: Sequence[Sequence[int]], between: frozenset[int] = frozenset()) -> int:
    """Return the bytes that running `kernels` (sets of operators) in this order allocates.

    `between` are tensors that lie in memory although only the kernel which makes them reads them: those between the
    kernels of a branch of a concurrent kernel.

    Parameters and live-ins are not counted: the caller holds them (`stage_bytes` adds them). A kernel that only gives
    its operand another shape shares its storage. The order must be an execution order.
    """
    storages, results = storages_and_results(graph, kernels, between)
    return sum(s.size_bytes for s in storages) + sum(r.size_bytes for r in results)


@dataclass(slots=True)
class Storage:
    """A block of memory of a stage: from its first kernel to its last; a result's is there until somebody frees it.

    `tensors` are those of a result that share it, the first of which has its size: others may have been there before.
    """

    size_bytes: int
    first: int
    last: int
    tensors: tuple[int, ...] = ()


def storages_and_results(
    graph: OpGraph, kernels: Sequence[Sequence[int]], between: frozenset[int] = frozenset(), *, pooled: bool = False
) -> tuple[list[Storage], list[Storage]]:
    """Return the storages taken and given back inside a stage, and those of its results: see `storage_bytes`."""
    place = {op: i for i, kernel in enumerate(kernels) for op in kernel}
    root = _shared(graph, kernels)
    last, kept = _lifetimes(graph, place, root, between)
    lives, leaving = list[Life](), dict[int, tuple[int, ...]]()
    for i, kernel in enumerate(kernels):
        for t in _made(graph, kernel, place, between):
            owner = root[t]
            if owner == t or (owner in kept and owner not in leaving):
                end = len(kernels) if owner in kept else last[t]
                lives.append(Life(i, end, graph.tensors[owner].size_bytes))
            if owner in kept:
                leaving[owner] = (*leaving.get(owner, ()), t)
    places, sizes = (share_storages if pooled else place_tensors)(lives, len(kernels))
    storages = [Storage(size, len(kernels), 0) for size in sizes]
    for life, where in zip(lives, places, strict=True):
        one = storages[where.storage]
        one.first, one.last = min(one.first, life.first), max(one.last, life.last)
    results = [storages[where.storage] for life, where in zip(lives, places, strict=True) if life.last == len(kernels)]
    for result, tensors in zip(results, leaving.values(), strict=True):
        result.tensors = tensors
    return [s for s in storages if s.last < len(kernels)], results


class Life(NamedTuple):
    """A tensor's bytes, and the first and the last step at which they must be there."""

    first: int
    last: int
    size_bytes: int


class Place(NamedTuple):
    """Where a tensor lies: the number of its storage, and the bytes from where that begins."""

    storage: int
    offset: int


def place_tensors(lives: Sequence[Life], end: int) -> tuple[list[Place], list[int]]:
    """Return the place of each tensor, and the bytes of each storage.

    Those that are alive at the step `end` and after it, which are of steps before it, get the first storages, each one
    of its own size: who frees one then frees no more. The others follow, the largest first (greedy by size: Pisarchyk
    and Lee, Efficient Memory Management for Deep Neural Net Inference, MLSys 2020 workshop), each into the smallest gap
    that is free while it lives and large enough, in one of these storages or in a last one, which grows.
    """
    line = _Line(len(lives), end)
    ended = [i for i, life in enumerate(lives) if life.last >= end]
    at, begins = dict[int, int](), [0]
    for i in ended:
        at[i] = begins[-1]
        line.lay(lives[i], at[i])
        begins.append(line.close(at[i] + lives[i].size_bytes))
    for i in sorted(set(range(len(lives))).difference(ended), key=lambda i: (-lives[i].size_bytes, i)):
        at[i] = line.smallest_gap(lives[i])
        line.lay(lives[i], at[i])
    numbers = [bisect.bisect_right(begins, at[i]) - 1 for i in range(len(lives))]
    places = [Place(number, at[i] - begins[number]) for i, number in enumerate(numbers)]
    grown = [p.offset + x.size_bytes for p, x in zip(places, lives, strict=True) if p.storage == len(ended)]
    return places, [lives[i].size_bytes for i in ended] + ([max(grown)] if grown else [])


def share_storages(lives: Sequence[Life], end: int) -> tuple[list[Place], list[int]]:
    """Return the place of each tensor, at the start of a storage, and the bytes of each storage.

    As `place_tensors`, with a storage for each tensor that is alive at once: the VM's pool hands these on to other
    functions, size by size. In the order of time, as TVM plans, a small tensor takes the large storage that the next
    large one would need, and what leaves is never a place for what was there before.
    """
    taken: list[list[Life]] = []  # of each storage in the order of time, no two at once
    sizes: list[int] = []
    out = [0] * len(lives)
    for i in sorted(range(len(lives)), key=lambda i: (lives[i].last < end, -lives[i].size_bytes, i)):
        fitting = [s for s, size in enumerate(sizes) if size >= lives[i].size_bytes and _is_free(taken[s], lives[i])]
        out[i] = min(fitting, key=lambda s: (sizes[s], -s), default=len(taken))
        if out[i] == len(taken):
            taken.append([])
            sizes.append(lives[i].size_bytes)
        bisect.insort(taken[out[i]], lives[i])
    return [Place(number, 0) for number in out], sizes


def _is_free(taken: Sequence[Life], life: Life) -> bool:
    at = bisect.bisect_left(taken, life)
    return (at == 0 or taken[at - 1].last < life.first) and (at == len(taken) or life.last < taken[at].first)


class _Line:
    """Storages one behind the other on one line of addresses, the last without an end, and what lies there when."""

    def __init__(self, num_tensors: int, end: int) -> None:
        self._end = end
        self._size = 0
        self._first, self._last, self._from, self._to = np.zeros((4, 2 * num_tensors), np.int64)

    def lay(self, life: Life, address: int) -> None:
        """Lay a tensor at an address."""
        i = self._size
        self._first[i], self._last[i] = life.first, life.last
        self._from[i], self._to[i] = address, address + life.size_bytes
        self._size += 1

    def close(self, address: int) -> int:
        """End a storage; return where the next begins. Between them is never room."""
        begin = int(_aligned(address + 1))
        self.lay(Life(0, self._end, begin - address), address)
        return begin

    def smallest_gap(self, life: Life) -> int:
        """Return the address of the smallest gap that a tensor fits in; the lowest of several."""
        n = self._size
        met = np.flatnonzero((self._first[:n] <= life.last) & (life.first <= self._last[:n]))
        met = met[np.argsort(self._from[met], kind="stable")]
        begins = np.append(0, _aligned(np.maximum.accumulate(self._to[met])))
        room = np.append(self._from[met], np.iinfo(np.int64).max) - begins
        fitting = np.flatnonzero(room >= life.size_bytes)
        return int(begins[fitting[np.argmin(room[fitting])]])


def _aligned(address: Any) -> Any:
    return -(-address // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _lifetimes(
    graph: OpGraph, place: Mapping[int, int], root: Mapping[int, int], between: frozenset[int]
) -> tuple[dict[int, int], set[int]]:
    """Return the last kernel that reads each storage made here, and the storages that leave the stage, by tensor."""
    last: dict[int, int] = {}
    kept: set[int] = set()
    for t, tensor in enumerate(graph.tensors):
        if tensor.producer not in place or (_inside(tensor, place) and t not in between):
            continue
        owner = root[t]
        inner = [place[c] for c in tensor.consumers if c in place]
        last[owner] = max([last.get(owner, -1), *inner])
        if tensor.is_output or len(inner) < len(tensor.consumers) or not tensor.consumers:
            kept.add(owner)
    made_here = {t: i for t, i in last.items() if graph.tensors[t].producer in place and t not in kept}
    return made_here, kept


def _shared(graph: OpGraph, kernels: Sequence[Sequence[int]]) -> dict[int, int]:
    """Return, per tensor, the tensor whose storage it uses: its own, or that of the operand it reshapes."""
    root = {t: t for t in range(len(graph.tensors))}
    for kernel in kernels:
        if not all(_is_reshape(graph, graph.operators[op]) for op in kernel):
            continue
        for op in kernel:
            source = graph.operators[op].inputs[0]
            for t in graph.operators[op].outputs:
                root[t] = root[source]
    return root


def _is_reshape(graph: OpGraph, op: Operator) -> bool:
    """Whether an operator's result holds its operand's values in the same order, so that no kernel is made."""
    if op.family in _RESHAPES:
        return True
    if op.family != "permute_dims":
        return False
    before, after = (graph.tensors[t].shape for t in (op.inputs[0], op.outputs[0]))
    axes = op.attrs.get("axes")
    order = [int(a) % len(before) for a in axes] if axes is not None else list(reversed(range(len(before))))
    moved = [a for a in order if before[a] > 1]
    return moved == sorted(moved) and math.prod(before) == math.prod(after)


def _inside(tensor: Tensor, place: Mapping[int, int]) -> bool:
    """Whether only the kernel that makes a tensor reads it."""
    own = place[tensor.producer]
    return not tensor.is_output and bool(tensor.consumers) and all(place.get(c) == own for c in tensor.consumers)


def _made(graph: OpGraph, kernel: Sequence[int], place: Mapping[int, int], between: frozenset[int]) -> list[int]:
    outputs = [t for op in sorted(kernel) for t in graph.operators[op].outputs]
    return [t for t in outputs if t in between or not _inside(graph.tensors[t], place)]
