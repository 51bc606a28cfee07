"""Training on placed devices: every gradient against torch's in float64, then steps, failures, checkpoints.

The gradient of a step is read off the optimiser: after the first step with momentum, the momentum is the gradient.
"""

import copy
import dataclasses
import errno
import functools
import math
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from torch import nn

import tvmhet
from tests.placed import cpus
from tvmhet import training_checkpoint, zoo
from tvmhet.errors import BadBatch, BadBundle, BadGraph, BadInput, NotFinite, NotSupported, PlanMismatch, WorkerFailed
from tvmhet.ir.optimizers import AdamW, Sgd
from tvmhet.ir.training_step import forward_prepared, read_step
from tvmhet.runtime.program import ValueSpec
from tvmhet.runtime.training_noise import draw
from tvmhet.runtime.training_program import Noise
from tvmhet.solve.schedules import Schedule
from tvmhet.training_build import build_training
from tvmhet.training_checkpoint import read_checkpoint, torch_state_dict, write_checkpoint
from tvmhet.training_placement import TrainingPlacement

MICRO, COUNT = 2, 4


class Net(nn.Module):
    """Tokens with a tied classifier, a normalised and a plain layer, dropout if asked for."""

    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(13, 8), nn.LayerNorm(8)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.bn, self.drop = nn.BatchNorm1d(5), nn.Dropout(dropout)

    def forward(self, tokens):
        x = self.norm(self.embed(tokens))
        x = self.bn(x + self.second(self.drop(nn.functional.gelu(self.first(x)))))
        return x @ self.embed.weight.T


@functools.cache
def imported(model=None, optimizer=None, dropout=0.0):
    inputs = (torch.zeros(MICRO, 5, dtype=torch.int64),)
    model = Net(dropout) if model is None else model
    chosen = optimizer or Sgd(lr=0.1, momentum=0.9)
    return model, tvmhet.from_torch(model, inputs, loss="cross_entropy", optimizer=chosen, mode="training")


def batches(steps, seed=5):
    g = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(0, 13, (MICRO * COUNT, 5), generator=g) for _ in range(2)) for _ in range(steps)]


