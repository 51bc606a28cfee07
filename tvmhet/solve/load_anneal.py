"""Annealing of a placement (passes/load_anneal.cc), and how much work a search for placements may do."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tvmhet._passes import passes_func
from tvmhet.solve.contract import Blocks
from tvmhet.solve.load_chain import Placement, valued
from tvmhet.solve.loads import LoadProblem
from tvmhet.solve.orders import successors
from tvmhet.solve.pack import as_tensor, pack_lists

HOT = 0.3  # first temperature of annealing


@dataclass(frozen=True, slots=True)
class Effort:
    """Limits in steps, so that results repeat. The defaults take a few seconds on one core."""

    anneal_moves: int = 400_000  # per round
    anneal_rounds: int = 8
    seeds: int = 8
    max_downsets: int = 60_000
    max_pairs: int = 60_000_000
    max_entries: int = 120_000_000  # of the tables that price sets of one device; 0: never
    more_entries: int = 3_000_000_000  # beyond, where up to 500 blocks leave a gap above 1 %; about two minutes
    cpsat_s: float = 6.0  # in CP-SAT's deterministic seconds; 0: never


def anneal(
    problem: LoadProblem,
    blocks: Blocks,
    start: Placement,
    effort: Effort,
    ordered: bool,
    seed: int,
    heat: float = HOT,
) -> Placement:
    """Return the best placement found from `start`; with `ordered`, one that keeps the order of the devices."""
    slots, home = start.slots, start.home.copy()
    if ordered and seed % 2:  # idle devices first instead of last: a new first stage becomes possible
        idle = [d for d in range(len(slots)) if not (home == d).any()]
        turn = idle + [d for d in range(len(slots)) if d not in idle]
        home = np.array([turn.index(int(d)) for d in home], np.int32)
        slots = tuple(slots[d] for d in turn)
    nets_read: list[list[int]] = [[] for _ in range(blocks.count)]
    nets_made: list[list[int]] = [[] for _ in range(blocks.count)]
    for e, (src, readers) in enumerate(zip(blocks.net_src, blocks.net_readers, strict=True)):
        nets_made[src].append(e)
        for r in readers:
            nets_read[r].append(e)
    before: list[list[int]] = [[] for _ in range(blocks.count)]
    for u, v in blocks.neighbours:
        before[v].append(u)
    along = blocks.preds if ordered else before
    arrays = (
        np.ascontiguousarray(blocks.time_s[:, list(slots)]),
        blocks.memory_bytes,
        blocks.net_cost_s,
        np.array([problem.types[t].memory_bytes for t in slots], np.float64),
        np.array([problem.types[t].transfer_scale for t in slots], np.float64),
        np.array(blocks.net_src, np.int32),
        *pack_lists(blocks.net_readers),
        *pack_lists(nets_read),
        *pack_lists(nets_made),
        *pack_lists(along),
        *pack_lists(successors(along)),
    )
    passes_func("tvmhet.LoadAnneal")(
        [as_tensor(a) for a in arrays],
        as_tensor(home),
        ordered,
        effort.anneal_moves,
        effort.anneal_rounds,
        heat,
        seed + 1,
    )
    return valued(problem, blocks, home, slots)
