"""Training steps compiled for GPUs, without one: every kernel binds threads, NVRTC takes it, and it computes torch's
gradients when its threads run one after another on a CPU."""

import copy
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import tvm
from torch import nn

import tvmhet
from tests.emit.serial import num_threads_bound, serial
from tests.emulated_cuda.kernels import check_stages
from tests.placed import cpus
from tests.runtime.test_training import COUNT, MICRO, Net, assert_gradients, batches, torch_step
from tvmhet import bundle as bundle_module
from tvmhet._tvm import PrimFunc
from tvmhet.emit.lower import kernel_passes, lower_stage, make_target, vm_passes
from tvmhet.emit.nvrtc import compile_cubin, cuda_sources
from tvmhet.emit.schedule import ScheduleReport, schedule_kernels
from tvmhet.errors import BadBundle, BadInput, MissingPackage, NotSupported
from tvmhet.ir.optimizers import AdamW, Sgd
from tvmhet.ir.training_step import read_step
from tvmhet.runtime import fleet
from tvmhet.runtime.cubins import Cubins
from tvmhet.runtime.training_program import Function
from tvmhet.solve.schedules import Schedule
from tvmhet.training import HetTrainer
from tvmhet.training_build import build_training
from tvmhet.training_deploy import function_sources, program_of, stage_functions
from tvmhet.training_interface import TrainingInterface
from tvmhet.training_placement import TrainingPlacement


def imported(model, inputs, optimizer):
    return tvmhet.from_torch(model, inputs, loss="cross_entropy", optimizer=optimizer, mode="training")


def tokens(dropout=0.0, optimizer=None):
    model = Net(dropout)
    return model, imported(model, (torch.zeros(MICRO, 5, dtype=torch.int64),), optimizer or Sgd(lr=0.1, momentum=0.9))


class Pictures(nn.Module):
    """Strided and grouped convolutions, batch norm, both pools, a matmul."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.stem, self.bn = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8)
        self.grouped, self.last = nn.Conv2d(8, 8, 3, padding=1, groups=4), nn.Linear(8, 5)

    def forward(self, x):
        x = nn.functional.max_pool2d(torch.relu(self.bn(self.stem(x))), 3, 2, 1)
        x = nn.functional.silu(self.grouped(x)) + x
        return self.last(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1))


def placed(step, cluster, places, num_microbatches, shares=()):
    """Stages of equal numbers of operators, the devices of the cluster dealt in order, `places` by stage."""
    ids = iter([d for group in cluster.groups() for d in group.device_ids])
    forward, num = read_step(step).forward, len(places)
    return TrainingPlacement(
        tuple(forward[i * len(forward) // num : (i + 1) * len(forward) // num] for i in range(num)),
        tuple(tuple(next(ids) for _ in range(count)) for count in places),
        (False,) * num,
        Schedule.ONE_F_ONE_B,
        num_microbatches,
        shares,
    )


def compiled(step, placement, cluster, makers=("tvm",), max_norm=None):
    """Every function by stage and name: what is compiled of it."""
    _, made = stage_functions(read_step(step), placement, max_norm)
    return {key: source for key, (source, _) in function_sources(made, placement, cluster, makers).items()}


def built_for_gpus():
    """A small trainer on two GPUs of unlike shares."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    step = imported(model, (torch.zeros(2, 4),), Sgd(momentum=0.9))
    cluster = tvmhet.ClusterSpec.of({"t4": 2})
    placement = placed(step, cluster, (2,), 3, ((2, 1),))
    return model, build_training(step, cluster=cluster, plan=placement, global_batch=6, makers=("tvm",), seed=5)


