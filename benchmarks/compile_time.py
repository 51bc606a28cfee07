"""How long do builds take: BERT-base and ResNet-50 for three targets, first with an empty cache, then again?

    python -m benchmarks.compile_time [--models bert_base,resnet50] [--devices cpu-x86-64-v4,cpu-x86-64-v2,a100]

Each pass is a fresh process and imports torch, TVM and the models too, as a user's script does. Wall seconds and, for
busy machines, CPU seconds of the process and its compilers. CUDA is compiled to source, which needs no GPU.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

MODELS, DEVICES = "bert_base,resnet50", "cpu-x86-64-v4,cpu-x86-64-v2,a100"


@contextmanager
def timed(label: str) -> Iterator[None]:
    """Print the wall and CPU seconds of a block, its child processes included."""
    wall, cpu = time.perf_counter(), sum(os.times()[:4])
    yield
    print(f"{label:40} {time.perf_counter() - wall:6.1f} s, {sum(os.times()[:4]) - cpu:6.1f} CPU s", flush=True)


def build_all(models: list[str], devices: list[str]) -> None:
    """Build every model for every device, and say what each took."""
    with timed("    import of tvmhet"):
        import tvmhet
        from tvmhet import zoo
    for name in models:
        with timed(f"    {name}: made and imported"):
            module, example = zoo.get(name)
            model = tvmhet.from_torch(module.eval(), example)
        for device in devices:
            cluster = tvmhet.ClusterSpec.of({device: 1})
            with timed(f"    {name} for {device}: planned"):
                plan = tvmhet.plan(model, cluster=cluster)
            with timed(f"    {name} for {device}: built"):
                tvmhet.build(model, cluster=cluster, plan=plan).close()


def main() -> None:
    """Two passes, each a process, over one cache that is empty at first."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--devices", default=DEVICES)
    parser.add_argument("--pass-only", action="store_true", help="build in this process, over the cache that is set")
    args = parser.parse_args()
    if args.pass_only:
        build_all(args.models.split(","), args.devices.split(","))
        return
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    with tempfile.TemporaryDirectory() as cache:
        for label in ("empty cache", "again"):
            print(f"{label}:", flush=True)
            command = [sys.executable, "-m", "benchmarks.compile_time", *sys.argv[1:], "--pass-only"]
            with timed(f"  {label}, in all"):
                subprocess.run(command, env={**os.environ, "TVMHET_CACHE_DIR": cache}, check=True)


if __name__ == "__main__":
    main()
