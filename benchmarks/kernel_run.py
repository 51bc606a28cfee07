"""One model at one batch size on one core or GPU: the process that `kernels.py` starts for it, a JSON line per result.

    python -m benchmarks.kernel_run resnet50 1 --makers tvm,library,both [--device cuda]

Every way runs in this one process, in turn, the order rotating each round; ratios are taken within each round against
torch eager, on a core by CPU time of the process, which other work on the machine disturbs least. On a GPU it is wall
time from inputs on the host to results on the host, for every way, with float32 kept (no TF32). Slow and risky ways
come last and alone against eager (torch.compile, then `tvm.compile`), so that the parent may stop waiting without loss.
"""

# ruff: noqa: E402 (thread counts are set before the libraries load)
from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TVM_NUM_THREADS"):
    os.environ[_name] = "1"

import argparse
import json
import shutil
import statistics
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import tvm
from torch.utils._python_dispatch import TorchDispatchMode
from tvm import relax

import tvmhet
from benchmarks.here import cpu_types, gpu_type, on_gpu
from benchmarks.kernel_ceiling import Ceiling, KernelTime, cpu_seconds, kernel_times
from tvmhet import zoo
from tvmhet.emit.lower import lower_plain
from tvmhet.ir.model import Model
from tvmhet.runtime.cuda_times import turn

MAKERS = {"tvm": ("tvm",), "library": ("library",), "both": ("tvm", "library")}
MIN_ROUNDS, MAX_ROUNDS, MAX_GPU_ROUNDS = 5, 25, 200
WORST = 10
KERNEL_ROUNDS, PROFILED_ROUNDS = 7, 3
MEMORY_RUNS = 3  # of each way: workspaces that are made late in the first run are there in the next
MOST_NAMED = 60  # of a GPU's kernels, in the file
Run = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run the model: a call that runs one input."""

    name: str
    run: Run


@dataclass(frozen=True, slots=True)
class Setting:
    """A CPU type or this machine's first GPU, the clock and the most rounds."""

    device: str
    on_gpu: bool

    @property
    def clock(self) -> Callable[[Run], float]:
        return wall_seconds if self.on_gpu else cpu_seconds

    @property
    def most_rounds(self) -> int:
        return MAX_GPU_ROUNDS if self.on_gpu else MAX_ROUNDS

    def torch_run(self, module: Callable[..., Any], example: Sequence[torch.Tensor]) -> Run:
        """A call that runs a torch module, on a GPU from the host to the host."""
        if self.on_gpu:
            return lambda: _to_host(module(*(x.to("cuda") for x in example)))
        return lambda: module(*example)


def _to_host(result: Any) -> Any:
    return [_to_host(r) for r in result] if isinstance(result, tuple | list) else result.cpu()


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors made inside the mode that were alive at once, at the end of any operator.

    Views of `given` tensors (a transposed weight) are not made inside.
    """

    def __init__(self, given: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known = {t.untyped_storage().data_ptr() for t in given}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        self.peak = max(self.peak, self.now)
        return out

    def _note(self, storage: Any) -> None:
        address, size = storage.data_ptr(), storage.nbytes()
        if address in self._known or size == 0:
            return
        self._known.add(address)
        self.now += size
        weakref.finalize(storage, self._forget, address, size)

    def _forget(self, address: int, size: int) -> None:
        self._known.discard(address)
        self.now -= size


def say(kind: str, **values: Any) -> None:
    """Print one result."""
    print(json.dumps({"kind": kind, **values}), flush=True)


def batched(example: tuple[Any, ...], batch: int) -> tuple[Any, ...]:
    """The example inputs `batch` times over along their first axis."""
    return tuple(torch.cat([x] * batch) if batch > 1 else x for x in example)


def first_tensor(result: Any) -> np.ndarray:
    """The first tensor of a result."""
    if isinstance(result, tuple | list):
        return first_tensor(result[0])
    return np.asarray(result.detach() if isinstance(result, torch.Tensor) else result)


def wall_seconds(run: Run) -> float:
    """Wall time of one call."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def compare(base: Way, ways: Sequence[Way], seconds: float, want: np.ndarray, setting: Setting) -> None:
    """Run `base` and `ways` in turn for about `seconds`; say each way's times, ratios to `base`, and difference."""
    with turn(0) if setting.on_gpu else nullcontext():
        _compare([base, *ways], seconds, want, setting)


