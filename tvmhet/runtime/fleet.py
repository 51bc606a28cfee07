"""Everything a running program holds of the machine: workers, pipes and shared memory, taken and given back as one."""

from __future__ import annotations

import os
import selectors
from collections.abc import Iterable
from contextlib import suppress
from time import monotonic

from tvmhet.cluster.local import cuda_ordinals
from tvmhet.errors import NotSupported, WorkerFailed
from tvmhet.runtime.arena import FrameLayout, Layout, Segment, store_params
from tvmhet.runtime.cores import check_host_runs, worker_environment
from tvmhet.runtime.messages import MAX_TOKENS_IN_PIPE, Failure, Token, receive_object, write_token
from tvmhet.runtime.processes import Worker, WorkerProcess, WorkerThread
from tvmhet.runtime.program import DeviceBinding, PipelineProgram
from tvmhet.runtime.worker import Route, WorkerConfig

_JOIN_S = 5.0


def default_num_frames(program: PipelineProgram) -> int:
    """Return how many inputs keep every device busy: one at each replica of each stage, and one on either side."""
    return 2 + sum(len(stage.devices) for stage in program.stages)


def max_num_frames(program: PipelineProgram) -> int:
    """Return how many inputs may be in flight before a token pipe could fill up."""
    tokens = max((len(program.predecessors(s.index)) + 1 for s in program.stages), default=1)
    return max(1, MAX_TOKENS_IN_PIPE // (tokens * max(1, len(program.stages))))


def check_gpus(bindings: Iterable[DeviceBinding]) -> None:
    """Raise NotSupported when a device needs a GPU that this machine does not have."""
    wanted = [b for b in bindings if b.kind == "cuda"]
    if wanted and (num_gpus := len(cuda_ordinals())) <= max(b.ordinal for b in wanted):
        have = f"only {num_gpus}" if num_gpus else "no NVIDIA GPU"
        raise NotSupported(
            f"the plan runs on {len(wanted)} GPUs, {wanted[0].device_id!r} first; this machine has {have}",
            "export the bundle and run it where the GPUs are, or plan for the devices of ClusterSpec.from_local()",
        )


class Fleet:
    """The workers of one program, started together. Use `start`; `close` gives everything back and may be repeated."""

    def __init__(self, program: PipelineProgram, num_frames: int) -> None:
        self.program = program
        self.pid = os.getpid()
        self._open_fds: list[int] = []
        self._segments: list[Segment] = []
        self.workers: list[Worker] = []
        self.devices = tuple(dict.fromkeys(d for stage in program.stages for d in stage.devices))
        specs = tuple(program.values[name] for name in sorted(program.values) if name not in program.params)
        self.layout = FrameLayout.of(specs, len(program.stages), num_frames, len(self.devices))
        frames = Segment.create("tvmhet-frames", self.layout.size_bytes)
        self._segments.append(frames)
        self.memory = frames.memory
        self._inbound = {device: self._pipe() for device in self.devices}
        self.done_fd, self._done_write_fd = self._pipe()

    @classmethod
    def start(cls, program: PipelineProgram, num_frames: int, timeout_s: float) -> Fleet:
        """Start every worker at once and wait until all have loaded their stages.

        Raises WorkerFailed with the worker's own text when one cannot, NotSupported when this host cannot run its code.
        """
        used = [program.bindings[d] for stage in program.stages for d in stage.devices]
        check_host_runs(used)
        check_gpus(used)
        fleet = cls(program, num_frames)
        try:
            fleet._launch()
            fleet._wait_ready(timeout_s)
        except BaseException:
            fleet.close()
            raise
        return fleet

    def send(self, stage: int, frame: int, input_index: int) -> None:
        """Tell the device that serves `stage` for this input that the program's inputs are there."""
        device = self.program.stages[stage].device_of(input_index)
        with suppress(BrokenPipeError):  # its worker died: the control socket says so
            write_token(self._inbound[device][1], Token(stage, frame, input_index, False))

    def close(self) -> None:
        """Stop the workers, wait for their end, and give back pipes and memory. In a forked child this does nothing."""
        if os.getpid() != self.pid:
            return
        for worker in self.workers:
            with suppress(OSError):
                worker.stop(self._inbound[worker.config.binding.device_id][1])
        for worker in self.workers:
            worker.join(_JOIN_S)
        self.workers.clear()
        for fd in self._open_fds:
            os.close(fd)
        self._open_fds.clear()
        for segment in self._segments:
            segment.close()

    def _pipe(self) -> tuple[int, int]:
        ends = os.pipe()
        self._open_fds.extend(ends)
        return ends

    def _launch(self) -> None:
        used = dict.fromkeys(name for stage in self.program.stages for name in stage.params)
        params, params_layout = store_params(self.program.params, used)
        self._segments.append(params)
        for number, device in enumerate(self.devices):
            binding = self.program.bindings[device]
            config = self._config(number, binding, params_layout, params.fd)
            if runs_in_thread(binding):
                self.workers.append(WorkerThread(config))
            else:
                fds = {config.inbound_fd, config.done_fd, config.frames_fd, config.params_fd}
                fds.update(fd for routes in config.routes.values() for r in routes for fd in r.fds if fd is not None)
                self.workers.append(WorkerProcess(config, worker_environment(binding, os.environ), sorted(fds)))

    def _config(self, number: int, binding: DeviceBinding, params: Layout, params_fd: int) -> WorkerConfig:
        own = binding.device_id
        stages = tuple(s for s in self.program.stages if own in s.devices)
        return WorkerConfig(
            worker=number,
            binding=binding,
            stages=stages,
            num_tokens={s.index: num_tokens(self.program, s.index) for s in stages},
            routes={s.index: self._routes(s.index, own) for s in stages},
            inbound_fd=self._inbound[own][0],
            done_fd=self._done_write_fd,
            frames=self.layout,
            frames_fd=self._segments[0].fd,
            params=params,
            params_fd=params_fd,
        )

    def _routes(self, stage: int, own: str) -> tuple[Route, ...]:
        return tuple(
            Route(s, tuple(None if d == own else self._inbound[d][1] for d in self.program.stages[s].devices))
            for s in self.program.successors(stage)
        )

    def _wait_ready(self, timeout_s: float) -> None:
        deadline_s = monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            for worker in self.workers:
                selector.register(worker.control, selectors.EVENT_READ, worker)
            while selector.get_map():
                events = selector.select(max(0.0, deadline_s - monotonic()))
                if not events:
                    late = ", ".join(key.data.config.binding.device_id for key in selector.get_map().values())
                    raise WorkerFailed(
                        f"the workers of {late} have not loaded their stages after {timeout_s:g} s",
                        "raise start_timeout_s, or look for what keeps this machine busy",
                    )
                for key, _ in events:
                    _expect_ready(key.data)
                    selector.unregister(key.fileobj)


def runs_in_thread(binding: DeviceBinding) -> bool:
    """Whether a device is a thread of this process rather than a process of its own."""
    return binding.kind == "cuda"


def num_tokens(program: PipelineProgram, stage: int) -> int:
    """Return how many tokens make one input of a stage ready: one per stage before it, one for the program's inputs."""
    return len(program.predecessors(stage)) + (1 if needs_source(program, stage) else 0)


def needs_source(program: PipelineProgram, stage: int) -> bool:
    """Whether the parent itself must announce an input to this stage."""
    reads_input = any(program.producer(value) is None for value in program.stages[stage].inputs)
    return reads_input or not program.predecessors(stage)


def sinks(program: PipelineProgram) -> tuple[int, ...]:
    """Return the stages that no stage reads: when all of them are done, every stage is."""
    read = {p for s in program.stages for p in program.predecessors(s.index)}
    return tuple(s.index for s in program.stages if s.index not in read)


def _expect_ready(worker: Worker) -> None:
    device = worker.config.binding.device_id
    try:
        message = receive_object(worker.control)
    except EOFError:
        raise worker_failed(device, "while it started", worker.obituary(), None, None) from None
    if isinstance(message, Failure):
        raise worker_failed(device, "while it loaded its stages", message.text, None, None)


def worker_failed(device: str, when: str, text: str, stage: str | None, input_index: int | None) -> WorkerFailed:
    """Return the error for a worker that raised or died, with what it said."""
    return WorkerFailed(
        f"the worker of device {device!r} failed {when}: {text.strip()}",
        "the text above is the worker's own; a killed worker may have run out of memory",
        device=device,
        stage=stage,
        input_index=input_index,
        text=text,
    )
