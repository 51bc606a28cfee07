"""A built model: call it, stream through it, measure it against its plan, export it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from tvmhet.errors import NotSupported
from tvmhet.nested import one_call
from tvmhet.plans import Plan
from tvmhet.runtime.engine import Engine
from tvmhet.runtime.local import HetRuntime
from tvmhet.runtime.program import PipelineProgram
from tvmhet.runtime.stats import RunStats
from tvmhet.runtime.whole import WholeProgram, WholeRuntime
from tvmhet.sessions import Session


def load(directory: str | Path) -> HetModule:
    """Return the module that `HetModule.export` wrote, bound to this machine's devices.

    Torch is needed only if kernels of the bundle are the library's. Raises BadBundle for a file that is missing,
    changed or of another schema, PlanMismatch for another TVM.
    """
    from tvmhet.bundle import read_bundle

    return HetModule(*read_bundle(directory))


class HetModule:
    """The model on its placed devices. Workers start at the first call; `close` (or `with`) stops them.

    `lib(x)` runs one input; `lib.map(inputs)` keeps every stage busy and yields results in order. A model with states
    has `sessions`, of which `lib(x)`, `state`, `set_state` and `reset` are of the first.
    """

    def __init__(
        self,
        plan: Plan,
        program: PipelineProgram | WholeProgram,
        *,
        inline: bool = False,
        engine: Engine | None = None,
    ) -> None:
        self.plan = plan
        self.program = program
        self._runtime: HetRuntime | WholeRuntime = (
            WholeRuntime(program)
            if isinstance(program, WholeProgram)
            else HetRuntime(program, inline=inline, engine=engine)
        )

    def on_ray(
        self,
        address: str | None = None,
        *,
        machines: Mapping[str, str] | None = None,
        max_in_flight: int | None = None,
        start_timeout_s: float = 120.0,
    ) -> HetModule:
        """Return this model on the machines of a Ray cluster: each stage where the plan has it.

        `address` is the cluster's ("HOST:PORT"; by default the one that runs here, or that `ray.init` has connected).
        A machine of the cluster file is the Ray node of that name (`ray start --node-name=rack-1`); for others
        `machines` gives the node's name, host name, address or id. tvmhet is installed on all of them, and this
        process runs on one.

        Starting raises MissingPackage without Ray, NotSupported where no cluster answers, BadInput for a machine
        without a node, PlanMismatch for one with another TVM. NotSupported at once for a model that is placed whole.
        """
        if isinstance(self.program, WholeProgram):
            raise NotSupported(
                f"the model is placed whole on {self.plan.stages[0].placement.devices[0]!r}",
                "export the bundle and load it on that machine",
            )
        from tvmhet.runtime.cluster import ClusterEngine

        engine = ClusterEngine(self.program, address, machines, max_in_flight, start_timeout_s)
        return HetModule(self.plan, self.program, engine=engine)

    @property
    def sessions(self) -> tuple[Session, ...]:
        """The sessions of a model with states; without states there are none. `lib(x)` is `lib.sessions[0](x)`."""
        return tuple(Session(self._runtime, i) for i in range(self.program.num_sessions if self.program.states else 0))

    @property
    def stall_limit_s(self) -> float | None:
        """Seconds for which no stage may end while somebody waits for a result, 600 unless set; None is no limit.

        After them the run is given up, and WorkerFailed says what each worker was doing; the next `with lib:` begins
        anew. A model that runs in this process has no limit, and setting one raises NotSupported.
        """
        return self._runtime.stall_limit_s

    @stall_limit_s.setter
    def stall_limit_s(self, seconds: float | None) -> None:
        self._runtime.stall_limit_s = seconds

    def state(self) -> dict[str, Any]:
        """Return copies of the first session's states, by name."""
        return self._runtime.states(0)

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Replace states of the first session. Raises BadInput for what is no state of the model, or does not fit."""
        self._runtime.set_states(0, state)

    def reset(self) -> None:
        """Begin the first session anew."""
        self._runtime.set_states(0, None)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Run one input; return its result as the model would, as numpy arrays or, for torch inputs, torch tensors.

        Inputs are given in order, by name, or as one mapping: `lib(x, m)`, `lib(x=x, mask=m)`, `lib(batch)`.
        """
        return self._runtime(*one_call(inputs, named))

    def map(self, inputs: Iterable[Any], max_in_flight: int | None = None) -> Iterator[Any]:
        """Run many inputs, several in flight; yield results in the order of the inputs.

        An item is one input, or a tuple or mapping of a model's several. `inputs` is read at most `max_in_flight` items
        ahead, by default as many as keep every stage busy. Raises BadInput for an input that does not fit when its turn
        comes.
        """
        return self._runtime.map(inputs, max_in_flight)

    def benchmark(self, *inputs: Any, num_inputs: int = 20, warmup: int = 3) -> RunStats:
        """Measure latency and throughput on repeated `inputs`; `report` prints them beside the predictions.

        `warmup` inputs are run before, untimed; then `num_inputs` one at a time, and as many with the pipeline full.
        """
        return self._runtime.benchmark(inputs, num_inputs, warmup)

    def report(self, stats: RunStats) -> str:
        """Return predicted against measured, per stage and end to end, as text."""
        from tvmhet.report.table import benchmark_to_text

        return benchmark_to_text(self.plan, stats)

    def export(self, directory: str | Path) -> Path:
        """Write the bundle: manifest, one library per stage, parameters. The directory appears whole or not at all."""
        from tvmhet.bundle import export_bundle

        return export_bundle(self.plan, self.program, Path(directory))

    def close(self) -> None:
        """Stop the workers and free their memory. May be repeated."""
        self._runtime.close()

    def __enter__(self) -> HetModule:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