def _compare(every: Sequence[Way], seconds: float, want: np.ndarray, setting: Setting) -> None:
    base = every[0]
    off = {w.name: float(np.abs(first_tensor(w.run()) - want).max()) for w in every}  # a warm-up, too
    times: dict[str, list[float]] = {w.name: [] for w in every}
    begin = time.perf_counter()
    for i in range(setting.most_rounds):
        if i >= MIN_ROUNDS and time.perf_counter() - begin > seconds:
            break
        for way in (*every[i % len(every) :], *every[: i % len(every)]):
            times[way.name].append(setting.clock(way.run))
    for way in every:
        ratios = [e / t for t, e in zip(times[way.name], times[base.name], strict=True)]
        low, ratio, high = statistics.quantiles(ratios, n=4)
        say(
            "way", way=way.name, median_s=statistics.median(times[way.name]), ratio=ratio, low=low, high=high,
            rounds=len(ratios), difference=off[way.name], largest=float(np.abs(want).max()),
        )  # fmt: skip


def ours(model: Model, makers: str, device: str, budget_s: float) -> Any:
    """`tvmhet.build` on one device, in this process, after measuring kernels for `budget_s` seconds."""
    cluster = tvmhet.ClusterSpec.of({device: 1})
    if budget_s and makers == "both":
        tvmhet.profile(model, cluster=cluster, budget_s=budget_s)
    return tvmhet.build(model, cluster=cluster, makers=MAKERS[makers], inline=True)


def say_kernels(lib: Any, model: Model, inputs: Sequence[np.ndarray], ceiling: Ceiling, makers: str) -> None:
    """Say the worst kernels of a module, those that hold at least a thousandth of its time, and the VM's storage."""
    found = kernel_times(lib, model, inputs, ceiling, KERNEL_ROUNDS)
    total_s = sum(k.seconds for k in found.kernels)
    heavy = [k for k in found.kernels if k.seconds > total_s / 1000]
    params = sum(v.nbytes for v in lib.program.params.values())
    say("memory", way=makers, storage_bytes=found.storage_bytes, param_bytes=params)
    say("kernels", way=makers, total_s=total_s, num=len(found.kernels), near=_near(found.kernels),
        worst=[asdict(k) for k in sorted(heavy, key=lambda k: k.share)[:WORST]])  # fmt: skip


def _near(kernels: Sequence[KernelTime]) -> dict[str, float]:
    """The time-weighted share of the ceiling by maker."""
    out = {}
    for maker in sorted({k.maker for k in kernels}):
        own = [k for k in kernels if k.maker == maker]
        out[maker] = sum(k.share * k.seconds for k in own) / sum(k.seconds for k in own)
    return out


def say_gpu_memory(lib: Any, inputs: Sequence[np.ndarray], makers: str) -> None:
    """Say the storage that the VM plans and what torch's calls hold beside it while inputs run, and parameters."""
    before = _start_counting()
    for _ in range(MEMORY_RUNS):
        lib(*inputs)
    params = sum(v.nbytes for v in lib.program.params.values())
    planned = lib.plan.stages[0].memory_bytes - params
    say("memory", way=makers, storage_bytes=planned + torch.cuda.max_memory_allocated() - before, param_bytes=params)


def say_torch_gpu_memory(module: torch.nn.Module, run: Run) -> None:
    """Say the most bytes that torch held at once on the GPU while inputs ran, workspaces of its libraries too."""
    before = _start_counting()
    for _ in range(MEMORY_RUNS):
        run()
    params = sum(v.nbytes for v in {id(v): v for v in module.state_dict().values()}.values())
    say("memory", way="torch eager", storage_bytes=torch.cuda.max_memory_allocated() - before, param_bytes=params)


