"""How much memory does a process take that runs one model, ours against torch eager?

    python -m benchmarks.peak_memory [--models resnet50,bert_base] [--batch 1]

Each side is a process of its own on one core and one thread: it imports, loads the model (torch: module and weights;
ours: a bundle that was exported before, by each choice of makers) and runs it five times. Printed: by how much the peak
of its resident memory (VmHWM) lies above what it held after its imports, weights included.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

MODELS = "resnet50,bert_base,gpt2_small,vit_b16,mobilenet_v3,dlrm"
MAKERS = {"tvm": ("tvm",), "both": ("tvm", "library")}
_RUNS = 5
_MIB = 1024  # in KiB, the unit of VmHWM and VmRSS


def _kib(field: str) -> int:
    found = re.search(rf"^{field}:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def run_torch(model: str, batch: int) -> float:
    """Load and run by torch eager in this process; MiB."""
    import torch

    from benchmarks.kernel_run import batched
    from tvmhet import zoo

    torch.set_num_threads(1)
    before = _kib("VmRSS")
    module, example = zoo.get(model)
    module, example = module.eval(), batched(example, batch)
    with torch.no_grad():
        for _ in range(_RUNS):
            module(*example)
    return (_kib("VmHWM") - before) / _MIB


def run_bundle(bundle: str) -> float:
    """Load and run a bundle in this process; MiB."""
    import torch

    from tvmhet.bundle import read_bundle
    from tvmhet.module import HetModule

    torch.set_num_threads(1)
    inputs = [torch.load(p) for p in sorted(Path(bundle).parent.glob("input*.pt"))]
    before = _kib("VmRSS")
    with HetModule(*read_bundle(bundle), inline=True) as lib:
        for _ in range(_RUNS):
            lib(*inputs)
    return (_kib("VmHWM") - before) / _MIB


def export(model: str, batch: int, folder: Path) -> None:
    """Write the inputs and a bundle for each choice of makers."""
    import torch

    import tvmhet
    from benchmarks.here import cpu_types
    from benchmarks.kernel_run import batched
    from tvmhet import zoo

    module, example = zoo.get(model)
    example = batched(example, batch)
    for i, value in enumerate(example):
        torch.save(value, folder / f"input{i}.pt")
    imported = tvmhet.from_torch(module.eval(), example)
    cluster = tvmhet.ClusterSpec.of({cpu_types()[-1]: 1})
    for name, makers in MAKERS.items():
        tvmhet.build(imported, cluster=cluster, makers=makers, inline=True).export(folder / name)


def _in_process(*args: str) -> float:
    environment = {**os.environ, **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TVM_NUM_THREADS"), "1")}
    command = [sys.executable, "-m", "benchmarks.peak_memory", "--side", *args]
    answer = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    return float(json.loads(answer.splitlines()[-1]))


def main() -> None:
    """Print a line for each model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--side", nargs=2, help="what a process of this script runs: torch or a bundle's path; a model")
    args = parser.parse_args()
    if args.side:
        what, model = args.side
        print(json.dumps(run_torch(model, args.batch) if what == "torch" else run_bundle(what)))
        return
    for model in args.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            export(model, args.batch, Path(folder))
            batch = ("--batch", str(args.batch))
            sides = {"torch eager": _in_process("torch", model, *batch)}
            sides |= {f"ours, {m}": _in_process(str(Path(folder) / m), model, *batch) for m in MAKERS}
        text = ", ".join(f"{side} {mib:.0f} MiB" for side, mib in sides.items())
        print(f"{model:14} batch {args.batch}: {text}", flush=True)


if __name__ == "__main__":
    main()