def test_a_step_is_built_exported_and_read_back_and_says_where_it_cannot_run(tmp_path, monkeypatch):
    def missing(library):
        raise MissingPackage("no NVRTC", "install it")

    monkeypatch.setattr(bundle_module, "make_cubins", missing)
    monkeypatch.setattr(fleet, "cuda_ordinals", lambda: {"local/t4:0": 0})
    model, trainer = built_for_gpus()
    batch = (torch.zeros(6, 4), torch.zeros(6, dtype=torch.int64))
    for made in (trainer, tvmhet.load_trainer(trainer.export(tmp_path / "bundle"))):
        with pytest.raises(NotSupported, match=r"runs on 2 GPUs, 'node0/t4:0' first; this machine has only 1"):
            made.train_step(*batch)
        assert made.seed == 5 and made.program.max_norm is None
        np.testing.assert_array_equal(made.state_dict()["weight"], model.weight.detach().numpy())
        assert not made.optimizer_state()["weight", Sgd(momentum=0.9).state[0]].any()
        assert [b.ordinal for b in made.program.bindings.values()] == [0, 1]
    names = {f.name for f in (tmp_path / "bundle").iterdir()}
    assert {"stage0.forward0.so", "stage0.backward0.so", "stage0.reduce0.so", "stage0.reduce1.so"} <= names
    assert {"stage0.update0.0.so", "stage0.update1.0.so"} <= names and "stage0.forward1.so" not in names
    assert not list((tmp_path / "bundle").glob("*.cubins"))
    with pytest.raises(BadBundle, match="load_trainer"):
        tvmhet.load(tmp_path / "bundle")


@pytest.mark.slow
def test_a_bundle_has_machine_code_of_every_function(tmp_path):
    program = tvmhet.load_trainer(built_for_gpus()[1].export(tmp_path / "bundle")).program
    (stage,) = program.stages
    updates = (update for share in stage.shares for update in share.updates)
    for f in (*stage.forward, *stage.backward, *(share.reduce for share in stage.shares), *updates):
        assert f.cubins == f.library.with_suffix(".cubins")
        assert Cubins.read(f.cubins).arch == "sm_75"
        assert all(code[:4] == b"\x7fELF" for code in Cubins.read(f.cubins).code.values())
    again = HetTrainer(TrainingInterface.of(tokens()[1], {}), program).export(tmp_path / "again")
    assert {p.name: p.read_bytes() for p in again.glob("*.cubins")} == {
        p.name: p.read_bytes() for p in (tmp_path / "bundle").glob("*.cubins")
    }


def test_a_bundle_trains_as_the_trainer_that_wrote_it(tmp_path):
    step = imported(
        nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3, bias=False)), (torch.zeros(2, 4),), Sgd(lr=0.1, momentum=0.9)
    )
    cluster = cpus(v2=1)
    placement = placed(step, cluster, (1,), 2)
    data = [(torch.randn(4, 4), torch.tensor([0, 1, 2, 0])) for _ in range(3)]
    options = {"cluster": cluster, "plan": placement, "global_batch": 4, "makers": ("tvm",), "max_norm": 0.5, "seed": 3}
    with build_training(step, **options) as trainer:
        losses = trainer.fit(data)
        trainer.export(tmp_path / "bundle")  # as it was built
        checkpoint = trainer.save(tmp_path / "run.safetensors")
        more = trainer.fit(data)
    with tvmhet.load_trainer(tmp_path / "bundle") as trainer:
        assert trainer.fit(data) == losses
        trainer.restore(checkpoint)
        assert trainer.fit(data) == more


@pytest.mark.parametrize("norm", [0.0, -1.0, float("nan"), float("inf")])
def test_a_norm_that_is_none_is_refused(norm):
    step = imported(nn.Linear(4, 3), (torch.zeros(2, 4),), Sgd())
    cluster = cpus(v2=1)
    with pytest.raises(BadInput, match="max_norm is"):
        build_training(step, cluster=cluster, plan=placed(step, cluster, (1,), 1), global_batch=2, max_norm=norm)


def test_a_changed_bundle_is_refused(tmp_path):
    step = imported(nn.Linear(4, 3), (torch.zeros(2, 4),), Sgd())
    cluster = cpus(v2=1)
    options = {"cluster": cluster, "plan": placed(step, cluster, (1,), 1), "global_batch": 2, "makers": ("tvm",)}
    with build_training(step, **options) as trainer:
        folder = trainer.export(tmp_path / "bundle")
    manifest = json.loads((folder / "manifest.json").read_text())
    for broken in ({**manifest, "stages": [{}]}, {**manifest, "model": {}}, {**manifest, "kind": "pipeline"}):
        (folder / "manifest.json").write_text(json.dumps(broken))
        with pytest.raises(BadBundle):
            tvmhet.load_trainer(folder)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "stage0.forward0.so").write_bytes(b"")
    with pytest.raises(BadBundle, match="changed after it was built"):
        tvmhet.load_trainer(folder)


CASES = {
    "tokens": lambda: (*tokens(), batches(1)[0]),
    "pictures": lambda: _pictures(),
}


