r"""Plan a published input and write the placement in its project's own format, or print the whole table.

    python -m benchmarks.planner msr FILE.json --objective throughput|latency [--non-contiguous] --out placement.json
    python -m benchmarks.planner helix ilp_model.lp --out layout.ini
    python -m benchmarks.planner piper FILE.json --devices 8 --memory-gb 8 --minibatch 1920 --bandwidth-gb 25 \
        --out plan.json
    python -m benchmarks.planner pipedream graph.txt --devices 16 --bandwidth-gb 1.25 --out plan.json
    python -m benchmarks.planner table

Each prints one JSON line: objective, bound, seconds, solver. GB are 2^30 bytes, as in the papers' code. The value is
that of the evaluator written from the paper, not the solver's own.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.planner import helix, msr, pipedream, piper
from benchmarks.planner.table import print_table
from tvmhet.errors import BadInput, HetError, Infeasible
from tvmhet.solve.balance import balance
from tvmhet.solve.layers import place_layers
from tvmhet.solve.offload import offload
from tvmhet.solve.replicated import plan_replicated
from tvmhet.solve.training import plan_training

_GIB = 1024.0**3
Answer = tuple[str, dict[str, Any]]  # text of the placement file, report


def run_msr(args: argparse.Namespace) -> Answer:
    """Plan a graph for throughput or latency."""
    graph = msr.read(args.file)
    problem = msr.load_problem(graph)
    latency, contiguous = args.objective == "latency", not args.non_contiguous
    plan = offload(problem) if latency else balance(problem, contiguous=contiguous)
    if plan.reason:
        raise Infeasible(f"{args.file.name}: {plan.reason}")
    split = msr.split_of(graph, plan)
    value = msr.latency(graph, split) if latency else msr.throughput(graph, split, contiguous=contiguous)
    report = {"objective": value, "bound": plan.lower_bound, "solver": plan.solver}
    return json.dumps(split | report), report


def run_helix(args: argparse.Namespace) -> Answer:
    """Place layers for the most tokens per second; the bound is an upper one."""
    model = helix.read(args.file)
    plan = place_layers(helix.layer_problem(model))
    if plan.tokens_per_s <= 0:
        raise Infeasible(
            f"{args.file.name}: no layout carries a token: the nodes' layers with links from the source to the sink "
            f"do not make {model.num_layers} layers; add nodes, or rates for more layers, or links"
        )
    nodes = sorted(model.rate)
    value = helix.tokens_per_s(model, {i: x for i, x in zip(nodes, plan.intervals, strict=True) if x})
    report = {"objective": value, "bound": plan.upper_bound, "solver": plan.solver}
    return helix.layout_text(plan, model), report


def run_piper(args: argparse.Namespace) -> Answer:
    """Plan pipelined training with tensor and data parallelism."""
    model = piper.read(args.file)
    limits = (args.devices, args.memory_gb * _GIB, args.minibatch, args.bandwidth_gb * _GIB)
    problem = piper.training_problem(model, *limits)
    plan = plan_training(problem)
    if plan.reason:
        raise Infeasible(f"{args.file.name}: {plan.reason}")
    out = piper.plan_of(model, problem, plan)
    report = {
        "objective": piper.time_per_sample(model, out, *limits),
        "bound": plan.lower_bound_s,
        "solver": plan.solver,
    }
    return json.dumps(out | report), report


def run_pipedream(args: argparse.Namespace) -> Answer:
    """Plan pipelined data parallelism."""
    profile = pipedream.read(args.file)
    rate = args.bandwidth_gb * _GIB
    plan = plan_replicated(pipedream.replicated_problem(profile, args.devices, rate))
    out = pipedream.plan_of(profile, plan)
    value = pipedream.stage_time_s(profile, out, args.devices, rate)
    report = {"objective": value, "bound": plan.lower_bound_s, "solver": plan.solver}
    return json.dumps(out | report), report


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as e:
        raise BadInput(f"{path} cannot be written: {e.strerror}", "give a file in a folder that exists") from e


def parser() -> argparse.ArgumentParser:
    """Build the command line."""
    top = argparse.ArgumentParser(prog="python -m benchmarks.planner")
    sub = top.add_subparsers(dest="format", required=True)
    runs: dict[str, Callable[[argparse.Namespace], Answer]] = {
        "msr": run_msr,
        "helix": run_helix,
        "piper": run_piper,
        "pipedream": run_pipedream,
    }
    for name, run in runs.items():
        p = sub.add_parser(name, help=run.__doc__)
        p.add_argument("file", type=Path)
        p.add_argument("--out", type=Path, help="where to write the placement")
        p.set_defaults(run=run)
        if name == "msr":
            p.add_argument("--objective", choices=("throughput", "latency"), default="throughput")
            p.add_argument("--non-contiguous", action="store_true")
        if name in ("piper", "pipedream"):
            p.add_argument("--devices", type=int, required=True)
            p.add_argument("--bandwidth-gb", type=float, required=True, help="GiB/s")
        if name == "piper":
            p.add_argument("--memory-gb", type=float, required=True, help="GiB per device")
            p.add_argument("--minibatch", type=int, required=True, help="micro-batches in a batch")
    table = sub.add_parser("table", help="all published inputs beside the checkout: ours, peer, bound, seconds")
    table.add_argument("--only", help="print only rows whose name contains this")
    table.add_argument("--data", type=Path, help="the folder `placement`; default: ../shared/data/placement")
    return top


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    args = parser().parse_args(argv)
    if args.format == "table":
        return print_table(args.data, args.only)
    started = time.monotonic()
    try:
        text, report = args.run(args)
        report["seconds"] = round(time.monotonic() - started, 3)
        if args.out:
            _write(args.out, text)
    except HetError as e:
        print(e, file=sys.stderr)
        return 1
    print(json.dumps({"input": args.file.name, **report}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
