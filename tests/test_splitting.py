"""Plans with tensor split: predicted or given times, devices of one machine, what is printed, refused and kept."""

from __future__ import annotations

import random
from contextlib import closing
from dataclasses import replace
from functools import cache

import pytest
import torch

import tvmhet
from tests.graph.test_cutting import Block
from tests.oracle_training import best_iteration
from tvmhet.cluster import ClusterSpec
from tvmhet.cost.measured import MeasuredKernels
from tvmhet.cost.table import Entry, TimeTable
from tvmhet.errors import BadInput, Infeasible
from tvmhet.graph.cutting import part_of
from tvmhet.graph.fusion import LegalKernel
from tvmhet.planning_training import TrainingGoal, make_training_problem
from tvmhet.plans import Plan
from tvmhet.solve import solve_iteration
from tvmhet.splitting import (
    Wish,
    _entry,
    added_by_host_s,
    all_gather_s,
    all_reduce_s,
    kernel_names,
    longer_through_host_s,
    priced_splits,
    scaled_where_measured,
    wishes_of,
)
from tvmhet.times import Candidates, time_table
from tvmhet.training_pipeline import timed_training_graph
from tvmhet.training_placement import TrainingPlacement
from tvmhet.training_splits import with_team_times

GPU = "h100-sxm-80gb"


def gpus(count: int, machines: int = 1) -> ClusterSpec:
    """Machines with GPUs of one type."""
    network = {"bandwidth": "100 Gbit/s", "latency": "5 us"}
    return ClusterSpec.from_dict({"nodes": [{"count": machines, "devices": {GPU: count}}], "network": network})


def small_gpus(count: int, memory_bytes: int) -> ClusterSpec:
    """One machine with GPUs that have little memory."""
    cluster = gpus(count)
    (node,) = cluster.nodes
    ((device, _),) = node.devices
    return replace(cluster, nodes=(replace(node, devices=((replace(device, memory_bytes=memory_bytes), count),)),))


@cache
def model():
    """Two layers, wide enough that a product is worth more than its launch."""
    layers = torch.nn.Sequential(Block(1024, 16), Block(1024, 16)).eval()
    return tvmhet.from_torch(layers, (torch.randn(8, 256, 1024),))


@pytest.fixture(autouse=True)
def own_database(tmp_path, monkeypatch):
    monkeypatch.setenv("TVMHET_CACHE_DIR", str(tmp_path))


def test_one_input_takes_less_on_devices_that_share_its_kernels():
    alone = tvmhet.plan(model(), cluster=gpus(4), objective="latency")
    plan = tvmhet.plan(model(), cluster=gpus(4), objective="latency", splits=[2, 4])
    assert plan.objective_value < 0.6 * alone.objective_value
    assert [(s.degree, len(s.placement.devices)) for s in plan.stages] == [(4, 4)]
    assert plan.lower_bound <= plan.objective_value
    assert f"1 x 4 split {GPU}" in str(plan) and "split over 4 devices" in str(plan)
    assert f"on 1 x 4 split {GPU}" in plan.explain("0_fc1")
    assert {e.device for e in plan.timeline} == set(plan.stages[0].placement.devices)
    assert Plan.from_json(plan.to_json()) == plan
    assert "build passes it through the host's memory" in plan.notes[0]


def test_what_it_takes_longer_through_the_host_is_said():
    """Per layer two sums of 8 MiB over PCIe 5: each written once and read by four, for an NVLink's two crossings."""
    device, size = gpus(4).device_types()[0], 8 * 256 * 1024 * 4
    graph = tvmhet.extract_graph(model())
    longer = longer_through_host_s(part_of(graph, 4), range(len(graph.operators)), device)
    assert longer == pytest.approx(4 * (added_by_host_s(device, 4, size) - all_reduce_s(device, 4, size)))
    assert 4 * 5 * size / device.host_byte_per_s > longer > 0.5 * 4 * 5 * size / device.host_byte_per_s


def test_splits_over_cpu_devices_are_priced_as_they_run():
    """Each writes its part of a sum to shared memory and reads both."""
    cluster = ClusterSpec.of({"cpu-x86-64-v3": 2})
    (device,) = cluster.device_types()
    assert all_reduce_s(device, 2, 8 * 10**9) == pytest.approx(device.host_latency_s + 24e9 / device.host_byte_per_s)
    alone, plan = (tvmhet.plan(model(), cluster=cluster, objective="latency", splits=s) for s in ((), [2]))
    assert plan.objective_value < 0.7 * alone.objective_value and [s.degree for s in plan.stages] == [2]
    assert not any("host's memory" in note for note in plan.notes)


