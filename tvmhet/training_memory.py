"""What each device of a placed training step will hold when it runs, before anything is compiled.

    state      parameters, buffers and the optimiser's tensors, twice: a step writes the other generation
    values     the batch, and what crosses the device's stages: once per slot (`runtime.training_memory`)
    private    sums of gradients, stashes, storages of the functions, workspaces of kernels

The functions are those that are emitted. `graph.storage` says what storages each takes, `emit.workspace` what
kernels on CPUs take while they run, and TVM's allocators are repeated over the schedule of a step: they round to pages
and keep what is freed. What library functions, and kernels on GPUs, take and free while they run is not counted.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tvmhet.cluster.device import DeviceType
from tvmhet.cluster.spec import ClusterSpec
from tvmhet.emit.workspace import workspaces
from tvmhet.graph.storage import Storage, storages_and_results
from tvmhet.ir.training_functions import StageFunction
from tvmhet.ir.training_step import Step
from tvmhet.runtime.training_memory import TrainingMemory
from tvmhet.runtime.training_program import Function, TrainingProgram, TrainingStage
from tvmhet.training_deploy import cut_kernels, devices_of, fused_kernels, program_of, replica_of, stage_functions
from tvmhet.training_placement import TrainingPlacement

_PAGE_BYTES = 4096
_STEPS = 2  # the second finds the allocator as every later one does


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of one device at the peak of a step; `stash_bytes`, the most kept by schedule, is part of the private."""

    state_bytes: int
    value_bytes: int
    private_bytes: int
    stash_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.state_bytes + self.value_bytes + self.private_bytes


def memory_of_placement(
    step: Step,
    placement: TrainingPlacement,
    *,
    cluster: ClusterSpec,
    makers: Sequence[str],
) -> dict[str, DeviceMemory]:
    """Return the memory of each device that `placement` uses."""
    parts, made = stage_functions(step, placement, None)
    bare = [{n: Function(Path(), f.inputs, f.outputs) for n, f in functions.items()} for functions in made]
    program = program_of(step, parts, bare, placement, cluster, None)
    layout = TrainingMemory.of(program)
    needs: list[dict[str, _Need]] = []
    types = dict(devices_of(placement, cluster))
    known: dict[tuple[int, str], _Need] = {}
    for k, functions in enumerate(made):
        needs.append({})
        for name, f in functions.items():
            device = types[placement.devices[k][replica_of(name)]]
            key = id(f), device.name
            if key not in known:
                known[key] = _Need.of(f, makers, device)
            needs[k][name] = known[key]
    return {device: _of_device(program, layout, needs, device) for device in program.devices}


@dataclass(frozen=True, slots=True)
class _Event:
    """One kernel: storages taken (number, bytes), results taken (bytes, names), numbers of storages given back."""

    taken: tuple[tuple[int, int], ...]
    results: tuple[tuple[int, frozenset[str]], ...]
    freed: tuple[int, ...]


def _events(
    storages: Sequence[Storage], results: Sequence[tuple[Storage, frozenset[str]]], num_kernels: int
) -> Iterable[_Event]:
    taken: list[list[tuple[int, int]]] = [[] for _ in range(num_kernels)]
    made: list[list[tuple[int, frozenset[str]]]] = [[] for _ in range(num_kernels)]
    freed: list[list[int]] = [[] for _ in range(num_kernels)]
    for i, s in enumerate(storages):
        taken[s.first].append((i, s.size_bytes))
        freed[s.last].append(i)
    for r, names in results:
        made[r.first].append((r.size_bytes, names))
    return (_Event(tuple(a), tuple(b), tuple(c)) for a, b, c in zip(taken, made, freed, strict=True) if a or b or c)


@dataclass(frozen=True, slots=True)
class _Need:
    """What a call of a function takes, kernel by kernel: see `_Event`; `workspaces` are bytes of kernels' buffers."""

    events: tuple[_Event, ...]
    workspaces: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, function: StageFunction, makers: Sequence[str], device: DeviceType) -> _Need:
        mod, graph, kernels = cut_kernels(function, makers)
        if graph is None:
            return cls(())
        storages, results = storages_and_results(graph, [k.ops for k in kernels], pooled=True)
        called: dict[int, set[str]] = {}
        for t, name in zip(graph.outputs, function.outputs, strict=True):
            called.setdefault(t, set()).add(name)
        named = [(r, frozenset(n for t in r.tensors for n in called.get(t, ()))) for r in results]
        is_cpu = device.target["kind"] == "llvm"
        work = workspaces(fused_kernels(mod, graph, kernels), device.target) if is_cpu else ()
        return cls(tuple(_events(storages, named, len(kernels))), work)


