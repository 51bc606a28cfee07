"""A placed program over the machines of a Ray cluster: on each a Ray actor, which runs the parts that are there.

    driver ──inputs──► MachineServer on rack-1 ──values──► MachineServer on rack-2 ──outputs──► driver

The driver hands the parts of an input out at once, each with references to what it reads: Ray starts a part when these
are there, and moves them from machine to machine, not through the driver. Ray's scheduler is asked for no core or GPU:
the plan says which devices are used.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tvmhet.cluster.ray_nodes import SEES_GPUS, connect, nodes_of, on_node
from tvmhet.errors import HetError, NotSupported, PartLost, PlanMismatch, WorkerFailed
from tvmhet.runtime.crew import HEED_S
from tvmhet.runtime.engine import check_in_flight
from tvmhet.runtime.fleet import default_num_frames
from tvmhet.runtime.machine_server import VERSIONS, MachineServer, Shipment
from tvmhet.runtime.machines import Part, part_program, parts_of
from tvmhet.runtime.program import Array, PipelineProgram
from tvmhet.runtime.stalls import DEFAULT_LIMIT_S, StallClock
from tvmhet.runtime.stats import StageRun

_NUM_PINGS = 7
_CLOSE_S = 10.0
_ANSWER_S = 10.0  # in which a part that has been given up on its machine has said so
_NOT_OURS = "the text above is the machine's own"
#: Inputs up to this size go with each call that reads them, which is about 1 ms faster; larger ones are stored once.
_IN_CALL_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class _Server:
    """The actor on a machine, whose clock is `ahead_s` ahead of the driver's."""

    actor: Any
    ahead_s: float


@dataclass(frozen=True, slots=True)
class _Flight:
    outputs: tuple[Any, ...]  # references, or arrays that no part makes
    runs: tuple[Any, ...]  # one reference per part


