"""Tokens per second of GPT-2 small that keeps its keys and values: two unlike CPU types, each alone, and torch.

    python -m benchmarks.decoding [--rounds 5] [--tokens 24] [--max-len 256]

One core of the lowest and one of the highest x86-64 level of this machine. "together" has two sessions, whose calls
overlap, the others one; torch is eager, with one thread. All run in turn, nothing else should. Nothing is profiled.
First of all the greedy texts of both sessions are compared with torch's, token by token.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

import torch

import tvmhet
from benchmarks.here import cpu_types
from tvmhet import zoo
from tvmhet.kernel_keys import cpu_model
from tvmhet.module import HetModule

Call = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
TOGETHER, TORCH = "together", "torch"


def text(call: Call, first: int, tokens: int) -> list[int]:
    """Continue a text of one token greedily."""
    said = [first]
    for at in range(tokens):
        logits = call(torch.tensor([[said[-1]]]), torch.tensor([at]))
        said.append(int(logits[0, -1].argmax()))
    return said


def texts(lib: HetModule, tokens: int) -> list[list[int]]:
    """Continue a text in every session at once."""
    found: dict[int, list[int]] = {}

    def talk(session: int) -> None:
        found[session] = text(lib.sessions[session], 100 + session, tokens)

    threads = [threading.Thread(target=talk, args=(s,)) for s in range(len(lib.sessions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[s] for s in range(len(lib.sessions))]


def main() -> int:
    """Print a table of ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--max-len", type=int, default=256)
    given = parser.parse_args()
    torch.set_num_threads(1)
    low, high = cpu_types()[0], cpu_types()[-1]
    print(f"{cpu_model()}, torch {torch.__version__}; {' '.join(sys.argv[1:])}")
    module, inputs = zoo.get("gpt2_decoder", max_len=given.max_len)
    ways: dict[str, tuple[dict[str, int], int]] = {
        TOGETHER: ({low: 1, high: 1}, 2),
        f"{low} alone": ({low: 1}, 1),
        f"{high} alone": ({high: 1}, 1),
    }
    with ExitStack() as stack, torch.no_grad():
        libs = {}
        for way, (counts, sessions) in ways.items():
            model = tvmhet.from_torch(module, inputs, num_sessions=sessions)
            libs[way] = stack.enter_context(tvmhet.build(model, cluster=tvmhet.ClusterSpec.of(counts)))
        said = texts(libs[TOGETHER], given.tokens)
        want = [text(module, words[0], given.tokens) for words in said]
        same = sum(a == b for got, model in zip(said, want, strict=True) for a, b in zip(got, model, strict=True))
        print(f"{same} of {sum(map(len, said))} tokens are torch's")
        for lib in libs.values():
            texts(lib, 1)  # starts its workers
        measured: dict[str, list[float]] = {way: [] for way in [*libs, TORCH]}
        for _ in range(given.rounds):
            for way, lib in libs.items():
                began_s = time.monotonic()
                count = sum(len(words) - 1 for words in texts(lib, given.tokens))
                measured[way].append(count / (time.monotonic() - began_s))
            began_s = time.monotonic()
            text(module, 100, given.tokens)
            measured[TORCH].append(given.tokens / (time.monotonic() - began_s))
    best = max(statistics.median(measured[way]) for way in measured if way.endswith("alone"))
    print("| way | planned tokens/s | measured (least to most) | over the best alone | over torch |")
    print("|---|---|---|---|---|")
    for way, rates in measured.items():
        plan = libs[way].plan if way in libs else None
        planned = "" if plan is None else f"{1 / max(plan.period_s, plan.latency_s / ways[way][1]):.1f}"
        median, spread = statistics.median(rates), f"{min(rates):.1f} to {max(rates):.1f}"
        over = statistics.median(r / t for r, t in zip(rates, measured[TORCH], strict=True))
        print(f"| {way} | {planned} | {median:.1f} ({spread}) | {median / best:.2f} | {over:.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
