"""A program over the machines of a Ray cluster: the local runtime's results and errors, each stage on its machine."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import tvmhet
from benchmarks.ray_machines import MACHINES, two_machines
from tests.graph.test_cutting import Block
from tests.placed import BEST
from tests.report import plans
from tests.runtime.programs import full, skip_answer
from tests.runtime.test_failures import asserting_program, is_running, wait_until_gone  # noqa: F401
from tvmhet import cli
from tvmhet.cli.options import read_cluster
from tvmhet.cluster.local import machine_of
from tvmhet.cluster.spec import ClusterSpec
from tvmhet.errors import BadInput, NotSupported, PartLost, WorkerFailed
from tvmhet.module import HetModule
from tvmhet.runtime import CpuDevice, HetRuntime, PipelineProgram, assign_cores
from tvmhet.runtime.cluster import ClusterEngine
from tvmhet.runtime.machines import parts_of
from tvmhet.runtime.whole import WholeProgram

pytest.importorskip("ray", reason="running on several machines needs ray")
pytestmark = pytest.mark.slow

TWO = ClusterSpec.from_dict(
    {
        "nodes": [
            {"name": "rack-1", "devices": {f"cpu-x86-64-{BEST}": 1}},
            {"name": "rack-2", "devices": {"cpu-x86-64-v2": 1}},
        ],
        "network": {"bandwidth": "10 Gbit/s", "latency": "100 us"},
    }
)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with two_machines() as address:
        yield address


def over_machines(program: PipelineProgram) -> PipelineProgram:
    """The same program, with cpu0 on rack-1 and cpu1 on rack-2."""
    ids = {"cpu0": "rack-1/cpu:0", "cpu1": "rack-2/cpu:0"}
    stages = tuple(replace(s, devices=tuple(ids[d] for d in s.devices)) for s in program.stages)
    bindings = assign_cores([CpuDevice(d) for d in ids.values()])
    return replace(program, stages=stages, bindings=bindings)


def on_ray(program: PipelineProgram, address: str, **options: object) -> HetRuntime:
    placed = over_machines(program)
    return HetRuntime(placed, engine=ClusterEngine(placed, address, **options))  # type: ignore[arg-type]


def test_skips_replicas_and_outputs_of_every_kind(skip_program: PipelineProgram, address: str) -> None:
    with on_ray(skip_program, address) as runtime:
        for got, want in zip(runtime(full(2)), skip_answer(full(2)), strict=True):
            np.testing.assert_array_equal(got, want)
            assert got.flags.writeable
        results = list(runtime.map(full(i) for i in range(30)))
        for i, result in enumerate(results):
            for got, want in zip(result, skip_answer(full(i)), strict=True):
                np.testing.assert_array_equal(got, want)
        assert all(isinstance(y, torch.Tensor) for y in runtime(torch.ones(4, 8)))
        with pytest.raises(BadInput, match="shape"):
            runtime(np.ones((2, 2), np.float32))


def test_times_are_of_one_clock_and_of_the_planned_devices(skip_program: PipelineProgram, address: str) -> None:
    with on_ray(skip_program, address) as runtime:
        stats = runtime.benchmark([full(1)], num_inputs=10)
    program = runtime.program
    assert {(s.stage, s.name) for s in stats.stages} == {(s.index, s.name) for s in program.stages}
    by_input: dict[int, dict[int, object]] = {}
    for run in stats.timeline:
        assert run.device == program.stages[run.stage].device_of(run.input_index)
        by_input.setdefault(run.input_index, {})[run.stage] = run
    assert sorted(by_input) == list(range(min(by_input), min(by_input) + 10))
    for runs in by_input.values():
        for stage in range(len(program.stages)):
            for before in program.predecessors(stage):
                # the clocks are one here; what was measured of them may be off by half a message
                assert runs[stage].start_s > runs[before].end_s - 0.2  # type: ignore[attr-defined]
    assert all(s.hop is not None for s in stats.stages[1:]) and stats.shared_cores == ()


def test_a_stage_that_raises_fails_its_input_only(asserting_program: PipelineProgram, address: str) -> None:  # noqa: F811
    yes, no = np.array(True), np.array(False)
    with on_ray(asserting_program, address) as runtime:
        np.testing.assert_array_equal(runtime(full(1), yes), full(3))
        with pytest.raises(WorkerFailed, match="the stage refuses its input") as caught:
            runtime(full(1), no)
        error = caught.value
        assert (error.device, error.stage, error.input_index) == ("rack-1/cpu:0", "picky", 1)
        assert "'picky'" in str(error) and "input 1" in str(error) and not isinstance(error, PartLost)
        got = []
        with pytest.raises(WorkerFailed, match="input 6"):
            got.extend(runtime.map((full(i), no if i in (4, 5) else yes) for i in range(20)))
        assert len(got) <= 4
        for i, result in enumerate(runtime.map((full(i), yes) for i in range(20))):
            np.testing.assert_array_equal(result, full(2 * i + 1))


def test_a_team_hands_over_on_its_machine(address: str) -> None:
    """Its steps are one part, so Ray is asked once; a stage on the other machine follows."""
    torch.manual_seed(0)
    module, x = nn.Sequential(Block(64, 4), nn.Linear(64, 8)).eval(), torch.randn(2, 6, 64)
    racks = [
        {"name": "rack-1", "devices": {f"cpu-x86-64-{BEST}": 2}},
        {"name": "rack-2", "devices": {"cpu-x86-64-v2": 1}},
    ]
    cluster = ClusterSpec.from_dict({"nodes": racks, "network": {"bandwidth": "10 Gbit/s", "latency": "100 us"}})
    splits = [{"degree": 2, "device": f"cpu-x86-64-{BEST}", "times_s": {"*": 1e-9}}]
    pins = {"0_*": f"cpu-x86-64-{BEST}", "1*": "cpu-x86-64-v2"}
    model = tvmhet.from_torch(module, (x,))
    with torch.no_grad():
        want = module(x).numpy()
    with tvmhet.build(model, cluster=cluster, objective="latency", splits=splits, pin=pins) as built:
        assert [s.degree for s in built.plan.stages] == [2, 1] and len(parts_of(built.program)) == 2
        here = built(x).numpy()
        np.testing.assert_allclose(here, want, rtol=0, atol=2e-5 * np.abs(want).max())
        with built.on_ray(address) as there:
            for got in there.map([x] * 5):
                assert got.numpy().tobytes() == here.tobytes()
            assert [s.stage for s in there.benchmark(x, num_inputs=3).stages] == [0, 1]


def workers() -> list[int]:
    """Process ids of the devices' workers, on all nodes of this machine."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ")
            parent = re.search(r"PPid:\s*(\d+)", (process / "status").read_text())
            if b"tvmhet" in command and parent:
                above = Path(f"/proc/{parent.group(1)}/cmdline").read_bytes()
                found += [int(process.name)] if b"ray::MachineServer" in above else []
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def test_a_dead_worker_ends_everything_and_start_begins_anew(skip_program: PipelineProgram, address: str) -> None:
    runtime = on_ray(skip_program, address).start()
    try:
        running = workers()
        assert len(running) >= 2
        os.kill(running[0], signal.SIGKILL)
        with pytest.raises(PartLost, match="failed"):
            for _ in range(50):
                runtime(full(1))
        with pytest.raises(PartLost):
            runtime(full(1))
        wait_until_gone(running)
        runtime.start()
        np.testing.assert_array_equal(runtime(full(3))[0], skip_answer(full(3))[0])
        running = workers()
    finally:
        runtime.close()
    wait_until_gone(running)
    assert not any(map(is_running, running))
    with pytest.raises(NotSupported, match="closed"):
        runtime(full(1))


