"""Kernels that were measured on a GPU against what is predicted of them: one table by maker and family.

    python -m benchmarks.measured_gpu [FILE]

FILE is what `tvmhet database --export` writes, or that gzipped; default: kernels of an H100 (results). Those were
measured before the library joined what follows a convolution in one call (steps 2), so that every operator but those of
attention and the bias of a convolution by channel was a call of its own, and before it wrote convolutions in place;
later ones are taken as they are called now.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import numpy as np

from tvmhet.cluster import device_type
from tvmhet.cost.model import KernelDesc, OpDesc, from_text
from tvmhet.cost.workload import kernel_of
from tvmhet.library_calls import library_calls, result_copy
from tvmhet.times import gpu_entries

SHIPPED = Path(__file__).parent / "results" / "h100_kernels_measured.jsonl.gz"
_APART = "steps 2"


def rows(path: Path) -> Iterator[tuple[str, str, KernelDesc, float]]:
    """Yield (device type, toolchain, kernel, seconds) of every kernel that ran."""
    raw = path.read_bytes()
    for line in (gzip.decompress(raw) if path.suffix == ".gz" else raw).splitlines():
        run = json.loads(line)
        if run["status"] == "ok" and run.get("description"):
            yield run["device"], run["toolchain"], from_text(run["description"]), median(run["times_s"])


def calls_then(desc: KernelDesc) -> tuple[KernelDesc, ...]:
    """Return the calls that the library made before it joined what follows a convolution (steps 2)."""
    if _kind(desc) == "  attention":
        return library_calls(desc)
    if desc.root.family == "conv2d" and desc.root.size("groups") > 1:
        made = library_calls(desc)
    else:
        made = tuple(kernel_of(op) for op in desc.ops if op.family != "movement") or (kernel_of(desc.ops[0]),)
    return (*made, *(_copy_then(desc) if desc.root.family == "conv2d" else result_copy(desc)))


def _copy_then(desc: KernelDesc) -> tuple[KernelDesc, ...]:
    """The copy of what a convolution returns, which was made unless an activation wrote in place."""
    after = [op.name for op in desc.ops if op.family == "elementwise"]
    if any(name not in ("add", "relu") for name in after):
        return ()
    num_values = desc.write_bytes // 4
    return (kernel_of(OpDesc("movement", (round(num_values),) * 2, desc.dtype, "copy")),)


def predicted_s(device: str, toolchain: str, desc: KernelDesc) -> float:
    """Return the estimate of a kernel, called as it was when it was measured."""
    calls_of = calls_then if toolchain.endswith(_APART) else library_calls
    return gpu_entries(device_type(device), [desc], calls_of)[0].seconds


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path, default=SHIPPED)
    errors: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for device, toolchain, desc, seconds in rows(parser.parse_args().file):
        ratio = predicted_s(device, toolchain, desc) / seconds
        for family in dict.fromkeys((_kind(desc), desc.root.family)):
            errors[device, desc.maker, family].append(ratio)
    print(f"{'type':<16}{'maker':<9}{'kernels of':<14}{'rows':>5}{'median error':>14}{'bias':>8}{'quartiles':>16}")
    for (device, maker, family), found in sorted(errors.items()):
        low, middle, high = np.quantile(found, (0.25, 0.5, 0.75)) - 1
        off = median(abs(ratio - 1) for ratio in found)
        print(f"{device:<16}{maker:<9}{family:<14}{len(found):>5}{off:>13.1%}{middle:>+9.1%}{low:>+8.0%}{high:>+8.0%}")


def _kind(desc: KernelDesc) -> str:
    """The family of a kernel's main operator, split where parts of it run unlike."""
    root = desc.root
    if root.family == "matmul" and sum(op.family == "matmul" for op in desc.ops) > 1:
        return "  attention"
    if root.family != "conv2d":
        return root.family
    if root.size("groups") > 1:
        return "  by channel"
    return f"  {root.size('kh')} x {root.size('kw')}"


if __name__ == "__main__":
    main()
