"""Does recommending types and counts together beat recommending one type, only data parallelism, or equal layers?

    python -m benchmarks.recommend [--models resnet50,...] [--markets aws,gcp,lambda,owned]

Training: benchmarks/recommend_training.py.

11 models of tvmhet.zoo at their published sizes, as services, on three markets of the shipped price list (aws, gcp,
lambda; on demand, at most 8 instances of each kind), with the learned GPU times. Both sides use the same times.

    price       least USD/h for 0.6, 2.5 and 9 times what one device of the fastest type does
    time        most inputs per second for 1.5, 4 and 15 times what one device of the fastest type costs
    inventory   most inputs per second of 2 x A100-40, 4 x V100-16 and 8 x T4, all owned
    memory      as price, every device with 45 % of the memory that the whole model takes (its weights, or its largest
                operator where that is more)

    (a) one type          the best fleet of a single device type
    (b) whole models      only copies of the whole model, on any types (data parallel)
    (c) equal layers      the recommended devices, in a row, as many operators on each
    (d) fastest           the type with the highest rate only
    (e) cheapest          the type with the lowest price only

A gain is the share by which the other's goal is worse than the recommendation's; "none" counts cases in which the other
has no answer at all. Losing results are kept: a gain below 0 would be printed as `worst`.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np

from tvmhet import zoo
from tvmhet.cluster import DeviceType, InstanceOffer, Market, device_type
from tvmhet.ir.importers import from_torch
from tvmhet.ir.prepare import Prepared
from tvmhet.recommending.flow import candidates_of
from tvmhet.recommending.job import Goal, Job
from tvmhet.recommending.option import Option, best, value
from tvmhet.recommending.space import options_of
from tvmhet.recommending.study import Study, study_with
from tvmhet.solve import Objective
from tvmhet.solve.evaluate import evaluate
from tvmhet.solve.orders import first_order
from tvmhet.solve.pack import allowed_times, predecessors, state_graph
from tvmhet.solve.pipeline import StageSearch
from tvmhet.solve.units import Unit
from tvmhet.times import time_table

MARKETS = ("aws", "gcp", "lambda")
LOADS, BUDGETS = (0.6, 2.5, 9.0), (1.5, 4.0, 15.0)
SOON = 0.6  # of the least latency without splits: what "soon" asks for
INVENTORY = {"a100-sxm-40gb": 2, "v100-sxm2-16gb": 4, "t4": 8}
SCARCE = 0.45
OTHERS = ("(a) one type", "(b) whole models", "(c) equal layers", "(d) fastest", "(e) cheapest")
SAME = 1e-3


@dataclass(frozen=True)
class Row:
    """One case: the recommendation's value and the others'; inf where there is no answer."""

    model: str
    market: str
    question: str
    devices: str
    value: float
    others: tuple[float, ...]


def jobs(study: Study, units: tuple[Unit, ...], question: str) -> Iterator[Job]:
    """The cases of a question on one market."""
    alone = [(u.rate_per_s, study.space.groups[u.devices.index(1)]) for u in units if sum(u.devices) == 1]
    if not alone:  # no device holds the model: the fastest unit stands in
        unit = max(units, key=lambda u: u.rate_per_s)
        rate, usd = unit.rate_per_s, _usd_per_h(study, unit)
    else:
        rate, group = max(alone, key=lambda pair: pair[0])
        usd = group.usd_per_h
    if question in ("price", "memory"):
        yield from (Job(Goal.PRICE, throughput_per_s=rate * load) for load in LOADS)
    elif question == "soon":
        least_s = min(u.latency_s for u in dataclasses.replace(study, splits=()).units().units)
        yield from (Job(Goal.PRICE, throughput_per_s=rate * load, latency_ms=1e3 * SOON * least_s) for load in LOADS)
    elif question == "time":
        yield from (Job(Goal.TIME, budget_usd=usd * budget) for budget in BUDGETS)
    else:
        yield Job(Goal.TIME)


def _usd_per_h(study: Study, unit: Unit) -> float:
    return math.fsum(n * g.usd_per_h for n, g in zip(unit.devices, study.space.groups, strict=True))


def rows_of(study: Study, model: str, market: str, question: str) -> Iterator[Row]:
    """Solve the cases of one question for ours and the others."""
    every = study.units().units
    asked = dataclasses.replace(study, splits=()).units().units or every  # the same questions, whatever may be split
    for job in jobs(study, asked, question) if every else ():
        units = study.units(job.latency_limit_s)
        single = tuple(u for u in units.units if sum(u.devices) == 1)
        options, _ = options_of(study.space, job, units.units)
        chosen = best(job, options)
        if chosen is None:
            yield Row(model, market, question, "refused", math.inf, (math.inf,) * len(OTHERS))
            continue
        whole, _ = options_of(study.space, job, single) if single else ((), True)
        others = (
            _best(job, [o for o in options if o.is_homogeneous]),
            _best(job, list(whole)),
            _equal_layers(study, job, chosen) if job.latency_ms is None else math.inf,
            _best(job, _only(options, _type_with(study, single or units.units, cheapest=False))),
            _best(job, _only(options, _type_with(study, single or units.units, cheapest=True))),
        )
        yield Row(model, market, question, chosen.short, value(job, chosen), others)


def _best(job: Job, options: list[Option]) -> float:
    found = best(job, options)
    return math.inf if found is None else value(job, found)


def _only(options: tuple[Option, ...], name: str) -> list[Option]:
    return [o for o in options if set(o.devices) == {name}]


def _type_with(study: Study, units: tuple[Unit, ...], cheapest: bool) -> str:
    """The type of the fastest device (by the rate of one), or of the cheapest per device."""
    if cheapest:
        return min(study.market.offers, key=lambda o: (o.usd_per_h / o.num_devices, o.key)).device.name
    uniform = [u for u in units if sum(n > 0 for n in u.devices) == 1] or list(units)
    unit = max(uniform, key=lambda u: u.rate_per_s / sum(u.devices))
    return study.space.groups[int(np.argmax(unit.devices))].device.name


def _equal_layers(study: Study, job: Job, chosen: Option) -> float:
    """The goal's value of one pipeline over the chosen devices with as many operators on each, the fast ones first."""
    problem = study.problem
    order = first_order(predecessors(problem))
    graph = state_graph(problem, order, full=False, max_states=6000)
    search = StageSearch(problem, graph, allowed_times(problem), Objective.THROUGHPUT)
    group_of = {study.space.groups[g].device.name: g for g in reversed(range(len(study.space.groups)))}
    names = sorted(chosen.devices, key=lambda n: -device_type(n).peak("float32"))
    devices = [group_of[n] for n in names for _ in range(chosen.devices[n])]
    num = min(len(devices), problem.num_nodes, graph.num_states - 1)
    done = np.array([bin(int.from_bytes(w.tobytes(), "little")).count("1") for w in graph.words])
    cuts = [int(np.abs(done - problem.num_nodes * i / num).argmin()) for i in range(num + 1)]
    cuts = sorted({0, *cuts, graph.num_states - 1})
    flat = [x for i in range(len(cuts) - 1) for x in (i, i + 1, devices[i], 1)]
    try:
        choices = search.choices(flat, np.array(cuts, np.int32))
        stages, period_s = evaluate(problem, choices, Objective.THROUGHPUT)
    except ValueError:  # a part fits no device
        return math.inf
    if any(s.memory_bytes > problem.groups[s.group].memory_bytes for s in stages) or not math.isfinite(period_s):
        return math.inf
    slower = dataclasses.replace(chosen, rate_per_s=1.0 / period_s)
    if job.goal is Goal.TIME:
        return value(job, slower)
    assert job.throughput_per_s is not None, "price cases ask for a throughput"
    return chosen.usd_per_h * max(1.0, job.throughput_per_s * period_s)  # machines in proportion to what it lacks


