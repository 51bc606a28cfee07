"""Times and stashes of a real training step, operator by operator, against the step's own graph."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import tvmhet
from tests.placed import cpus
from tvmhet.context import beside, company, context_factor, keep_context, keep_operators, kernel_factors
from tvmhet.cost.measure import Measurement
from tvmhet.cost.measured import MeasuredKernels
from tvmhet.errors import BadInput, MeasurementFailed, PlanMismatch
from tvmhet.graph.panels import panel_weights
from tvmhet.ir.optimizers import plan_name
from tvmhet.ir.training_functions import backward_function, forward_function
from tvmhet.ir.training_stages import split_stages
from tvmhet.ir.training_step import read_step
from tvmhet.runtime.training_program import Function
from tvmhet.solve.schedules import Schedule
from tvmhet.training_inside import Half
from tvmhet.training_placement import TrainingPlacement
from tvmhet.training_runs import keep_stages
from tvmhet.training_times import BACKWARD, FORWARD, StepKernels, step_graph

CLUSTER = tvmhet.ClusterSpec.of({"a100": 2, "t4": 2})


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.LayerNorm(96), nn.Linear(96, 10))
    return tvmhet.from_torch(
        net, torch.randn(16, 64), mode="training", loss="cross_entropy", optimizer="sgd", momentum=0.9
    )


@pytest.fixture(scope="module")
def made(model):
    return step_graph(model, CLUSTER.device_types(), None, ("tvm", "library"))


def test_every_backward_operator_is_priced_once(model, made):
    prepared, numbers = made
    assert numbers.size == 16
    alone = np.array([numbers.backward[i] for i, k in enumerate(numbers.candidates.kernels) if len(k.ops) == 1])
    singles = {k.ops[0] for k in numbers.candidates.kernels if len(k.ops) == 1}
    assert singles == set(range(len(prepared.graph.operators)))
    assert np.isfinite(alone).all()
    assert (numbers.backward > 0).any()
    assert "learned" in numbers.backward_source


def test_weights_that_change_are_in_no_panels():
    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.rand(16, 32))

        def forward(self, x):
            return x @ self.weight

    step = tvmhet.from_torch(Product(), torch.rand(8, 16), mode="training", loss="mse", optimizer="sgd")
    kernels = StepKernels.of(step, ("tvm",))
    assert panel_weights(kernels.forward_graph)  # it is not for the graph that there are none
    for half in (kernels.forward, kernels.backward):
        assert not half.panels and not any(d.panels for d in half.descs)


def test_a_kernels_backward_time_is_the_sum_of_its_operators(made):
    _, numbers = made
    by_op = {k.ops[0]: numbers.backward[i] for i, k in enumerate(numbers.candidates.kernels) if len(k.ops) == 1}
    for i, k in enumerate(numbers.candidates.kernels):
        assert numbers.backward[i] == pytest.approx(sum(by_op[o] for o in k.ops))


def test_stashes_are_what_the_backward_half_reads(model, made):
    step = read_step(model)
    whole = split_stages(step, [list(step.forward)])[0]
    weights = {t.name for t in step.prepared.graph.tensors if t.is_param}
    size = {t.name: t.size_bytes for t in step.prepared.graph.tensors}
    assert sum(size[t] for t in made[1].kept) == sum(size[t] for t in whole.saved if t not in weights)


def test_the_plan_takes_the_models_optimiser_and_names_its_sources(model):
    assert plan_name(model.optimizer) == "momentum"
    plan = tvmhet.plan(model, cluster=CLUSTER, mode="training", global_batch=64)
    assert plan.training.optimizer == "momentum"
    assert "assumed" not in plan.training.backward_source
    assert plan.training.num_microbatches == 4
    ops = [o for s in plan.stages for o in s.placement.ops]
    assert sorted(ops) == sorted(read_step(model).forward)


def test_passes_take_what_they_were_seen_to_take_beside_other_devices(model, tmp_path):
    two = cpus(v2=1, v3=1)
    key, makers = read_step(model).prepared.key, ("tvm", "library")
    with closing(MeasuredKernels(tmp_path / "measured.db")) as database:
        plain = step_graph(model, two.device_types(), database, makers)[1]
        for device in two.device_types():
            keep_context(database, key, device, (2.0,), 1.0, FORWARD)
            keep_context(database, key, device, (3.0,), 1.0, beside(1) + FORWARD)
            keep_context(database, key, device, (5.0,), 1.0, beside(1) + BACKWARD)
        alone = step_graph(model, two.device_types(), database, makers)[1]
        together = step_graph(model, two.device_types(), database, makers, company(two))[1]
    assert alone.forward.seconds == pytest.approx(2 * plain.forward.seconds)
    assert alone.backward == pytest.approx(plain.backward)
    assert together.forward.seconds == pytest.approx(3 * plain.forward.seconds)
    assert together.backward == pytest.approx(5 * plain.backward)


def test_operators_take_what_they_were_seen_to_take_in_the_step(model, tmp_path):
    (v2,) = cpus(v2=1).device_types()
    key, makers = read_step(model).prepared.key, ("tvm", "library")
    kernels = StepKernels.of(model, makers)
    with closing(MeasuredKernels(tmp_path / "measured.db")) as database:
        plain = kernels.times([v2], database, in_context=False)
        for candidates, half in ((kernels.forward, FORWARD), (kernels.backward, BACKWARD)):
            own = kernels.operators(candidates)
            keep_context(database, key, v2, (2.0,), 1.0, half)
            keep_context(database, key, v2, (6.0,), 1.0, beside(1) + half)
            keep_operators(database, key, v2, own, [2.0 + k for k in range(len(own))], [1.0] * len(own), half)
        alone = kernels.times([v2], database, in_context=True)
        together = kernels.times([v2], database, in_context=True, company=beside(1))
    for before, seen, beside_one in zip(plain, alone, together, strict=True):
        factors = 2.0 + np.arange(len(before.seconds))[:, None]
        assert seen.seconds == pytest.approx(factors * before.seconds)
        assert beside_one.seconds == pytest.approx(3 * seen.seconds)


def test_a_calls_seconds_go_to_its_operators_and_a_sums_to_what_made_the_gradient(model):
    step = read_step(model)
    (parts,) = split_stages(step, [step.forward])
    half = Half.of(backward_function(step, parts, recompute=False), ("tvm", "library"))
    assert {name for own in half.kernels for name in own} == set(parts.backward)
    assert [a.shape for a in half.args[-len(parts.gradients) :]] == [
        tuple(model.params[p].shape) for p, _ in parts.gradients
    ]
    times = [float(i + 1) for i in range(len(half.kernels))]
    function = Function(Path("half.so"), (), ())
    jobs = []

    def run(job):
        jobs.append(job)
        return Measurement("ok", tuple(times))

    seconds = half.operator_seconds(function, run, 2 * sum(times))
    assert jobs[0].library == function.library and jobs[0].calls
    for name in parts.backward:
        took = sum(t * own.count(name) / len(own) for t, own in zip(times, half.kernels, strict=True))
        assert seconds[name] == pytest.approx(2 * took)
    times.pop()
    with pytest.raises(MeasurementFailed, match=f"made {len(times)} calls, it has {len(times) + 1} kernels"):
        half.operator_seconds(function, run, 1.0)


class _Places(nn.Module):
    """Too many places to be kept as a parameter (over 1 MiB of indices): they are counted in the code."""

    def __init__(self) -> None:
        super().__init__()
        self.place, self.out = nn.Embedding(140_000, 1), nn.Linear(140_000, 4)

    def forward(self, x):
        return self.out(x + self.place(torch.arange(140_000))[:, 0])


def test_numbers_that_are_counted_are_no_call():
    """TVM computes the places when it compiles: the half makes one call less than it has operators' kernels."""
    step = read_step(
        tvmhet.from_torch(_Places(), torch.randn(2, 140_000), mode="training", loss="cross_entropy", optimizer="adamw")
    )
    counted = {o.name for o in step.prepared.graph.operators if o.family == "arange"}
    (parts,) = split_stages(step, [step.forward])
    functions = forward_function(step, parts, recompute=False), backward_function(step, parts, recompute=False)
    for function, operators, left in zip(functions, (parts.forward, parts.backward), (counted, set()), strict=True):
        half = Half.of(function, ("tvm", "library"))
        assert counted and set(function.calls) - {name for own in half.kernels for name in own} == left
        assert set(function.calls) <= set(operators)


