"""Devices that share a core run their passes one after another, in the order of their ranks."""

import os
import threading
import time
from itertools import pairwise

from tests.runtime.test_training import batches, build, imported
from tvmhet.runtime.training_turns import NOBODY, Turns, new_row


class Ring:
    """Devices as threads that share rows; what they hand over are semaphores."""

    def __init__(self, cores, directory):
        self.rows = {core: new_row(len(cores)) for core in sorted(set().union(*cores))}
        self.ran = []
        self.handed = {(d, core): threading.Semaphore(0) for d in range(len(cores)) for core in self.rows}
        fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT)
        self.turns = [
            Turns(
                [self.rows[core] for core in own],
                own,
                d,
                fd,
                lambda core, d=d: self.handed[d, core].acquire(),
                lambda to, core: self.handed[to, core].release(),
            )
            for d, own in enumerate(cores)
        ]

    def wait(self, device, rank):
        """Start a thread in which a device asks for its turn, and return it once the wish is known."""
        thread = threading.Thread(target=self._run, args=(device, rank))
        thread.start()
        while all(row[1 + device] == NOBODY for row in self.rows.values()):
            time.sleep(0.001)
        return thread

    def _run(self, device, rank):
        self.turns[device].take(rank)
        self.ran.append(device)
        self.turns[device].give()


def test_who_waits_with_the_lowest_rank_comes_first(tmp_path):
    ring = Ring([(0,)] * 3, tmp_path)
    first = ring.turns[0]
    first.take(5)
    others = [ring.wait(1, 3), ring.wait(2, 2)]
    first.give(ready=1)  # goes before both, so the core stays
    assert not ring.ran
    first.give(ready=4)
    for thread in others:
        thread.join()
    assert ring.ran == [2, 1]
    assert ring.rows[0].tolist() == new_row(3).tolist()


def test_a_device_of_two_cores_keeps_both_from_others(tmp_path):
    ring = Ring([(0, 1), (0,), (1,)], tmp_path)
    ring.turns[0].take(0)
    others = [ring.wait(1, 1), ring.wait(2, 1)]
    assert not ring.ran
    ring.turns[0].give()
    for thread in others:
        thread.join()
    assert sorted(ring.ran) == [1, 2]


def test_devices_with_cores_of_their_own_never_wait(tmp_path):
    ring = Ring([(0,), (1,), ()], tmp_path)
    for turns in ring.turns:
        turns.take(0)


def test_passes_on_one_core_do_not_overlap():
    """Two devices on one core: every pass and update lies between others."""
    allowed = os.sched_getaffinity(0)
    (data,) = batches(1)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        with build(imported()[1]) as trainer:
            trainer.train_step(data)
            passes = sorted((t.start_s, t.end_s) for t in trainer.times())
    finally:
        os.sched_setaffinity(0, allowed)
    assert len(passes) == 2 * (2 * 4 + 1)
    assert all(end_s <= start_s for (_, end_s), (start_s, _) in pairwise(passes))
