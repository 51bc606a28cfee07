"""Is the recommended type the right one? Predicted choices against published measurements of the same job on several.

    python benchmarks/decisions.py --data DIR

    transformers   NeuSight's end-to-end times (float32, torch eager) of whole models on A100-40 PCIe, P100 and V100-32;
                   every model measured on at least two of them. Predicted by models trained without the type (each type
                   left out in turn) and by the shipped ones, which have seen kernels of these types, not these runs.
    LLM layers     Vidur's four products of one layer (float16) on A40, A100-80 and H100, by model, tokens and tensor
                   parallel width. None of these rows trained anything here.

"time" chooses the fastest type, "price" the one whose time x price is least, with every price list of the shipped file
that has all types as one-device machines, on demand, with the lowest of all providers, and at par: at prices that make
the types cost the same over the jobs together, so that only the differences between jobs decide. A choice is right when
the chosen type's measured value is within 5 % of the best measured one; the regret is what it is above it.
"""

from __future__ import annotations

import argparse
import io
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "cost_models")]  # scripts, not packages
# ruff: noqa: E402

import datasets
from whole_models import Run, left_out_model, read_runs

from cost_models import Bench
from tvmhet.cluster import Market, device_type
from tvmhet.cost.boosted import LearnedModel
from tvmhet.cost.model import CostModel, OpDesc
from tvmhet.cost.roofline import SPEC_SHEET, Roofline
from tvmhet.cost.workload import kernel_of

GOOD = 0.05
VIDUR = {"a40": "a40", "a100": "a100-sxm-80gb", "h100": "h100-sxm-80gb"}
_PRODUCTS = ("attn_pre_proj_ms", "attn_post_proj_ms", "mlp_up_proj_ms", "mlp_down_proj_ms")


@dataclass(frozen=True)
class Choice:
    """One job: measured and predicted seconds by type."""

    job: str
    measured_s: Mapping[str, float]
    predicted_s: Mapping[str, float]

    def regret(self, usd_per_h: Mapping[str, float] | None) -> float:
        """How far above the best the measured value of the predicted best is; by time, or by price."""
        weight = {t: 1.0 if usd_per_h is None else usd_per_h[t] for t in self.measured_s}
        chosen = min(sorted(self.measured_s), key=lambda t: self.predicted_s[t] * weight[t])
        return self.measured_s[chosen] * weight[chosen] / min(s * weight[t] for t, s in self.measured_s.items()) - 1


def by_job(runs: Iterable[Run], model_of: Callable[[str], CostModel]) -> list[Choice]:
    """Group runs by job; those on one type only are left out."""
    jobs: dict[str, dict[str, Run]] = {}
    for run in runs:
        jobs.setdefault(run.name, {})[run.device] = run
    return [
        Choice(
            name,
            {d: r.measured_s for d, r in on.items()},
            {d: r.predicted_s(model_of(d)) for d, r in on.items()},
        )
        for name, on in sorted(jobs.items())
        if len(on) > 1
    ]


def llm_layers(data: Path, model_of: Callable[[str], CostModel], every: int) -> list[Choice]:
    """Every so many rows of Vidur's products that were measured on all three types."""
    found: dict[tuple[str, ...], dict[str, list[float]]] = {}
    shapes: dict[tuple[str, ...], tuple[OpDesc, ...]] = {}
    for row in datasets.read_rows(data / "vidur" / "mlp.csv.gz"):
        times = [row[c] for c in _PRODUCTS]
        if not all(times):
            continue
        key = (row["model"], row["num_tokens"], row["num_tensor_parallel_workers"])
        found.setdefault(key, {}).setdefault(VIDUR[row["gpu"]], []).append(sum(map(float, times)) / 1e3)
        shapes.setdefault(key, _layer(row))
    whole = sorted(k for k, on in found.items() if len(on) == len(VIDUR))[::every]
    out = []
    for key in whole:
        kernels = [kernel_of(op) for op in shapes[key]]
        predicted = {d: float(model_of(d).predict(kernels).seconds.sum()) for d in VIDUR.values()}
        out.append(Choice("/".join(key), {d: statistics.median(t) for d, t in found[key].items()}, predicted))
    return out


