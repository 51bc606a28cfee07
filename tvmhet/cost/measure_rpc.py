"""Measure compiled kernels on devices that a TVM RPC tracker knows, each under the key of its device type.

    python -m tvm.exec.rpc_tracker --port 9190                                          on any machine
    python -m tvm.exec.rpc_server --tracker HOST:9190 --key t4                          on a machine with a T4

Every kernel gets a session of its own, which the server runs in a child process and ends at the time limit. Generated
kernels only: a library kernel would need torch on the other side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import relax, rpc

from tvmhet.cluster.device import DeviceType
from tvmhet.cost.measure import ArgSpec, KernelJob, Measurement, TimerLimits
from tvmhet.cost.measure_worker import argument_values, largest_difference
from tvmhet.errors import BadInput, MeasurementFailed, NotSupported

_SYSTEM_CPU = "target.llvm_get_system_cpu"


@dataclass(frozen=True, slots=True)
class Tracker:
    """A tracker at `host`:`port`. `keys` maps names of device types to their keys; a type's own name if not given."""

    host: str
    port: int
    keys: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def parse(text: str, keys: Sequence[tuple[str, str]] = ()) -> Tracker:
        """Read "host:port". Raises BadInput."""
        host, _, port = text.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise BadInput(f"the tracker is {text!r}", "write it as HOST:PORT, for example 10.0.0.5:9190")
        return Tracker(host, int(port), tuple(keys))

    def key(self, device: DeviceType) -> str:
        """Return the key under which servers with such a device register."""
        return dict(self.keys).get(device.name, device.name)

    def timers(self, devices: Sequence[DeviceType], limits: TimerLimits) -> dict[str, RemoteTimer]:
        """Return a timer for each of `devices` that a server is registered for, by name.

        Raises MeasurementFailed if the tracker cannot be reached, NotSupported for a CPU type whose server has
        another processor than this machine: times of CPU types belong to a processor.
        """
        servers = self._connect().summary()["server_info"]  # the queues leave out servers that are busy
        known = {str(server["key"]).removeprefix("server:") for server in servers}
        found = {d.name: RemoteTimer(self, d, limits) for d in devices if self.key(d) in known}
        for timer in found.values():
            timer.check_processor()
        return found

    def request(self, device: DeviceType, limit_s: float) -> Any:
        """Return a session on a server with such a device, ended by the server after `limit_s`."""
        return self._connect().request(self.key(device), session_timeout=limit_s)

    def _connect(self) -> Any:
        try:
            return rpc.connect_tracker(self.host, self.port)
        except (RuntimeError, OSError) as error:
            raise MeasurementFailed(
                f"no tracker answers at {self.host}:{self.port}: {str(error).splitlines()[0]}",
                "start one with python -m tvm.exec.rpc_tracker, and check host and port",
            ) from error


@dataclass(slots=True)
class RemoteTimer:
    """Times kernels on one device type behind a tracker, as `KernelTimer` does here."""

    tracker: Tracker
    device: DeviceType
    limits: TimerLimits = field(default_factory=TimerLimits)

    def check_processor(self) -> None:
        """Raise NotSupported if the server of a CPU type has another processor than this machine."""
        if not self.device.is_cpu:
            return
        session = self.tracker.request(self.device, self.limits.time_limit_s)
        there, here = session.get_function(_SYSTEM_CPU)(), tvm.get_global_func(_SYSTEM_CPU)()
        if str(there) != str(here):
            raise NotSupported(
                f"the server of {self.device.name!r} has a {there}, this machine a {here}: times belong to a processor",
                "profile this CPU type on its own machine, and bring the times: tvmhet database --export, --import",
            )

    def measure(self, job: KernelJob) -> Measurement:
        """Run one job. Whatever the kernel does to its server, this returns; MeasurementFailed without a tracker."""
        if not job.library.is_file():
            return Measurement("build_error", note=f"{job.library} does not exist")
        try:
            session = self.tracker.request(self.device, self.limits.time_limit_s)
        except RuntimeError as error:
            return Measurement("timeout", note=f"no server of {self.device.name!r} became free: {_first_line(error)}")
        try:
            session.upload(str(job.library))
            device = session.cpu() if self.device.is_cpu else session.cuda()
            machine = relax.VirtualMachine(session.load_module(job.library.name), device)
        except Exception as error:  # whatever the other side raises becomes a status
            return Measurement("build_error", note=_first_line(error))
        try:
            args = [_argument(spec, seed, device) for seed, spec in enumerate(job.args)]
            if job.reference is not None:
                session.upload(str(job.reference))
                reference = relax.VirtualMachine(session.load_module(job.reference.name), device)
                difference = largest_difference(_run(machine, job, args), _run(reference, job, args))
                if not difference <= job.tolerance:
                    note = f"results differ from the reference's by {difference:.2g} of their largest value"
                    return Measurement("wrong", note=f"{note}; {job.tolerance:g} is allowed")
            return self._time(machine, device, job.function, args)
        except Exception as error:
            status = "timeout" if "timeout" in str(error).lower() else "crash"
            return Measurement(status, note=_first_line(error))

    def _time(self, machine: Any, device: Any, function: str, args: Sequence[Any]) -> Measurement:
        machine.save_function(function, "tvmhet_timed", *args)
        first_s = machine.time_evaluator("tvmhet_timed", device, number=1, repeat=1)().results[0]
        wanted = max(self.limits.repeats, min(self.limits.min_total_s / first_s, 10 * self.limits.repeats))
        repeats = max(1, int(min(wanted, self.limits.budget_s / first_s)))
        times_s = tuple(machine.time_evaluator("tvmhet_timed", device, number=1, repeat=repeats)().results)
        return Measurement.of_device(times_s)

    def close(self) -> None:
        """Sessions end with their kernels; nothing is held."""


def _run(machine: Any, job: KernelJob, args: Sequence[Any]) -> Any:
    """Run a function there and return its results, by the calls that work over RPC."""
    machine.set_input(job.function, *args)
    machine.invoke_stateful(job.function)
    return machine.get_outputs(job.function)


def _argument(spec: ArgSpec, seed: int, device: Any) -> Any:
    values = argument_values(spec.shape, spec.dtype, spec.int_high, seed)
    return tvm.runtime.tensor(values, device)


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"[:500]
