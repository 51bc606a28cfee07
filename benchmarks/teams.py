"""How much sooner does a team of two devices answer than one (tensor split), and is that what its plan says?

    python -m benchmarks.teams [--models bert_base,gpt2_small,vit_b16,t5_small] [--rounds 7] [--num-inputs 5]
    python -m benchmarks.teams --check llama,mistral,bart

On this machine's highest CPU type, in turn: one device of one core; a team of two; one device of two cores, whose
kernels share their work out themselves; torch eager with two threads. Let nothing else run. Printed: what plans say and
medians of the rounds, and how many times as fast as the one device each way is, round by round. Nothing is profiled.
`--check` compares answers of other models (`cpu_gate_models.py`), split wherever they can be, with one device's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

import tvmhet
from benchmarks import cpu_gate_models
from benchmarks.here import cpu_types
from tvmhet import zoo
from tvmhet.errors import NotSupported
from tvmhet.kernel_keys import cpu_model
from tvmhet.module import HetModule

ALONE, TEAM, CORES = "one device", "team of two", "two cores"


def libraries(model: str, stack: ExitStack) -> dict[str, HetModule]:
    """Build a model for each way, for latency."""
    module, inputs = zoo.get(model)
    best = cpu_types()[-1]
    imported = tvmhet.from_torch(module, inputs)
    ways = {ALONE: ({best: 1}, []), TEAM: ({best: 2}, [2]), CORES: ({f"{best}-2core": 1}, [])}
    return {
        way: stack.enter_context(
            tvmhet.build(imported, cluster=tvmhet.ClusterSpec.of(devices), objective="latency", splits=splits)
        )
        for way, (devices, splits) in ways.items()
    }


def timed(run: Callable[[], object], num_inputs: int) -> float:
    """Return the median seconds of calls, after one that does not count."""
    run()
    times = []
    for _ in range(num_inputs):
        start_s = time.monotonic()
        run()
        times.append(time.monotonic() - start_s)
    return statistics.median(times)


def compare(model: str, rounds: int, num_inputs: int) -> None:
    """Run a model every way in turn, and print a line for each."""
    module, inputs = zoo.get(model)
    with ExitStack() as stack:
        made = libraries(model, stack)
        first = made[ALONE](*inputs)
        ways: dict[str, Callable[[], object]] = {w: lambda lib=lib: lib(*inputs) for w, lib in made.items()}  # type: ignore[misc]
        stack.enter_context(torch.no_grad())
        ways["torch, two threads"] = lambda: module(*inputs)
        alone: dict[str, list[float]] = {way: [] for way in ways}
        rate: dict[str, list[float]] = {way: [] for way in made}
        for _ in range(rounds):
            for way, run in ways.items():
                alone[way].append(timed(run, num_inputs))
            for way, lib in made.items():
                rate[way].append(1 / lib._runtime.period_s(inputs, num_inputs))
        difference = _difference(first, made[TEAM](*inputs))
    steps = len(made[TEAM].program.stages)
    print(
        f"{model}: {[s.degree for s in made[TEAM].plan.stages]} devices by stage, {steps} steps; {difference:.1e} off"
    )
    for way, times in alone.items():
        plan = f"{1e3 * made[way].plan.latency_s:7.1f}" if way in made else 7 * " "
        ratios = [a / b for a, b in zip(alone[ALONE], times, strict=True)]
        streamed = ""
        if way in made:
            faster = statistics.median(b / a for a, b in zip(rate[ALONE], rate[way], strict=True))
            streamed = f"   {statistics.median(rate[way]):7.2f} inputs/s, {faster:.2f} times"
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        print(
            f"  {way:18} planned {plan} ms, took {1e3 * statistics.median(times):7.1f} ms, "
            f"{middle:.2f} times as fast ({low:.2f} to {high:.2f}){streamed}",
            flush=True,
        )


def check(name: str) -> None:
    """Print how far a model's answers on a team of two are from one device's."""
    module, inputs = cpu_gate_models.get(name)
    best, model = cpu_types()[-1], tvmhet.from_torch(module, inputs)
    options: dict[str, Any] = {"objective": "latency", "cluster": tvmhet.ClusterSpec.of({best: 2})}
    plan = tvmhet.plan(model, **options, splits=[{"degree": 2, "times_s": {"*": 1e-9}}])
    try:
        team = tvmhet.build(model, **options, plan=plan)
    except NotSupported as error:
        print(f"  {name}: {error.problem}", flush=True)
        return
    with team, tvmhet.build(model, **options) as alone:
        difference = _difference(alone(*inputs), team(*inputs))
        print(f"  {name}: {len(team.program.stages)} steps; {difference:.1e} of the largest off", flush=True)


def _difference(one: object, other: object) -> float:
    pairs = zip(_tensors(one), _tensors(other), strict=True)
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)


def _tensors(result: object) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    assert isinstance(result, tuple)
    return [tensor for part in result for tensor in _tensors(part)]


def main(argv: Sequence[str] | None = None) -> None:
    """Compare each model on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="bert_base,gpt2_small,vit_b16,t5_small")
    parser.add_argument("--check", default="")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--num-inputs", type=int, default=5)
    args = parser.parse_args(argv)
    torch.set_num_threads(2)
    print(
        f"{cpu_model()}, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}; torch {torch.__version__}"
    )
    for name in args.check.split(",") if args.check else ():
        check(name)
    for model in () if args.check else args.models.split(","):
        compare(model, args.rounds, args.num_inputs)


if __name__ == "__main__":
    main()
