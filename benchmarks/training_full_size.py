"""Does one real step of a full-size model give torch's gradients, and what does it take?

    python -m benchmarks.training_full_size --models resnet50,bert_base --out benchmarks/results/training_full_size.json

Each model is imported with SGD and momentum, placed as one stage on one x86-64-v4 device, and run for one step of one
micro-batch. After the first step the momentum is the gradient. Errors are norms of differences from torch in float64,
each by the largest gradient's norm; beside them those of torch's own float32 step. CPU seconds of import are of this
process, seconds of the step are wall time on a machine that may be busy.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import resource
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

import tvmhet
from tvmhet import zoo
from tvmhet.cluster.spec import ClusterSpec
from tvmhet.ir.optimizers import Sgd
from tvmhet.ir.training_model import TrainingModel
from tvmhet.ir.training_step import read_step
from tvmhet.kernel_keys import cpu_model
from tvmhet.solve.schedules import Schedule
from tvmhet.training_build import build_training
from tvmhet.training_placement import TrainingPlacement

MODELS: dict[str, dict[str, int]] = {
    "resnet50": {"batch": 2, "image": 224},
    "bert_base": {"batch": 2, "length": 128},
}
CLUSTER = {"nodes": [{"devices": {"cpu-x86-64-v4": 1}}]}

Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Row:
    """One model's step; errors relative to the largest gradient's norm."""

    model: str
    parameters: int
    import_cpu_s: float
    compile_s: float
    step_s: float
    worker_bytes: int
    loss: float
    torch_loss: float
    worst_gradient: str
    worst_error: float
    torch_float32_error: float


def measured(name: str) -> Row:
    """Import, build, run one step, and compare."""
    torch.manual_seed(0)
    model, inputs = zoo.get(name, **MODELS[name])
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.train()
    start = time.process_time()
    step = tvmhet.from_torch(model, inputs, loss="cross_entropy", optimizer=Sgd(lr=0.0, momentum=0.9), mode="training")
    import_s = time.process_time() - start
    with torch.no_grad():
        shape = model.eval()(*inputs).shape
    model.train()
    targets = torch.randint(0, shape[-1], shape[:-1])
    loss, found, times, taken = _step(step, [*inputs, targets])
    torch_loss, double = _torch(model, inputs, targets, torch.float64)
    _, single = _torch(model, inputs, targets, torch.float32)
    errors, own = _errors(found, double), _errors(single, double)
    worst = max(errors, key=lambda n: errors[n])
    size = sum(p.numel() for p in model.parameters())
    figures = (size, import_s, *times, taken, loss, torch_loss)
    return Row(name, *figures, worst, errors[worst], max(own.values()))


def _step(step: TrainingModel, batch: list[torch.Tensor]) -> tuple[float, Gradients, tuple[float, float], int]:
    """Return the loss, the gradients, seconds of compiling and of the step, and what the worker took."""
    cluster = ClusterSpec.from_dict(CLUSTER)
    (device,) = [d for group in cluster.groups() for d in group.device_ids]
    whole = TrainingPlacement((read_step(step).forward,), ((device,),), (False,), Schedule.ONE_F_ONE_B, 1)
    start = time.monotonic()
    with build_training(step, cluster=cluster, plan=whole, global_batch=step.batch_size) as trainer:
        built = time.monotonic()
        loss = trainer.train_step(batch)
        first = time.monotonic()
        gradients = {n: torch.from_numpy(a) for (n, _), a in trainer.optimizer_state().items()}
        trainer.train_step(batch)  # the first one starts the worker
        second = time.monotonic()
        return loss, gradients, (built - start, second - first), trainer.memory_bytes()[device]


def _torch(
    model: nn.Module, inputs: tuple[torch.Tensor, ...], targets: torch.Tensor, dtype: torch.dtype
) -> tuple[float, Gradients]:
    own = copy.deepcopy(model).to(dtype).train()
    y = own(*(x.to(dtype) if x.is_floating_point() else x for x in inputs))
    loss = nn.functional.cross_entropy(y.reshape(-1, y.shape[-1]), targets.reshape(-1))
    loss.backward()
    return loss.item(), {n: p.grad for n, p in own.named_parameters() if p.grad is not None}


def _errors(found: Gradients, want: Gradients) -> dict[str, float]:
    largest = max(float(g.norm()) for g in want.values())
    return {n: float((found[n].double() - g.double()).norm()) / largest for n, g in want.items()}


def main() -> None:
    """Print a row per model; write them with the machine and the versions."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    print("model, CPU seconds of import, seconds of compile and step, memory, worst error, torch's own in fp32")
    rows = []
    for name in args.models.split(","):
        r = measured(name)
        rows.append(asdict(r))
        seconds = f"{r.import_cpu_s:7.1f} s {r.compile_s:7.1f} s {r.step_s:6.2f} s {r.worker_bytes / 2**30:5.2f} GiB"
        print(f"{r.model:10} {seconds} {r.worst_error:.2e} {r.torch_float32_error:.2e}  {r.worst_gradient}", flush=True)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    head = {"machine": cpu_model(), "python": platform.python_version(), "torch": torch.__version__}
    if args.out:
        args.out.write_text(json.dumps({**head, "parent_peak_gib": round(most, 2), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