def scarce(market: Market, prepared: Prepared) -> Market:
    """The market with little memory on every device."""
    assert prepared.graph is not None
    sizes = [t.size_bytes for t in prepared.graph.tensors]
    weights = sum(t.size_bytes for t in prepared.graph.tensors if t.is_param)
    return with_memory(market, int(max(SCARCE * weights, 4 * max(sizes))))


def with_memory(market: Market, room_bytes: int) -> Market:
    """The market with at most so much memory on every device."""

    def less(device: DeviceType) -> DeviceType:
        return dataclasses.replace(device, memory_bytes=min(room_bytes, device.memory_bytes))

    offers = tuple(dataclasses.replace(o, device=less(o.device)) for o in market.offers)
    return dataclasses.replace(market, offers=offers)


def inventory() -> Market:
    """Machines that are there already."""
    offers = tuple(InstanceOffer(n, device_type(n), c, 0.0, 1, provider="owned") for n, c in INVENTORY.items())
    return Market(offers)


def every_market(providers: Collection[str]) -> Market:
    """All offers of all cases together, for the types they have."""
    shipped = [Market.shipped(m).where(spot=False).offers for m in providers]
    return Market(tuple(o for offers in (*shipped, inventory().offers) for o in offers))


def all_rows(models: list[str], markets: Collection[str]) -> Iterator[Row]:
    """Every case of every model on these markets; a line on standard error for each model."""
    for name in models:
        module, inputs = zoo.get(name)
        prepared, candidates = candidates_of(from_torch(module, inputs))
        providers = [m for m in markets if m != "owned"]
        table = time_table(candidates, every_market(providers).device_types(), None)
        for market in providers:
            offered = Market.shipped(market).where(spot=False)
            study = study_with(prepared, candidates, table, offered)
            for question in ("price", "time"):
                yield from rows_of(study, name, market, question)
            study = study_with(prepared, candidates, table, scarce(offered, prepared))
            yield from rows_of(study, name, market, "memory")
        if "owned" in markets:
            yield from rows_of(study_with(prepared, candidates, table, inventory()), name, "owned", "inventory")
        sys.stderr.write(f"{name} done, {time.process_time():.0f} s of CPU\n")


