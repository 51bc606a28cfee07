"""Where values lie in a frame: none is written over while it is needed, whatever runs first; chains stay small."""

from __future__ import annotations

import random
from itertools import combinations
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.test_machines import chain
from tests.runtime.test_random_programs import DEVICES, Drawn, drawn_programs, program_of
from tvmhet.runtime import DeviceBinding, PipelineProgram
from tvmhet.runtime.arena import ALIGNMENT_BYTES, Layout, aligned
from tvmhet.runtime.lifetimes import clashes
from tvmhet.runtime.program import ValueSpec

BINDINGS = {d: DeviceBinding(d, "llvm") for d in DEVICES}


def sized(program: PipelineProgram, rng: random.Random) -> Layout:
    """The layout of the program's values, of random sizes."""
    shapes = {name: (rng.choice([1, 16, 17, 64, 300]),) for name in sorted(program.values)}
    return Layout.sharing((ValueSpec.of(n, s, "float32") for n, s in shapes.items()), clashes(program), 100)


def overlapping(layout: Layout) -> list[tuple[str, str]]:
    spans = {s.name: (o, o + s.size_bytes) for s, o in zip(layout.specs, layout.offsets, strict=True)}
    return [(a, b) for a, b in combinations(spans, 2) if spans[a][0] < spans[b][1] and spans[b][0] < spans[a][1]]


def ever_together(program: PipelineProgram, rng: random.Random) -> set[frozenset[str]]:
    """Pairs of values that are needed at the same time in one run, stages beginning and ending in a random order."""
    waiting, running, done = {s.index for s in program.stages}, set[int](), set[int]()
    together: set[frozenset[str]] = set()
    readers = {v: {s.index for s in program.stages if v in s.inputs} for v in program.values}
    while waiting or running:
        ready = [s for s in waiting if done.issuperset(program.predecessors(s))]
        if ready and (not running or rng.random() < 0.5):
            running.add(now := rng.choice(sorted(ready)))
            waiting.discard(now)
        else:
            done.add(now := rng.choice(sorted(running)))
            running.discard(now)
        begun = running | done
        needed = [
            v
            for v in program.values
            if ((maker := program.producer(v)) is None or maker in begun)
            and (v in program.outputs or not readers[v] <= done or maker in running)
        ]
        together |= {frozenset(pair) for pair in combinations(needed, 2)}
    return together


@given(drawn_programs(), st.integers(0, 2**32 - 1))
@settings(max_examples=300, deadline=None)
def test_no_value_is_written_over_while_it_is_needed(drawn: Drawn, seed: int) -> None:
    rng = random.Random(seed)
    program = program_of(drawn, lambda *_: Path("none"), BINDINGS)
    layout = sized(program, rng)
    assert all(offset % ALIGNMENT_BYTES == 0 and offset >= 100 for offset in layout.offsets)
    ends = [o + s.size_bytes for s, o in zip(layout.specs, layout.offsets, strict=True)]
    assert layout.size_bytes >= max(ends) and layout.size_bytes % ALIGNMENT_BYTES == 0
    shared = overlapping(layout)
    for _ in range(5):
        together = ever_together(program, rng)
        assert not [pair for pair in shared if frozenset(pair) in together]


def test_a_long_chain_has_two_places_between_its_ends() -> None:
    """What comes in gives its place away once it is read, what goes out keeps its own."""
    program = chain(*((d,) for d in ("m/cpu:0", "m/cpu:1") * 10))
    specs = tuple(program.values[v] for v in sorted(program.values))
    layout = Layout.sharing(specs, clashes(program))
    assert len(specs) == 21 and layout.size_bytes == 2 * aligned(specs[0].size_bytes)


def test_a_value_that_is_read_late_keeps_its_place() -> None:
    program = chain(*((f"m/cpu:{k}",) for k in range(6)), skips=((0, 5),))
    clash = clashes(program)
    assert all(clash("v0", f"v{k}") for k in (1, 2, 3, 4)) and clash("v0", "v5")
    assert not clash("x", "v1") and not clash("v1", "v3") and clash("v1", "v2")