def _pictures():
    model = Pictures()
    step = imported(model, (torch.zeros(MICRO, 3, 16, 16),), Sgd(lr=0.1, momentum=0.9))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(MICRO * COUNT, 3, 16, 16, generator=generator)
    return model, step, (x, torch.randint(0, 5, (MICRO * COUNT,), generator=generator))


@pytest.mark.slow
@pytest.mark.parametrize(("case", "device"), [("tokens", "v100-pcie-32gb"), ("pictures", "a100")])
def test_scheduled_kernels_have_torchs_gradients_when_threads_run_in_turn(case, device, tmp_path):
    """Schedules for the GPU, their thread loops serial, compiled for this CPU and run by the engine."""
    model, step, batch = CASES[case]()
    gpus, here = tvmhet.ClusterSpec.of({device: 2}), cpus(v2=1, v3=1)
    sources = compiled(step, placed(step, gpus, (1, 1), COUNT), gpus)
    placement = placed(step, here, (1, 1), COUNT)
    read = read_step(step)
    parts, made = stage_functions(read, placement, None)
    functions = [
        {name: _serial_function(sources[k, name], f, tmp_path / f"{k}.{name}.so") for name, f in own.items()}
        for k, own in enumerate(made)
    ]
    program = program_of(read, parts, functions, placement, here, None)
    double = copy.deepcopy(model).double().train()
    with HetTrainer(TrainingInterface.of(step, {}), program) as trainer:
        loss = trainer.train_step(batch)
        assert loss == pytest.approx(_double_step(double, batch), rel=1e-5)
        assert_gradients(trainer, double)


def _double_step(model, batch):
    """One step of torch in float64 with the same micro-batches."""
    if batch[0].dtype == torch.int64:
        return torch_step(model, torch.optim.SGD(model.parameters(), lr=0.0), batch)
    losses = []
    for x, target in zip(batch[0].double().split(MICRO), batch[1].split(MICRO), strict=True):
        loss = nn.functional.cross_entropy(model(x), target)
        (loss / COUNT).backward()
        losses.append(loss.item())
    return sum(losses) / COUNT


def _serial_function(source, function, library: Path) -> Function:
    target, report = make_target(source.target), ScheduleReport()
    with target:
        mod = tvm.transform.Sequential(kernel_passes())(source.module)
        mod = schedule_kernels(mod, target, report)
    assert not report.unscheduled
    out = mod.clone()
    for gvar, func in mod.functions_items():
        if isinstance(func, PrimFunc):
            assert num_threads_bound(func) >= 2, gvar
            out.update_func(gvar, serial(func))
    host = tvm.target.Target({"kind": "llvm", "mcpu": "x86-64-v2"})
    with host:
        lowered = tvm.transform.Sequential(vm_passes(False))(out)
        tvm.compile(lowered, target=host, relax_pipeline=None).export_library(str(library))
    return Function(library, function.inputs, function.outputs)


@pytest.mark.slow
def test_kernels_of_a_step_compute_what_they_say_on_an_emulated_gpu():
    """Forward, backward and update: barriers and bounds too, which serial loops do not show."""
    _, step, _ = _pictures()
    gpu = tvmhet.ClusterSpec.of({"a100": 1})
    sources = compiled(step, placed(step, gpu, (1,), COUNT), gpu, max_norm=1.0).values()
    report = check_stages([s.module for s in sources], next(s.target for s in sources), rtol=1e-4)
    assert sum(report.applied.values()) > 25


@pytest.mark.slow
def test_nvrtc_takes_every_function_of_three_unlike_stages():
    _, step = tokens(dropout=0.1, optimizer=AdamW())
    cluster = tvmhet.ClusterSpec.of({"a100": 1, "v100-pcie-32gb": 2, "t4": 2})
    kernels = 0
    placement = placed(step, cluster, (1, 2, 2), COUNT, ((), (), (3, 1)))
    for (stage, name), source in compiled(step, placement, cluster, max_norm=1.0).items():
        executable, report = lower_stage(source.module, source.target)
        assert not report.unscheduled, (stage, name)
        for text in cuda_sources(executable.mod):
            kernels += len(compile_cubin(text, str(source.target["arch"])).kernels)
    assert kernels > 50


def test_interfaces_are_what_the_model_says():
    _, step = tokens()
    interface = TrainingInterface.of(step, {})
    own = [f.name for f in dataclasses.fields(interface) if f.name != "dealt"]
    assert all(getattr(interface, name) == getattr(step, name) for name in own)
