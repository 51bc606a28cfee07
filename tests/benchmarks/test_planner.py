"""Published inputs: read, plan, write, value. Values to reach are the peers' own (see benchmarks/planner/table.py)."""

from __future__ import annotations

import json

import pytest

from benchmarks.planner import helix, msr, pipedream, piper
from benchmarks.planner.__main__ import main
from benchmarks.planner.baselines import load_baselines
from tvmhet.errors import BadGraph, BadModel
from tvmhet.solve.balance import Effort, balance


def graph_file(tmp_path, **change):
    """A chain of three nodes in the msr format."""
    nodes = [
        {
            "id": 10 + v,
            "supportedOnFpga": 1,
            "cpuLatency": 9.0,
            "fpgaLatency": 3.0,
            "isBackwardNode": 0,
            "size": 1.0,
            "colorClass": v,
        }
        for v in range(3)
    ]
    edges = [{"sourceId": 10 + v, "destId": 11 + v, "cost": 0.5} for v in range(2)]
    graph = {"maxSizePerFPGA": 10.0, "maxFPGAs": 2, "maxCPUs": 1, "nodes": nodes, "edges": edges} | change
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(graph))
    return path


def test_msr_writes_a_split_with_its_value(tmp_path, capsys):
    out = tmp_path / "split.json"
    assert main(["msr", str(graph_file(tmp_path)), "--out", str(out)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["objective"] == pytest.approx(6.5)
    assert report["bound"] == pytest.approx(6.5)
    split = json.loads(out.read_text())
    assert sorted(i for kind in ("fpgas", "cpus") for m in split[kind] for i in m["nodes"]) == [10, 11, 12]


def test_msr_latency_uses_one_accelerator_for_a_chain(tmp_path, capsys):
    assert main(["msr", str(graph_file(tmp_path)), "--objective", "latency"]) == 0
    assert json.loads(capsys.readouterr().out)["objective"] == pytest.approx(9.0)


def test_the_evaluators_refuse_broken_splits(tmp_path):
    graph = msr.read(graph_file(tmp_path))
    with pytest.raises(BadGraph, match="no device"):
        msr.throughput(graph, {"fpgas": [{"nodes": [10]}], "cpus": []}, contiguous=True)
    with pytest.raises(BadGraph, match="two devices"):
        msr.throughput(graph, {"fpgas": [{"nodes": [10, 11]}, {"nodes": [11, 12]}], "cpus": []}, contiguous=True)
    with pytest.raises(BadGraph, match="not contiguous"):
        msr.throughput(graph, {"fpgas": [{"nodes": [10, 12]}, {"nodes": [11]}], "cpus": []}, contiguous=True)
    with pytest.raises(BadGraph, match="wait for each other"):
        msr.latency(graph, {"fpgas": [{"nodes": [10, 12]}, {"nodes": [11]}], "cpus": []})
    free = msr.throughput(graph, {"fpgas": [{"nodes": [10, 12]}, {"nodes": [11]}], "cpus": []}, contiguous=False)
    assert free == pytest.approx(7.0)


@pytest.mark.parametrize(
    "change",
    [{"nodes": [{"id": 1}]}, {"edges": [{"sourceId": 10, "destId": 99, "cost": 1.0}]}, {"maxFPGAs": 0, "maxCPUs": 0}],
)
def test_bad_files_end_with_a_message_and_write_nothing(tmp_path, capsys, change):
    out = tmp_path / "split.json"
    assert main(["msr", str(graph_file(tmp_path, **change)), "--out", str(out)]) == 1
    assert "TVMHET-E" in capsys.readouterr().err
    assert not out.exists()


def test_a_missing_file_is_named(capsys):
    assert main(["helix", "nowhere.lp"]) == 1
    assert "nowhere.lp" in capsys.readouterr().err


def test_other_formats_refuse_what_they_cannot_read(tmp_path):
    path = tmp_path / "x"
    path.write_text("Maximize\n x\nSubject To\n c: x <= 1\nBounds\nEnd\n")
    with pytest.raises(BadModel):
        helix.read(path)
    path.write_text("{}")
    with pytest.raises(BadModel):
        piper.read(path)
    path.write_text("node1 -- Conv2d -- forward=1\n")
    with pytest.raises(BadModel, match="x:1"):
        pipedream.read(path)


@pytest.mark.shared
@pytest.mark.parametrize(
    ("name", "peer"),
    [
        ("LayerGraphs/bert24_inference", 17.790),
        ("LayerGraphs/bert24_training", 41.746),
        ("LayerGraphs/resnet50_inference", 33.775),
        ("LayerGraphs/resnet50_training", 78.632),
        ("LayerGraphs/inceptionv3_inference", 51.552),
        ("OperatorGraphs/bert_l-3_inference", 27.919),
        ("OperatorGraphs/resnet50_inference", 124.349),
    ],
)
def test_contiguous_throughput_reaches_the_peers_and_is_proved(shared_data, name, peer):
    graph = msr.read(shared_data / "placement" / "msr" / "throughput-inputs" / f"{name}.json")
    problem = msr.load_problem(graph)
    plan = balance(problem)
    value = msr.throughput(graph, msr.split_of(graph, plan), contiguous=True)
    assert value <= peer * (1 + 1e-4)
    assert plan.optimal
    assert value <= min(load_baselines(problem).values()) * (1 + 1e-9)


@pytest.mark.shared
def test_free_throughput_beats_the_contiguous_optimum(shared_data):
    graph = msr.read(shared_data / "placement/msr/throughput-inputs/OperatorGraphs/bert_l-3_inference.json")
    plan = balance(msr.load_problem(graph), contiguous=False, effort=Effort(seeds=2, cpsat_s=0))
    assert msr.throughput(graph, msr.split_of(graph, plan), contiguous=False) <= 21.909
    assert plan.optimal


@pytest.mark.shared
def test_contiguous_training_is_proved_where_downsets_are_too_many(shared_data):
    graph = msr.read(shared_data / "placement/msr/throughput-inputs/OperatorGraphs/bert_l-3_training.json")
    plan = balance(msr.load_problem(graph), effort=Effort(seeds=0))
    assert msr.throughput(graph, msr.split_of(graph, plan), contiguous=True) <= 65.3032
    assert plan.lower_bound >= plan.objective * (1 - 2e-5)


@pytest.mark.shared
@pytest.mark.parametrize(
    ("case", "known"),
    [
        ("single_cluster_layout_llama70b_ilp", 2045.64),
        ("single_cluster_layout_llama30b_ilp_a100", 1044.53),
        ("single_cluster_layout_llama30b_ilp_t4", 397.68),
        ("single_cluster_layout_llama30b_ilp_l4", 252.64),
        ("ablation_layouts_quality", 286.58),
    ],
)
def test_helix_layouts_reach_the_best_known(shared_data, tmp_path, capsys, case, known):
    path, out = shared_data / "placement" / "helix" / case / "ilp_model.lp", tmp_path / "layout.ini"
    assert main(["helix", str(path), "--out", str(out)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert known <= report["objective"] <= report["bound"] * (1 + 1e-9)
    model = helix.read(path)
    assert helix.tokens_per_s(model, helix.read_layout(out)) == pytest.approx(report["objective"])
    assert helix.tokens_per_s(model, helix.read_layout(path.with_name("ilp_sol.ini"))) <= known * (1 + 1e-4)


@pytest.mark.shared
@pytest.mark.parametrize(("devices", "peer"), [(8, 0.16586), (32, 0.041516), (64, 0.020201), (512, 0.0025612)])
def test_piper_plans_reach_the_peers(shared_data, tmp_path, capsys, devices, peer):
    path, out = shared_data / "placement" / "piper" / "bert32a100.json", tmp_path / "plan.json"
    limits = ["--devices", str(devices), "--memory-gb", "8", "--minibatch", "1920", "--bandwidth-gb", "25"]
    assert main(["piper", str(path), *limits, "--out", str(out)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["objective"] <= peer
    assert report["bound"] == pytest.approx(report["objective"], rel=1e-5)
    assert json.loads(out.read_text())["stages"]


@pytest.mark.shared
def test_pipedream_plans_are_valued_alike(shared_data, capsys):
    path = shared_data / "placement" / "pipedream" / "vgg16" / "graph.txt"
    assert main(["pipedream", str(path), "--devices", "8", "--bandwidth-gb", "1.25"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["objective"] == pytest.approx(report["bound"])