class ClusterEngine:
    """Runs a program over Ray. `address` is of a Ray cluster; `machines` gives nodes to machines named otherwise.

    More inputs are in flight than on one machine, by one for each part: of those some are on their way.
    """

    over_machines = True

    def __init__(
        self,
        program: PipelineProgram,
        address: str | None = None,
        machines: Mapping[str, str] | None = None,
        max_in_flight: int | None = None,
        start_timeout_s: float = 120.0,
    ) -> None:
        check_in_flight(max_in_flight)
        if program.states:
            raise NotSupported(
                f"a model with {len(program.states)} states over several machines", "run it on one machine"
            )
        self.record: list[StageRun] | None = None
        self._stall_limit_s: float | None = DEFAULT_LIMIT_S
        self._stall = StallClock()
        self._program = program
        self._parts = parts_of(program)
        self.capacity = max_in_flight or default_num_frames(program) + len(self._parts)
        self._address = address
        self._machines = machines or {}
        self._start_timeout_s = start_timeout_s
        self._servers: dict[str, _Server] = {}
        self._flights: dict[int, _Flight] = {}
        self._unfinished: deque[int] = deque()  # oldest first; some have been taken
        self._next_index = 0
        self._ray: Any = None
        self._has_connected = False
        self._broken: HetError | None = None
        self.shared_cores: tuple[str, ...] = ()

    def start(self) -> None:
        """Ship every part to its machines and start it there. After `close` or the loss of a part, start afresh.

        Raises BadInput for a machine without a node, PlanMismatch for one of another TVM, WorkerFailed for a part that
        does not start; nothing is left running.
        """
        if self._ray is not None:
            return
        self._broken = None
        self._stall.progress()
        self._ray, self._has_connected = connect(self._address)
        try:
            self._start_parts()
        except BaseException:
            self.close()
            raise

    def _start_parts(self) -> None:
        ray = self._ray
        machines = dict.fromkeys(m for part in self._parts for m in part.machines)
        nodes = nodes_of(machines, ray.nodes(), self._machines)
        actors = {machine: self._actor(nodes[machine]) for machine in machines}
        self._servers = {machine: _Server(actor, 0.0) for machine, actor in actors.items()}
        for machine, actor in actors.items():
            _check_versions(machine, self._get(actor.versions.remote(), machine))
        started = []
        for number, part in enumerate(self._parts):
            for machine in dict.fromkeys(part.machines):
                shipment = ray.put(Shipment.of(part_program(self._program, part, machine)))
                limits_s = (self._start_timeout_s, self._stall_limit_s)
                reference = actors[machine].start.remote(number, shipment, *limits_s)
                started.append((machine, reference))
        shared = [self._get(reference, machine) for machine, reference in started]
        self.shared_cores = tuple(dict.fromkeys(device for devices in shared for device in devices))
        self._servers = {machine: _Server(actor, self._ahead_s(actor, machine)) for machine, actor in actors.items()}

    def _actor(self, node: str) -> Any:
        server = self._ray.remote(MachineServer)
        return server.options(num_cpus=0, scheduling_strategy=on_node(node), runtime_env=SEES_GPUS).remote()

    def _get(self, reference: Any, machine: str) -> Any:
        """Return what a starting part answers; its errors are ours."""
        from ray.exceptions import GetTimeoutError, RayError, RayTaskError

        try:
            return self._ray.get(reference, timeout=self._start_timeout_s)
        except GetTimeoutError:
            problem = f"machine {machine!r} has not started its part after {self._start_timeout_s:g} s"
            raise WorkerFailed(problem, "raise start_timeout_s, or look for what keeps it busy") from None
        except RayTaskError as error:
            if isinstance(error.cause, HetError):
                raise error.cause from None
            raise _on(machine, error) from error
        except RayError as error:
            raise _on(machine, error) from error

    def _ahead_s(self, actor: Any, machine: str) -> float:
        """Return how far a machine's clock is ahead of this one's, from the quickest of some answers."""
        answers = []
        for _ in range(_NUM_PINGS):
            asked_s = time.monotonic()
            there_s = self._get(actor.clock_s.remote(), machine)
            heard_s = time.monotonic()
            answers.append((heard_s - asked_s, there_s - (asked_s + heard_s) / 2))
        return float(min(answers)[1])

    def close(self) -> None:
        """Stop the parts on all machines. May be repeated."""
        if self._ray is None:
            return
        from ray.exceptions import RayError

        ray, self._ray = self._ray, None
        self._flights.clear()
        self._unfinished.clear()
        if self._servers:
            with suppress(RayError):
                closing = [server.actor.close.remote() for server in self._servers.values()]
                ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_S)
        for server in self._servers.values():
            ray.kill(server.actor)
        self._servers.clear()
        if self._has_connected:
            ray.shutdown()

    @property
    def stall_limit_s(self) -> float | None:
        """The limit of each part on its machine, and of what is heard of them."""
        return self._stall_limit_s

    @stall_limit_s.setter
    def stall_limit_s(self, seconds: float | None) -> None:
        self._stall_limit_s = seconds
        for server in self._servers.values():
            server.actor.limit_stalls.remote(seconds)

    def submit(self, arrays: list[Array], session: int = 0) -> int:
        """Hand the parts of one input out. Waits while `capacity` inputs are in flight."""
        ray = self._running()
        index = self._next_index
        self._next_index += 1
        while not self.has_room():
            self.wait(None, HEED_S)
        given = dict(zip(self._program.inputs, arrays, strict=True))
        known: dict[str, Any] = {n: a if a.nbytes <= _IN_CALL_BYTES else ray.put(a) for n, a in given.items()}
        runs = []
        for number, part in enumerate(self._parts):
            server = self._servers[part.machine_of(index)]
            run = server.actor.run.options(num_returns=len(part.makes) + 1)
            *made, times = run.remote(number, *(known[name] for name in part.reads))
            known.update(zip(part.makes, made, strict=True))
            runs.append(times)
        there = {**self._program.params, **{n: np.array(a) for n, a in given.items() if n in self._program.outputs}}
        outputs = tuple(there[n] if n in there else known[n] for n in self._program.outputs)
        self._flights[index] = _Flight(outputs, tuple(runs))
        if runs:
            self._unfinished.append(index)
        return index

    def has_room(self, session: int = 0) -> bool:
        """Whether fewer inputs than may be in flight are unfinished: the oldest ends first."""
        while len(self._unfinished) >= self.capacity and self._ray is not None and self.is_done(self._unfinished[0]):
            self._unfinished.popleft()
        return len(self._unfinished) < self.capacity or self._ray is None

    def is_done(self, index: int) -> bool:
        """Whether all parts of an input are done."""
        ray = self._running()
        done = self._are_done(ray, index, 0.0)
        if not done:
            self._heed_stall(ray)
        return done

    def _heed_stall(self, ray: Any) -> None:
        """Give the run up if no part ends and no machine says why, as it would if its own workers went no further.

        Of a part each stage may take `stall_limit_s`.
        """
        if self._stall_limit_s is None:
            return
        runs = [run for flight in self._flights.values() for run in flight.runs]
        seconds = self._stall.look(lambda: self._progress(ray, runs))
        if seconds >= self._stall_limit_s * max(len(part.stages) for part in self._parts) + _ANSWER_S:
            machines = ", ".join(map(repr, self._servers))
            lost = PartLost(
                f"no part has ended for {seconds:.0f} s, and none of the machines {machines} says why",
                "see what Ray says of its nodes, and whether they reach each other; the next start begins anew",
            )
            self._lose(lost)
            raise lost

    def _progress(self, ray: Any, runs: Sequence[Any]) -> bytes:
        """Return what changes when a part ends, or an input comes or goes."""
        num_done = len(ray.wait(runs, num_returns=len(runs), timeout=0.0)[0]) if runs else 0
        return repr((self._next_index, len(self._flights), num_done)).encode()

    def wait(self, index: int | None, timeout_s: float, session: int = 0) -> None:
        """Wait for the parts of one input, or of the oldest that is unfinished."""
        with suppress(IndexError):  # another thread has seen the last one end
            which = self._unfinished[0] if index is None else index
            if (ray := self._ray) is not None:
                self._are_done(ray, which, timeout_s)

    def _are_done(self, ray: Any, index: int, timeout_s: float) -> bool:
        flight = self._flights.get(index)
        runs = [] if flight is None else list(flight.runs)
        return not runs or len(ray.wait(runs, num_returns=len(runs), timeout=timeout_s)[0]) == len(runs)

    def states(self, session: int) -> dict[str, Array]:
        """None: programs with states are refused."""
        return {}

    def set_states(self, session: int, given: Mapping[str, Array] | None) -> None:
        """Nothing is there to set."""

    def take(self, index: int) -> list[Array]:
        """Wait for one input's outputs. After the loss of a part everything is closed."""
        from ray.exceptions import RayError, RayTaskError

        ray = self._running()
        flight = self._flights.pop(index)
        try:
            wanted = dict.fromkeys((*flight.runs, *(o for o in flight.outputs if isinstance(o, ray.ObjectRef))))
            got = dict(zip(wanted, ray.get(list(wanted)), strict=True))
        except RayTaskError as error:
            if not isinstance(error.cause, WorkerFailed):
                raise WorkerFailed(f"a part failed on input {index}: {error.cause}", _NOT_OURS) from error
            found = _of_input(error.cause, index)
            if isinstance(found, PartLost):
                self._lose(found)
            raise found from None
        except RayError as error:
            said = str(error).strip()
            names = [repr(m) for m, s in self._servers.items() if s.actor._actor_id.hex() in said] or ["of the plan"]
            lost = PartLost(
                f"machine {', '.join(names)} was lost on input {index}: {said}",
                "see what Ray says of that node; the next start begins anew",
            )
            self._lose(lost)
            raise lost from error
        if self.record is not None:
            for number, part in enumerate(self._parts):
                ahead_s = self._servers[part.machine_of(index)].ahead_s
                runs = got[flight.runs[number]]
                self.record.extend(_here(run, part, index, ahead_s) for run in runs)
        return [np.array(got[o] if isinstance(o, ray.ObjectRef) else o) for o in flight.outputs]

    def _running(self) -> Any:
        if self._broken is not None:
            raise self._broken
        if self._ray is None:
            raise NotSupported("the module is closed", "build or load it again")
        return self._ray

    def _lose(self, error: HetError) -> None:
        self._broken = error
        self.close()


