"""Training steps with split stages: gradients, losses and state are torch's, whatever else the placement does."""

from __future__ import annotations

import copy
import dataclasses
import itertools

import numpy as np
import pytest
import torch
from torch import nn

import tvmhet
from tests.placed import cpus
from tests.runtime.test_training import COUNT, MICRO, assert_gradients, batches, torch_step
from tests.runtime.test_training import imported as imported_of
from tvmhet.dealt import Dealt
from tvmhet.errors import BadInput, NotSupported
from tvmhet.graph.cutting import Cut, part_of
from tvmhet.ir.optimizers import AdamW
from tvmhet.ir.training_step import forward_prepared, read_step
from tvmhet.solve.schedules import Schedule
from tvmhet.training import load_trainer
from tvmhet.training_build import build_training
from tvmhet.training_placement import TrainingPlacement
from tvmhet.training_predict import predict_training
from tvmhet.training_teams import forward_part, on_teams, training_part


class Layer(nn.Module):
    """A transformer's layer: attention by heads and two products, with dropout inside if asked for."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.up, self.down, self.drop = nn.Linear(16, 32), nn.Linear(32, 16), nn.Dropout(dropout)
        self.dropout = dropout

    def forward(self, x):
        b, s, d = x.shape
        y = self.norm1(x)
        q, k, v = (f(y).view(b, s, 4, d // 4).transpose(1, 2) for f in (self.q, self.k, self.v))
        a = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)
        x = x + self.o(a.transpose(1, 2).reshape(b, s, d))
        return x + self.down(self.drop(nn.functional.gelu(self.up(self.norm2(x)))))


class Net(nn.Module):
    """Tokens, layers, classes."""

    def __init__(self, dropout=0.0, num_layers=1):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(13, 16), nn.Linear(16, 13)
        self.layers = nn.Sequential(*[Layer(dropout) for _ in range(num_layers)])

    def forward(self, tokens):
        return self.head(self.layers(self.embed(tokens)))


def imported(model=None, optimizer=None):
    return imported_of(model or Net(), optimizer)


def placed(trained, devices, degrees=(), schedule="1f1b", recompute=False, shares=(), cuts=()):
    """Stages that end after `cuts` of the operators, on the devices with these numbers."""
    cluster = cpus(v3=4)
    ids = [d for group in cluster.groups() for d in group.device_ids]
    forward, num = read_step(trained).forward, len(devices)
    ends = [0, *(int(c * len(forward)) for c in cuts or [i / num for i in range(1, num)]), len(forward)]
    stages = tuple(forward[a:b] for a, b in itertools.pairwise(ends))
    places = tuple(tuple(ids[i] for i in own) for own in devices)
    return cluster, TrainingPlacement(stages, places, (recompute,) * num, Schedule(schedule), COUNT, shares, degrees)


def build(trained, devices, max_norm=None, makers=("tvm",), seed=0, **how):
    cluster, placement = placed(trained, devices, **how)
    options = {"max_norm": max_norm, "makers": makers, "seed": seed, "global_batch": MICRO * COUNT}
    return build_training(trained, cluster=cluster, plan=placement, **options)


HOW = {
    "two": {"devices": [(0, 1)], "degrees": (2,)},
    "four": {"devices": [(0, 1, 2, 3)], "degrees": (4,)},
    "two, recomputed, library": {"devices": [(0, 1)], "degrees": (2,), "recompute": True, "makers": ("tvm", "library")},
    "two replicas of two": {"devices": [(0, 1, 2, 3)], "degrees": (2,)},
    "two replicas of two, shares": {"devices": [(0, 1, 2, 3)], "degrees": (2,), "shares": ((3, 1),)},
    "two, one": {"devices": [(0, 1), (2,)], "degrees": (2, 1)},
    "one, two, gpipe": {"devices": [(0,), (1, 2)], "degrees": (1, 2), "schedule": "gpipe"},
    "two, two": {"devices": [(0, 1), (2, 3)], "degrees": (2, 2)},
    "inside the products": {"devices": [(0, 1), (2, 3)], "degrees": (2, 2), "cuts": (0.7,)},
    "two, two, wavelet": {"devices": [(0, 1), (2, 3)], "degrees": (2, 2), "schedule": "wavelet"},
    "interleaved": {"devices": [(0, 1), (2, 3)] * 2, "degrees": (2,) * 4, "schedule": "interleaved"},
}


@pytest.mark.parametrize("how", [pytest.param(h, marks=[] if h == "two" else pytest.mark.slow) for h in HOW])
def test_gradients_losses_and_state_are_torchs(how):
    model, trained = imported()
    double = copy.deepcopy(model).double().train()
    reference = torch.optim.SGD(double.parameters(), lr=0.1, momentum=0.9)
    data = batches(4)
    with build(trained, **HOW[how], max_norm=0.5) as trainer:
        assert trainer.train_step(data[0]) == pytest.approx(torch_step(double, reference, data[0], 0.5), rel=1e-5)
        assert_gradients(trainer, double)
        ours = trainer.fit(data[1:])
        np.testing.assert_allclose(ours, [torch_step(double, reference, b, 0.5) for b in data[1:]], rtol=1e-5)
        for name, value in double.state_dict().items():
            np.testing.assert_allclose(trainer.state_dict()[name], value.numpy(), rtol=1e-4, atol=1e-6, err_msg=name)


class Normed(nn.Module):
    """A batch norm of columns that are dealt out: so are its statistics, which each device renews of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.up, self.down = nn.Embedding(13, 8), nn.Linear(8, 16), nn.Linear(16, 13)
        self.bn = nn.BatchNorm1d(16)

    def forward(self, tokens):
        x = self.up(self.embed(tokens)).reshape(-1, 16)
        return self.down(torch.relu(self.bn(x))).reshape(*tokens.shape, 13)


