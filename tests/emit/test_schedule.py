"""Scheduling: the first rule that takes a kernel; a rule that raises falls through and is counted."""

from collections import Counter

import pytest
import tvm

import tvmhet
from tests.emit.cpu.kernels import target
from tests.emit.modules import chain
from tests.zoo.test_zoo import SMALL
from tvmhet import zoo
from tvmhet._tvm import PrimFunc, structural_equal
from tvmhet.candidates import candidate_kernels
from tvmhet.emit import schedule
from tvmhet.emit.lower import kernel_passes, lower_stage, make_target, scheduled_kernels
from tvmhet.emit.schedule import ScheduleReport, is_scheduled, schedule_kernels
from tvmhet.graph.fusion import fuse_ops_groups
from tvmhet.graph.kernel_key import kernel_key
from tvmhet.graph.placement import KernelPlacement
from tvmhet.ir.kernel_module import kernels_module
from tvmhet.ir.prepare import prepare

TARGET_DESCRIPTION = {
    "kind": "cuda",
    "arch": "sm_80",
    "max_threads_per_block": 1024,
    "max_shared_memory_per_block": 49152,
}
TARGET = make_target(TARGET_DESCRIPTION)


@pytest.fixture(scope="module")
def kernels():
    with TARGET:
        return tvm.transform.Sequential(kernel_passes())(chain("matmul", "exp", side=64))


def prims(mod):
    return {g.name_hint: f for g, f in mod.functions_items() if isinstance(f, PrimFunc)}


def raises(func):
    """A rule that fails on every kernel, as dlight's Matmul does on some it only half knows."""
    raise AssertionError("cannot match")


def declines(func):
    """A rule that takes nothing."""
    return None


def test_every_kernel_is_scheduled_and_counted(kernels):
    report = ScheduleReport()
    out = schedule_kernels(kernels, TARGET, report)
    assert all(is_scheduled(f) for f in prims(out).values())
    assert report.applied == {"Matmul": 1, "Fallback": 1}
    assert not report.raised and not report.unscheduled


def test_a_rule_that_raises_falls_through(kernels, monkeypatch):
    known = schedule.rules_for(TARGET)
    monkeypatch.setattr(schedule, "rules_for", lambda target: (("Raises", raises), *known))
    report = ScheduleReport()
    out = schedule_kernels(kernels, TARGET, report)
    assert report.raised == {"Raises": 2}
    assert report.applied == {"Matmul": 1, "Fallback": 1}
    assert all(is_scheduled(f) for f in prims(out).values())


def test_a_kernel_that_no_rule_takes_is_named(kernels, monkeypatch):
    monkeypatch.setattr(schedule, "rules_for", lambda target: (("Raises", raises), ("Declines", declines)))
    report = ScheduleReport()
    out = schedule_kernels(kernels, TARGET, report)
    assert sorted(report.unscheduled) == sorted(prims(kernels))
    assert report.raised == {"Raises": 2} and not report.applied
    assert structural_equal(out, kernels)


def test_what_is_scheduled_stays(kernels):
    once = schedule_kernels(kernels, TARGET, ScheduleReport())
    again = ScheduleReport()
    assert structural_equal(schedule_kernels(once, TARGET, again), once)
    assert not again.applied


def test_the_input_is_unchanged(kernels):
    before = tvm.ir.save_json(kernels)
    schedule_kernels(kernels, TARGET, ScheduleReport())
    assert tvm.ir.save_json(kernels) == before


def test_a_sort_that_launches_its_own_threads_is_left_alone_and_compiles():
    report = lower_stage(chain("sort", side=64), TARGET_DESCRIPTION)[1]
    assert dict(report.applied) == {"by hand": 1}


@pytest.mark.slow
def test_no_rule_raises_on_what_tvm_fuses_of_the_zoo():
    """A rule that raises is passed over, and what takes the kernel instead may be ten times slower."""
    found = {}
    for name in ("mobilenet_v3", "convnext_t", "gpt2_small", "dlrm"):
        prepared = prepare(tvmhet.from_torch(*zoo.get(name, **SMALL[name])))
        graph, report = prepared.operator_graph, ScheduleReport()
        names = [o.name for o in graph.operators]
        groups = [tuple(names[o] for o in k.ops) for k in fuse_ops_groups(graph)]
        with target():
            scheduled_kernels(
                kernels_module(prepared.mod, [KernelPlacement(g[-1], g, "tvm") for g in groups]), target(), report
            )
        found[name] = report.raised, [k for k in report.unscheduled if "pool" not in k]
    assert found == dict.fromkeys(found, (Counter(), []))


@pytest.mark.parametrize("name", ["mobilenet_v3", "gpt2_small", "dlrm"])
def test_every_kernel_that_only_cpus_have_is_taken_by_a_rule_that_is_meant_for_it(name):
    prepared = prepare(tvmhet.from_torch(*zoo.get(name, **SMALL[name])))
    graph, report = prepared.operator_graph, ScheduleReport()
    names = [o.name for o in graph.operators]
    distinct = {kernel_key(graph, k.ops, "tvm"): k.ops for k in candidate_kernels(graph, ("tvm",)) if k.cpu_only}
    kernels = [KernelPlacement(f"k{i}", tuple(names[o] for o in ops), "tvm") for i, ops in enumerate(distinct.values())]
    with target():
        scheduled_kernels(kernels_module(prepared.mod, kernels), target(), report)
    assert kernels and not report.unscheduled and not report.raised
    assert set(report.applied) <= {"attention", "contraction", "in turn", "windows"}
    assert ("windows" in report.applied) == (name == "dlrm")
