"""Files that somebody damaged, in the four published formats: a plan, or one error with a code; never a crash."""

from __future__ import annotations

import copy
import gzip
import json
import math
import random

import pytest

from benchmarks.planner.__main__ import main

_BAD = [None, -1, math.nan, math.inf, 1e308, "x", "", [], {}, True]


def msr_file() -> dict:
    nodes = [
        {"id": v, "supportedOnFpga": 1, "cpuLatency": 9.0, "fpgaLatency": 3.0, "isBackwardNode": 0, "size": 1.0}
        for v in range(3)
    ]
    nodes[0]["colorClass"] = nodes[1]["colorClass"] = 7
    edges = [{"sourceId": v, "destId": v + 1, "cost": 0.5} for v in range(2)]
    return {"maxSizePerFPGA": 10.0, "maxFPGAs": 2, "maxCPUs": 1, "nodes": nodes, "edges": edges}


def piper_file() -> dict:
    def config(v: int, degree: int) -> dict:
        return {
            "id": "vanilla",
            "timePerSample": 2.0 / degree,
            "parameterSize": 4.0,
            "memoryUsageA": 1.0,
            "memoryUsageB": 2.0,
            "syncTimeFw": {str(v - 1): 1.0} if v else {},
            "syncTimeBw": {str(v + 1): 1.0} if v < 2 else {},
        }

    nodes = [{"id": v, "TMPCs": {str(t): [config(v, t)] for t in (1, 2)}} for v in range(3)]
    edges = [{"sourceId": v, "destId": v + 1, "communicationCost": 8.0} for v in range(2)]
    return {"nodes": nodes, "edges": edges}


def helix_file() -> str:
    """Two nodes, two layers: each node holds one or both."""
    rows = [f" end_constraint_{i}: start_{i} + hold_{i}_1 + 2 hold_{i}_2 <= 2" for i in range(2)]
    for i in range(2):
        flows = " + ".join(f"flow_{a}_{i}" for a in ("source", 1 - i))
        rows.append(f" node_throughput_constraint_{i}: {flows} - 9 hold_{i}_1 - 4 hold_{i}_2 <= 0")
        for a, b in (("source", i), (i, "sink"), (i, 1 - i)):
            rows.append(f" edge_flow_constr_{a}_{b}: flow_{a}_{b} - 50 switch_{a}_{b} <= 0")
        end, ahead = f"start_{i} + hold_{i}_1 + 2 hold_{i}_2", f"- start_{1 - i}"
        rows.append(f" edge_disable_constr_source_{i}: start_{i} + 2 switch_source_{i} <= 2")
        rows.append(f" edge_disable_constr_{i}_sink: 2 switch_{i}_sink - {end.replace('+', '-')} <= 0")
        rows.append(f" edge_disable_constr_{i}_{1 - i}: {end} {ahead} + 2 switch_{i}_{1 - i} <= 2")
    return "Maximize\n flow\nSubject To\n" + "\n".join(rows) + "\nBounds\nEnd\n"


def pipedream_file() -> str:
    line = (
        "node{} -- Conv -- forward_compute_time=1.5, backward_compute_time=3.0, activation_size=8.0, parameter_size=4.0"
    )
    return "\n".join([*(line.format(v) for v in range(3)), "\tnode0 -- node1", "\tnode1 -- node2"]) + "\n"


def damaged_record(record: dict, rng: random.Random) -> str:
    """Remove or replace one value anywhere."""
    record = copy.deepcopy(record)
    places: list[tuple] = []

    def walk(x) -> None:
        for key in list(x) if isinstance(x, dict) else range(len(x)) if isinstance(x, list) else ():
            places.append((x, key))
            walk(x[key])

    walk(record)
    holder, key = rng.choice(places)
    if rng.random() < 0.15:
        del holder[key]
    else:
        holder[key] = rng.choice(_BAD)
    return json.dumps(record)


def damaged_text(text: str, rng: random.Random) -> str:
    """Cut, insert, or drop a line."""
    at = rng.randrange(len(text))
    lines = text.splitlines()
    del lines[rng.randrange(len(lines))]
    return rng.choice(
        [
            text[:at],
            text[:at] + text[at + rng.randrange(1, 30) :],
            text[:at] + rng.choice(["nan", "-", "1e400", "\0", "x", "<=", "_", "="]) + text[at:],
            "\n".join(lines),
        ]
    )