def test_a_part_that_goes_no_further_is_given_up(skip_program: PipelineProgram, address: str) -> None:
    """Of workers that hang nothing can be read: their machine looks at them now and then."""
    runtime = on_ray(skip_program, address)
    with runtime:
        runtime.stall_limit_s = 1.0
        running = workers()
        for pid in running:
            os.kill(pid, signal.SIGSTOP)
        with pytest.raises(PartLost, match=r"no stage has ended for 1 s with 1 input .* device 'rack-1/cpu:0' waits"):
            runtime(full(1))
    wait_until_gone(running)


def test_machines_that_are_not_there_are_named(skip_program: PipelineProgram, address: str) -> None:
    with pytest.raises(BadInput, match=r"'rack-2' of the plan is none .* among rack-1 .*, rack-2 "):
        on_ray(skip_program, address, machines={"rack-2": "rack-7"}).start()
    with pytest.raises(NotSupported, match=r"no Ray cluster answers at '127\.0\.0\.1:1'"):
        on_ray(skip_program, "127.0.0.1:1").start()
    with pytest.raises(NotSupported, match="is a Ray client's address"):
        on_ray(skip_program, "ray://127.0.0.1:10001").start()
    with pytest.raises(BadInput, match="max_in_flight is 0"):
        on_ray(skip_program, address, max_in_flight=0)


