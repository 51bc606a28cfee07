"""Does one real step of every full-size model give torch's gradients, tensor by tensor, and what does it take?

    python -m benchmarks.training_full_size --out benchmarks/results/training_full_size.json

Each model is imported with SGD and momentum, placed as one stage on one device of the highest x86-64 level here, and
run for one step of one micro-batch (T5: six, each on other inputs). After the first step the momentum is the
gradient. The error of a gradient is the norm of its difference from torch's in float64, by its own norm, or by 1e-4
of the largest gradient's where its own is smaller. Beside it the worst error of torch's own float32 step, over 1 and
2 threads and, of convolutions, both memory layouts; and what one rounding does to the step in float64, each parameter
moved to a neighbour in float32 or left: what no float32 step can be held to. A model passes whose worst error is
within 1e-4, or within 1.5 of the larger of those two. Dropout is off. CPU seconds of import are of this process,
seconds of the step are wall time on a machine that may be busy. With --out, rows of other models stay.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import tvmhet
from benchmarks.here import cpu_types
from tvmhet import zoo
from tvmhet.cluster.spec import ClusterSpec
from tvmhet.ir.optimizers import Sgd
from tvmhet.ir.training_import import resolve_loss
from tvmhet.ir.training_model import TrainingModel
from tvmhet.ir.training_step import read_step
from tvmhet.kernel_keys import cpu_model
from tvmhet.solve.schedules import Schedule
from tvmhet.training_build import build_training
from tvmhet.training_placement import TrainingPlacement

#: The LSTM takes 9.7 GiB: gradients of a weight by 16 steps are kept until one kernel adds them.
CLUSTER = {"nodes": [{"devices": {cpu_types()[-1]: {"count": 1, "memory": "16 GiB"}}}]}
LIMIT, OF_TORCHS, FLOOR, MOMENTUM = 1e-4, 1.5, 1e-4, 0.9
_DRAWS = 2  # of moved parameters, for each batch

Gradients = dict[str, torch.Tensor]
Loss = str | Callable[..., torch.Tensor]


def _two_losses(logits: tuple[torch.Tensor, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    """Of the classifier, and 0.4 of the auxiliary one's, as in the paper."""
    return F.cross_entropy(logits[0], target) + 0.4 * F.cross_entropy(logits[1], target)


@dataclass(frozen=True, slots=True)
class Case:
    """A model of the zoo; `classes` are those of targets, None for targets like the output, in (0, 1).

    `batches` are steps, each on inputs of another seed; the worst of all counts, ours and torch's.
    """

    name: str
    sizes: dict[str, Any]
    classes: int | None = 1000
    loss: Loss = "cross_entropy"
    batches: int = 1  # several where a ReLU within rounding of zero decides: which side has one is chance


