"""Training: does recommending types and counts together beat one type, only data parallelism, or equal layers?

    python -m benchmarks.recommend_training [--models resnet50,...] [--questions price,memory,...] [--markets aws,...]

11 models of tvmhet.zoo at their published sizes, AdamW, 256 samples an iteration, 10,000 iterations, micro-batches of 1
and 4 times the zoo's sample (MoE: 2 and 8), on three markets of the shipped price list (aws, gcp, lambda; on demand, at
most 8 instances of each kind), with the learned GPU times. Both sides use the same times.

    price       least USD within a quarter of the hours that the cheapest instance takes
    time        least hours within three times the USD that it costs
    memory, memory time
                as price and time, every device with 45 % of the least memory in which the whole model can be trained
                (weights, gradients, optimiser state and what one micro-batch keeps and needs, recomputing); the
                deadline is the geometric mean of the hours of the cheapest and of the fastest answer
    tight, tight time
                the same with a tenth more than the least memory in which any plan of the market's largest fleet fits
    inventory   least hours on 2 x A100-40, 4 x V100-16 and 8 x T4, all owned
    few A100    least USD on one machine of 4 x A100-40 and four of 4 x T4 (gcp's prices), in 0.7 times the hours that
                the A100 take alone

    (a) one type          the best fleet of a single device type
    (b) whole models      only copies of the whole model, on any types (data parallel), unlike shares of the batch
    (c) equal layers      the recommended devices, in a row, as many operators on each
    (d) fastest           the type whose best fleet is the fastest, alone
    (e) cheapest          the type with the lowest price of a device, alone

The last table bounds what any fleet of the market could do, however it is used.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import replace

import numpy as np

from benchmarks.recommend import MARKETS, OTHERS, SCARCE, Row, every_market, inventory, show, with_memory
from tvmhet import zoo
from tvmhet.candidates import MAKERS
from tvmhet.cluster import InstanceOffer, Market, device_type
from tvmhet.ir.importers import from_torch
from tvmhet.planning_training import TrainingGoal, dividing, make_training_problem
from tvmhet.recommending.job import Goal, Job
from tvmhet.recommending.option import Option, best, value
from tvmhet.recommending.training import Planned, TrainingStudy
from tvmhet.recommending.training_fleets import cluster_of
from tvmhet.recommending.training_search import MOST_PLANS, MOST_SINGLE, FleetSearch
from tvmhet.recommending.training_study import make_training_study
from tvmhet.solve import IterationProblem, Schedule, Status, simulate_training
from tvmhet.solve.iteration_candidate import Candidate, judge, solution_of
from tvmhet.solve.iteration_tables import IterationTables
from tvmhet.solve.orders import first_order
from tvmhet.solve.pack import predecessors, state_graph

BATCH, ITERATIONS = 256, 10_000
SIZES = (1, 4)
SIZES_OF = {"moe": (2, 8)}  # at batch 1 it has fewer operators: not the same model
QUESTIONS = ("price", "time", "memory", "memory time", "tight", "tight time", "inventory", "few A100")
TIGHT = 1.1  # of the least memory of any plan
EFFORT = (MOST_SINGLE, MOST_PLANS)  # fleets planned for a case: of one type, of any; as `recommend` does
BOUNDS: list[tuple[str, float]] = []  # question, how much lower the bound is than the answer


def job(goal: Goal, deadline_h: float | None = None, budget_usd: float | None = None) -> Job:
    """A training job of the benchmark."""
    return Job(goal, BATCH * ITERATIONS, deadline_h, budget_usd, global_batch=BATCH)


def cheapest_alone(study: TrainingStudy) -> Option | None:
    """The cheapest answer without limits: mostly one instance."""
    return best(job(Goal.PRICE), FleetSearch(study, job(Goal.PRICE)).run(1, 1).options())


def row_of(study: TrainingStudy, model: str, market: str, question: str, asked: Job) -> Row:
    """Solve one case for ours and the others."""
    search = FleetSearch(study, asked).run(*EFFORT)
    options = search.options()
    chosen = best(asked, options)
    if chosen is None:
        return Row(model, market, question, "refused", math.inf, (math.inf,) * len(OTHERS))
    copies = search.options(study.fleets.copies_s)
    fastest = min((o for o in options if o.is_homogeneous), key=lambda o: o.time(), default=chosen)
    cheap = min(study.market.offers, key=lambda o: (o.usd_per_h / o.num_devices, o.key)).device.name
    others = (
        _best(asked, [o for o in options if o.is_homogeneous]),
        _best(asked, copies),
        _equal_layers(study, asked, chosen),
        _best(asked, [o for o in options if o.devices.keys() == fastest.devices.keys()]),
        _best(asked, [o for o in options if set(o.devices) == {cheap}]),
    )
    BOUNDS.append((question, 1 - min(1.0, search.bound() / value(asked, chosen))))
    return Row(model, market, question, chosen.short, value(asked, chosen), others)


def _best(asked: Job, options: list[Option]) -> float:
    found = best(asked, options)
    return math.inf if found is None else value(asked, found)


def _equal_layers(study: TrainingStudy, asked: Job, chosen: Option) -> float:
    """The goal's value of one pipeline over the chosen devices with as many operators on each, the fast ones first."""
    cluster = cluster_of(study.market, chosen.instances)
    groups = cluster.groups()
    problem = make_training_problem(dividing(study.graphs, BATCH), cluster, groups, {}, study.goal)
    fast = sorted(range(len(groups)), key=lambda g: -groups[g].device.peak("float32"))
    devices = [g for g in fast for _ in range(groups[g].num_devices)]
    least = math.inf
    for option, micro in enumerate(problem.options):
        order = first_order(predecessors(micro.forward))
        graph = state_graph(micro.forward, order, full=False, max_states=6000)
        num = min(len(devices), micro.forward.num_nodes, graph.num_states - 1)
        done = np.array([bin(int.from_bytes(w.tobytes(), "little")).count("1") for w in graph.words])
        near = {int(np.abs(done - micro.forward.num_nodes * i / num).argmin()) for i in range(num + 1)}
        cuts = np.array(sorted({0, *near, graph.num_states - 1}), np.int32)
        tables = IterationTables(problem, option, graph, cuts)
        for again in (False, True):
            mode = {m.group: i for i, m in enumerate(tables.modes) if m.recompute == again and m.degree == 1}
            rows = [(i, i + 1, mode[devices[i]], 1) for i in range(len(cuts) - 1)]
            if any(not math.isfinite(tables.time_s[m, b, c]) for b, c, m, _ in rows):
                continue
            placings = tables.placings([x for row in rows for x in row])
            if (found := judge(problem, option, placings, Schedule.ONE_F_ONE_B, "equal")) is not None:
                least = min(least, _counts_s(problem, found))
    if math.isinf(least):
        return least
    hours = study.market.running.hours(least * ITERATIONS, 0)
    if asked.goal is Goal.TIME:
        return hours
    late = 1.0 if asked.deadline_h is None else max(1.0, hours / asked.deadline_h)
    return chosen.usd_per_h * hours * late  # a miss is made up in proportion


