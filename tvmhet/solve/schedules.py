"""Schedules of a training pipeline: the order in which each device runs forward (F) and backward (B) passes.

    GPipe, 3 micro-batches        1F1B, first of 2 stages       interleaved, 2 chunks a device (F', B': chunk 1)
    F0 F1 F2 B0 B1 B2             F0 F1 B0 F2 B1 B2             F0 F1 F'0 F'1 B'0 B'1 B0 B1 ...

    wavelet, 3 stages, tick-wave 0 2, tock-wave 1 3
    F0 F1 .. .. .. B0 F2 .. .. B1 F3 ..
    .. F0 .. .. B0 F1 .. .. B1 F2 .. ..
    .. .. F0 B0 .. .. F1 B1 .. .. F2 B2

How many micro-batches a device holds between their F and their B decides its memory:

    GPipe        all of its micro-batches
    1F1B         ceil((replicas of its stage and of all later ones) / replicas of its stage); K - i without replicas
    interleaved  (v - 1) K + 2 (K - 1 - d) + 1 chunks, on device d of K with v chunks each
    wavelet      2 on the first K // 2 stages, 1 on the others (with replicas: so many for each of the widest stage)

The 1F1B count is that of Narayanan et al. (PipeDream, SOSP 2019) and, with replicas, Tarnawski et al. (Piper, NeurIPS
2021); the interleaved order is that of Narayanan et al. (Megatron-LM, SC 2021). Wavelet has two waves of one job on the
same devices, the second half a cycle behind, so that on later stages its F comes in the memory valley after the first
one's B (Wang et al., Wavelet, MLSys 2021). Of that paper it has only this: a device runs one pass at a time, both waves
share the weights, and their gradients are added before the one update, so that the numbers are those of any schedule.

Replicas with unlike shares of the micro-batches get theirs as evenly spread as they can be. One order serves them all:
F of micro-batch m comes at m, its B at m + lag, F first where both come at once, and no stage has less lag than one
after it. So no pass waits for one that comes later, and no order can wait for ever. A stage all of whose replicas run
one micro-batch in every r has the counts above.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from tvmhet.errors import BadInput


class Schedule(str, enum.Enum):
    """The order of forward and backward passes."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    WAVELET = "wavelet"


#: Schedules in the order in which equal values are broken.
PREFERRED = (Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED, Schedule.GPIPE, Schedule.WAVELET)


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of one micro-batch through one chunk of a device; `chunk` is 0 unless the schedule is interleaved."""

    backward: bool
    chunk: int
    microbatch: int


def passes_of_replica(num_microbatches: int, replicas: int, replica: int = 0) -> int:
    """Return how many micro-batches a replica runs: they are dealt in turn, so the first replica has the most."""
    return (num_microbatches - replica + replicas - 1) // replicas


def deal(shares: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the micro-batches of each replica: as many as its share, spread evenly; equal shares go in turn."""
    total = sum(shares)
    turns = sorted(((2 * i + 1) * total / (2 * n), r) for r, n in enumerate(shares) for i in range(n))
    own: list[list[int]] = [[] for _ in shares]
    for m, (_, r) in enumerate(turns):
        own[r].append(m)
    return tuple(map(tuple, own))


def span(shares: Sequence[int]) -> int:
    """Return among how many micro-batches in a row each unlike replica of a stage has about one."""
    return -(-sum(shares) // min(shares))


def lags(schedule: Schedule, spans: Sequence[int], num_microbatches: int) -> tuple[int, ...]:
    """Return, per stage of a pipeline that is not interleaved, how many micro-batches later a B comes than its F."""
    if schedule is Schedule.GPIPE:
        return (num_microbatches,) * len(spans)
    away = list(accumulate(reversed(spans)))[::-1]
    if schedule is Schedule.WAVELET and away:
        wave = max(spans)  # one micro-batch for each replica
        away = [min(n, 2 * wave if k < len(away) // 2 else wave) for k, n in enumerate(away)]
    return (*(n - 1 for n in away[:-1]), 0) if away else ()


def held(microbatches: Sequence[int], lag: int) -> int:
    """Return how many micro-batches a replica holds between F and B at most."""
    most, first = 0, 0
    for i, m in enumerate(microbatches):
        while microbatches[first] + lag < m:
            first += 1
        most = max(most, i - first + 1)
    return most


def linear_order(microbatches: Sequence[int], lag: int) -> tuple[Pass, ...]:
    """Return the passes of one replica: see above."""
    turns = [(m + lag * backward, backward, m) for m in microbatches for backward in (False, True)]
    return tuple(Pass(backward, 0, m) for _, backward, m in sorted(turns))


def interleaved_order(microbatches: Sequence[int], device: int, num_devices: int, num_chunks: int) -> tuple[Pass, ...]:
    """Return the passes of device `device` of `num_devices` that holds `num_chunks` chunks of the model.

    Micro-batches go through a chunk in rounds of `num_devices`. Raises BadInput unless that divides their number.
    """
    if len(microbatches) % num_devices:
        raise BadInput(
            f"{len(microbatches)} micro-batches on {num_devices} interleaved devices",
            "the number of micro-batches must be a multiple of the number of devices",
        )
    total = len(microbatches) * num_chunks

    def item(k: int, backward: bool) -> Pass:
        chunk = k // num_devices % num_chunks
        at = k // (num_devices * num_chunks) * num_devices + k % num_devices
        return Pass(backward, num_chunks - 1 - chunk if backward else chunk, microbatches[at])

    ahead = min(total, interleaved_window(device, num_devices, num_chunks) - 1)
    order = [item(k, False) for k in range(ahead)]
    for k in range(total - ahead):
        order += [item(ahead + k, False), item(k, True)]
    return (*order, *(item(k, True) for k in range(total - ahead, total)))


def interleaved_window(device: int, num_devices: int, num_chunks: int) -> int:
    """Return how many passes of chunks device `device` holds at most between forward and backward."""
    return (num_chunks - 1) * num_devices + 2 * (num_devices - 1 - device) + 1


def peak_bytes(order: Sequence[Pass], chunk_bytes: Sequence[float]) -> float:
    """Return the most bytes kept at once by a device that runs `order`; `chunk_bytes[c]` for one pass of chunk c."""
    held = peak = 0.0
    for p in order:
        held += -chunk_bytes[p.chunk] if p.backward else chunk_bytes[p.chunk]
        peak = max(peak, held)
    return peak