MODELS = {
    "resnet50": Case("resnet50", {"batch": 2}),
    "inception_v3": Case("inception_v3", {"batch": 2}),
    "inception_v3_aux": Case("inception_v3", {"batch": 2, "aux": True}, loss=_two_losses),
    "vit_b16": Case("vit_b16", {"batch": 2}),
    "bert_base": Case("bert_base", {"batch": 2, "length": 128}, 2),
    "gpt2_small": Case("gpt2_small", {"batch": 1, "length": 128}, 50257),
    "t5_small": Case("t5_small", {"batch": 2}, 32128, batches=6),
    "lstm": Case("lstm", {"batch": 2}, 32000),
    "dlrm": Case("dlrm", {"batch": 128}, None, F.binary_cross_entropy),
    "moe": Case("moe", {"batch": 2}, None, "mse"),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One model's step; errors as the head of this file has them."""

    model: str
    sizes: dict[str, Any]
    batches: int
    parameters: int
    tensors: int
    import_cpu_s: float
    compile_s: float
    step_s: float
    worker_bytes: int
    loss: float
    torch_loss: float
    worst_gradient: str
    worst_error: float
    torch_float32_error: float
    one_rounding_error: float
    errors: dict[str, float] = field(repr=False)
    machine: str

    @property
    def passes(self) -> bool:
        """Whether every gradient is torch's."""
        return self.worst_error <= max(LIMIT, OF_TORCHS * max(self.torch_float32_error, self.one_rounding_error))


def measured(name: str) -> Row:
    """Import, build, run one step, and compare."""
    case = MODELS[name]
    model, _ = zoo.get(case.name, **case.sizes)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.train()
    batches = [_batch(case, model, seed) for seed in range(case.batches)]
    *inputs, targets = batches[0]
    start = time.process_time()
    options = {"loss": case.loss, "optimizer": Sgd(lr=0.0, momentum=MOMENTUM), "mode": "training"}
    step = tvmhet.from_torch(model, tuple(inputs), example_targets=(targets,), **options)
    import_s = time.process_time() - start
    loss, found, times, taken = _steps(step, batches)
    del step
    loss_function = resolve_loss(case.loss, model, inputs, (targets,))[0]
    errors: dict[str, float] = {}
    own, rounding, torch_loss = 0.0, 0.0, math.nan
    for seed, (batch, gradients) in enumerate(zip(batches, found, strict=True)):
        value, exact = _torch(model, batch, loss_function, torch.float64)
        torch_loss = value if math.isnan(torch_loss) else torch_loss
        errors = {n: max(e, errors.get(n, 0.0)) for n, e in _errors(gradients, exact).items()}
        for _ in _settings(model):
            own = max(own, *_errors(_torch(model, batch, loss_function, torch.float32)[1], exact).values())
        for draw in range(_DRAWS):
            near = _one_rounding_away(model, seed * _DRAWS + draw)
            rounding = max(rounding, *_errors(_torch(near, batch, loss_function, torch.float64)[1], exact).values())
    worst = max(errors, key=lambda n: errors[n])
    size = sum(p.numel() for p in model.parameters())
    figures = (size, len(errors), import_s, *times, taken, loss, torch_loss)
    return Row(name, case.sizes, case.batches, *figures, worst, errors[worst], own, rounding, errors, cpu_model())


def _batch(case: Case, model: nn.Module, seed: int) -> list[torch.Tensor]:
    """Inputs and targets; the zoo's own inputs first."""
    _, inputs = zoo.get(case.name, **case.sizes)
    torch.manual_seed(seed)
    if seed:
        inputs = tuple(_like(x) for x in inputs)
    return [*inputs, _targets(case, model, inputs)]


def _like(x: torch.Tensor) -> torch.Tensor:
    return torch.randn(x.shape) if x.is_floating_point() else torch.randint(0, int(x.max()) + 1, x.shape)


def _targets(case: Case, model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    with torch.no_grad():
        shape = copy.deepcopy(model).eval()(*inputs).shape
    return torch.rand(shape) if case.classes is None else torch.randint(0, case.classes, shape[:-1])


def _steps(
    step: TrainingModel, batches: list[list[torch.Tensor]]
) -> tuple[float, list[Gradients], tuple[float, float], int]:
    """Return the first loss, the gradients of each step, seconds of compiling and of a step, and the worker's bytes."""
    cluster = ClusterSpec.from_dict(CLUSTER)
    (device,) = [d for group in cluster.groups() for d in group.device_ids]
    whole = TrainingPlacement((read_step(step).forward,), ((device,),), (False,), Schedule.ONE_F_ONE_B, 1)
    start = time.monotonic()
    with build_training(step, cluster=cluster, plan=whole, global_batch=step.batch_size) as trainer:
        built = time.monotonic()
        losses, found, before = [], [], Gradients()
        for batch in batches:
            losses.append(trainer.train_step(batch))
            momentum = {n: torch.from_numpy(a).double() for (n, _), a in trainer.optimizer_state().items()}
            found.append({n: m - MOMENTUM * before[n] if before else m for n, m in momentum.items()})
            before = momentum
        first = time.monotonic()
        trainer.train_step(batches[0])  # the first one started the worker
        second = time.monotonic()
        return losses[0], found, (built - start, second - first), trainer.memory_bytes()[device]


def _torch(
    model: nn.Module, batch: list[torch.Tensor], loss: Callable[..., torch.Tensor], dtype: torch.dtype
) -> tuple[float, Gradients]:
    own = copy.deepcopy(model).to(dtype).train()
    *inputs, targets = [x.to(dtype) if x.is_floating_point() else x for x in batch]
    value = loss(own(*inputs), targets)
    value.backward()
    return value.item(), {n: p.grad for n, p in own.named_parameters() if p.grad is not None}


def _one_rounding_away(model: nn.Module, seed: int) -> nn.Module:
    """Return the model with each float32 parameter moved to one of its neighbours, or left, with equal chance."""
    near = copy.deepcopy(model)
    chance = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in near.parameters():
            towards = torch.randint(-1, 2, p.shape, generator=chance).to(p.dtype)
            p.copy_(torch.where(towards == 0, p, torch.nextafter(p, towards * math.inf)))
    return near


def _settings(model: nn.Module) -> Iterator[None]:
    """Put torch and the model into each setting in turn."""
    formats = [torch.contiguous_format]
    if any(isinstance(m, nn.Conv2d) for m in model.modules()):
        formats.append(torch.channels_last)
    threads = torch.get_num_threads()
    for layout in formats:
        model.to(memory_format=layout)
        for torch_threads in (1, 2):
            torch.set_num_threads(torch_threads)
            yield
    torch.set_num_threads(threads)


def _errors(found: Gradients, exact: Gradients) -> dict[str, float]:
    floor = FLOOR * max(float(g.norm()) for g in exact.values())
    return {n: float((found[n].double() - g).norm()) / max(float(g.norm()), floor) for n, g in exact.items()}


def main() -> None:
    """Print a row per model; write them with the machine and the versions."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    print(
        f"{'model':16} {'tensors':>7} {'worst':>8} {'torch':>8} {'one':>8}  import  compile    step  worker      worst "
        f"gradient\n{'':16} {'':7} {'error':>8} {'float32':>8} {'rounding':>8}   CPU s        s       s  GiB"
    )
    for name in args.models.split(","):
        r = measured(name)
        seconds = f"{r.import_cpu_s:7.1f}  {r.compile_s:7.1f} {r.step_s:7.2f}  {r.worker_bytes / 2**30:4.2f}"
        verdict = "passes" if r.passes else "FAILS "
        errors = f"{r.tensors:7} {r.worst_error:8.1e} {r.torch_float32_error:8.1e} {r.one_rounding_error:8.1e}"
        print(f"{r.model:16} {errors} {seconds}  {verdict}  {r.worst_gradient}", flush=True)
        if args.out:
            _keep(args.out, r)


def _keep(out: Path, row: Row) -> None:
    rows = json.loads(out.read_text())["rows"] if out.exists() else []
    order = list(MODELS)
    rows = sorted([r for r in rows if r["model"] != row.model] + [asdict(row)], key=lambda r: order.index(r["model"]))
    head = {"python": platform.python_version(), "torch": torch.__version__}
    out.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
