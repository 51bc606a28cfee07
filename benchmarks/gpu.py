"""Does tvmhet run on this machine's NVIDIA GPUs, is it right, and how fast is it against its plan and torch?

    python -m benchmarks.gpu [--models resnet50,bert_base,gpt2_small] [--makers tvm,library+tvm] [--inputs 20]

Each step prints a line, "ok" or "FAILED" with the whole error, and the others go on; the exit status says whether all
were ok. The output is what to send along with a report. Errors are the largest difference from torch in float32 on the
CPU, over the largest output. Times are medians and quartiles of single inputs, with the copies to and from the GPU.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tvmhet
from tvmhet import zoo
from tvmhet._tvm import TVM_VERSION
from tvmhet.cluster.local import cuda_ordinals, detect
from tvmhet.cluster.nodes import NodeClass
from tvmhet.cluster.nvml import read_nvml
from tvmhet.runtime.cuda import architecture

LARGEST_ERROR = 1e-3
MODELS, MAKERS = "resnet50,bert_base,gpt2_small", "tvm,library+tvm"


def checked(name: str, step: Callable[[], str]) -> bool:
    """Run a step and print what it says, or its error; return whether it ended well."""
    begin = time.monotonic()
    try:
        said = step()
    except Exception:
        print(f"FAILED  {name}\n{traceback.format_exc()}", flush=True)
        return False
    print(f"ok      {name}: {said} ({time.monotonic() - begin:.1f} s)", flush=True)
    return True


def versions() -> str:
    """What a report needs to know of the software."""
    cuda = f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}" if torch.version.cuda else "CPU only"
    return (
        f"Python {platform.python_version()}, TVM {TVM_VERSION}, torch {torch.__version__} ({cuda}), driver {driver()}"
    )


def driver() -> str:
    """The version of the NVIDIA driver; why there is none."""
    report = read_nvml()
    if report.reason:
        return report.reason
    import pynvml

    pynvml.nvmlInit()
    return str(pynvml.nvmlSystemGetDriverVersion())


def check_gpu(device_id: str, ordinal: int) -> str:
    """TVM's CUDA runtime sees the GPU, as the architecture for which its device type is compiled."""
    kinds = {t.name: t for t in detect().device_types()}
    wanted = str(kinds[device_id.rpartition("/")[2].rpartition(":")[0]].target["arch"])
    found = architecture(ordinal)
    return f"CUDA device {ordinal} is {found}" + ("" if found == wanted.rstrip("af") else f", its type says {wanted}")


def clusters() -> dict[str, tvmhet.ClusterSpec]:
    """A cluster of one GPU of each type of this machine, and, where it has several GPUs, one of them all."""
    (node,) = detect().nodes
    gpus = tuple((device, count) for device, count in node.devices if not device.is_cpu)
    made = {f"1 x {device.name}": _cluster(((device, 1),)) for device, _ in gpus}
    if sum(count for _, count in gpus) > 1:
        made[" + ".join(f"{count} x {device.name}" for device, count in gpus)] = _cluster(gpus)
    return made


def _cluster(devices: Any) -> tvmhet.ClusterSpec:
    return tvmhet.ClusterSpec((NodeClass("local", devices),), custom_types=tuple(device for device, _ in devices))


def check_model(
    module: torch.nn.Module, inputs: Sequence[torch.Tensor], cluster: tvmhet.ClusterSpec, makers: str, num_inputs: int
) -> str:
    """Build a model for a cluster, export it, and run the bundle: right, and how fast."""
    with torch.no_grad():
        want = module(*inputs).numpy()
    imported = tvmhet.from_torch(module, tuple(inputs))
    built = tvmhet.build(imported, cluster=cluster, makers=tuple(makers.split("+")))
    with tempfile.TemporaryDirectory() as folder:
        bundle = built.export(Path(folder) / "bundle")
        cubins = len(list(bundle.glob("*.cubins")))
        with tvmhet.load(bundle) as loaded:
            got = loaded(*inputs).numpy()
            error = float(np.abs(got - want).max() / np.abs(want).max())
            if not error <= LARGEST_ERROR:
                raise AssertionError(f"the output is {error:.1e} off torch's; at most {LARGEST_ERROR:g} is expected")
            stats = loaded.benchmark(*inputs, num_inputs=num_inputs)
    stages = built.plan.stages
    return (
        f"error {error:.1e}, latency {stats.latency.median_s * 1e3:.3f} ms, {stats.throughput_per_s:.1f} inputs/s; "
        f"planned {built.plan.latency_s * 1e3:.3f} ms; {torch_latency(module, inputs, num_inputs)}; "
        f"{len(stages)} stages, {sum(len(s.kernels) for s in stages)} kernels, {cubins} with cubins"
    )


def torch_latency(module: torch.nn.Module, inputs: Sequence[torch.Tensor], num_inputs: int) -> str:
    """The median of torch eager in float32 on the first GPU, copies to and from it counted."""
    if not torch.cuda.is_available():
        return "torch has no CUDA"
    module = module.to("cuda")
    seconds = []
    for _ in range(num_inputs + 3):
        begin = time.monotonic()
        with torch.no_grad():
            module(*(x.to("cuda") for x in inputs)).cpu()
        seconds.append(time.monotonic() - begin)
    module.to("cpu")
    return f"torch eager {statistics.median(seconds[3:]) * 1e3:.3f} ms"


def main() -> int:
    """Print the steps and what came of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--makers", default=MAKERS)
    parser.add_argument("--inputs", type=int, default=20)
    args = parser.parse_args()
    print("python -m benchmarks.gpu", *sys.argv[1:])
    checked("software", versions)
    if not (gpus := cuda_ordinals()):
        print(f"FAILED  no GPU to run on: {read_nvml().reason or 'none that can be described, see tvmhet devices'}")
        return 1
    torch.backends.cudnn.allow_tf32 = False  # what torch is timed with is float32, as ours is
    well = [checked(device, lambda d=device, n=ordinal: check_gpu(d, n)) for device, ordinal in gpus.items()]
    for cluster_name, cluster in clusters().items():
        for model in args.models.split(","):
            for makers in args.makers.split(","):
                well.append(
                    checked(
                        f"{model} on {cluster_name} by {makers}",
                        lambda c=cluster, m=model, k=makers: check_model(*zoo.get(m), c, k, args.inputs),
                    )
                )
    print(f"{sum(well)} of {len(well)} ok")
    return 0 if all(well) else 1


if __name__ == "__main__":
    sys.exit(main())
