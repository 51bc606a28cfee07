"""One table: every published input, our value, the peers' best, the best known, our bound, and our seconds.

Peers' figures are those of their papers' solvers, rerun or published; helix' also come with the inputs (ilp_sol.ini).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.planner import helix, msr, pipedream, piper
from benchmarks.planner.baselines import load_baselines
from benchmarks.planner.baselines_latency import latency_baselines
from tvmhet.solve.balance import balance
from tvmhet.solve.layers import place_layers
from tvmhet.solve.offload import offload
from tvmhet.solve.replicated import plan_replicated
from tvmhet.solve.training import plan_training

_GIB = 1024.0**3


@dataclass(frozen=True)
class Row:
    """One line: `run` returns (our value, our bound, other planners' values by name)."""

    name: str
    peer: float | None
    known: float | None  # the best value known before, where that is not the peers'
    higher: bool  # is more better?
    run: Callable[[], tuple[float, float, dict[str, float]]]
    peer_s: float | None = None  # seconds of the peer's solver, where they are published


def print_table(data: Path | None, only: str | None) -> int:
    """Print the table over the inputs found in `data`; 1 if there are none."""
    root = data or Path(os.environ.get("TVMHET_SHARED", "../shared")) / "data" / "placement"
    if not root.is_dir():
        print(f"no published inputs at {root}; give --data or set TVMHET_SHARED")
        return 1
    print("| input | ours | peer | known better | bound | gap | seconds | / peer's | against the peer | baselines |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for row in rows(root):
        if only and only not in row.name:
            continue
        started = time.monotonic()
        value, bound, others = row.run()
        seconds = time.monotonic() - started
        gap = abs(value - bound) / value
        cells = (
            row.name,
            f"{value:.6g}",
            _number(row.peer),
            _number(row.known),
            f"{bound:.6g}",
            f"{gap:.2%}",
            f"{seconds:.2f}",
            "unknown" if row.peer_s is None else f"{seconds / row.peer_s:.2g}",
            _verdict(row, value),
            ", ".join(f"{k} {v:.5g}" for k, v in others.items()),
        )
        print("| " + " | ".join(cells) + " |", flush=True)
    return 0


def _number(x: float | None) -> str:
    return "" if x is None else f"{x:.6g}"


def _verdict(row: Row, value: float) -> str:
    if row.peer is None:
        return ""
    ratio = value / row.peer if row.higher else row.peer / value
    word = "equal" if abs(ratio - 1) < 1e-4 else "better" if ratio > 1 else "WORSE"
    return word if word == "equal" else f"{word} {ratio:.3f}x"


def rows(root: Path) -> Iterator[Row]:
    """Every row whose input exists."""
    yield from _msr_throughput(root / "msr" / "throughput-inputs")
    yield from _msr_latency(root / "msr" / "latency-inputs")
    yield from _helix(root / "helix")
    yield from _piper(root / "piper" / "bert32a100.json")
    yield from _pipedream(root / "pipedream")


_THROUGHPUT = {  # file: contiguous peer, best non-contiguous known
    "LayerGraphs/bert24_inference": (17.790, 17.715),
    "LayerGraphs/bert24_training": (41.746, 39.790),
    "LayerGraphs/resnet50_inference": (33.775, None),
    "LayerGraphs/resnet50_training": (78.632, None),
    "LayerGraphs/inceptionv3_inference": (51.552, None),
    "OperatorGraphs/bert_l-3_inference": (27.919, 21.908),
    "OperatorGraphs/bert_l-3_training": (65.303, 54.207),
    "OperatorGraphs/resnet50_inference": (124.349, None),
}


def _msr_throughput(folder: Path) -> Iterator[Row]:
    for name, (peer, free) in _THROUGHPUT.items():
        path = folder / f"{name}.json"
        if not path.exists():
            continue
        for contiguous in (True, False):

            def run(path: Path = path, contiguous: bool = contiguous) -> tuple[float, float, dict[str, float]]:
                graph = msr.read(path)
                plan = balance(msr.load_problem(graph), contiguous=contiguous)
                value = msr.throughput(graph, msr.split_of(graph, plan), contiguous=contiguous)
                return value, plan.lower_bound, load_baselines(msr.load_problem(graph)) if contiguous else {}

            kind = "contiguous" if contiguous else "non-contiguous"
            yield Row(f"msr {name} {kind}", peer, None if contiguous else free, False, run)


def _msr_latency(folder: Path) -> Iterator[Row]:
    peers = {
        "LayerGraphs/bert24_inference": (100.22, None),
        "OperatorGraphs/bert_l-3_inference": (414.44, 408.47),
        "LayerGraphs/resnet50_inference": (1564.9, None),
    }
    for name, (peer, known) in peers.items():
        path = folder / f"{name}.json"
        if path.exists():

            def run(path: Path = path) -> tuple[float, float, dict[str, float]]:
                graph = msr.read(path)
                plan = offload(msr.load_problem(graph))
                others = latency_baselines(msr.load_problem(graph))
                return msr.latency(graph, msr.split_of(graph, plan)), plan.lower_bound, others

            yield Row(f"msr latency {name}", peer, known, False, run)


_HELIX_S = {  # seconds of the authors' own Gurobi runs, on 20 threads
    "single_cluster_layout_llama70b_ilp": 600.0,
    "ablation_layouts_quality": 3803.0,
}


def _helix(folder: Path) -> Iterator[Row]:
    known = {"single_cluster_layout_llama70b_ilp": 2045.64, "single_cluster_layout_llama30b_ilp_l4": 252.65}
    for path in sorted(folder.glob("*/ilp_model.lp")):
        model = helix.read(path)
        theirs = path.with_name("ilp_sol.ini")
        peer = helix.tokens_per_s(model, helix.read_layout(theirs)) if theirs.exists() else None

        def run(model: helix.HelixModel = model) -> tuple[float, float, dict[str, float]]:
            plan = place_layers(helix.layer_problem(model))
            layout = {i: x for i, x in zip(sorted(model.rate), plan.intervals, strict=True) if x}
            return helix.tokens_per_s(model, layout), plan.upper_bound, {}

        case = path.parent.name
        yield Row(f"helix {case}", peer, known.get(case), True, run, _HELIX_S.get(case))


def _piper(path: Path) -> Iterator[Row]:
    for devices, peer in ((8, 0.16586), (32, 0.041515), (64, 0.020201), (512, 0.0025611)):
        if path.exists():

            def run(devices: int = devices) -> tuple[float, float, dict[str, float]]:
                model = piper.read(path)
                limits = (devices, 8 * _GIB, 1920, 25 * _GIB)
                problem = piper.training_problem(model, *limits)
                plan = plan_training(problem)
                value = piper.time_per_sample(model, piper.plan_of(model, problem, plan), *limits)
                return value, plan.lower_bound_s, {}

            yield Row(f"piper bert32 k={devices}", peer, None, False, run)


def _pipedream(folder: Path) -> Iterator[Row]:
    for path in sorted(folder.glob("*/graph.txt")):
        for devices in (4, 16):

            def run(path: Path = path, devices: int = devices) -> tuple[float, float, dict[str, float]]:
                profile = pipedream.read(path)
                rate = 1.25 * _GIB
                plan = plan_replicated(pipedream.replicated_problem(profile, devices, rate))
                value = pipedream.stage_time_s(profile, pipedream.plan_of(profile, plan), devices, rate)
                return value, plan.lower_bound_s, {}

            yield Row(f"pipedream {path.parent.name} {devices} devices, 1.25 GiB/s", None, None, False, run)