def _check_versions(machine: str, there: Mapping[str, str]) -> None:
    if other := [what for what, version in VERSIONS.items() if there.get(what) != version]:
        what = other[0]
        raise PlanMismatch(
            f"machine {machine!r} has {what} {there.get(what)}, this one {VERSIONS[what]}", "install the same on both"
        )


def _on(machine: str, error: Exception) -> WorkerFailed:
    said = str(error).strip().splitlines()
    return WorkerFailed(
        f"machine {machine!r} cannot start its part: {said[-1] if said else type(error).__name__}",
        "see what Ray says of that node, and that tvmhet is installed there as it is here",
        text=str(error),
    )


def _of_input(error: WorkerFailed, index: int) -> WorkerFailed:
    """Return a part's error with the number that the input has here: a part counts those that came to it."""
    problem = error.problem.replace(f"on input {error.input_index}", f"on input {index}")
    named: dict[str, Any] = {"device": error.device, "stage": error.stage, "text": error.text}
    return type(error)(problem, error.remedy, input_index=index, **named)


def _here(run: StageRun, part: Part, index: int, ahead_s: float) -> StageRun:
    """Return a part's run of a stage as the driver counts stages, inputs and seconds."""
    spans = {name: getattr(run, name) - ahead_s for name in ("start_s", "loaded_s", "computed_s", "end_s")}
    return replace(run, stage=part.stages[run.stage], input_index=index, **spans)
