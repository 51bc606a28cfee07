"""How does the time to plan grow with operators, device types and devices?

    python -m benchmarks.planner.scale [--plot growth.svg]

Models are random: blocks of 3 to 8 operators with residual and parallel branches, 5 to 300 us each. Groups are type x
region: fast links inside a node's type, 12 GB/s in a region, 125 MB/s and 2 ms between regions. One line per size:
CPU seconds (other work on the machine does not count), the plan's gap and the peak memory of the process so far.
"""

from __future__ import annotations

import argparse
import math
import random
import resource
import sys
import time
from pathlib import Path

from tvmhet.solve import DeviceGroup, Edge, Kernel, Link, Problem, Weight, check, solve

SIZES = (  # operators, types, devices of each type, regions
    (125, 4, 8, 1),
    (250, 4, 8, 1),
    (500, 4, 8, 1),
    (500, 8, 8, 1),
    (500, 8, 128, 3),
    (1000, 4, 16, 1),
    (2000, 8, 32, 1),
    (5000, 8, 128, 3),
)


def random_model(num_ops: int, seed: int = 0) -> list[list[int]]:
    """Return predecessors of a random model with residual and parallel branches."""
    rng = random.Random(seed)
    preds: list[list[int]] = [[]]
    while len(preds) < num_ops:
        base = len(preds) - 1
        for _ in range(rng.randint(3, 8)):
            preds.append([len(preds) - 1])
        if rng.random() < 0.7:
            preds.append([base, len(preds) - 1])
        elif rng.random() < 0.3:
            fork = len(preds) - 1
            preds += [[fork], [fork], [fork + 1]]
            preds.append([fork + 2, fork + 3])
    return preds


def random_cluster_problem(num_ops: int, types: int, per_type: int, regions: int, seed: int = 0) -> Problem:
    """Return a problem over types x regions groups."""
    rng = random.Random(seed)
    preds = random_model(num_ops, seed)
    readers: list[list[int]] = [[] for _ in preds]
    for v, p in enumerate(preds):
        for u in p:
            readers[u].append(v)
    speed = [rng.uniform(0.3, 3.0) for _ in range(types)]

    def times(base_s: float) -> tuple[float, ...]:
        return tuple(base_s / speed[g % types] * rng.uniform(0.8, 1.25) for g in range(types * regions))

    kernels = []
    for v in range(len(preds)):
        base_s = rng.uniform(5e-6, 3e-4)
        kernels.append(Kernel((v,), times(base_s)))
        if len(readers[v]) == 1 and len(preds[readers[v][0]]) == 1:
            kernels.append(Kernel((v, readers[v][0]), times(1.1 * base_s)))
    edges = [Edge(-1, (0,), 600_000)]
    edges += [Edge(u, tuple(r), rng.choice([100_000, 400_000, 1_600_000]), not r) for u, r in enumerate(readers)]
    weights = tuple(Weight((v,), rng.choice([0, 0, 4_000_000])) for v in range(len(preds)))
    groups = tuple(
        DeviceGroup(f"type {g % types}, region {g // types}", max(1, per_type // regions), 16e9, stage_overhead_s=5e-6)
        for g in range(types * regions)
    )

    def link(a: int, b: int) -> Link:
        if a == b:
            return Link(5e-6, 25e9)
        return Link(2e-5, 12e9) if a // types == b // types else Link(2e-3, 1.25e8)

    links = tuple(tuple(link(a, b) for b in range(len(groups))) for a in range(len(groups)))
    return Problem(len(preds), tuple(kernels), tuple(edges), weights, groups, links, (Link(5e-6, 12e9),) * len(groups))


def main(argv: list[str] | None = None) -> int:
    """Print the table; with --plot also draw it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner.scale", description=__doc__)
    parser.add_argument("--plot", type=Path, help="where to write an .svg")
    args = parser.parse_args(argv)
    print("| operators | types | regions | devices | CPU s | stages | gap | MiB |")
    print("|---|---|---|---|---|---|---|---|")
    points: list[tuple[int, float]] = []
    for size in SIZES:
        problem = random_cluster_problem(*size)
        started = time.process_time()
        solution = solve(problem)
        seconds = time.process_time() - started
        check(problem, solution)
        points.append((size[0], seconds))
        devices = sum(g.num_devices for g in problem.groups)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        row = (size[0], size[1], size[3], devices, f"{seconds:.2f}", len(solution.stages), f"{solution.gap:.1%}", peak)
        print("| " + " | ".join(str(x) for x in row) + " |", flush=True)
    if args.plot:
        _plot(points, args.plot)
    return 0


def _plot(points: list[tuple[int, float]], path: Path) -> None:
    """Draw CPU seconds against operators, both logarithmic, as a plain SVG."""

    def place(ops: float, seconds: float) -> tuple[float, float]:
        return 60 + 380 * math.log10(ops / 100) / 2, 260 - 220 * math.log10(seconds / 0.1) / 3

    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="480" height="310" font-family="sans-serif" font-size="12">'
    ]
    lines.append('<rect width="480" height="310" fill="white"/>')
    for ops in (100, 1000, 10000):
        x, y = place(ops, 0.1)
        lines.append(f'<path d="M{x} {y}V40" stroke="#ccc"/><text x="{x - 12}" y="{y + 18}">{ops}</text>')
    for seconds in (0.1, 1, 10, 100):
        x, y = place(100, seconds)
        lines.append(f'<path d="M{x} {y}H440" stroke="#ccc"/><text x="16" y="{y + 4}">{seconds:g} s</text>')
    for ops, seconds in points:
        x, y = place(ops, seconds)
        lines.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="#06c"/>')
    lines.append('<text x="200" y="300">operators</text><text x="16" y="24">CPU seconds to plan, one core</text></svg>')
    path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