@dataclass(slots=True)
class _Allocator:
    """TVM's pooled allocator."""

    held_bytes: int = 0
    _free: Counter[int] = field(default_factory=Counter)

    def take(self, size_bytes: int) -> int:
        pages = -(-size_bytes // _PAGE_BYTES)
        if self._free[pages]:
            self._free[pages] -= 1
        else:
            self.held_bytes += pages * _PAGE_BYTES
        return pages

    def give_back(self, pages: Iterable[int]) -> None:
        self._free.update(pages)


@dataclass(slots=True)
class _WorkspacePool:
    """TVM's pool of a thread's workspaces: the smallest free one that is enough, else the largest is made larger."""

    held_bytes: int = 0
    _free: list[int] = field(default_factory=list)  # pages, sorted

    def run(self, sizes_bytes: Sequence[int]) -> None:
        """Take the buffers of a kernel, then give them back."""
        taken = []
        for size in sizes_bytes:
            pages = -(-size // _PAGE_BYTES)
            at = bisect.bisect_left(self._free, pages)
            if at < len(self._free):
                pages = self._free.pop(at)
            else:
                smaller = self._free.pop() if self._free else 0
                self.held_bytes += (pages - smaller) * _PAGE_BYTES
            taken.append(pages)
        self._free = sorted([*self._free, *taken])


@dataclass(slots=True)
class _Device:
    """One device's private memory, pass by pass, as `runtime.training_loop` holds it. A block is (pages, bytes)."""

    program: TrainingProgram
    needs: Sequence[Mapping[str, _Need]]  # by stage and name of the function
    device: str
    allocator: _Allocator = field(default_factory=_Allocator)
    workspaces: _WorkspacePool = field(default_factory=_WorkspacePool)
    stash_bytes: int = 0
    _sums: dict[int, list[int]] = field(default_factory=dict)
    _buffers: dict[int, list[int]] = field(default_factory=dict)
    _stash: dict[tuple[int, int], list[tuple[int, int]]] = field(default_factory=dict)

    def run_step(self) -> None:
        for action in self.program.orders[self.device]:
            key = (action.stage, action.microbatch)
            if action.backward:
                self._backward(self.program.stages[action.stage], key)
            else:
                self._stash[key] = self._forward(self.program.stages[action.stage])
            held = sum(size for blocks in self._stash.values() for _, size in blocks)
            self.stash_bytes = max(self.stash_bytes, held)
        for stage in self.program.stages:
            if self.device in stage.devices:
                self._finish(stage, stage.devices.index(self.device))
        for held_pages in (*self._sums.values(), *self._buffers.values()):
            self.allocator.give_back(held_pages)
        self._sums.clear()
        self._buffers.clear()

    def _forward(self, stage: TrainingStage) -> list[tuple[int, int]]:
        """Return what is kept for the backward pass."""
        wanted = set(stage.backward[0].inputs) - self.program.values.keys()
        noise = [n.spec for n in self.program.noise if n.spec.name in {*stage.forward[0].inputs, *wanted}]
        drawn = [(self.allocator.take(n.size_bytes), n.size_bytes, frozenset({n.name})) for n in noise]
        kept, renewed = [], []
        for pages, size, names in (*drawn, *self._call(stage.index, "forward0")):
            if names & wanted:
                kept.append((pages, size))
            elif names & stage.buffers.keys():
                renewed.append(pages)
            else:
                self.allocator.give_back([pages])
        self.allocator.give_back(self._buffers.get(stage.index, []))
        self._buffers[stage.index] = renewed
        return kept

    def _backward(self, stage: TrainingStage, key: tuple[int, int]) -> None:
        fresh = []
        for pages, _, names in self._call(stage.index, "backward0"):
            if any(n.startswith("sum.") for n in names):
                fresh.append(pages)
            else:
                self.allocator.give_back([pages])
        self.allocator.give_back(self._sums.get(stage.index, []))
        self._sums[stage.index] = fresh
        self.allocator.give_back(pages for pages, _ in self._stash.pop(key))

    def _finish(self, stage: TrainingStage, replica: int) -> None:
        totals = [pages for name in (f"reduce{replica}",) for pages, _, _ in self._call(stage.index, name)]
        for name in self.needs[stage.index]:
            if name == f"norm{replica}" or name.startswith(f"update{replica}."):
                self.allocator.give_back([pages for pages, _, _ in self._call(stage.index, name)])
        self.allocator.give_back(totals)

    def _call(self, stage: int, function: str) -> list[tuple[int, int, frozenset[str]]]:
        """Call a function, if there is one: (pages, bytes, names) of each of its results' blocks."""
        if function not in self.needs[stage]:
            return []
        for sizes in self.needs[stage][function].workspaces:
            self.workspaces.run(sizes)
        held: dict[int, int] = {}
        results = []
        for event in self.needs[stage][function].events:
            held |= {i: self.allocator.take(size) for i, size in event.taken}
            results += [(self.allocator.take(size), size, names) for size, names in event.results]
            self.allocator.give_back(held[i] for i in event.freed)
        return results


def _of_device(
    program: TrainingProgram, layout: TrainingMemory, needs: Sequence[Mapping[str, _Need]], device: str
) -> DeviceMemory:
    run = _Device(program, needs, device)
    for _ in range(_STEPS):
        run.run_step()
    state, values = layout.shared_bytes(program, device)
    return DeviceMemory(state, values, run.allocator.held_bytes + run.workspaces.held_bytes, run.stash_bytes)
