"""Does choosing what to measure find the best plan for less? Ours against random, uncertainty-only and two plain BOs.

    python -m benchmarks.measuring --data DIR [--seeds 100] [--first 0]

The oracle hides published times (aiconfigurator, bfloat16 products, measured on all of seven GPU types) until they
are paid for. A seed draws a job (8 products with repeat counts) and a price for each type, in proportion to its hidden
speed on the job times a lognormal factor (0.1): as on a market, the fast ones cost more, and none is obviously best.
Plans are every type alone and every ordered pair of types at every cut of the job, as a pipeline; the best costs least
per pass. What is known before is the data sheet: a roofline times 1.5, with a spread of 0.35 in the log; no measured
time is in it. Budget: half of what measuring every product on every type costs; starting a type's machine takes 120 s.

    ours              choose_measurements: expected value of the decision per dollar, stops by itself
    random            the same belief and decision, pairs in random order
    uncertainty       the same belief and decision, the most uncertain seconds per dollar first
    BO                Gaussian process over plans, expected improvement; a trial measures all of the plan's products
                      (Snoek et al., NIPS 2012: the conventional choice)
    BO, cherry        the same, begun with three spread-out trials, stopped when the expected improvement is below 10 %
                      of the best (after Alipourfard et al., "CherryPick", NSDI 2017)
"""

from __future__ import annotations

import argparse
import csv
import gzip
import itertools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "cost_models"))  # scripts, not a package
# ruff: noqa: E402

from datasets import AICONFIGURATOR as TYPES

from tvmhet.cluster import device_type
from tvmhet.cost.model import OpDesc
from tvmhet.cost.roofline import SPEC_SHEET, Roofline
from tvmhet.cost.workload import kernel_of
from tvmhet.recommending.belief import Belief, Pair, generations
from tvmhet.recommending.measuring import Errors, Prices, choose_measurements
from tvmhet.recommending.uncertainty import KernelBelief

Floats = NDArray[np.float64]
JOB, MARGIN, SIGMA = 8, 1.5, 0.35
PRICE_SPREAD = 0.1
START_S = 120.0
DRAWS = 4096
GOOD = 0.05


@dataclass(frozen=True)
class Oracle:
    """One job: hidden seconds (types, products), what the data sheet says of them, and a price for each type."""

    true_s: Floats
    prior_s: Floats
    usd_per_h: Floats

    @property
    def plans(self) -> list[tuple[int, int, int]]:
        """(first type, second type, cut): products before the cut run on the first; no second type at the last cut."""
        n = len(self.usd_per_h)
        pairs = [(a, b, c) for a, b in itertools.permutations(range(n), 2) for c in range(1, JOB)]
        return [(a, a, JOB) for a in range(n)] + pairs

    def cost(self, seconds: Floats) -> Floats:
        """USD per pass of every plan; `seconds` has shape (types, products, draws)."""
        total = np.concatenate([np.zeros_like(seconds[:, :1]), np.cumsum(seconds, axis=1)], axis=1)
        out = []
        for a, b, cut in self.plans:
            rent = self.usd_per_h[a] + (self.usd_per_h[b] if cut < JOB else 0.0)
            busy = np.maximum(total[a, cut], total[b, JOB] - total[b, cut])
            out.append(rent * busy / 3600)
        return np.stack(out)

    def prices(self) -> Prices:
        """What measuring costs."""
        names = list(TYPES.values())
        per_s = dict(zip(names, (self.usd_per_h / 3600).tolist(), strict=True))
        return Prices({n: p * START_S for n, p in per_s.items()}, per_s)

    def pair_usd(self, t: int, k: int, started: bool) -> float:
        """USD to measure product k on type t."""
        return self.prices().usd(list(TYPES.values())[t], float(self.true_s[t, k]), started)

    def exhaustive_usd(self) -> float:
        """USD to measure everything."""
        return math.fsum(self.pair_usd(t, k, k > 0) for t in range(len(TYPES)) for k in range(JOB))


@dataclass(frozen=True)
class Outcome:
    """What a strategy spent and how far above the best plan's cost its choice is."""

    usd: float
    regret: float


def draw_oracle(rows: Floats, sizes: list[tuple[int, int, int]], seed: int) -> Oracle:
    """A job of products that take between 20 us and 20 ms on the A100, each repeated so that it counts."""
    rng = np.random.default_rng(seed)
    usable = np.flatnonzero((rows[:, 0] > 20e-6) & (rows[:, 0] < 20e-3))
    chosen = rng.choice(usable, JOB, replace=False)
    prior = np.empty((len(TYPES), JOB))
    for t, name in enumerate(TYPES.values()):
        descs = [kernel_of(OpDesc("linear", (1, *sizes[i]), "bfloat16")) for i in chosen]
        prior[t] = MARGIN * Roofline(device_type(name), SPEC_SHEET).predict(descs).seconds
    repeats = np.maximum(1, np.round(rng.uniform(0.3, 3.0, JOB) * 5e-3 / rows[chosen, 0]))
    true = rows[chosen].T * repeats
    total = true.sum(axis=1)
    usd = 2.0 * total[0] / total * rng.lognormal(0.0, PRICE_SPREAD, len(TYPES))
    return Oracle(true, prior * repeats, usd)


