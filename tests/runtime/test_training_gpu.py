"""Training steps on emulated GPUs, and on GPUs beside CPU devices: gradients, losses and state are torch's."""

import copy
import itertools
import threading

import numpy as np
import pytest
import torch
from torch import nn

import tvmhet
from benchmarks import gpu
from tests import emulated_cuda
from tests.runtime.test_training import COUNT, MICRO, Net, assert_gradients, batches, torch_step
from tvmhet import deploy, zoo
from tvmhet.cluster import local
from tvmhet.cluster.spec import ClusterSpec
from tvmhet.errors import NotFinite, WorkerFailed
from tvmhet.ir.optimizers import AdamW, Sgd
from tvmhet.ir.training_step import read_step
from tvmhet.runtime import fleet, vm
from tvmhet.runtime.training_gpu import GpuMemory
from tvmhet.solve.schedules import Schedule
from tvmhet.training_build import build_training
from tvmhet.training_checkpoint import torch_state_dict
from tvmhet.training_placement import TrainingPlacement

A100 = "a100-sxm-80gb"


@pytest.fixture
def gpus(monkeypatch):
    """Four emulated GPUs, as this machine's."""
    emulated_cuda.install()
    found = {f"local/{A100}:{i}": i for i in range(4)}
    monkeypatch.setattr(fleet, "cuda_ordinals", lambda: found)
    monkeypatch.setattr(local, "cuda_ordinals", lambda: found)


class Small(nn.Module):
    """One of each that the runtime treats apart, and nothing that is slow to compile."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.bn, self.last = nn.Embedding(13, 8), nn.BatchNorm1d(5), nn.Linear(8, 13)

    def forward(self, tokens):
        return self.last(torch.relu(self.bn(self.embed(tokens))))


def imported(model=None, optimizer=None):
    model = model or Net()
    inputs = (torch.zeros(MICRO, 5, dtype=torch.int64),)
    chosen = optimizer or Sgd(lr=0.1, momentum=0.9)
    return model, tvmhet.from_torch(model, inputs, loss="cross_entropy", optimizer=chosen, mode="training")


def built(step, devices, schedule="1f1b", recompute=None, shares=(), degrees=(), **options):
    """A trainer of stages of equal numbers of operators; `devices` are those of each, "g0" a GPU, "c0" a CPU device."""
    cluster = ClusterSpec.from_dict({"nodes": [{"devices": {A100: 4, "cpu-x86-64-v2": 2}}]})
    ids = {f"{'c' if g.device.is_cpu else 'g'}{i}": d for g in cluster.groups() for i, d in enumerate(g.device_ids)}
    forward, num = read_step(step).forward, len(devices)
    placement = TrainingPlacement(
        tuple(forward[i * len(forward) // num : (i + 1) * len(forward) // num] for i in range(num)),
        tuple(tuple(ids[d] for d in stage.split()) for stage in devices),
        recompute or (False,) * num,
        Schedule(schedule),
        COUNT,
        shares,
        degrees,
    )
    options |= {"makers": ("tvm",), "global_batch": MICRO * COUNT}
    return build_training(step, cluster=cluster, plan=placement, **options)


def reference_of(model):
    double = copy.deepcopy(model).double().train()
    return double, torch.optim.SGD(double.parameters(), lr=0.1, momentum=0.9)


def assert_trains_as_torch(trainer, model, max_norm=None, with_buffers=True):
    """One step's gradients, then losses, then parameters and buffers."""
    double, reference = reference_of(model)
    data = batches(4)
    assert trainer.train_step(data[0]) == pytest.approx(torch_step(double, reference, data[0], max_norm), rel=1e-5)
    assert_gradients(trainer, double)
    ours = trainer.fit(data[1:])
    np.testing.assert_allclose(ours, [torch_step(double, reference, b, max_norm) for b in data[1:]], rtol=1e-5)
    found = trainer.state_dict()
    wanted = double.state_dict() if with_buffers else dict(double.named_parameters())
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value.detach().numpy(), rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_a_step_on_two_gpus_is_torchs(gpus):
    model, step = imported(Small())
    with built(step, ["g0", "g1"]) as trainer:
        assert_trains_as_torch(trainer, model)
        assert all(size > 0 for size in trainer.stash_bytes().values())
        assert all(t.worked_s > 0.0 for t in trainer.times())
        assert sum(t.name.startswith("node0/a100") for t in threading.enumerate()) == 2
    assert not any(t.name.startswith("node0/a100") for t in threading.enumerate())


