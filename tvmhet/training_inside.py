"""What each operator of a training step takes inside the step: every call of its two halves timed, as they are emitted.

    the half as one stage, compiled ──► seconds of its calls ──► seconds of its operators, by their names in the step

A kernel's time goes to its operators in equal parts. What adds a gradient to its sum belongs to what made the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tvmhet.cost.measure import ArgSpec, KernelJob, Measurement
from tvmhet.errors import MeasurementFailed
from tvmhet.graph.fusion import LegalKernel
from tvmhet.graph.opgraph import OpGraph
from tvmhet.ir.training_functions import StageFunction
from tvmhet.runtime.training_program import Function
from tvmhet.training_deploy import cut_kernels


@dataclass(frozen=True)
class Half:
    """The forward or the backward function of a step that is one stage, and which operators its kernels hold."""

    args: tuple[ArgSpec, ...]
    kernels: tuple[tuple[str, ...], ...]  # in the order of their calls; operators by their names in the step

    @classmethod
    def of(cls, function: StageFunction, makers: Sequence[str]) -> Half:
        """Cut the function into kernels, as its build does."""
        mod, graph, kernels = cut_kernels(function, makers)
        args = tuple(ArgSpec(tuple(int(d) for d in p.ty.shape), str(p.ty.dtype)) for p in mod["main"].params)
        if graph is None:
            return cls(args, ())
        return cls(args, tuple(_operators(graph, k, function.calls) for k in kernels if not _is_constant(graph, k)))

    def operator_seconds(
        self, compiled: Function, run: Callable[[KernelJob], Measurement], total_s: float
    ) -> Mapping[str, float]:
        """Time every call; return the seconds of each operator, which are `total_s` together.

        Raises MeasurementFailed where the function does not run, or makes other calls than it has kernels.
        """
        made = run(KernelJob(compiled.library, self.args, calls=True))
        if made.status != "ok":
            raise MeasurementFailed(f"a whole pass cannot be timed: {made.status} {made.note}".strip(), "see the text")
        if len(made.times_s) != len(self.kernels):
            raise MeasurementFailed(
                f"a pass made {len(made.times_s)} calls, it has {len(self.kernels)} kernels",
                "its operators are priced by what the whole pass takes",
            )
        seconds: dict[str, float] = {}
        for operators, kernel_s in zip(self.kernels, made.times_s, strict=True):
            for name in operators:
                seconds[name] = seconds.get(name, 0.0) + kernel_s / len(operators)
        whole_s = sum(seconds.values())
        return {name: s * total_s / whole_s for name, s in seconds.items()}


def _is_constant(graph: OpGraph, kernel: LegalKernel) -> bool:
    """Whether TVM runs a kernel while it compiles: one that counts. It keeps those that fill or spread a constant."""
    return all(graph.operators[i].family == "arange" for i in kernel.ops)


def _operators(graph: OpGraph, kernel: LegalKernel, calls: Sequence[str]) -> tuple[str, ...]:
    """The step's operators in a kernel; where it only adds to sums, those that made what it adds."""
    own = [i for i in kernel.ops if i < len(calls)] or [
        p for i in kernel.ops for t in graph.operators[i].inputs if 0 <= (p := graph.tensors[t].producer) < len(calls)
    ]
    return tuple(calls[i] for i in own)