@pytest.mark.slow
def test_statistics_of_columns_are_dealt_out_with_them():
    model, trained = imported(Normed())
    double = copy.deepcopy(model).double().train()
    reference = torch.optim.SGD(double.parameters(), lr=0.1, momentum=0.9)
    data = batches(3)
    assert "b_bn_running_mean" in on_teams(read_step(trained), placed(trained, [(0, 1)], (2,))[1]).dealt
    with build(trained, [(0, 1)], degrees=(2,)) as trainer:
        ours = trainer.fit(data)
        state = trainer.state_dict()
    np.testing.assert_allclose(ours, [torch_step(double, reference, b) for b in data], rtol=1e-5)
    for name, value in double.state_dict().items():
        np.testing.assert_allclose(state[name], value.numpy(), rtol=1e-4, atol=1e-6, err_msg=name)


def test_every_device_holds_its_part_and_no_more():
    """Of the layer's six products a device has half, of the rest all; the state that is saved is whole."""
    _, trained = imported()
    step = read_step(trained)
    _, placement = placed(trained, [(0, 1)], (2,))
    made = on_teams(step, placement)
    cut = {step.model.torch_names[name] for name in made.dealt}
    products = {f"layers.0.{p}.weight" for p in ("q", "k", "v", "o", "up", "down")}
    assert cut == products | {f"layers.0.{p}.bias" for p in ("q", "k", "v", "up")}
    sizes = {t.name: t.size_bytes for t in made.step.prepared.operator_graph.tensors}
    whole = {t.name: t.size_bytes for t in step.prepared.operator_graph.tensors}
    for name, dealt in made.dealt.items():
        assert [sizes[own] for own in dealt.names] == [whole[name] / 2] * 2
    assert made.placement.levels == (0,) * 2 * 5  # two exchanges of a layer in each direction part five passes


@pytest.mark.slow
def test_a_run_goes_on_from_a_checkpoint_on_other_devices_and_from_a_bundle(tmp_path):
    """Dropout of parts is that of the whole: a team goes on as one device would, and the other way round."""
    _, trained = imported(Net(dropout=0.3), AdamW(lr=3e-3, weight_decay=0.1))
    data = batches(4)
    with build(trained, [(0, 1)], degrees=(2,), seed=3) as team:
        before = team.fit(data[:2])
        saved = team.save(tmp_path / "run.safetensors")
        bundle = team.export(tmp_path / "bundle")
        want = team.fit(data[2:])
        team.restore(saved)
        assert team.fit(data[2:]) == want
        state = team.state_dict()
    with build(trained, [(0,)], seed=3) as alone:
        np.testing.assert_allclose(alone.fit(data[:2]), before, rtol=1e-5)
        alone.restore(saved)
        np.testing.assert_allclose(alone.fit(data[2:]), want, rtol=1e-5)
        for name, value in alone.state_dict().items():
            if name != "layers.0.k.bias":  # keys moved alike change no attention: AdamW follows rounding there
                np.testing.assert_allclose(value, state[name], atol=2e-5, err_msg=name)
        back = alone.save(tmp_path / "alone.safetensors")
    with load_trainer(bundle) as loaded:
        np.testing.assert_allclose(loaded.fit(data[:2]), before, rtol=1e-6)
        loaded.restore(back)
        np.testing.assert_allclose(loaded.state_dict()["layers.0.up.weight"], state["layers.0.up.weight"], atol=1e-4)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("runs", [(8,), (4, 2, 2)])
