"""The memory of training: what a placement is said to take, what its workers take, and the limit that they keep."""

import functools
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

import tvmhet
from tests.placed import cpus
from tvmhet.cluster.spec import ClusterSpec
from tvmhet.errors import OutOfMemory
from tvmhet.ir.optimizers import AdamW
from tvmhet.ir.training_step import read_step
from tvmhet.runtime.training_memory import num_slots
from tvmhet.runtime.training_program import Function
from tvmhet.solve.schedules import Schedule
from tvmhet.training_build import build_training
from tvmhet.training_deploy import program_of, stage_functions
from tvmhet.training_example import example_batch
from tvmhet.training_memory import memory_of_placement
from tvmhet.training_placement import TrainingPlacement

MICRO, COUNT, WIDTH = 256, 4, 512


@functools.cache
def model():
    """Layers of 1 MB of weights and 0.5 MB for each of several tensors kept per micro-batch."""
    layers = [m for _ in range(6) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    net = nn.Sequential(*layers, nn.Linear(WIDTH, 10))
    return tvmhet.from_torch(
        net, torch.zeros(MICRO, WIDTH), loss="cross_entropy", optimizer=AdamW(lr=1e-3), mode="training"
    )


def placed(schedule, recompute, replicas=1):
    forward = read_step(model()).forward
    cluster = cpus(v3=2 * replicas)
    ids = cluster.groups()[0].device_ids
    half = len(forward) // 2
    devices = (ids[:replicas], ids[replicas:])
    stages = (forward[:half], forward[half:])
    return cluster, TrainingPlacement(stages, devices, (recompute,) * 2, Schedule(schedule), COUNT)


def in_a_row(schedule, stages=4):
    """Stages on devices of one type, without recomputing."""
    forward = read_step(model()).forward
    cluster = cpus(v3=stages)
    cuts = [len(forward) * k // stages for k in range(stages + 1)]
    names = tuple(forward[a:b] for a, b in pairwise(cuts))
    devices = tuple((d,) for d in cluster.groups()[0].device_ids)
    return cluster, TrainingPlacement(names, devices, (False,) * stages, Schedule(schedule), COUNT)


def said(placement, cluster):
    return memory_of_placement(read_step(model()), placement, cluster=cluster, makers=("tvm",))


def run(cluster, placement, steps=2):
    options = {"cluster": cluster, "plan": placement, "global_batch": MICRO * COUNT, "makers": ("tvm",)}
    with build_training(model(), **options) as trainer:
        batch = example_batch(trainer.batch_specs)
        losses = [trainer.train_step(batch) for _ in range(steps)]
        return losses, trainer.memory_bytes()


WAYS = [("1f1b", False), *(pytest.param("gpipe", again, marks=pytest.mark.slow) for again in (False, True))]


@pytest.mark.parametrize(("schedule", "recompute"), WAYS)
def test_what_workers_take_is_what_was_said(schedule, recompute):
    cluster, placement = placed(schedule, recompute)
    _, taken = run(cluster, placement)
    for device, memory in said(placement, cluster).items():
        assert memory.total_bytes == pytest.approx(taken[device], rel=0.05)


def test_what_convolutions_take_while_they_run_is_said():
    """The gradient of a weight is computed for 2 x 2 places and cut to one: for 512 x 512 channels, 4 of 11 MB."""
    net = nn.Sequential(nn.Conv2d(3, 512, 1), nn.ReLU(), nn.Conv2d(512, 512, 1, stride=2), nn.Flatten())
    step = tvmhet.from_torch(net, torch.zeros(4, 3, 8, 8), loss="mse", optimizer="sgd", mode="training")
    cluster = cpus(v3=1)
    ((device,),) = [g.device_ids for g in cluster.groups()]
    whole = TrainingPlacement((read_step(step).forward,), ((device,),), (False,), Schedule.GPIPE, 1)
    options = {"cluster": cluster, "makers": ("tvm",)}
    with build_training(step, plan=whole, global_batch=4, **options) as trainer:
        batch = example_batch(trainer.batch_specs)
        for _ in range(2):
            trainer.train_step(batch)
        taken = trainer.memory_bytes()[device]
    memory = memory_of_placement(read_step(step), whole, **options)[device]
    assert memory.total_bytes == pytest.approx(taken, rel=0.05)


@pytest.mark.slow
def test_replicas_take_what_was_said_or_up_to_two_megabytes_less():
    """Not every page that replicas share is touched by each of them: 1.3 to 1.6 MB here, of 12 to 60 MB."""
    cluster, placement = placed("1f1b", False, replicas=2)
    _, taken = run(cluster, placement)
    for device, memory in said(placement, cluster).items():
        assert 0.95 * taken[device] <= memory.total_bytes <= taken[device] + 2e6


def limited(memory_bytes, count=2):
    text = f"nodes: [{{devices: {{cpu-x86-64-v3: {{count: {count}, memory: {memory_bytes} B}}}}, link: shm}}]"
    return ClusterSpec.from_yaml(text)


@pytest.mark.slow
def test_a_device_takes_no_more_than_its_memory():
    """GPipe keeps all micro-batches: with less memory than that, only recomputing trains, to the same losses."""
    cluster, keeping = placed("gpipe", False)
    _, recomputing = placed("gpipe", True)
    most = [
        max(
            m.total_bytes for m in memory_of_placement(read_step(model()), p, cluster=cluster, makers=("tvm",)).values()
        )
        for p in (keeping, recomputing)
    ]
    assert most[1] < 0.85 * most[0]
    tight = limited(int(1.05 * most[1]))
    with pytest.raises(OutOfMemory, match=r"device 'node0/cpu-x86-64-v3:[01]' has used up its memory during"):
        run(tight, keeping)
    losses, taken = run(tight, recomputing)
    assert max(taken.values()) <= 1.05 * most[1]
    assert losses == run(cluster, recomputing)[0]


@pytest.mark.slow
def test_two_waves_train_where_1f1b_keeps_too_much():
    """Of four stages the first keeps four micro-batches in 1F1B, and two in two waves: same losses in less memory."""
    cluster, eager = in_a_row("1f1b")
    _, waves = in_a_row("wavelet")
    most = [max(m.total_bytes for m in said(p, cluster).values()) for p in (eager, waves)]
    assert 1.1 * most[1] < most[0]
    tight = limited(int(1.05 * most[1]), count=4)
    with pytest.raises(OutOfMemory, match="has used up its memory during"):
        run(tight, eager)
    losses, taken = run(tight, waves)
    assert max(taken.values()) <= 1.05 * most[1]
    assert losses == run(cluster, eager)[0]


def test_state_that_does_not_fit_is_refused_before_the_first_step():
    _, placement = placed("gpipe", True)
    with pytest.raises(OutOfMemory, match="while it loaded its functions: MemoryError: state and values take"):
        run(limited(1 << 20), placement)


@pytest.mark.slow
def test_a_plan_that_fits_on_paper_fits_in_fact():
    tight = limited(38 << 20)
    plan = tvmhet.plan(model(), cluster=tight, mode="training", global_batch=MICRO * COUNT, makers=("tvm",))
    assert max(s.memory_bytes for s in plan.stages) < 38 << 20
    _, taken = run(tight, plan)
    for stage in plan.stages:
        assert stage.memory_bytes == pytest.approx(max(taken[d] for d in stage.placement.devices), rel=0.05)


@pytest.mark.parametrize(("schedule", "slots"), [("1f1b", 2), ("gpipe", COUNT)])
def test_micro_batches_that_are_on_their_way_at_once_have_slots_of_their_own(schedule, slots):
    cluster, placement = placed(schedule, False)
    parts, functions = stage_functions(read_step(model()), placement, None)
    bare = [{n: Function(Path(), f.inputs, f.outputs) for n, f in stage.items()} for stage in functions]
    assert num_slots(program_of(read_step(model()), parts, bare, placement, cluster, None)) == slots