def test_a_plan_that_splits_nothing_is_the_plan_without_splits():
    alone, plan = tvmhet.plan(model(), cluster=gpus(4)), tvmhet.plan(model(), cluster=gpus(4), splits=[2])
    assert plan.lower_bound == pytest.approx(alone.lower_bound, rel=1e-5)  # proofs stop a little apart
    same = replace(plan, lower_bound=alone.lower_bound)
    assert same.to_json() == alone.to_json() and '"degree"' not in alone.to_json()


def test_given_times_are_taken_and_a_file_says_the_same(tmp_path):
    file = tmp_path / "splits.yaml"
    file.write_text(f"- degree: 2\n  device: {GPU}\n  times_s: {{'*_fc2': 1e-7, '*_fc1+*': 2e-7}}\n")
    plan = tvmhet.plan(model(), cluster=gpus(2), objective="latency", splits=file)
    times = {k.ops: p for s in plan.stages for k, p in zip(s.kernels, s.predictions, strict=True)}
    assert times["0_fc2",].time_s == 1e-7 and times["0_fc2",].source == "given"
    row = {"degree": 2, "device": GPU, "times_s": {"*_fc2": 1e-7, "*_fc1+*": 2e-7}}
    assert tvmhet.plan(model(), cluster=gpus(2), objective="latency", splits=[row]).to_json() == plan.to_json()