def read_rows(data: Path) -> tuple[Floats, list[tuple[int, int, int]]]:
    """Seconds (shapes, types) of the products that were measured on all types, and their (m, n, k)."""
    times, sizes = [], []
    with gzip.open(data / "aiconfigurator" / "gemm_sglang_0.5.10.csv.gz", "rt") as file:
        for row in csv.DictReader(file):
            if row["gemm_dtype"] == "bfloat16" and all(row[c] for c in TYPES):
                times.append([float(row[c]) / 1e3 for c in TYPES])
                sizes.append((int(row["m"]), int(row["n"]), int(row["k"])))
    return np.array(times), sizes


class Known:
    """The belief that the strategies which measure pairs share, and the decision that they all make."""

    def __init__(self, oracle: Oracle) -> None:
        self.oracle = oracle
        self.names = list(TYPES.values())
        self.pairs = [(n, f"{k:02d}") for n in self.names for k in range(JOB)]
        prior = [
            KernelBelief(float(oracle.prior_s[self.at(p)]), SIGMA, p[0], "linear", p[1], "roofline") for p in self.pairs
        ]
        self.belief = Belief.of(prior, generations(map(device_type, self.names)))

    def at(self, pair: Pair) -> tuple[int, int]:
        """The row and column of a pair."""
        return self.names.index(pair[0]), int(pair[1])

    def result(self, pair: Pair) -> float:
        """The hidden seconds of a pair."""
        return float(self.oracle.true_s[self.at(pair)])

    def values(self, errors: Errors) -> Floats:
        """The cost of every plan in each draw of the errors."""
        rows = np.array([errors[p] for p in self.pairs]).reshape(len(self.names), JOB, -1)
        seconds: Floats = self.oracle.prior_s[:, :, None] * np.exp(rows)
        return self.oracle.cost(seconds)

    def regret(self) -> float:
        """How far above the best the plan is that is expected to cost least; a pipeline waits for its slowest part."""
        drawn = self.values(self.belief.draw(np.random.default_rng(0), DRAWS))
        true = self.oracle.cost(self.oracle.true_s[:, :, None])[:, 0]
        return float(true[int(drawn.mean(axis=1).argmin())] / true.min() - 1)


def ours(oracle: Oracle, budget: float, seed: int) -> Outcome:
    """Expected value of the decision per dollar."""
    known = Known(oracle)
    made = choose_measurements(known.belief, oracle.prices(), budget, known.values, result=known.result, seed=seed)
    known.belief = made.belief
    paid = sum(
        oracle.pair_usd(
            *known.at((c.device_type, c.key)), any(d.device_type == c.device_type for d in made.choices[:i])
        )
        for i, c in enumerate(made.choices)
    )
    return Outcome(paid, known.regret())


Order = Callable[[Known, list[Pair], np.random.Generator], Pair]


def in_order(order: Order) -> Callable[[Oracle, float, int], Outcome]:
    """A strategy that measures pairs in some order until the budget is spent."""

    def run(oracle: Oracle, budget: float, seed: int) -> Outcome:
        known, rng, spent = Known(oracle), np.random.default_rng(seed), 0.0
        left = list(known.pairs)
        started: set[str] = set()
        while left:
            pair = order(known, left, rng)
            left.remove(pair)
            usd = oracle.pair_usd(*known.at(pair), pair[0] in started)
            if spent + usd > budget:
                continue
            spent += usd
            started.add(pair[0])
            known.belief = known.belief.after(pair, known.result(pair))
        return Outcome(spent, known.regret())

    return run


def _any(known: Known, left: list[Pair], rng: np.random.Generator) -> Pair:
    return left[int(rng.integers(len(left)))]


def _widest(known: Known, left: list[Pair], rng: np.random.Generator) -> Pair:
    prices = known.oracle.prices()
    sigma = dict(zip(known.belief.pairs, np.sqrt(np.diag(known.belief.cov)), strict=True))

    def rate(pair: Pair) -> tuple[float, Pair]:
        seconds = known.belief.seconds[pair]
        return seconds * float(sigma[pair]) / prices.usd(pair[0], seconds, True), pair

    return max(left, key=rate)


