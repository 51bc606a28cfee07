"""Parts of a program by machine: every stage in one part, on the device that the whole program has for that input."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.programs import full, specs
from tests.runtime.test_random_programs import DEVICES, Drawn, drawn_programs, program_of
from tvmhet.cluster.local import machine_of
from tvmhet.cluster.ray_nodes import connect, nodes_of
from tvmhet.errors import BadInput, MissingPackage, NotSupported, PartLost, PlanMismatch
from tvmhet.runtime import CpuDevice, PipelineProgram, StageProgram, assign_cores
from tvmhet.runtime.cluster import ClusterEngine, _check_versions, _here, _Server
from tvmhet.runtime.crew import HEED_S
from tvmhet.runtime.machine_server import VERSIONS
from tvmhet.runtime.machines import Part, part_program, parts_of
from tvmhet.runtime.stalls import StallClock
from tvmhet.runtime.stats import StageRun

MACHINES = ("rack-1", "rack-2", "rack-3")


def chain(*devices: tuple[str, ...], skips: tuple[tuple[int, int], ...] = ()) -> PipelineProgram:
    """x -> v0 -> v1 -> ..., stage k on `devices[k]`; skip (a, b): stage b reads what stage a makes, too."""
    stages = []
    for k, on in enumerate(devices):
        reads = (f"v{k - 1}" if k else "x", *(f"v{a}" for a, b in skips if b == k))
        stages.append(StageProgram(k, f"s{k}", Path("none"), reads, (f"v{k}",), on))
    ids = dict.fromkeys(d for on in devices for d in on)
    bindings = assign_cores([CpuDevice(d) for d in ids])
    values = specs("x", *(f"v{k}" for k in range(len(devices))))
    return PipelineProgram(values, ("x",), (f"v{len(devices) - 1}",), tuple(stages), {}, bindings)


A0, A1, B0, B1 = "a/cpu:0", "a/cpu:1", "b/cpu:0", "b/cpu:1"


def test_stages_that_follow_one_another_on_a_machine_are_one_part() -> None:
    assert parts_of(chain((A0,), (A1,), (B0,), (A0,))) == (
        Part(("a",), (0, 1), ("x",), ("v1",)),
        Part(("b",), (2,), ("v1",), ("v2",)),
        Part(("a",), (3,), ("v2",), ("v3",)),
    )


def test_who_waits_for_a_value_does_not_wait_for_the_stage_after_it() -> None:
    """Stage 2 (on b) reads stage 0's value, so stage 1 (on a, as stage 0) is a part of its own."""
    program = chain((A0,), (A1,), (B0,), skips=((0, 2),))
    assert [(p.machines, p.stages) for p in parts_of(program)] == [(("a",), (0,)), (("a",), (1,)), (("b",), (2,))]


def test_a_part_does_not_wait_for_what_only_a_later_stage_reads() -> None:
    """Stage 2 reads stage 1's value of b, for which stage 0, on the same machine, need not wait."""
    program = chain((A0,), (B0,), (A0,), skips=((0, 2),))
    assert [p.stages for p in parts_of(program)] == [(0,), (1,), (2,)]


def test_replicas_go_by_the_machines_that_they_stand_on() -> None:
    program = chain((A0, A1), (A0,), (A0, B0), (A1, B1), (B0, A0))
    first, second, third = parts_of(program)
    assert (first.machines, first.stages) == (("a",), (0, 1))
    assert (second.machines, second.stages) == (("a", "b"), (2, 3))
    assert (third.machines, third.stages) == (("b", "a"), (4,))
    assert [s.devices for s in part_program(program, first, "a").stages] == [(A0, A1), (A0,)]
    assert [s.devices for s in part_program(program, second, "b").stages] == [(B0,), (B1,)]
    assert second.machine_of(4) == "a" and third.machine_of(4) == "b"


@given(drawn_programs(), st.tuples(*[st.sampled_from(MACHINES)] * len(DEVICES)))
@settings(max_examples=200, deadline=None)
def test_any_program_runs_part_by_part(drawn: Drawn, machines: tuple[str, ...]) -> None:
    ids = {device: f"{machine}/{device}:0" for device, machine in zip(DEVICES, machines, strict=True)}
    bindings = assign_cores([CpuDevice(d) for d in ids.values()])
    placed = replace(drawn, devices=tuple(tuple(ids[d] for d in on) for on in drawn.devices))
    program = program_of(placed, lambda *_: Path("none"), bindings)
    parts = parts_of(program)
    assert sorted(s for part in parts for s in part.stages) == list(range(len(program.stages)))
    came: Counter[tuple[int, str]] = Counter()
    for i in range(12):
        known = set(program.inputs)
        for number, part in enumerate(parts):
            assert known >= set(part.reads)
            machine = part.machine_of(i)
            for here, s in zip(part_program(program, part, machine).stages, part.stages, strict=True):
                device = here.device_of(came[number, machine])
                assert device == program.stages[s].device_of(i) and machine_of(device) == machine
                assert (here.name, here.inputs, here.outputs) == (f"s{s}", *_io(program, s))
            came[number, machine] += 1
            known |= set(part.makes)
        assert known >= set(program.outputs)