class Head(torch.nn.Module):
    """A pair of products, and one that makes the model's result."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.head = torch.nn.Linear(64, 128), torch.nn.Linear(128, 64), torch.nn.Linear(64, 96)

    def forward(self, x):
        return self.head(self.down(torch.relu(self.up(x))))


def test_what_devices_exchange_is_in_the_time_of_the_kernel_that_makes_it():
    """Kernels of a second each: a sum is an all-reduce more, a result in parts an all-gather; branches have no time."""
    graph, cluster = tvmhet.extract_graph(tvmhet.from_torch(Head().eval(), (torch.randn(8, 64),))), gpus(2)
    (device,) = cluster.device_types()
    singles = [LegalKernel((i,)) for i in range(len(graph.operators))]
    up, head = graph.index("up"), graph.index("head")
    branched = LegalKernel((up, head), "concurrent", (((up,),), ((head,),)))
    candidates = Candidates.of(graph, singles)

    def second(part):
        return TimeTable.empty(len(part.kernels), [GPU]).with_entries(
            GPU, {k: Entry(1.0, 1.0, 1.0, "learned") for k in range(len(part.kernels))}
        )

    (split,) = priced_splits(wishes_of([2]), graph, candidates, cluster, second)
    more = {op.name: e.seconds - 1.0 for op, e in zip(graph.operators, split.entries, strict=True)}
    summed, joined = all_reduce_s(device, 2, 8 * 64 * 4), all_gather_s(device, 2, 8 * 96 * 4)
    assert more.pop("down") == pytest.approx(summed) and more.pop("head_add") == pytest.approx(joined)
    assert set(more.values()) == {0.0} and summed != joined
    given = Wish(2, times_s={"*": 1e-6})
    both = replace(candidates, kernels=(*singles, branched))
    with_branches = [_entry(given, part_of(graph, 2, joins=True), None, device, 0, k, "any") for k in both.kernels]
    assert [e.source for e in with_branches] == ["given"] * len(singles) + ["cannot run"]


def test_parts_of_measured_kernels_follow_them():
    """The others are priced as they are."""
    graph, cluster = tvmhet.extract_graph(model()), gpus(2)
    devices = cluster.device_types()
    whole = Candidates.of(graph, [LegalKernel((i,)) for i in range(len(graph.operators))])
    part = Candidates.of(part_of(graph, 2, joins=True).graph, whole.kernels)
    ahead, direct = time_table(whole, devices, None), time_table(part, devices, None)
    known = graph.index("0_fc1")
    seconds = 3 * ahead.entry(known, GPU).seconds
    table = ahead.with_entries(GPU, {known: Entry(seconds, seconds, seconds, "measured")})
    made = scaled_where_measured(lambda p: time_table(p, devices, None), table, whole, devices)(part)
    assert made.entry(known, GPU).source == "calibrated"
    assert made.entry(known, GPU).seconds == pytest.approx(3 * direct.entry(known, GPU).seconds)
    others = [k for k in range(len(whole.kernels)) if k != known]
    assert all(made.entry(k, GPU) == direct.entry(k, GPU) for k in others)


def test_teams_stay_in_their_machine():
    plan = tvmhet.plan(model(), cluster=gpus(2, machines=2), objective="latency", splits=[2, 4])
    assert {s.degree for s in plan.stages} == {2}
    for stage in plan.stages:
        assert len({d.split("/")[0] for d in stage.placement.devices}) == 1


def test_a_model_that_fits_only_where_it_is_split():
    layer = tvmhet.from_torch(Block(1024, 16).eval(), (torch.randn(1, 16, 1024),))  # 48 MiB of weights, up to 16 each
    cluster = small_gpus(8, 10 * 2**20)
    with pytest.raises(Infeasible, match="alone needs 16"):
        tvmhet.plan(layer, cluster=cluster)
    plan = tvmhet.plan(layer, cluster=cluster, splits=[4])
    assert max(s.memory_bytes for s in plan.stages) <= 10 * 2**20 and 4 in {s.degree for s in plan.stages}
    assert len({d for s in plan.stages for d in s.placement.devices}) == 8


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ([1], "at least 2"),
        ([2.0], "whole number"),
        (3, "give degrees"),
        ([2, 2], "the same degree"),
        ([2, {"degree": 3, "times_s": {"0_fc1": 1e-6}}], "divide each other"),
        ([{"degree": 2, "devise": GPU}], "devise"),
        ([{"degree": 2, "device": "t4"}], "name a type of the cluster: h100"),
        ([{"degree": 2, "times_s": {"no such": 1e-6}}], "no such kernel"),
        ([{"degree": 2, "times_s": {"0_fc1": -1e-6}}], "above 0"),
        ([{"degree": 2, "times_s": {"0_fc1": "soon"}}], "above 0"),
        ("nowhere.yaml", "cannot be read"),
    ],
)
def test_bad_splits_are_refused(splits, message):
    with pytest.raises(BadInput, match=message):
        tvmhet.plan(model(), cluster=gpus(6), splits=splits)


def test_a_split_that_no_machine_can_hold_is_said():
    plan = tvmhet.plan(model(), cluster=gpus(6), splits=[4])
    assert plan.notes[-1].startswith("no split over 4 devices") and {s.degree for s in plan.stages} == {1}


BATCH = {"mode": "training", "global_batch": 8, "recompute": False, "schedules": ("1f1b",)}


def test_a_training_step_may_be_split():
    alone = tvmhet.plan(model(), cluster=gpus(4), **BATCH)
    plan = tvmhet.plan(model(), cluster=gpus(4), splits=[2, 4], **BATCH)
    assert plan.lower_bound <= plan.objective_value < alone.objective_value
    assert max(s.degree for s in plan.stages) > 1
    split = next(s for s in plan.stages if s.degree > 1)
    assert f"{split.degree} split {GPU}" in str(plan) and f"split over {split.degree} devices" in str(plan)
    assert {e.device for e in plan.timeline} == {d for s in plan.stages for d in s.placement.devices}
    assert Plan.from_json(plan.to_json()) == plan
    assert "build passes it through the host's memory" in "".join(plan.notes)
    placement = TrainingPlacement.of_plan(plan)
    assert placement.team_sizes == tuple(s.degree for s in plan.stages)
    assert [len(placement.devices[k]) for k in range(len(plan.stages))] == [
        len(s.placement.devices) for s in plan.stages
    ]


def test_a_traced_step_may_be_split():
    """Backward times are of the step's own operators, cut by the cost model's ratio; dropping the split costs more."""
    module = torch.nn.Sequential(Block(1024, 16), torch.nn.Flatten(), torch.nn.Linear(64 * 1024, 10))
    step = tvmhet.from_torch(
        module, (torch.randn(32, 64, 1024),), loss="cross_entropy", optimizer="adamw", mode="training"
    )
    plan, alone = (
        tvmhet.plan(step, cluster=gpus(4), global_batch=32, splits=s, schedules=("1f1b",)) for s in ([4], ())
    )
    assert plan.lower_bound <= plan.objective_value < 0.8 * alone.objective_value
    assert 4 in {s.degree for s in plan.stages}


def test_training_that_splits_nothing_is_the_plan_without_splits():
    slow = [{"degree": 2, "times_s": {"*": 1.0}, "backward_times_s": {"*": 1.0}}]
    plan, alone = (tvmhet.plan(model(), cluster=gpus(2), splits=s, **BATCH) for s in (slow, ()))
    assert (plan.stages, plan.objective_value) == (alone.stages, alone.objective_value)


def test_a_step_fits_where_state_is_split():
    layer = tvmhet.from_torch(Block(1024, 16).eval(), (torch.randn(1, 16, 1024),))  # 48 MiB of weights, 16 in one
    cluster = small_gpus(8, 48 * 2**20)  # with gradients, sums and AdamW's state five times as much
    with pytest.raises(Infeasible, match="memory"):
        tvmhet.plan(layer, cluster=cluster, **BATCH)
    with pytest.raises(Infeasible, match="memory and device counts together"):  # no operator alone is too large
        tvmhet.plan(layer, cluster=small_gpus(8, 38 * 2**20), splits=[4], **BATCH)
    plan = tvmhet.plan(layer, cluster=cluster, splits=[4], **BATCH)
    assert max(s.memory_bytes for s in plan.stages) <= 48 * 2**20 and 4 in {s.degree for s in plan.stages}


def numbers(module, inputs, cluster, splits, goal=None):
    """The training problem that `plan` makes, and its graph."""
    with closing(MeasuredKernels(None)) as measured:
        _, made = timed_training_graph(tvmhet.from_torch(module, inputs), measured, cluster, ("tvm", "library"))
    made = with_team_times(made, wishes_of(splits), cluster, cluster.device_types())
    goal = goal or TrainingGoal(4 * made.size, schedules=("1f1b",), recompute=False)
    return make_training_problem([made], cluster, cluster.groups(), {}, goal), made


def test_backward_passes_add_up_once_what_flows_back_whole():
    """Of a layer of Megatron: two sums forward, of both products' rows, and two backward, of what its norms give."""
    problem, made = numbers(Block(1024, 16).eval(), (torch.randn(8, 256, 1024),), gpus(2), [2])
    (split,), micro = made.splits, problem.options[0]
    part = part_of(made.graph, 2)
    ops = range(len(made.graph.operators))
    assert part.flowing_back_bytes(ops) == part.summed_bytes(ops) == (8 * 256 * 1024 * 4,) * 2
    alone = {k.ops[0]: i for i, k in enumerate(made.candidates.kernels) if len(k.ops) == 1 and k.maker == "tvm"}
    at, device = made.graph.index, gpus(2).device_types()[0]
    first, second = (alone[at(name)] for name in ("q", "k"))  # equal products of the same tensor
    added = all_reduce_s(device, 2, 8 * 256 * 1024 * 4)
    assert split.backward_s[first] - split.backward_s[second] == pytest.approx(added)
    assert split.backward_s[second] < 0.7 * made.backward[second, 0]
    bytes_ = {(w.size_bytes, w.is_whole) for w in micro.forward.weights}
    assert bytes_ == {(4 * 2**20, False), (16 * 2**20, False), (4096, False), (4096, True), (4 * 4096, False)}
    norms = {made.graph.tensors[i].name for i in split.whole}
    kept = dict(zip(_kept_names(made), micro.stashes, strict=True))
    assert all(w.is_whole == (name in norms) for name, w in kept.items())
    assert {w.is_whole for w in kept.values()} == {True, False}