def bayesian(stop: float, start: int) -> Callable[[Oracle, float, int], Outcome]:
    """Bayesian optimisation over plans with a Matern 5/2 process on the log of cost; stops below `stop` of the best."""

    def run(oracle: Oracle, budget: float, seed: int) -> Outcome:
        rng, plans = np.random.default_rng(seed), oracle.plans
        x = _features(oracle)
        true = oracle.cost(oracle.true_s[:, :, None])[:, 0]
        seen: list[int] = []
        done: set[tuple[int, int]] = set()
        spent = 0.0
        first = [int(i) for i in rng.permutation(len(plans))[:1]]
        while len(first) < start:  # spread out: each as far as can be from those before
            gap = np.min([np.abs(x - x[i]).sum(axis=1) for i in first], axis=0)
            first.append(int(gap.argmax()))
        skipped: set[int] = set()
        while len(seen) + len(skipped) < len(plans):
            if len(seen) < len(first):
                pick = first[len(seen)] if first[len(seen)] not in skipped else -1
                if pick < 0:
                    first.pop(len(seen))
                    continue
            elif not seen:  # none of the first trials was payable
                pick = next(i for i in range(len(plans)) if i not in skipped)
            else:
                gain = _improvement(x, seen, np.log(true))
                gain[[*seen, *skipped]] = -1.0
                pick = int(gain.argmax())
                if gain[pick] < stop:
                    break
            a, b, cut = plans[pick]
            pairs = [(a if k < cut else b, k) for k in range(JOB)]
            new = [p for p in pairs if p not in done]
            usd = sum(oracle.pair_usd(t, k, any(d[0] == t for d in {*done, *new[:i]})) for i, (t, k) in enumerate(new))
            if spent + usd > budget:
                skipped.add(pick)
                continue
            spent += usd
            done |= set(new)
            seen.append(pick)
        regret = true[seen].min() / true.min() - 1 if seen else true.mean() / true.min() - 1
        return Outcome(spent, float(regret))

    return run


def _features(oracle: Oracle) -> Floats:
    devices = [device_type(n) for n in TYPES.values()]
    per_type = np.array([[math.log(d.peak("bfloat16")), math.log(d.dram_byte_per_s)] for d in devices])
    per_type = np.column_stack([per_type, np.log(oracle.usd_per_h)])
    per_type = (per_type - per_type.mean(axis=0)) / per_type.std(axis=0)
    return np.array([[*per_type[a], *per_type[b], 3.0 * cut / JOB] for a, b, cut in oracle.plans])


def _improvement(x: Floats, seen: list[int], log_cost: Floats) -> Floats:
    """Expected improvement over the best so far, as a share of it."""
    y = log_cost[seen]
    scale = max(float(y.std()), 0.1)
    k_seen = _matern(x[seen], x[seen]) + 1e-6 * np.eye(len(seen))
    k_all = _matern(x, x[seen])
    solved = np.linalg.solve(k_seen, np.column_stack([(y - y.mean()) / scale, k_all.T]))
    mean = y.mean() + scale * (k_all @ solved[:, 0])
    std = scale * np.sqrt(np.clip(1.0 - np.einsum("ij,ji->i", k_all, solved[:, 1:]), 1e-12, None))
    z = (y.min() - mean) / std
    cdf = np.array([0.5 * math.erfc(-v / math.sqrt(2)) for v in z])
    out: Floats = (y.min() - mean) * cdf + std * np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    return out


def _matern(a: Floats, b: Floats) -> Floats:
    r = np.sqrt(5.0 * ((a[:, None] - b[None]) ** 2).sum(axis=2)) / 2.0
    out: Floats = (1.0 + r + r**2 / 3.0) * np.exp(-r)
    return out


STRATEGIES: dict[str, Callable[[Oracle, float, int], Outcome]] = {
    "ours": ours,
    "random": in_order(_any),
    "uncertainty": in_order(_widest),
    "BO": bayesian(stop=0.0, start=1),
    "BO, cherry": bayesian(stop=0.1, start=3),
    "nothing measured": lambda oracle, budget, seed: Outcome(0.0, Known(oracle).regret()),
}


def main() -> int:
    """Print one line per strategy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="of the seeds")
    parser.add_argument("--share", type=float, default=0.5, help="of the exhaustive cost: the budget")
    args = parser.parse_args()
    rows, sizes = read_rows(args.data)
    seeds = range(args.first, args.first + args.seeds)
    of = f"{len(rows)} products on {len(TYPES)} types"
    print(f"seeds {seeds[0]} to {seeds[-1]}, budget {args.share:g} of the exhaustive cost, {of}")
    print(
        "| strategy | within 5 % | regret: median | mean | worst | spent of exhaustive: median | most | over budget |"
    )
    print("|---|---|---|---|---|---|---|---|")
    oracles = [draw_oracle(rows, sizes, seed) for seed in seeds]
    for name, run in STRATEGIES.items():
        made = [run(o, args.share * o.exhaustive_usd(), seed) for seed, o in zip(seeds, oracles, strict=True)]
        spent = [m.usd / o.exhaustive_usd() for m, o in zip(made, oracles, strict=True)]
        regret = [m.regret for m in made]
        figures = (
            sum(r <= GOOD for r in regret) / len(made), median(regret), sum(regret) / len(made), max(regret),
            median(spent), max(spent),
        )  # fmt: skip
        over = sum(s > args.share * (1 + 1e-9) for s in spent)
        print(f"| {name} | {' | '.join(f'{x:.1%}' for x in figures)} | {over} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