def test_parts_join_to_what_was_dealt(axis, runs):
    whole = np.arange(64.0).reshape(8, 8)
    dealt = Dealt(("a", "b"), axis - 2 if axis >= 0 else axis, runs)
    parts = dealt.parts(whole)
    assert [p.size for p in parts] == [32, 32]
    np.testing.assert_array_equal(dealt.joined(parts), whole)
    assert runs == (8,) or parts[0].take([2, 3], axis).tolist() == whole.take([4, 6], axis).tolist()


class Fused(nn.Module):
    """Pieces of one product's columns, by a split or by slices, whose gradients are put side by side or added."""

    def __init__(self, splits):
        super().__init__()
        self.three, self.down, self.splits = nn.Linear(8, 24), nn.Linear(8, 8), splits

    def forward(self, x):
        y = self.three(x)
        a, b, c = y.split(8, -1) if self.splits else (y[:, :8], y[:, 8:16], y[:, 16:])
        return self.down(a * b + c)


def test_plans_cut_what_both_passes_can_cut():
    """The forward part that is priced is what the built step does, in models with dropout, too."""
    for model in (Net(dropout=0.1), Net()):
        step = read_step(imported(model)[1])
        graph = forward_prepared(step).operator_graph
        ahead, both = forward_part(step, graph, 2), training_part(step, 2)
        joint = step.prepared.operator_graph
        named = {joint.tensors[t].name: cut for t, cut in both.cuts.items()}
        assert {graph.tensors[t].name: cut for t, cut in ahead.cuts.items()}.items() <= named.items()
        assert {graph.operators[i].name for i in ahead.summed} == {
            joint.operators[i].name for i in both.summed if joint.operators[i].name in step.forward_set
        }
        assert len(ahead.summed) == 2


def test_pieces_of_columns_are_dealt_out_in_both_passes_or_in_none():
    by_splits, by_slices = (
        read_step(tvmhet.from_torch(Fused(s), torch.randn(4, 8), loss="mse", optimizer="sgd", mode="training"))
        for s in (True, False)
    )
    part, graph = training_part(by_splits, 2), by_splits.prepared.operator_graph
    cuts = {graph.tensors[t].name: cut for t, cut in part.cuts.items()}
    assert cuts["p_three_weight"] == Cut(-2, (8, 8, 8)) and cuts["p_three_bias"] == Cut(-1, (8, 8, 8))
    assert cuts[by_splits.gradients["p_three_weight"]] == Cut(-2, (8, 8, 8))
    ahead = forward_prepared(by_slices).operator_graph
    assert len(part_of(ahead, 2).summed) == 1  # the forward pass alone could
    assert training_part(by_slices, 2) is None and forward_part(by_slices, ahead, 2) is None


class PerHead(nn.Module):
    """One product for every head: on parts of the heads, each device would have a part of its gradient's sum."""

    def __init__(self):
        super().__init__()
        self.up, self.each, self.down = nn.Linear(8, 16), nn.Linear(4, 4, bias=False), nn.Linear(16, 8)

    def forward(self, x):
        heads = self.up(x).view(-1, 4, 4)
        return self.down(self.each(torch.relu(heads)).reshape(-1, 16))


def test_gradients_are_cut_as_their_parameters():
    """And are no sums still to be added up: so the forward pass is cut less than it could be alone."""
    steps = [read_step(imported(Net(num_layers=2))[1])]
    for module in (PerHead(), Fused(True)):
        step = tvmhet.from_torch(module, torch.randn(4, 8), loss="mse", optimizer="sgd", mode="training")
        steps.append(read_step(step))
    parts = [training_part(step, 2) for step in steps]
    for step, part in zip(steps, parts, strict=True):
        tensors = step.prepared.operator_graph.tensors
        number = {t.name: i for i, t in enumerate(tensors)}
        for weight, result in step.gradients.items() if part else ():
            assert part.cuts.get(number[weight]) == part.cuts.get(number[result]), weight
            assert tensors[number[result]].producer not in part.summed
    ahead = forward_prepared(steps[1]).operator_graph
    assert "p_up_weight" in {ahead.tensors[t].name for t in part_of(ahead, 2).cuts}
    assert [part is not None for part in parts] == [True, False, True]