MAKERS = {
    "msr": (lambda rng: damaged_record(msr_file(), rng), []),
    "msr latency": (lambda rng: damaged_record(msr_file(), rng), ["--objective", "latency"]),
    "piper": (
        lambda rng: damaged_record(piper_file(), rng),
        ["--devices", "2", "--memory-gb", "1", "--minibatch", "4", "--bandwidth-gb", "1"],
    ),
    "helix": (lambda rng: damaged_text(helix_file(), rng), []),
    "pipedream": (lambda rng: damaged_text(pipedream_file(), rng), ["--devices", "2", "--bandwidth-gb", "1"]),
}


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_damaged_files_end_in_a_plan_or_in_one_error(name, tmp_path, capsys):
    make, options = MAKERS[name]
    path, refused = tmp_path / "input", 0
    for seed in range(40):
        path.write_text(make(random.Random(seed)))
        status = main([name.split()[0], str(path), *options])
        out, err = capsys.readouterr()
        if status:
            refused += 1
            assert err.startswith("[TVMHET-E"), err
            assert not out
        else:
            assert math.isfinite(json.loads(out)["objective"])
    assert refused > 3


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_the_undamaged_files_are_planned(name, tmp_path, capsys):
    options = MAKERS[name][1]
    files = {"msr": json.dumps(msr_file()), "piper": json.dumps(piper_file()), "helix": helix_file()}
    path = tmp_path / "input"
    path.write_text(files.get(name.split()[0], pipedream_file()))
    assert main([name.split()[0], str(path), *options]) == 0
    assert json.loads(capsys.readouterr().out)["objective"] > 0


def test_a_cycle_is_named(tmp_path, capsys):
    record = msr_file()
    record["edges"].append({"sourceId": 2, "destId": 0, "cost": 0.0})
    path = tmp_path / "input"
    path.write_text(json.dumps(record))
    assert main(["msr", str(path)]) == 1
    assert "cycle" in capsys.readouterr().err


def run(tmp_path, capsys, kind, text, *options):
    """Return (exit status, report or error) of one file."""
    path = tmp_path / "input"
    path.write_text(text if isinstance(text, str) else json.dumps(text))
    status = main([kind, str(path), *(options or MAKERS[kind][1])])
    out, err = capsys.readouterr()
    return status, err if status else json.loads(out)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.replace(
            "parameter_size=4.0", "parameter_size=4.0 -- stage_id=1"
        ),  # as pipedream's optimiser writes
        lambda t: t.replace("\t", "    ").replace("\n", "\r\n"),
        lambda t: "\ufeff" + t + "\n\t\n   \n",
        lambda t: t.replace("Conv", "Conv2d(3, kernel_size=(1, 1), inplace=True)"),
        lambda t: t.replace("Conv", "a -- b"),
        lambda t: t.replace("activation_size=8.0", "activation_size=[3.0; 5.0]"),
        lambda t: t.replace("activation_size=8.0", "activation_size=[3.0, 5.0]"),
    ],
)
def test_pipedream_files_are_written_in_several_ways(change, tmp_path, capsys):
    plain = run(tmp_path, capsys, "pipedream", pipedream_file())[1]
    status, other = run(tmp_path, capsys, "pipedream", change(pipedream_file()))
    assert status == 0
    assert other["objective"] == plain["objective"]


def test_pipedream_names_negative_figures_and_double_nodes(tmp_path, capsys):
    text = pipedream_file()
    status, error = run(
        tmp_path, capsys, "pipedream", text.replace("forward_compute_time=1.5", "forward_compute_time=-1")
    )
    assert status == 1 and "input:1: node0" in error
    status, error = run(tmp_path, capsys, "pipedream", text.replace("node1 -- Conv", "node0 -- Conv"))
    assert status == 1 and "input:2: node0 has a line already" in error


def test_piper_names_what_is_missing_or_double(tmp_path, capsys):
    def error_of(change) -> str:
        record = piper_file()
        change(record["nodes"], record["edges"])
        status, error = run(tmp_path, capsys, "piper", record)
        assert status == 1
        return error

    assert "node 1: TMPCs has no configuration" in error_of(lambda nodes, _: nodes[1].update(TMPCs={"1": []}))
    assert "node id 0 occurs twice" in error_of(lambda nodes, _: nodes.append(nodes[0]))
    assert "no id of its own: 'vanilla'" in error_of(
        lambda nodes, _: nodes[1]["TMPCs"]["1"].append(nodes[1]["TMPCs"]["1"][0])
    )
    back = {"sourceId": 2, "destId": 0, "communicationCost": 0.0}
    assert "cycle" in error_of(lambda _, edges: edges.append(back))