def _layer(row: Mapping[str, str]) -> tuple[OpDesc, ...]:
    """The four products of one layer on one of the tensor-parallel devices."""
    tokens, width, inner = (int(float(row[c])) for c in ("num_tokens", "n_embd", "n_expanded_embd"))
    heads, kv, split = (int(float(row[c])) for c in ("n_head", "n_kv_head", "num_tensor_parallel_workers"))
    head = width // heads
    up = inner * (2 if row["use_gated_mlp"].lower() == "true" else 1)
    sizes = (
        (tokens, (heads + 2 * kv) * head // split, width),
        (tokens, width, width // split),
        (tokens, up // split, width),
        (tokens, width, inner // split),
    )
    return tuple(OpDesc("linear", (1, *s), "float16") for s in sizes)


def price_lists(types: Sequence[str]) -> dict[str, dict[str, float]]:
    """Prices of one-device machines, on demand, by provider; "cheapest": the lowest of all providers."""
    market = Market.shipped().where(spot=False)
    lists: dict[str, dict[str, float]] = {}
    for offer in market.offers:
        if offer.num_devices == 1:
            for name in (offer.provider, "cheapest of all"):
                prices = lists.setdefault(name, {})
                prices[offer.device.name] = min(offer.usd_per_h, prices.get(offer.device.name, math.inf))
    return {n: p for n, p in sorted(lists.items()) if all(t in p for t in types)}


def at_par(choices: Sequence[Choice]) -> dict[str, float]:
    """Prices at which no type is cheaper than another over the jobs together: the hardest ones to choose at."""
    types = sorted({t for c in choices for t in c.measured_s})
    common = next(t for t in types if all(t in c.measured_s for c in choices))
    ratio = {t: [math.log(c.measured_s[t] / c.measured_s[common]) for c in choices if t in c.measured_s] for t in types}
    return {t: math.exp(-statistics.mean(r)) for t, r in ratio.items()}


def line(jobs: str, predictor: str, goal: str, regrets: Sequence[float]) -> str:
    """One row of the table."""
    right = sum(r <= GOOD for r in regrets) / len(regrets)
    figures = (right, statistics.mean(regrets), max(regrets))
    return f"| {jobs} | {predictor} | {goal} | {len(regrets)} | {' | '.join(f'{x:.1%}' for x in figures)} |"


def table(jobs: str, predictor: str, choices: Sequence[Choice], priced: Mapping[str, str]) -> Iterable[str]:
    """Rows for time and for every price list; `priced` gives the type whose price stands for another board."""
    yield line(jobs, predictor, "time", [c.regret(None) for c in choices])
    types = sorted({t for c in choices for t in c.measured_s})
    for provider, prices in price_lists([priced.get(t, t) for t in types]).items():
        usd = {t: prices[priced.get(t, t)] for t in types}
        yield line(jobs, predictor, f"price, {provider}", [c.regret(usd) for c in choices])
    yield line(jobs, predictor, "price, at par", [c.regret(at_par(choices)) for c in choices])


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--every", type=int, default=10, help="of Vidur's rows, one in so many")
    args = parser.parse_args()
    print("| jobs | predicted by | goal | jobs | right (within 5 %) | mean regret | worst |")
    print("|---|---|---|---|---|---|---|")
    runs = read_runs(args.data)
    boards = {"a100-pcie-40gb": "a100-sxm-40gb", "v100-pcie-32gb": "v100-sxm2-16gb"}  # priced as its sister board
    bench = Bench(args.data, io.StringIO())
    predictors: dict[str, Callable[[str], CostModel]] = {
        "type left out": lambda d: left_out_model(bench, d),
        "shipped models": lambda d: LearnedModel.load(device_type(d), "queued"),
        "data sheet (roofline)": lambda d: Roofline(device_type(d), SPEC_SHEET),
    }
    for name, model_of in predictors.items():
        cached: dict[str, CostModel] = {}
        choices = by_job(runs, lambda d, m=model_of, c=cached: c.setdefault(d, m(d)))  # type: ignore[misc]
        print("\n".join(table("transformers", name, choices, boards)), flush=True)
    for name in ("shipped models", "data sheet (roofline)"):
        models = {d: predictors[name](d) for d in VIDUR.values()}
        choices = llm_layers(args.data, models.__getitem__, args.every)
        print("\n".join(table("LLM layers", name, choices, {})), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