class Net(nn.Module):
    """Two blocks worth a device each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def test_a_bundle_over_two_machines(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    net, x = Net().eval(), torch.randn(64, 512)
    pin = {"gelu": f"cpu-x86-64-{BEST}", "gelu_3": "cpu-x86-64-v2"}
    built = tvmhet.build(tvmhet.from_torch(net, (x,)), cluster=TWO, pin=pin)
    assert {machine_of(d) for s in built.plan.stages for d in s.placement.devices} == set(MACHINES)
    bundle = built.export(tmp_path / "bundle")
    with built as here:
        want = here(x)
        nothing_crossed = "all of it ran on this one, so nothing crossed a network"
        assert nothing_crossed in " ".join(here.report(here.benchmark(x, num_inputs=2)).split())
    torch.testing.assert_close(want, net(x), rtol=1e-4, atol=1e-5)
    with tvmhet.load(bundle).on_ray(address) as lib:
        assert torch.equal(lib(x), want)
        stats = lib.benchmark(x, num_inputs=5)
        assert {machine_of(run.device) for run in stats.timeline} == set(MACHINES)
        assert nothing_crossed not in " ".join(lib.report(stats).split())
    for options, status, words in (
        (["--ray", address], 0, "predicted and measured, 3 inputs"),
        (["--ray", address, "--machine", "rack-2=rack-9"], 2, "'rack-2' of the plan is none"),
        (["--ray", address, "--machine", "rack-2"], 2, "'rack-2' names no node"),
        (["--machine", "rack-2=rack-9"], 2, "--machine is given without --ray"),
    ):
        monkeypatch.setattr(sys, "argv", ["tvmhet", "run", str(bundle), "--num-inputs", "3", *options])
        with pytest.raises(SystemExit) as end:
            cli.main()
        printed = " ".join("".join(capsys.readouterr()).split())
        assert end.value.code == status and words in printed


def test_the_nodes_describe_themselves(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ClusterSpec.from_ray(address)
    assert {node.name for node in spec.nodes} == set(MACHINES) and sum(spec.counts().values()) == 2
    assert spec.network is not None and 1e-4 < spec.network.link.latency_s < 1 and spec.network.link.byte_per_s > 1e6
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert [n.devices for n in read_cluster("ray").nodes] == [n.devices for n in spec.nodes]


def test_a_model_placed_whole_is_refused() -> None:
    module = HetModule(plans.whole(), WholeProgram(Path("none"), ("x",), {}, "t4:0", "cuda"))
    with pytest.raises(NotSupported, match="placed whole on 't4:0'"):
        module.on_ray()


def test_the_loss_of_a_machine_is_named(skip_program: PipelineProgram, address: str) -> None:
    """The last test of this file: afterwards the cluster has one node."""
    runtime = on_ray(skip_program, address)
    try:
        runtime(full(1))
        daemons = [p for p in Path("/proc").glob("[0-9]*") if _is_daemon(p, address, b"rack-2")]
        assert len(daemons) == 1
        os.kill(int(daemons[0].name), signal.SIGKILL)
        with pytest.raises(PartLost, match="machine 'rack-2' was lost on input"):
            for i in range(1000):
                runtime(full(i))
                time.sleep(0.05)
        with pytest.raises(PartLost):
            runtime(full(1))
    finally:
        runtime.close()


def _is_daemon(process: Path, address: str, machine: bytes) -> bool:
    try:
        command = (process / "cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
    port = address.rpartition(":")[2].encode()
    return command.split(b"\0")[0].endswith(b"raylet") and machine in command and port in command