def placed(trained, num_stages, replicas=1, schedule="1f1b", recompute=False, chunks=1):
    """Stages of equal numbers of operators on CPU devices, and the cluster that has them."""
    forward = read_step(trained).forward
    total = num_stages * chunks
    cluster = cpus(v2=replicas * (num_stages // 2), v3=replicas * (num_stages - num_stages // 2))
    ids = [d for group in cluster.groups() for d in group.device_ids]
    placement = TrainingPlacement(
        tuple(forward[i * len(forward) // total : (i + 1) * len(forward) // total] for i in range(total)),
        tuple(tuple(ids[i % num_stages * replicas : (i % num_stages + 1) * replicas]) for i in range(total)),
        (recompute,) * total,
        Schedule(schedule),
        COUNT,
    )
    return cluster, placement


def build(trained, num_stages=2, seed=0, max_norm=None, makers=("tvm",), **how):
    """Without the library workers need no torch, and start at once."""
    cluster, placement = placed(trained, num_stages, **how)
    options = {"seed": seed, "max_norm": max_norm, "makers": makers}
    return build_training(trained, cluster=cluster, plan=placement, global_batch=MICRO * COUNT, **options)


def torch_step(model, optimizer, batch, max_norm=None):
    """One step of torch with the same micro-batches; returns the loss."""
    optimizer.zero_grad()
    losses = []
    for tokens, targets in zip(batch[0].split(MICRO), batch[1].split(MICRO), strict=True):
        y = model(tokens)
        loss = nn.functional.cross_entropy(y.reshape(-1, y.shape[-1]), targets.reshape(-1))
        (loss / COUNT).backward()
        losses.append(loss.item())
    if max_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    return sum(losses) / COUNT


def assert_gradients(trainer, model, tolerance=1e-4):
    """Compare the first step's gradients (the momentum) tensor by tensor with those in `model`."""
    kept = trainer.optimizer_state()
    largest = max(float(p.grad.norm()) for p in model.parameters())
    for name, p in model.named_parameters():
        error = float((torch.from_numpy(kept[name, "momentum_buffer"]).double() - p.grad).norm())
        assert error <= tolerance * max(float(p.grad.norm()), 1e-3 * largest), name


HOW = {
    "1f1b": {"num_stages": 2},
    "library": {"num_stages": 2, "makers": ("tvm", "library")},
    "gpipe, recomputed": {"num_stages": 2, "schedule": "gpipe", "recompute": True},
    "replicas": {"num_stages": 2, "replicas": 2},
    "three, replicas, recomputed": {
        "num_stages": 3,
        "replicas": 2,
        "recompute": True,
        "makers": ("tvm", "library"),
    },
    "interleaved": {"num_stages": 2, "schedule": "interleaved", "chunks": 2},
    "wavelet": {"num_stages": 3, "schedule": "wavelet"},
}


#: The other ways are taken by the zoo models below.
GRADIENTS = ("1f1b", "library", "three, replicas, recomputed", "interleaved", "wavelet")


@pytest.mark.parametrize("how", [pytest.param(h, marks=[] if h == "1f1b" else pytest.mark.slow) for h in GRADIENTS])
def test_gradients_and_losses_are_torchs(how):
    model, trained = imported()
    double = copy.deepcopy(model).double().train()
    reference = torch.optim.SGD(double.parameters(), lr=0.1, momentum=0.9)
    data = batches(6)
    with build(trained, **HOW[how]) as trainer:
        assert trainer.train_step(data[0]) == pytest.approx(torch_step(double, reference, data[0]), rel=1e-5)
        assert_gradients(trainer, double)
        if "replicas" not in how:  # with replicas the first one's statistics are kept
            for name, value in double.named_buffers():
                torch.testing.assert_close(
                    torch.from_numpy(trainer.state_dict()[name]),
                    value.to(torch.from_numpy(trainer.state_dict()[name]).dtype),
                )
        ours = trainer.fit(data[1:])
        theirs = [torch_step(double, reference, b) for b in data[1:]]
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["three, replicas, recomputed", "gpipe, recomputed", "interleaved", "wavelet"])
def test_fifty_steps_of_adamw_with_clipping_equal_torchs(how):
    model, trained = imported(optimizer=AdamW(lr=3e-3, weight_decay=0.1))
    double = copy.deepcopy(model).double().train()
    reference = torch.optim.AdamW(double.parameters(), lr=3e-3, weight_decay=0.1)
    data = batches(50)
    with build(trained, max_norm=0.5, **HOW[how]) as trainer:
        ours = trainer.fit(iter(data), steps=50)
    np.testing.assert_allclose(ours, [torch_step(double, reference, b, 0.5) for b in data], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("makers", [("tvm",), ("tvm", "library")], ids=str)
def test_bfloat16_steps_follow_exact_ones_on_float32_parameters(makers, tmp_path):
    model, inputs = Net(), (torch.zeros(MICRO, 5, dtype=torch.int64),)
    trained = tvmhet.from_torch(
        model, inputs, loss="cross_entropy", lr=0.1, momentum=0.9, mode="training", dtype="bfloat16"
    )
    double = copy.deepcopy(model).double().train()
    reference = torch.optim.SGD(double.parameters(), lr=0.1, momentum=0.9)
    data = batches(6)
    with build(trained, makers=makers) as trainer:
        ours = trainer.fit(data)
        trainer.save(tmp_path / "run.safetensors")
    theirs = [torch_step(double, reference, b) for b in data]
    np.testing.assert_allclose(ours, theirs, rtol=1e-2)
    assert not np.allclose(ours, theirs, rtol=1e-6)  # it did compute in bfloat16
    saved = torch_state_dict(tmp_path / "run.safetensors")
    assert {str(v.dtype) for v in saved.values()} == {"torch.float32", "torch.int64"}
    model.load_state_dict(saved)


@pytest.mark.parametrize(
    ("dtype", "rtol"),
    [
        pytest.param("float64", 1e-6, marks=pytest.mark.slow),
        pytest.param("float16", 1e-2, marks=pytest.mark.slow),
        ("bfloat16", 5e-2),
    ],
)
def test_parameters_of_another_dtype_stay_of_it(dtype, rtol, tmp_path):
    """Steps of two stages follow exact ones as far as the dtype goes; the checkpoint loads into the module."""
    model, inputs = Net().to(getattr(torch, dtype)), (torch.zeros(MICRO, 5, dtype=torch.int64),)
    trained = tvmhet.from_torch(model, inputs, loss="cross_entropy", lr=0.1, momentum=0.9, mode="training")
    double = copy.deepcopy(model).double().train()
    reference = torch.optim.SGD(double.parameters(), lr=0.1, momentum=0.9)
    data = batches(4)
    with build(trained) as trainer:
        ours = trainer.fit(data)
        trainer.save(tmp_path / "run.safetensors")
    np.testing.assert_allclose(ours, [torch_step(double, reference, b) for b in data], rtol=rtol)
    saved = torch_state_dict(tmp_path / "run.safetensors")
    assert {str(v.dtype) for v in saved.values()} == {f"torch.{dtype}", "torch.int64"}
    model.load_state_dict(saved)
    assert all(torch.isfinite(v).all() for v in saved.values())


def test_replicas_on_unlike_types_run_unlike_shares():
    """Three micro-batches on one type, one on the other: the gradients are those of the whole batch."""
    model, trained = imported()
    double = copy.deepcopy(model).double().train()
    reference = torch.optim.SGD(double.parameters(), lr=0.1, momentum=0.9)
    cluster = cpus(v2=1, v3=1)
    ids = tuple(d for group in cluster.groups() for d in group.device_ids)
    whole = (read_step(trained).forward,)
    placement = TrainingPlacement(whole, (ids,), (False,), Schedule.ONE_F_ONE_B, COUNT, ((1, 3),))
    data = batches(3)
    options = {"cluster": cluster, "plan": placement, "global_batch": MICRO * COUNT, "makers": ("tvm",)}
    with build_training(trained, max_norm=0.5, **options) as trainer:
        losses = trainer.fit(data)
        assert [len(order) for order in trainer.program.orders.values()] == [2, 6]
    np.testing.assert_allclose(losses, [torch_step(double, reference, b, 0.5) for b in data], rtol=1e-5)
    with pytest.raises(BadInput, match="each a share, at least 1, that add up"):
        dataclasses.replace(placement, shares=((2, 3),))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [Schedule.ONE_F_ONE_B, Schedule.GPIPE])
def test_a_stage_among_several_has_replicas_on_unlike_types(schedule):
    """The first of two stages on one device, the second on two types, of which one runs three of four micro-batches."""
    model, trained = imported()
    double = copy.deepcopy(model).double().train()
    reference = torch.optim.SGD(double.parameters(), lr=0.1, momentum=0.9)
    cluster = cpus(v2=1, v3=2)
    ids = [d for group in cluster.groups() for d in group.device_ids]
    forward = read_step(trained).forward
    half = len(forward) // 2
    devices = ((ids[1],), (ids[0], ids[2]))
    placement = TrainingPlacement(
        (forward[:half], forward[half:]), devices, (False, True), schedule, COUNT, ((), (1, 3))
    )
    assert placement.microbatches(1) == ((1,), (0, 2, 3))
    data = batches(2)
    options = {"cluster": cluster, "plan": placement, "global_batch": MICRO * COUNT, "makers": ("tvm",)}
    with build_training(trained, **options) as trainer:
        losses = [trainer.train_step(data[0])]
        want = [torch_step(double, reference, data[0])]
        assert_gradients(trainer, double)
        losses.append(trainer.train_step(data[1]))
        assert [len(trainer.program.orders[d]) for d in ids] == [2, 8, 6]
    np.testing.assert_allclose(losses, [*want, torch_step(double, reference, data[1])], rtol=1e-5)


def test_a_killed_worker_fails_the_step_and_changes_nothing():
    _, trained = imported()
    data = batches(3)
    with build(trained, seed=7, max_norm=0.5) as trainer:
        trainer.train_step(data[0])
        before = trainer.state_dict() | {"/".join(k): v for k, v in trainer.optimizer_state().items()}
        os.kill(trainer._engine._fleet.workers[0].pid, signal.SIGKILL)
        with pytest.raises(WorkerFailed, match="SIGKILL"):
            trainer.train_step(data[1])
        after = trainer.state_dict() | {"/".join(k): v for k, v in trainer.optimizer_state().items()}
        assert all(np.array_equal(before[n], after[n]) for n in before)
        assert trainer.steps_done == 1
        again = trainer.train_step(data[1])  # with new workers
    with build(trained, seed=7, max_norm=0.5) as unbroken:
        assert unbroken.fit(data[:2])[1] == again


def test_a_worker_killed_in_the_middle_of_a_step_changes_nothing(tmp_path):
    """The second worker is held before the step and killed once the first has run its first pass."""
    _, trained = imported()
    data = batches(2)
    path = tmp_path / "run.safetensors"
    with build(trained, seed=7) as trainer:
        trainer.train_step(data[0])
        saved = trainer.save(path).read_bytes()
        before = trainer.state_dict() | {"/".join(k): v for k, v in trainer.optimizer_state().items()}
        first, second = trainer._engine._fleet.workers
        passes = trainer._engine._board[f"times.{first.config.binding.device_id}"]
        passes[:] = 0
        os.kill(second.pid, signal.SIGSTOP)

        def kill_in_the_middle():
            while passes[0, 1] == 0:
                time.sleep(1e-3)
            os.kill(second.pid, signal.SIGKILL)

        killer = threading.Thread(target=kill_in_the_middle)
        killer.start()
        with pytest.raises(WorkerFailed, match="SIGKILL"):
            trainer.train_step(data[1])
        killer.join()
        after = trainer.state_dict() | {"/".join(k): v for k, v in trainer.optimizer_state().items()}
        assert all(np.array_equal(before[n], after[n]) for n in before)
        assert path.read_bytes() == saved and trainer.steps_done == 1


@pytest.fixture(scope="module", name="regression")
def regression_fixture():
    return regression()


def regression():
    """A model that takes floats, and a good batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    trained = tvmhet.from_torch(model, (torch.zeros(MICRO, 6),), loss="mse", optimizer=AdamW(), mode="training")
    return trained, [torch.randn(MICRO * COUNT, 6), torch.randn(MICRO * COUNT, 3)]


def kept(trainer):
    return trainer.state_dict() | {"/".join(k): v for k, v in trainer.optimizer_state().items()}


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_a_batch_with_nan_is_refused_and_changes_nothing(regression, max_norm):
    trained, good = regression
    bad = good[0].clone()
    bad[2 * MICRO, 1] = math.nan
    with build(trained, max_norm=max_norm) as trainer:
        trainer.train_step(good)
        before = kept(trainer)
        with pytest.raises(NotFinite, match="step 2: the loss of micro-batch 2 is nan; parameters stay"):
            trainer.train_step(bad, good[1])
        assert all(np.array_equal(v, before[n]) for n, v in kept(trainer).items()) and trainer.steps_done == 1
        assert math.isfinite(trainer.train_step(good))  # with the same workers


@pytest.mark.parametrize("dropout", [0.0, pytest.param(0.2, marks=pytest.mark.slow)])
def test_a_run_resumes_bit_equal_and_loads_into_torch(tmp_path, dropout):
    model, trained = imported(dropout=dropout)
    data = batches(4)
    path = tmp_path / "run.safetensors"
    with build(trained, seed=3, max_norm=0.5) as trainer:
        trainer.fit(data[:2])
        trainer.save(path)
        rest = trainer.fit(data[2:])
        last = trainer.state_dict()
    with build(trained, seed=99, max_norm=0.5) as resumed:
        assert resumed.restore(path).step == 2
        assert resumed.fit(data[2:]) == rest
        assert all(np.array_equal(v, last[n]) for n, v in resumed.state_dict().items())
    fresh = Net()
    fresh.load_state_dict(torch_state_dict(path))  # strict
    assert os.listdir(tmp_path) == ["run.safetensors"]
    assert not torch.equal(fresh.first.weight, model.first.weight)


def test_bad_checkpoints_and_batches_are_refused_and_change_nothing(tmp_path):
    _, trained = imported()
    zeros = torch.zeros(8, 5, dtype=torch.int64)
    path = tmp_path / "run.safetensors"
    with build(trained) as trainer:
        before = trainer.state_dict()
        good = read_checkpoint(trainer.save(path))
        write_checkpoint(path, dataclasses.replace(good, optimizer="AdamW()"))
        with pytest.raises(PlanMismatch, match=r"AdamW\(\)"):
            trainer.restore(path)
        write_checkpoint(
            path, dataclasses.replace(good, tensors={**good.tensors, "first.bias": np.zeros(3, np.float32)})
        )
        with pytest.raises(PlanMismatch, match=r"is \(3,\) float32; the model's is \(16,\) float32"):
            trainer.restore(path)
        path.write_bytes(path.read_bytes()[:100])
        with pytest.raises(BadBundle, match="cannot be read"):
            trainer.restore(path)
        with pytest.raises(BadBatch, match="holds 6 samples, the global batch is 8"):
            trainer.train_step(zeros[:6], zeros[:6])
        with pytest.raises(BadInput, match="takes 2 inputs"):
            trainer.train_step(zeros)
        assert all(np.array_equal(v, before[n]) for n, v in trainer.state_dict().items())
        assert trainer.steps_done == 0


def test_checkpoints_that_cannot_be_written_are_refused_and_nothing_is_lost(tmp_path, monkeypatch):
    _, trained = imported()
    path, pipe = tmp_path / "run.safetensors", tmp_path / "pipe"
    os.mkfifo(pipe)
    with build(trained) as trainer:
        whole = trainer.save(path).read_bytes()
        for place in (tmp_path, pipe):
            with pytest.raises(BadInput, match="is a folder or a device"):
                trainer.save(place)
        with pytest.raises(BadInput, match="cannot be written: "):
            trainer.save(path / "below a file")

        def full(tensors, file, metadata):
            file.write_bytes(b"a part")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(training_checkpoint, "save_file", full)
        with pytest.raises(BadInput, match="cannot be written: No space left on device"):
            trainer.save(path)
        assert path.read_bytes() == whole and pipe.is_fifo()
        assert sorted(os.listdir(tmp_path)) == ["pipe", "run.safetensors"]


def test_wrong_options_of_a_run_are_refused_before_a_step():
    _, trained = imported()
    zeros = torch.zeros(8, 5, dtype=torch.int64)
    for option in ({"seed": "a"}, {"seed": -1}, {"seed": 2**70}, {"seed": True}, {"max_norm": "1"}, {"max_norm": True}):
        (name,) = option
        with pytest.raises(BadInput, match=f"{name} is "):
            build(trained, **option)
    with build(trained) as trainer:
        for lr in ("a", math.nan, -1.0, math.inf, None):
            trainer.lr = lr
            with pytest.raises(BadInput, match="lr is "):
                trainer.train_step(zeros, zeros)
        with pytest.raises(BadInput, match="the loader is a int"):
            trainer.fit(3)
        for steps in (-1, "a", 1.5):
            with pytest.raises(BadInput, match="steps is "):
                trainer.fit([], steps=steps)
        assert trainer.fit([], steps=3) == [] and trainer.steps_done == 0
    trainer.lr = 0.1
    with pytest.raises(NotSupported, match="is closed"):
        trainer.train_step(zeros, zeros)


def test_bad_batches_and_placements_are_refused():
    _, trained = imported()
    cluster, placement = placed(trained, 2)
    with pytest.raises(BadBatch, match="micro-batches of 2 samples do not divide the global batch of 7"):
        build_training(trained, cluster=cluster, plan=placement, global_batch=7)
    with pytest.raises(BadBatch, match="the plan has 4 micro-batches"):
        build_training(trained, cluster=cluster, plan=placement, global_batch=6)
    stages = (placement.stages[0], placement.stages[1][1:])
    missing = TrainingPlacement(stages, placement.devices, placement.recompute, placement.schedule, COUNT)
    with pytest.raises(BadGraph, match="is in no stage"):
        build_training(trained, cluster=cluster, plan=missing, global_batch=8)
    with pytest.raises(BadInput, match="a device serves two stages"):
        TrainingPlacement(placement.stages, placement.devices[:1] * 2, (False, False), Schedule.GPIPE, COUNT)


def test_noise_depends_on_all_that_names_it_and_on_nothing_else():
    noise = Noise(ValueSpec.of("n", (64,), "float32"), "uniform")
    first = draw(noise, 1, 0, 1, 0)
    assert first.dtype == np.float32 and first.min() >= 0 and first.max() < 1
    assert np.array_equal(first, draw(noise, 1, 0, 1, 0))
    for other in ((2, 0, 1, 0), (1, 1, 1, 0), (1, 0, 2, 0), (1, 0, 1, 1)):
        assert not np.intersect1d(first, draw(noise, *other)).size > 2


def test_forward_names_are_those_of_the_whole_step():
    _, trained = imported()
    step = read_step(trained)
    assert tuple(op.name for op in forward_prepared(step).graph.operators) == step.forward


def test_saving_survives_kill(tmp_path):
    """A process killed while it saves again and again leaves a whole checkpoint."""
    code = f"""
import numpy as np
from pathlib import Path
from tvmhet.training_checkpoint import Checkpoint, write_checkpoint
for step in range(10**6):
    w = np.full(200_000, step, np.float32)
    write_checkpoint(Path({str(tmp_path / "c")!r}), Checkpoint({{"w": w}}, {{}}, {{"w": "w"}}, step, 0, "Sgd()"))
    print(step, flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while int(process.stdout.readline()) < 5:
            pass
        process.send_signal(signal.SIGKILL)
    checkpoint = read_checkpoint(tmp_path / "c")
    assert checkpoint.step >= 5 and (checkpoint.tensors["w"] == checkpoint.step).all()


SMALL = {
    "resnet50": {"batch": 2, "image": 64, "blocks": (1, 1, 1, 1), "base_width": 8, "num_classes": 10},
    "moe": {"batch": 2, "length": 8, "layers": 1, "dim": 16, "heads": 2, "hidden": 32, "experts": 4},
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "how"), [("resnet50", "gpipe, recomputed"), ("moe", "replicas")])
def test_small_zoo_models_train_like_torch(name, how):
    model, inputs = zoo.get(name, **SMALL[name])
    trained = tvmhet.from_torch(model, inputs, loss="cross_entropy", optimizer=Sgd(0.1, 0.9), mode="training")
    g = torch.Generator().manual_seed(2)
    classes = 10 if name == "resnet50" else int(trained.step.inputs[1].ty.shape.values[-1])
    shape = [int(d) for d in trained.step.inputs[1].ty.shape.values]
    x = torch.randn(MICRO * COUNT, *inputs[0].shape[1:], generator=g)
    target = torch.randint(0, min(classes, 8), (MICRO * COUNT, *shape[1:]), generator=g)
    double = copy.deepcopy(model).double().train()
    reference = torch.optim.SGD(double.parameters(), lr=0.1, momentum=0.9)
    with build(trained, **HOW[how]) as trainer:
        loss = trainer.train_step(x, target)
        assert loss == pytest.approx(torch_step(double, reference, (x.double(), target)), rel=1e-5)
        assert_gradients(trainer, double)