def test_piper_counts_nothing_for_a_pair_it_says_nothing_of(tmp_path, capsys):
    """A tensor without a synchronising time, one said twice, and a time of a pair that no tensor joins."""
    record = piper_file()
    for c in (c for node in record["nodes"] for cs in node["TMPCs"].values() for c in cs):
        c["syncTimeFw"], c["syncTimeBw"] = {}, {}
    status, without = run(tmp_path, capsys, "piper", record)
    record["nodes"][2]["TMPCs"]["2"][0]["syncTimeFw"] = {"0": 1e12}
    record["edges"] += [{**record["edges"][0], "communicationCost": 3.0}]
    record["edges"][0]["communicationCost"] = 5.0
    assert (status, without["objective"]) == (0, run(tmp_path, capsys, "piper", record)[1]["objective"])
    assert without["objective"] == pytest.approx(without["bound"], rel=1e-5)


def test_device_counts_that_nothing_can_use_cost_nothing(tmp_path, capsys):
    record = msr_file() | {"maxFPGAs": 10**7, "maxCPUs": 10**7}
    assert run(tmp_path, capsys, "msr", record, "--objective", "throughput")[1]["objective"] == 6.5
    assert run(tmp_path, capsys, "msr", record, "--non-contiguous")[1]["objective"] == 6.5
    many = run(tmp_path, capsys, "pipedream", pipedream_file(), "--devices", str(10**7), "--bandwidth-gb", "1")[1]
    assert many["objective"] == many["bound"]


def test_an_empty_graph_and_a_folder_that_is_not_there_are_named(tmp_path, capsys):
    assert "no nodes" in run(tmp_path, capsys, "msr", msr_file() | {"nodes": [], "edges": []}, "--non-contiguous")[1]
    out = tmp_path / "no" / "plan.json"
    status, error = run(tmp_path, capsys, "msr", msr_file(), "--out", str(out))
    assert status == 1 and str(out) in error


def _rows(text: str, without: str) -> str:
    return "\n".join(line for line in text.splitlines() if without not in line) + "\n"


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("msr", lambda: "[" * 100_000, "E008] input is not JSON: nested too deeply"),
        ("msr", lambda: json.dumps(msr_file())[:-1] + ",}", "E008] input is not JSON"),
        (
            "msr",
            lambda: json.dumps(msr_file()).replace('"maxFPGAs": 2', '"maxFPGAs": ' + "9" * 5000),
            "E008] input is not",
        ),
        ("msr", lambda: json.dumps(msr_file()).replace("9.0", "true", 1), "node 0: cpuLatency is True"),
        ("msr", lambda: json.dumps(msr_file()).replace('"supportedOnFpga": 1', '"supportedOnFpga": 2'), "give 0 or 1"),
        ("piper", lambda: "[" * 100_000, "E008] input is not JSON: nested too deeply"),
        ("piper", lambda: json.dumps(piper_file()).replace('{"1"', '{"\u00b2"'), "E008] input, node 0: tensor degree"),
        ("pipedream", lambda: "", "E010] input: the graph has no nodes"),
        ("pipedream", lambda: pipedream_file() + "\tnode0 -- node1 -- node2\n", "E008] input:6: cannot read"),
        ("helix", lambda: "", "E008] input has no line End"),
        ("helix", lambda: helix_file().replace("End", ""), "E008] input has no line End"),
        (
            "helix",
            lambda: _rows(helix_file(), "edge_disable_constr_0_1"),
            "no edge_disable_ row says when the hop 0 -> 1",
        ),
        ("helix", lambda: helix_file().replace("- 9 hold_0_1 - 4 hold_0_2 <=", "- 9 hold_0_1 >="), "_0 has >="),
        ("helix", lambda: helix_file().replace("<= 2\n", "<= 2.5\n"), "rows give [2.5] layers"),
        ("helix", lambda: helix_file().replace("hold_0_2 <= 2\n", "hold_0_2 <= 1e9\n"), "layers"),
        (
            "helix",
            lambda: helix_file().replace("hold_0_2", "hold_0_20000"),
            "E008] input: a node or the model has 20000",
        ),
        ("helix", lambda: _rows(helix_file(), "flow_constr_source"), "E004] input: no layout carries a token"),
    ],
)
def test_what_is_wrong_is_named(kind, text, said, tmp_path, capsys):
    status, error = run(tmp_path, capsys, kind, text())
    assert status == 1
    assert error.startswith("[TVMHET-E") and said in error, error


@pytest.mark.parametrize("kind", ["msr", "piper", "pipedream", "helix"])
def test_files_that_are_no_text_or_no_files_are_named(kind, tmp_path, capsys):
    packed = tmp_path / "packed"
    packed.write_bytes(gzip.compress(b"x" * 100))
    wide = tmp_path / "wide"
    wide.write_bytes(helix_file().encode("utf-16"))
    for path, said in ((packed, "not text"), (wide, "not text"), (tmp_path, "read"), (tmp_path / "none", "read")):
        assert main([kind, str(path), *MAKERS[kind][1]]) == 1
        out, error = capsys.readouterr()
        assert not out and error.startswith("[TVMHET-E008]") and said in error
