"""What do errors of predictions share, and does correcting by measured kernels bring the others nearer?

    python -m benchmarks.inferring --data DIR [--group matmul_tensor]

Published kernels that were measured on all types of a group, against rooflines of the data sheets and against learned
models from which the type was left out. Correlations are those of one kernel's log errors on two types; "types" is the
variance of the types' mean errors over that within a type. Then, 3,000 times: of eight kernels three are measured on
one type, whose other five and whose neighbours are corrected as `recommend(measurements=...)` does (belief.py, with a
spread of 0.25); mean absolute errors before and after, in %.
"""

from __future__ import annotations

import argparse
import io
import itertools
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "cost_models"))  # scripts, not a package
# ruff: noqa: E402

from benchmarks.cost_models import Bench, keys_of, spec_sheet_s
from tvmhet.cluster import device_type
from tvmhet.recommending.belief import NOISE, covariance, generations
from tvmhet.recommending.uncertainty import KernelBelief

Floats = NDArray[np.float64]
GROUPS = {"matmul_tensor": "held_out", "attention_decode": "held_out", "moe": "held_out", "linear_vector": "all",
          "conv": "all", "softmax": "all", "norm": "all"}  # fmt: skip
JOB, MEASURED, TRIES, SPREAD = 8, 3, 3000, 0.25


def log_errors(bench: Bench, group: str, source: str) -> tuple[list[str], Floats]:
    """The types of a group, and log(measured / predicted) of the kernels that all have, shape (types, kernels)."""
    samples, found = bench.samples(group), {}
    for held, _ in bench.left_out(group, GROUPS[group]):
        some = samples[held.device].take(held.rows)
        predicted = held.predicted if source == "learned" else spec_sheet_s(some, held.device)
        found[held.device] = dict(zip(keys_of(some), np.log(held.measured / predicted).tolist(), strict=True))
    names = list(found)
    common = [key for key in found[names[0]] if all(key in found[n] for n in names)]
    return names, np.array([[found[n][key] for key in common] for n in names])


def shared(names: list[str], errors: Floats) -> tuple[list[float], list[float], float]:
    """Correlations between types of one compute capability, those of others, and the types' share of the variance."""
    made, corr = generations(map(device_type, names)), np.corrcoef(errors)
    pairs = list(itertools.combinations(range(len(names)), 2))
    twins, others = ([float(corr[i, j]) for i, j in pairs if (made[names[i]] == made[names[j]]) is one]
                     for one in (True, False))  # fmt: skip
    return twins, others, float(errors.mean(axis=1).var() / errors.var(axis=1).mean())


def corrected(names: list[str], errors: Floats, source: str) -> tuple[float, float, float, float]:
    """Mean absolute errors of the type's other kernels and of the other types, each before and after."""
    rng, made = np.random.default_rng(0), generations(map(device_type, names))
    rows = [KernelBelief(1.0, SPREAD, n, "one", str(k), source) for n in names for k in range(JOB)]
    parts: list[list[float]] = [[], [], [], []]
    for _ in range(TRIES):
        own = errors[:, rng.choice(errors.shape[1], JOB, replace=False)].ravel()
        first = JOB * int(rng.integers(len(names)))
        seen = list(range(first, first + MEASURED))
        known = [rows[i] for i in seen]
        noise = NOISE**2 * np.eye(MEASURED)
        weight = np.linalg.solve(covariance(known, known, made) + noise, covariance(rows, known, made).T).T
        after = own - weight @ np.clip(own[seen], -3 * SPREAD, 3 * SPREAD)
        same = np.arange(first + MEASURED, first + JOB)
        others = np.setdiff1d(np.arange(len(rows)), np.arange(first, first + JOB))
        for part, values in zip(parts, (own[same], after[same], own[others], after[others]), strict=True):
            part.append(float(np.abs(np.expm1(values)).mean()))
    one, two, three, four = (float(np.mean(p)) for p in parts)
    return one, two, three, four


def main() -> int:
    """Print one row per group and kind of prediction."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--group", action="append", choices=list(GROUPS))
    args = parser.parse_args()
    print(
        "| group | predictions | kernels | one capability | others: least, mean, most | types "
        "| same type | other types |"
    )
    print("|---|---|---|---|---|---|---|---|")
    bench = Bench(args.data, io.StringIO())
    for group in args.group or GROUPS:
        for source in ("roofline", "learned"):
            names, errors = log_errors(bench, group, source)
            twins, others, types = shared(names, errors)
            same, same_after, other, other_after = (100 * e for e in corrected(names, errors, source))
            between = f"{min(others):.2f} {np.mean(others):.2f} {max(others):.2f}"
            alike = " ".join(f"{c:.2f}" for c in twins) or "none"
            print(
                f"| {group} | {source} | {errors.shape[1]} | {alike} | {between} | {types:.0%} "
                f"| {same:.1f} to {same_after:.1f} | {other:.1f} to {other_after:.1f} |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