HOW = {
    "gpipe, recomputed": {"devices": ["g0", "g1"], "schedule": "gpipe", "recompute": (True, True)},
    "replicas": {"devices": ["g0 g1", "g2 g3"]},
    "unlike shares": {"devices": ["g0 g1"], "shares": ((1, 3),)},
    "interleaved": {"devices": ["g0", "g1", "g0", "g1"], "schedule": "interleaved"},
    "wavelet": {"devices": ["g0", "g1"], "schedule": "wavelet"},
    "CPU, GPU": {"devices": ["c0", "g0"]},
    "GPU, CPU, recomputed": {"devices": ["g0", "c0"], "recompute": (True, False)},
    "a team of GPUs": {"devices": ["g0 g1"], "degrees": (2,)},
    "a CPU, a team of GPUs": {"devices": ["c0", "g0 g1"], "degrees": (1, 2)},
    "replicas on a GPU and a CPU": {"devices": ["g0 c0"], "shares": ((3, 1),)},
}


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
def test_steps_on_gpus_are_torchs(how, gpus):
    model, step = imported()
    with built(step, max_norm=0.5, **HOW[how]) as trainer:
        # with replicas the first one's buffers are kept
        only_first = "degrees" not in HOW[how] and any(" " in stage for stage in HOW[how]["devices"])
        assert_trains_as_torch(trainer, model, max_norm=0.5, with_buffers=not only_first)


@pytest.mark.slow
def test_a_run_on_gpus_goes_on_from_a_checkpoint_or_a_bundle_as_if_never_stopped(gpus, tmp_path):
    """AdamW and dropout; other workers, the same ones after `restore`, those of a bundle, and CPU devices."""
    _, step = imported(Net(dropout=0.3), AdamW(lr=3e-3, weight_decay=0.1))
    data = batches(4)
    with built(step, ["g0", "g1"], seed=3) as trainer:
        trainer.fit(data[:2])
        saved = trainer.save(tmp_path / "run.safetensors")
        want = trainer.fit(data[2:])
        trainer.restore(saved)
        assert trainer.fit(data[2:]) == want
        trainer.export(tmp_path / "bundle")
    assert set(torch_state_dict(saved)) == set(Net().state_dict())
    with tvmhet.load_trainer(tmp_path / "bundle") as trainer:
        trainer.restore(saved)
        assert trainer.fit(data[2:]) == want
    with built(step, ["c0", "c1"], seed=3) as trainer:
        trainer.restore(saved)
        np.testing.assert_allclose(trainer.fit(data[2:]), want, rtol=1e-5)


def snapshot(trainer):
    return trainer.state_dict() | {"/".join(k): v for k, v in trainer.optimizer_state().items()}


@pytest.mark.slow
def test_a_step_that_fails_on_a_gpu_leaves_the_state_and_the_next_goes_on(gpus, monkeypatch):
    model, step = imported(Small())
    data = batches(3)
    double, reference = reference_of(model)
    want = [torch_step(double, reference, b) for b in data]
    with built(step, ["g0", "g1"]) as trainer:
        losses = [trainer.train_step(data[0])]
        before, kept = snapshot(trainer), {n: np.array(v) for n, v in trainer._engine.state.items()}
        trainer._engine.restore({n: np.full_like(v, np.nan) if v.dtype.kind == "f" else v for n, v in kept.items()})
        for _ in range(2):
            with pytest.raises(NotFinite):
                trainer.train_step(data[1])
        trainer._engine.restore(kept)
        with monkeypatch.context() as patched:
            patched.setattr(vm, "copy", broken_after(vm.copy, 5))
            with pytest.raises(WorkerFailed, match="fallen off the bus"):
                trainer.train_step(data[1])
        after = snapshot(trainer)
        assert before.keys() == after.keys() and all(np.array_equal(before[n], after[n]) for n in before)
        np.testing.assert_allclose([*losses, *trainer.fit(data[1:])], want, rtol=1e-5)


def broken_after(copy, count):
    """`copy`, of which call `count` fails."""
    left = itertools.count(1)

    def copied(source, target):
        if next(left) == count:
            raise RuntimeError("the GPU has fallen off the bus")
        copy(source, target)

    return copied


@pytest.mark.slow
def test_the_check_of_a_machines_gpus_trains_a_step_on_all_of_them(gpus):
    sizes = {"batch": 2, "length": 8, "layers": 1, "dim": 16, "heads": 2, "vocab": 30, "max_len": 8}
    model, inputs = zoo.get("gpt2_small", **sizes)
    said = gpu.check_training(model, inputs, ClusterSpec.of({A100: 2}), "tvm", 1)
    assert float(said.removeprefix("gradients ").partition(" ")[0]) < 1e-5


def test_a_gpu_without_memory_for_state_and_values_is_named(gpus):
    with pytest.raises(MemoryError, match="state and values take 20 bytes, the device has 10"):
        GpuMemory(vm_binding()).limit(10, 20)


def vm_binding():
    return deploy.DeviceBinding("g0", "cuda", ordinal=0)