@pytest.mark.slow
def test_profile_runs_the_step_on_each_device_and_on_all(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))
    step = tvmhet.from_torch(net, torch.randn(32, 256), mode="training", loss="cross_entropy", optimizer="sgd")
    two = cpus(v2=1, v3=1)
    report = tvmhet.profile(step, cluster=two, budget_s=120, database=tmp_path / "measured.db")
    assert report.complete and not report.failed
    key = read_step(step).prepared.key
    kernels = StepKernels.of(step, ("tvm", "library"))
    with closing(MeasuredKernels(tmp_path / "measured.db")) as database:
        for device in two.device_types():
            for part in (FORWARD, BACKWARD, company(two) + FORWARD, company(two) + BACKWARD):
                assert 0.1 < context_factor(database, key, device, part) != 1.0
            for candidates, half in ((kernels.forward, FORWARD), (kernels.backward, BACKWARD)):
                factors = kernel_factors(database, key, device, kernels.operators(candidates), "", half)
                assert len(set(factors)) > 1
    plan = tvmhet.plan(step, cluster=two, mode="training", global_batch=128, database=tmp_path / "measured.db")
    started = time.monotonic()
    again = tvmhet.profile(step, cluster=two, plan=plan, database=tmp_path / "measured.db")
    assert (again.plans_run, again.measured) == (1, {})
    assert "one plan was run as planned" in str(again)
    assert time.monotonic() - started < report.seconds
    known = tvmhet.plan(step, cluster=two, mode="training", global_batch=128, database=tmp_path / "measured.db")
    assert known.objective_value != plan.objective_value