def _counts_s(problem: IterationProblem, plan: Candidate) -> float:
    """The iteration's seconds as those of recommended plans: by the form, or simulated where that is longer."""
    simulated = simulate_training(problem, solution_of(problem, plan, 0.0, Status.FEASIBLE, 0))
    return max(plan.value.iteration_s, simulated.iteration_s)


def few_a100() -> Market:
    """The machines that are left."""
    return Market(
        (
            InstanceOffer("a2-highgpu-4g", device_type("a100-sxm-40gb"), 4, 14.68, 1, provider="gcp"),
            InstanceOffer("n1-highmem-32-4xt4", device_type("t4"), 4, 3.29, 4, provider="gcp"),
        )
    )


def _asked(study: TrainingStudy, question: str) -> Job | None:
    """The limits of a case, which come from what one type or the cheapest instance does."""
    if question == "inventory":
        return job(Goal.TIME)
    if question == "few A100":
        options = FleetSearch(study, job(Goal.TIME)).run(1, 1).options()
        alone = best(job(Goal.TIME), [o for o in options if set(o.devices) == {"a100-sxm-40gb"}])
        return None if alone is None else job(Goal.PRICE, deadline_h=0.7 * alone.time())
    cheap = cheapest_alone(study)
    if cheap is None:
        return None
    if question.endswith("time"):
        return job(Goal.TIME, budget_usd=3 * cheap.cost())
    if question == "price":
        return job(Goal.PRICE, deadline_h=cheap.time() / 4)
    fastest = best(job(Goal.TIME), FleetSearch(study, job(Goal.TIME)).run(1, 1).options())
    assert fastest is not None, "there is a cheapest"
    return job(Goal.PRICE, deadline_h=math.sqrt(cheap.time() * fastest.time()))