def _io(program: PipelineProgram, stage: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return program.stages[stage].inputs, program.stages[stage].outputs


def node(name: str, address: str, alive: bool = True) -> dict[str, object]:
    return {
        "NodeID": f"id-{name}-{address}",
        "Alive": alive,
        "NodeName": name,
        "NodeManagerHostname": f"host-{address}",
        "NodeManagerAddress": address,
    }


NODES = (node("rack-1", "10.0.0.1"), node("other", "10.0.0.2"), node("rack-2", "10.0.0.3", alive=False))


def test_machines_are_nodes_by_name_or_as_given() -> None:
    for given_as in ("other", "10.0.0.2", "host-10.0.0.2", "id-other-10.0.0.2"):
        found = nodes_of(("rack-1", "rack-2"), NODES, {"rack-2": given_as})
        assert found == {"rack-1": "id-rack-1-10.0.0.1", "rack-2": "id-other-10.0.0.2"}


@pytest.mark.parametrize(
    ("machines", "given_as", "words"),
    [
        (("rack-1", "rack-2"), {}, r"'rack-2' of the plan is none .* among other \(10.0.0.2\), rack-1 \(10.0.0.1\)"),
        (("rack-1",), {"rack-1": "10.0.0.9"}, "'rack-1' of the plan is none .*'10.0.0.9' among"),
        (("rack-1",), {"rack-3": "other"}, "'rack-3', which is no machine of the plan"),
        (("rack-1", "rack-2"), {"rack-2": "rack-1"}, "'rack-1' and 'rack-2' are the same node"),
    ],
)
def test_machines_without_a_node_of_their_own_are_named(
    machines: tuple[str, ...], given_as: dict[str, str], words: str
) -> None:
    with pytest.raises(BadInput, match=words):
        nodes_of(machines, NODES, given_as)


def test_two_nodes_of_one_name_are_told_apart_by_address() -> None:
    twins = (node("rack-1", "10.0.0.1"), node("rack-1", "10.0.0.2"))
    with pytest.raises(BadInput, match="'rack-1' of the plan is several of"):
        nodes_of(("rack-1",), twins, {})
    assert nodes_of(("rack-1",), twins, {"rack-1": "10.0.0.2"}) == {"rack-1": "id-rack-1-10.0.0.2"}


def test_another_tvm_is_named() -> None:
    _check_versions("rack-2", VERSIONS)
    with pytest.raises(PlanMismatch, match=r"machine 'rack-2' has TVM 0\.1, this one"):
        _check_versions("rack-2", {"TVM": "0.1"})


def test_ray_that_is_missing_or_does_not_run_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotSupported, match=r"no Ray cluster answers at '127\.0\.0\.1:nowhere'"):
        connect("127.0.0.1:nowhere")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingPackage, match=r"pip install tvmhet\[ray\]"):
        connect(None)


class FakeRay:
    """Ray with actors that answer at once; `waits` holds what was waited for."""

    def __init__(self) -> None:
        self.waits: list[list[str]] = []
        self.run = SimpleNamespace(options=lambda num_returns: SimpleNamespace(remote=self.call(num_returns)))
        self.clock_s = SimpleNamespace(remote=lambda: None)
        self.limits_s: list[float | None] = []
        self.limit_stalls = SimpleNamespace(remote=self.limits_s.append)
        self.num_calls = 0

    def call(self, num_returns: int) -> Callable[..., list[str]]:
        def remote(*_: object) -> list[str]:
            self.num_calls += 1
            return [f"{self.num_calls}.{i}" for i in range(num_returns)]

        return remote

    def wait(self, references: list[str], num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        self.waits.append(references)
        return references, []

    def get(self, _: None, timeout: float) -> float:
        return time.monotonic() + 100


def test_no_more_inputs_are_in_flight_than_may_be() -> None:
    ray, engine = FakeRay(), ClusterEngine(chain((A0,)), max_in_flight=2)
    engine._ray, engine._servers = ray, {"a": _Server(ray, 0.0)}
    for _ in range(4):
        engine.submit([full(1)])
    assert ray.waits == [
        ["1.1"],
        ["2.1"],
    ]  # for the first input before the third goes, for the second before the fourth


class SilentRay(FakeRay):
    """Ray whose actors do not answer, which is told of after a while."""

    num_done = 0

    def wait(self, references: list[str], num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        return references[: self.num_done], references[self.num_done :]

    def kill(self, _: object) -> None:
        pass


def test_machines_that_say_nothing_are_given_up() -> None:
    """After what each stage of a part may take, and a while in which its machine would have said so."""
    now_s = 0.0
    ray, engine = SilentRay(), ClusterEngine(chain((A0,), (A0,), (B0,)))
    ray.close = SimpleNamespace(remote=lambda: "closing")
    assert [len(part.stages) for part in engine._parts] == [2, 1]
    engine._ray, engine._servers = ray, {m: _Server(ray, 0.0) for m in ("a", "b")}
    engine._stall, engine.stall_limit_s = StallClock(lambda: now_s), None
    index = engine.submit([full(1)])

    def look(seconds: float) -> None:
        nonlocal now_s
        for _ in range(round(seconds / HEED_S)):
            now_s += HEED_S
            assert not engine.is_done(index)

    look(100.0)
    engine.stall_limit_s = 3.0
    assert ray.limits_s == [None, None, 3.0, 3.0]  # both machines are told
    look(15.0)
    ray.num_done = 1  # the first part has ended
    look(16.0)
    with pytest.raises(PartLost, match=r"no part has ended for 16 s, and none of the machines 'a', 'b' says"):
        look(1.0)
    with pytest.raises(PartLost, match="no part has ended"):
        engine.submit([full(1)])


def test_times_of_a_machine_are_moved_to_the_drivers_clock() -> None:
    engine = ClusterEngine(chain((A0,)))
    engine._ray = FakeRay()
    assert engine._ahead_s(engine._ray, "a") == pytest.approx(100, abs=0.1)
    part = Part(("a",), (4, 7), (), ())
    moved = _here(StageRun(1, "a/cpu:0", 3, 101.0, 102.0, 103.0, 104.0), part, 9, 100.0)
    assert moved == StageRun(7, "a/cpu:0", 9, 1.0, 2.0, 3.0, 4.0)
