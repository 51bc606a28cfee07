"""Does tvmhet run on this machine's NVIDIA GPUs, is it right, and how fast is it against its plan and torch?

    python -m benchmarks.gpu [--models resnet50,bert_base,gpt2_small] [--makers tvm,library+tvm] [--inputs 20]

Models are run, and small ones of them trained for a step, on one GPU of each type and on all together.

Each step prints a line, "ok" or "FAILED" with the whole error, and the others go on; the exit status says whether all
were ok. The output is what to send along with a report. Errors are the largest difference from torch in float32 on the
CPU, over the largest output. Times are medians and quartiles of single inputs, with the copies to and from the GPU.
"""

from __future__ import annotations

import argparse
import copy
import math
import platform
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tvmhet
from tvmhet import zoo
from tvmhet._tvm import TVM_VERSION
from tvmhet.cluster.local import cuda_ordinals, detect, type_of
from tvmhet.cluster.nodes import NodeClass
from tvmhet.cluster.nvml import read_nvml
from tvmhet.ir.optimizers import Sgd
from tvmhet.ir.training_step import read_step
from tvmhet.runtime.cuda import architecture
from tvmhet.solve.schedules import Schedule
from tvmhet.training_build import build_training
from tvmhet.training_placement import TrainingPlacement

LARGEST_ERROR = 1e-3
#: Sizes at which a training step is checked: kernels of every kind, and few enough to compile in a minute.
TRAINED: dict[str, dict[str, Any]] = {
    "resnet50": {"batch": 4, "image": 64, "blocks": (1, 1, 1, 1), "base_width": 16, "num_classes": 10},
    "bert_base": {"batch": 4, "length": 32, "layers": 2, "dim": 128, "heads": 2, "vocab": 1000},
    "gpt2_small": {"batch": 4, "length": 32, "layers": 2, "dim": 128, "heads": 2, "vocab": 1000},
}
_MICROBATCHES = 2
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
    wanted = str(kinds[type_of(device_id)].target["arch"])
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


def check_training(
    module: torch.nn.Module, inputs: Sequence[torch.Tensor], cluster: tvmhet.ClusterSpec, makers: str, num_steps: int
) -> str:
    """Train for a step on a cluster, as one stage on each of its GPUs: torch's gradients, and how fast.

    After the first step with momentum and no decay, the momentum is the gradient. Errors are norms of differences, by
    the largest gradient's norm.
    """
    names = tuple(makers.split("+"))
    optimizer = Sgd(lr=0.0, momentum=0.9)
    step = tvmhet.from_torch(module, tuple(inputs), loss="cross_entropy", optimizer=optimizer, mode="training")
    ids = [d for group in cluster.groups() for d in group.device_ids]
    forward = read_step(step).forward
    cuts = [len(forward) * k // len(ids) for k in range(len(ids) + 1)]
    stages = tuple(forward[a:b] for a, b in pairwise(cuts))
    places, kept = tuple((d,) for d in ids), (False,) * len(ids)
    placement = TrainingPlacement(stages, places, kept, Schedule.ONE_F_ONE_B, _MICROBATCHES)
    size = _MICROBATCHES * step.batch_size
    with build_training(step, cluster=cluster, plan=placement, global_batch=size, makers=names) as trainer:
        batch = [torch.cat([x.roll(i, 0) for i in range(_MICROBATCHES)]) for x in inputs]
        with torch.no_grad():
            classes = module(*inputs).shape[-1]
        shape = trainer.batch_specs[-1].shape
        batch.append(torch.arange(math.prod(shape)).reshape(shape) % classes)
        loss = trainer.train_step(batch)
        found = {name: torch.from_numpy(a) for (name, _), a in trainer.optimizer_state().items()}
        seconds = []
        for _ in range(num_steps):
            begin = time.monotonic()
            trainer.train_step(batch)
            seconds.append(time.monotonic() - begin)
    torch_loss, exact = _gradients(module, batch, step.batch_size)
    largest = max(float(g.norm()) for g in exact.values())
    error = max(float((found[n].double() - g).norm()) for n, g in exact.items()) / largest
    if not error <= LARGEST_ERROR or not abs(loss - torch_loss) <= LARGEST_ERROR * abs(torch_loss):
        raise AssertionError(f"loss {loss} for torch's {torch_loss}, gradients {error:.1e} off")
    return f"gradients {error:.1e} off torch's, {statistics.median(seconds) * 1e3:.3f} ms a step of {size} samples"


def _gradients(
    module: torch.nn.Module, batch: Sequence[torch.Tensor], size: int
) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and the gradients of torch in float64, means over micro-batches."""
    double = copy.deepcopy(module).double().train()
    losses = []
    for *given, target in zip(*(tensor.split(size) for tensor in batch), strict=True):
        y = double(*(x.double() if x.is_floating_point() else x for x in given))
        loss = torch.nn.functional.cross_entropy(y.reshape(-1, y.shape[-1]), target.reshape(-1))
        (loss / _MICROBATCHES).backward()
        losses.append(loss.item())
    return statistics.mean(losses), {n: p.grad for n, p in double.named_parameters() if p.grad is not None}


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
                if model in TRAINED:
                    well.append(
                        checked(
                            f"a training step of a small {model} on {cluster_name} by {makers}",
                            lambda c=cluster, m=model, k=makers: check_training(
                                *zoo.get(m, **TRAINED[m]), c, k, args.inputs
                            ),
                        )
                    )
    print(f"{sum(well)} of {len(well)} ok")
    return 0 if all(well) else 1


if __name__ == "__main__":
    sys.exit(main())