@pytest.mark.slow
def test_gradients_of_pieces_are_one_devices():
    trained = tvmhet.from_torch(
        Fused(True), torch.randn(MICRO, 8), loss="mse", optimizer="sgd", lr=0.1, momentum=0.9, mode="training"
    )
    batch, found = [torch.randn(MICRO * COUNT, 8) for _ in range(2)], []
    for devices, degrees in (((0,), ()), ((0, 1), (2,))):
        with build(trained, [devices], degrees=degrees) as trainer:
            found.append((trainer.fit([batch] * 2), trainer.optimizer_state()))
    (losses, state), (of_team, parts) = found
    np.testing.assert_allclose(of_team, losses, rtol=1e-5)
    assert state.keys() == parts.keys()
    for key, value in state.items():
        np.testing.assert_allclose(parts[key], value, rtol=1e-4, atol=1e-6, err_msg=str(key))


def test_a_team_is_predicted():
    """About half the time and the weights of one device where products are all there is; exchanges and norms add."""
    wide = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512))
    trained = tvmhet.from_torch(wide, torch.randn(64, 512), loss="mse", optimizer="sgd", mode="training")
    cluster, team = placed(trained, [(0, 1)], (2,))
    alone = dataclasses.replace(team, devices=(team.devices[0][:1],), degrees=())
    both, one = (predict_training(trained, p, cluster=cluster) for p in (team, alone))
    assert both.solution.stages[0].placing.degree == 2
    assert both.memory_bytes[0] < one.memory_bytes[0]
    (stage,), (whole,) = both.solution.stages, one.solution.stages
    assert 0.5 < stage.weight_bytes / whole.weight_bytes < 0.51
    assert 0.4 < stage.forward_s / whole.forward_s < 0.8 and 0.4 < stage.backward_s / whole.backward_s < 0.8
    assert both.iteration_s < 0.8 * one.iteration_s


class Counting(nn.Module):
    """Every device would read the count that one of them renews."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("seen", torch.ones(()))

    def forward(self, x):
        self.seen.add_(1.0)
        return self.down(torch.relu(self.up(x)) / self.seen)


def test_unlike_replicas_are_split_alike_or_not_at_all():
    _, trained = imported()
    plan = tvmhet.plan(trained, cluster=cpus(v2=1, v3=1), global_batch=MICRO * COUNT, unlike_replicas=True)
    (first, *rest) = plan.stages
    both = dataclasses.replace(plan, stages=(first, *(dataclasses.replace(s, degree=2) for s in rest)))
    assert [len(team) for team in plan.teams()] == [2]  # unlike replicas of one stage
    assert TrainingPlacement.of_plan(plan).team_sizes == (1,)
    with pytest.raises(NotSupported, match="unlike replicas, stages 0, 1 of the plan, are split over 1, 2 devices"):
        TrainingPlacement.of_plan(both)


def test_what_teams_cannot_do_is_said():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.second(torch.relu(self.first(torch.relu(self.second(torch.relu(self.first(x)))))))

    step = tvmhet.from_torch(Tied(), torch.randn(MICRO, 8), loss="mse", optimizer="sgd", mode="training")
    _, placement = placed(step, [(0, 1), (2,)], (2, 1))
    with pytest.raises(NotSupported, match="is dealt out in a split stage, and another stage reads it"):
        on_teams(read_step(step), placement)
    conv = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten())
    step = tvmhet.from_torch(conv, torch.randn(MICRO, 3, 4, 4), loss="mse", optimizer="sgd", mode="training")
    _, placement = placed(step, [(0, 1)], (2,))
    with pytest.raises(NotSupported, match="nothing of the step can be cut"):
        on_teams(read_step(step), placement)
    counting = tvmhet.from_torch(Counting(), torch.randn(MICRO, 8), loss="mse", optimizer="sgd", mode="training")
    _, placement = placed(counting, [(0, 1)], (2,))
    with pytest.raises(NotSupported, match="several passes of a split stage read or renew buffer 'b_seen'"):
        on_teams(read_step(counting), placement)
    _, trained = imported()
    with pytest.raises(BadInput, match="stage 0 is split over 2 of its 3 devices"):
        placed(trained, [(0, 1, 2)], (2,))
    with pytest.raises(BadInput, match="2 degrees for 1 stages"):
        placed(trained, [(0, 1)], (2, 1))
    cluster, placement = placed(trained, [(0, 1)], (2,))
    with pytest.raises(NotSupported, match="the plan has split stages"):
        tvmhet.profile(trained, cluster=cluster, plan=placement, budget_s=0.0)
