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
from collections.abc import Iterator
from pathlib import Path

from tvmhet.solve import DeviceGroup, Edge, Kernel, Link, Problem, Weight, check, solve

#: (operators, types, devices of each type, regions) of each panel of the plot; each varies one of them.
GROWTH = {
    "operators": [(n, 4, 16, 1) for n in (125, 250, 500, 1000, 2000, 5000)],
    "device types": [(500, types, 64 // types, 1) for types in (2, 4, 8)],
    "devices": [(500, 4, each, 1) for each in (1, 4, 16, 64, 256, 1024)],
}
LARGE = [(500, 8, 128, 3), (2000, 8, 32, 1), (5000, 8, 128, 3)]


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
    sizes = dict.fromkeys(size for some in (*GROWTH.values(), LARGE) for size in some)
    seconds = {size: _row(size) for size in sizes}
    if args.plot:
        args.plot.write_text("\n".join(_plot(seconds)) + "\n")
    return 0


def _row(size: tuple[int, int, int, int]) -> float:
    """Plan one size, print its row and return the CPU seconds."""
    problem = random_cluster_problem(*size)
    started = time.process_time()
    solution = solve(problem)
    seconds = time.process_time() - started
    check(problem, solution)
    devices = sum(g.num_devices for g in problem.groups)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    row = (size[0], size[1], size[3], devices, f"{seconds:.2f}", len(solution.stages), f"{solution.gap:.1%}", peak)
    print("| " + " | ".join(str(x) for x in row) + " |", flush=True)
    return seconds


def _plot(seconds: dict[tuple[int, int, int, int], float]) -> Iterator[str]:
    """Draw CPU seconds against operators, types and devices, all logarithmic, as a plain SVG."""
    yield '<svg xmlns="http://www.w3.org/2000/svg" width="840" height="310" font-family="sans-serif" font-size="12">'
    yield '<rect width="840" height="310" fill="white"/><text x="16" y="24">CPU seconds to plan, one core</text>'
    for power in (-1, 0, 1):
        yield f'<text x="16" y="{_height(10**power) + 4:.1f}">{10**power:g} s</text>'
    for panel, (name, sizes) in enumerate(GROWTH.items()):
        left, values = 60 + 260 * panel, [_varied(name, size) for size in sizes]
        for power in (-1, 0, 1):
            yield f'<path d="M{left} {_height(10**power):.1f}h230" stroke="#ccc"/>'
        path = []
        for size, value in zip(sizes, values, strict=True):
            x = left + 10 + 210 * math.log(value / values[0]) / math.log(values[-1] / values[0])
            path.append(f"{x:.1f},{_height(seconds[size]):.1f}")
            yield f'<circle cx="{x:.1f}" cy="{_height(seconds[size]):.1f}" r="4" fill="#06c"/>'
            yield f'<text x="{x:.1f}" y="278" text-anchor="middle">{value}</text>'
        yield f'<polyline points="{" ".join(path)}" fill="none" stroke="#06c"/>'
        yield f'<text x="{left + 115}" y="300" text-anchor="middle">{name}</text>'
    yield "</svg>"


def _varied(name: str, size: tuple[int, int, int, int]) -> int:
    operators, types, each, regions = size
    return {"operators": operators, "device types": types, "devices": types * each * regions}[name]


def _height(seconds: float) -> float:
    return 190 - 70 * math.log10(seconds)


if __name__ == "__main__":
    sys.exit(main())