def _kept_names(made):
    return [t.name for t in made.graph.tensors if not t.is_param and t.consumers]


def test_given_times_of_both_passes_are_taken():
    module, inputs = torch.nn.Linear(64, 64), (torch.randn(4, 64),)
    rows = [{"degree": 2, "times_s": {"*": 3e-6}, "backward_times_s": {"matmul*": 5e-6}}]
    _, made = numbers(module, inputs, gpus(2), rows)
    (split,) = made.splits
    for k, name in enumerate(kernel_names(made.candidates)):
        ratio = made.backward[k, 0] / made.forward.seconds[k, 0]
        expected = 5e-6 if name.startswith("matmul") else 3e-6 * ratio
        assert (split.entries[k].seconds, split.backward_s[k]) == (3e-6, pytest.approx(expected))
    with pytest.raises(BadInput, match="no such kernel"):
        numbers(module, inputs, gpus(2), [{"degree": 2, "backward_times_s": {"conv": 1e-6}}])
    with pytest.raises(BadInput, match="above 0"):
        wishes_of([{"degree": 2, "backward_times_s": {"conv": 0}}])


@pytest.mark.parametrize("seed", range(6))
def test_training_with_splits_equals_exhaustive_search(seed):
    """A small model through the public path, on devices that are short of memory in half of the cases."""
    rng = random.Random(seed)
    width = rng.choice([256, 512])
    module = torch.nn.Sequential(torch.nn.Linear(width, width, bias=False), torch.nn.Linear(width, width, bias=False))
    inputs = (torch.randn(rng.choice([64, 512]), width),)
    small = 4 * width * width * rng.choice([5, 9]) + 8 * 4 * inputs[0].numel()
    cluster = small_gpus(4, small) if seed % 2 else gpus(2, machines=2)
    rows = [2, {"degree": 4, "times_s": {"*": rng.choice([2e-6, 8e-6])}}] if seed % 2 else [2]
    goal = TrainingGoal(4 * len(inputs[0]), schedules=("1f1b",), recompute=seed % 3 == 0)
    problem, _ = numbers(module, inputs, cluster, rows, goal)
    best = best_iteration(problem)
    assert solve_iteration(problem).iteration_s == pytest.approx(best, rel=1e-9)
    options = {"global_batch": goal.global_batch, "schedules": goal.schedules, "recompute": goal.recompute}
    plan = tvmhet.plan(tvmhet.from_torch(module, inputs), cluster=cluster, mode="training", splits=rows, **options)
    assert plan.lower_bound <= best * (1 + 1e-9) and best <= plan.objective_value * (1 + 1e-9)