def say_gpu_kernels(way: str, run: Run) -> None:
    """Say what the profiler sees on the GPU during a run: seconds of kernels and copies, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    with turn(0), profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED_ROUNDS):
            run()
        torch.cuda.synchronize()
    found = [(e.key, e.self_device_time_total * 1e-6 / PROFILED_ROUNDS, e.count) for e in profiler.key_averages()]
    longest = sorted((f for f in found if f[1] > 0), key=lambda f: -f[1])
    say("gpu kernels", way=way, busy_s=sum(s for _, s, _ in longest), num=sum(n for *_, n in longest) / PROFILED_ROUNDS,
        longest=[[name[:120], seconds, n / PROFILED_ROUNDS] for name, seconds, n in longest[:MOST_NAMED]])  # fmt: skip


def _start_counting() -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def torch_peak_bytes(module: torch.nn.Module, example: Sequence[torch.Tensor]) -> int:
    """The most bytes of activations that one eager run holds at once."""
    with LiveBytes([*module.state_dict().values(), *example]) as live:
        module(*example)
    return live.peak


def plain(model: Model, device: str, example: Sequence[torch.Tensor]) -> Run:
    """`tvm.compile` by default."""
    target = tvm.target.Target(dict(tvmhet.device_type(device).target))
    with target:
        machine = relax.VirtualMachine(tvm.compile(model.mod, target=target), tvm.cpu())
    values = [*(tvm.runtime.tensor(x.numpy()) for x in example), *model.params.values()]
    return lambda: machine["main"](*values)


def plain_on_gpu(model: Model, setting: Setting, example: Sequence[torch.Tensor]) -> Run:
    """`tvmhet.build` of the whole model, as `tvm.compile` does by default, from the host to the host."""
    target = dict(tvmhet.device_type(setting.device).target)
    machine = on_gpu(lower_plain(model.mod, target))
    params = [tvm.runtime.tensor(v, tvm.cuda(0)) for v in model.params.values()]

    def run() -> Any:
        return _numpy(machine["main"](*(tvm.runtime.tensor(x.numpy(), tvm.cuda(0)) for x in example), *params))

    return run


def _numpy(result: Any) -> Any:
    return result.numpy() if hasattr(result, "numpy") else [_numpy(part) for part in result]


def main() -> None:
    """Run the ways one group after the other, the surest first."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("batch", type=int)
    parser.add_argument("--makers", default="tvm,library,both")
    parser.add_argument("--against", default="torch.compile,tvm.compile")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--profile", type=float, default=0.0)
    parser.add_argument("--device", default="cpu", help="cpu, a CPU type, or cuda for the first GPU")
    parser.add_argument("--ceiling", default="[[], 0]", help="JSON: [copy rates, product rate]")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    on_gpu = args.device == "cuda"
    if not on_gpu:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.backends.cudnn.allow_tf32 = False
    named = {"cuda": gpu_type, "cpu": lambda: cpu_types()[-1]}
    setting = Setting(named[args.device]() if args.device in named else args.device, on_gpu)
    module, example = zoo.get(args.model)
    module, example = module.eval(), batched(example, args.batch)
    model, inputs = tvmhet.from_torch(module, example), [x.numpy() for x in example]
    want = first_tensor(module(*example))
    libs, ways = {}, []
    for makers in args.makers.split(","):
        try:
            lib = libs[makers] = ours(model, makers, setting.device, args.profile)
        except tvmhet.HetError as error:
            say("none", way=f"ours, {makers}", reason=error.problem)
            continue
        ways.append(Way(f"ours, {makers}", lambda lib=lib: lib(*inputs)))  # type: ignore[misc]
        if on_gpu:
            say_gpu_memory(lib, inputs, makers)
    if on_gpu:
        module = module.to("cuda")
    base = Way("torch eager", setting.torch_run(module, example))
    if on_gpu:
        say_torch_gpu_memory(module, base.run)
    compare(base, ways, args.seconds, want, setting)
    if on_gpu:
        say("plan", **{m: [lib.plan.latency_s, len(lib.plan.stages[0].kernels)] for m, lib in libs.items()})
        for way in (base, *ways):
            say_gpu_kernels(way.name, way.run)
    else:
        say("memory", way="torch eager", storage_bytes=torch_peak_bytes(module, example),
            param_bytes=sum(v.nbytes for v in {id(v): v for v in module.state_dict().values()}.values()))  # fmt: skip
        rates = json.loads(args.ceiling)
        for makers, lib in libs.items():
            say_kernels(lib, model, inputs, Ceiling(tuple(rates[0]), rates[1]), makers)
    for against in filter(None, args.against.split(",")):
        AGAINST[against](module, model, example, base, args.seconds / 2, want, setting)


def against_torch_compile(
    module: torch.nn.Module, _model: Model, example: Sequence[torch.Tensor], base: Way, seconds: float,
    want: np.ndarray, setting: Setting,
) -> None:  # fmt: skip
    """Say torch.compile's figures. It needs a C++ compiler on CPUs."""
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        say("none", way="torch.compile", reason="no C++ compiler on this machine")
        return
    fast = torch.compile(module)
    compare(base, [Way("torch.compile", setting.torch_run(fast, example))], seconds, want, setting)


def against_plain_tvm(
    _module: torch.nn.Module, model: Model, example: Sequence[torch.Tensor], base: Way, seconds: float,
    want: np.ndarray, setting: Setting,
) -> None:  # fmt: skip
    """Say the figure of plain `tvm.compile`: on CPUs of one run, which takes minutes."""
    if setting.on_gpu:
        run = plain_on_gpu(model, setting, example)
        compare(base, [Way("tvm.compile", run)], seconds, want, setting)
        return
    run = plain(model, setting.device, example)
    eager_s, plain_s = min(cpu_seconds(base.run) for _ in range(3)), cpu_seconds(run)
    say("way", way="tvm.compile", median_s=plain_s, ratio=eager_s / plain_s, low=None, high=None, rounds=1,
        difference=None, largest=None)  # fmt: skip


AGAINST: dict[str, Callable[..., None]] = {"torch.compile": against_torch_compile, "tvm.compile": against_plain_tvm}


if __name__ == "__main__":
    main()