def table(rows: list[Row]) -> str:
    """One line per question and other: how often and by how much the recommendation is better."""
    lines = [
        "| question | against | cases | better | equal | worse | none | gain: median | quartiles | most | worst |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    refused = [r for r in rows if math.isinf(r.value)]
    rows = [r for r in rows if math.isfinite(r.value)]
    for question in dict.fromkeys(r.question for r in rows):
        mine = [r for r in rows if r.question == question]
        for i, other in enumerate(OTHERS):
            gains = [r.others[i] / r.value - 1 for r in mine if math.isfinite(r.others[i])]
            none = len(mine) - len(gains)
            counts = (len(mine), sum(g > SAME for g in gains), sum(abs(g) <= SAME for g in gains),
                      sum(g < -SAME for g in gains), none)  # fmt: skip
            if gains:
                low, high = np.quantile(gains, (0.25, 0.75))
                spread = (f"{statistics.median(gains):.1%}", f"{low:.1%} to {high:.1%}", f"{max(gains):.1%}",
                          f"{min(gains):.1%}")  # fmt: skip
            else:
                spread = ("-",) * 4
            lines.append(f"| {question} | {other} | {' | '.join(map(str, counts))} | {' | '.join(spread)} |")
    if refused:
        lines.append(f"refused: {', '.join(f'{r.model} {r.market} {r.question}' for r in refused)}")
    return "\n".join(lines)


def show(cases: Iterator[Row]) -> None:
    """Print every case as it is found, then the table."""
    print("| model | market | question | rent | value | " + " | ".join(OTHERS) + " |")
    print("|" + "---|" * 10)
    rows = []
    for r in cases:
        found = " | ".join("none" if math.isinf(v) else f"{v:.5g}" for v in (r.value, *r.others))
        print(f"| {r.model} | {r.market} | {r.question} | {r.devices} | {found} |", flush=True)
        rows.append(r)
    print(f"\n{table(rows)}")


def main() -> int:
    """Print the table, then every case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(zoo.MODELS))
    parser.add_argument("--markets", default=",".join((*MARKETS, "owned")), help="providers of the price list; owned")
    args = parser.parse_args()
    show(all_rows(args.models.split(","), args.markets.split(",")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