def test_a_plan_of_one_device_takes_what_it_took_alone(model, tmp_path):
    """Two devices slow each other down tenfold: the plan is of one, priced by itself, and learns from its run."""
    two, path = cpus(v2=1, v3=1), tmp_path / "measured.db"
    kernels = StepKernels.of(model, ("tvm", "library"))
    key = kernels.step.prepared.key

    def planned():
        return tvmhet.plan(model, cluster=two, mode="training", global_batch=64, database=path)

    with closing(MeasuredKernels(path)) as database:
        for device in two.device_types():
            for half in (FORWARD, BACKWARD):
                keep_context(database, key, device, (1.01,), 1.0, half)
                keep_context(database, key, device, (10.0,), 1.0, company(two) + half)
        before = planned()
        ((own,),) = (stage.placement.devices for stage in before.stages)
        name = before.stages[0].placement.device_type
        one = two.with_counts({d.name: int(d.name == name) for d in two.device_types()})
        alone = tvmhet.plan(model, cluster=one, mode="training", global_batch=64, database=path)
        assert before.objective_value == alone.objective_value
        assert before.cluster_key == two.content_hash()
        assert before.lower_bound <= before.objective_value

        placement, stage = TrainingPlacement.of_plan(before), before.training.stages[0]
        took = {(0, name, FORWARD): 0.5 * stage.forward_s, (0, name, BACKWARD): 0.5 * stage.backward_s}
        keep_stages(kernels, placement, took, cluster=two, database=database)
        after = planned()
        assert after.stages[0].placement.devices == (own,)
        assert after.training.stages[0].forward_s == pytest.approx(0.5 * stage.forward_s)
        assert after.training.stages[0].backward_s == pytest.approx(0.5 * stage.backward_s)