def all_rows(models: list[str], asked: Collection[str], markets: Collection[str]) -> Iterator[Row]:
    """Every case of every model, of the questions asked on these markets; a line on standard error for each model."""
    providers = [m for m in markets if m not in ("owned", "left")]
    for name in models:
        known = [from_torch(*zoo.get(name, batch=b)) for b in SIZES_OF.get(name, SIZES)]
        goal = TrainingGoal(BATCH, unlike_replicas=True)
        every = make_training_study(known, every_market(providers), goal, MAKERS, None)
        least = SCARCE * whole_bytes(every)
        cases = [(inventory(), "owned", ["inventory"]), (few_a100(), "left", ["few A100"])]
        for market in providers:
            offered = Market.shipped(market).where(spot=False)
            cases.append((offered, market, ["price", "time"]))
            cases.append((with_memory(offered, int(least)), market, ["memory", "memory time"]))
            if {"tight", "tight time"} & set(asked):
                room = TIGHT * least_room(every.on(offered), int(least))
                cases.append((with_memory(offered, int(room)), market, ["tight", "tight time"]))
        for offered, market, questions in cases:
            if mine := [q for q in questions if q in asked and market in markets]:
                yield from rows_of(every.on(offered), name, market, mine)
        sys.stderr.write(f"{name} done, {time.process_time():.0f} s of CPU\n")


def whole_bytes(study: TrainingStudy) -> float:
    """What training the whole model on one device takes at least: the smallest micro-batch, recomputing or not."""
    problem = study.problem
    groups = tuple(replace(g, memory_bytes=1 << 50) for g in problem.groups)
    options = tuple(replace(o, forward=replace(o.forward, groups=groups)) for o in problem.options)
    roomy = replace(problem, options=options)
    micro = min(range(len(options)), key=lambda o: options[o].size)
    order = first_order(predecessors(options[micro].forward))
    graph = state_graph(options[micro].forward, order, full=False, max_states=6000)
    tables = IterationTables(roomy, micro, graph, np.array([0, graph.num_states - 1], np.int32))
    return float((tables.memory + tables.stash)[:, 0, 1].min())


def least_room(study: TrainingStudy, enough: int) -> float:
    """The least bytes of each device, up to `enough`, in which the largest fleet has a plan; within 5 %."""
    low, high = 0.0, float(enough)
    while high > 1.05 * max(low, enough / 64):
        middle = math.sqrt(max(low, enough / 64) * high)
        scarce = replace(study.on(with_memory(study.market, int(middle))), plans={})
        search = FleetSearch(scarce, job(Goal.TIME))
        row = search.largest()
        held = math.isfinite(scarce.fleets.bound_s[row]) and isinstance(scarce.planned(search.fleet(row)), Planned)
        low, high = (low, middle) if held else (middle, high)
    return high


def rows_of(study: TrainingStudy, model: str, market: str, questions: list[str]) -> Iterator[Row]:
    """The cases of some questions on one market."""
    study = replace(study, plans={})
    for question in questions:
        asked = _asked(study, question)
        if asked is not None:
            yield row_of(study, model, market, question, asked)


def bounds() -> str:
    """How much better than the answer any fleet could be, by question."""
    lines = ["| question | cases | no fleet can be lower by more than: median | most |", "|---|---|---|---|"]
    for question in dict.fromkeys(q for q, _ in BOUNDS):
        mine = [b for q, b in BOUNDS if q == question]
        lines.append(f"| {question} | {len(mine)} | {statistics.median(mine):.1%} | {max(mine):.1%} |")
    return "\n".join(lines)


def main() -> int:
    """Print every case, the table, then the bounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(zoo.MODELS))
    parser.add_argument("--questions", default=",".join(QUESTIONS))
    parser.add_argument("--markets", default=",".join(("owned", "left", *MARKETS)), help="providers; owned, left")
    args = parser.parse_args()
    show(all_rows(args.models.split(","), args.questions.split(","), args.markets.split(",")))
    print(f"\n{bounds()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