def test_a_plan_is_profiled_for_training_only(model):
    net = tvmhet.from_torch(nn.Sequential(nn.Linear(4, 4)).eval(), torch.randn(2, 4))
    two = cpus(v2=1, v3=1)
    with pytest.raises(BadInput, match="plan= is given for a model for inference"):
        tvmhet.profile(net, cluster=two, plan=tvmhet.plan(net, cluster=two))
    with pytest.raises(PlanMismatch, match="the plan was made for module"):
        tvmhet.profile(model, cluster=two, plan=tvmhet.plan(net, cluster=two))


def test_a_plan_is_not_run_before_the_step_is_measured(model, tmp_path):
    two = cpus(v2=1, v3=1)
    plan = tvmhet.plan(model, cluster=two, mode="training", global_batch=64)
    report = tvmhet.profile(model, cluster=two, plan=plan, budget_s=0, database=tmp_path / "measured.db")
    assert report.plans_run == 0
    assert "the plan was not run: the step is not measured as a whole yet" in str(report)


def test_operators_that_ran_in_a_plan_take_what_they_took_there(tmp_path):
    """Two stages, v2 then v3: forward passes twice and three times as long as expected, backward passes half as long.

    Operators that did not run on a type are corrected as those that did.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64), nn.GELU(), nn.Linear(64, 10))
    step = tvmhet.from_torch(net, torch.randn(16, 64), mode="training", loss="cross_entropy", optimizer="sgd")
    kernels, two = StepKernels.of(step, ("tvm",)), cpus(v2=1, v3=1)
    names, key = kernels.step.forward, kernels.step.prepared.key
    first = [g.device_ids[0] for g in two.groups()]
    placement = TrainingPlacement(
        (names[:4], names[4:]), tuple((d,) for d in first), (False, True), Schedule.ONE_F_ONE_B, 4
    )
    types = {d: g.device for g in two.groups() for d in g.device_ids}
    with closing(MeasuredKernels(tmp_path / "measured.db")) as database:
        for device in two.device_types():
            for half in (FORWARD, BACKWARD):
                for part in ("", company(two)):  # so short a run that what is usual counts as nothing beside the plan's
                    keep_context(database, key, device, (3e-12,), 2e-12, part + half)

        def seconds(part):
            devices = two.device_types()
            tables = kernels.times(devices, database, in_context=True, company=part)
            found = {}
            for table, candidates, half in zip(
                tables, (kernels.forward, kernels.backward), (FORWARD, BACKWARD), strict=True
            ):
                for row, ops in zip(table.seconds, kernels.operators(candidates), strict=True):
                    for device, s in zip(devices, row, strict=True):
                        found |= {(half, name, device.name): s / len(ops) for name in ops}
            return found

        before, alone = seconds(company(two)), seconds("")
        own = [
            set(stage) | {b for p in kernels.parts if p.forward[0] in stage for b in p.backward}
            for stage in placement.stages
        ]
        took, factors = {}, {}
        for k, device in enumerate(first):
            name = types[device].name
            for half, factor in ((FORWARD, 2.0 + k), (BACKWARD, 0.5)):
                expected = sum(s for (h, op, d), s in before.items() if (h, d) == (half, name) and op in own[k])
                took[k, name, half] = factor * expected
                factors[k, half] = factor
        took[1, types[first[1]].name, BACKWARD] += took[1, types[first[1]].name, FORWARD]  # which it repeats
        keep_stages(kernels, placement, took, cluster=two, database=database)
        after = seconds(company(two))
        assert seconds("") == alone  # of other company
        for (half, op, d), s in after.items():
            k = [types[x].name for x in first].index(d)
            if factors[k, half] > 1:
                assert s == pytest.approx(factors[k, half] * before[half, op, d])
            elif op in own[k]:
                assert s == pytest.approx(0.5 * before[half, op, d])
        assert any(op not in own[k] for k in (0, 1) for _, op, _ in after)
