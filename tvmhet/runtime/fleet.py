"""Everything a running program holds of the machine: workers, pipes and shared memory, taken and given back as one."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from tvmhet.cluster.local import cuda_ordinals
from tvmhet.errors import NotSupported
from tvmhet.runtime.arena import FrameLayout, Layout, Segment, StoredParams
from tvmhet.runtime.cores import check_host_runs, worker_environment
from tvmhet.runtime.crew import Crew
from tvmhet.runtime.lifetimes import clashes
from tvmhet.runtime.messages import MAX_TOKENS_IN_PIPE, Token
from tvmhet.runtime.processes import Worker, WorkerProcess, WorkerThread
from tvmhet.runtime.program import DeviceBinding, PipelineProgram
from tvmhet.runtime.states import States, frame_specs, kept_by_stages
from tvmhet.runtime.worker import Route, WorkerConfig


def default_num_frames(program: PipelineProgram) -> int:
    """Return how many inputs keep every device busy: one at each, for each stage of the plan, one on either side."""
    return 2 + len({(program.planned(stage.index), device) for stage in program.stages for device in stage.devices})


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
        self._segments: list[Segment] = []
        self._params: StoredParams | None = None  # kept while workers may still open its descriptor
        self.devices = tuple(dict.fromkeys(d for stage in program.stages for d in stage.devices))
        self.layout = FrameLayout.of(
            frame_specs(program), clashes(program), len(program.stages), num_frames, len(self.devices)
        )
        frames = Segment.create("tvmhet-frames", self.layout.size_bytes)
        self._segments.append(frames)
        self.memory = frames.memory
        self.states = States(program)
        self._kept = kept_by_stages(program)
        self._crew = Crew(self.devices)
        self.pid, self.done_fd = self._crew.pid, self._crew.done_fd

    @property
    def workers(self) -> Sequence[Worker]:
        """The workers, in order of their devices."""
        return self._crew.workers

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
            fleet._crew.wait_ready(timeout_s, "stages")
        except BaseException:
            fleet.close()
            raise
        return fleet

    def send(self, stage: int, frame: int, input_index: int, slot: int) -> None:
        """Tell the device that serves `stage` for this input that the program's inputs are there."""
        token = Token(stage, frame, input_index, False, slot)
        turn = slot // 2 if self.program.states else input_index
        self._crew.tell(self.program.stages[stage].device_of(turn), token)

    def exchange(self, kind: int, slot: int) -> int:
        """Tell every device that keeps states of a slot to store or to forget them; return how many there are."""
        keepers = {self.program.stages[stage].device_of(slot // 2) for stage in self._kept}
        for device in sorted(keepers):
            self._crew.tell(device, Token(kind, 0, 0, False, slot))
        return len(keepers)

    def close(self) -> None:
        """Stop the workers, wait for their end, and give back pipes and memory. In a forked child this does nothing."""
        if os.getpid() != self.pid:
            return
        self._crew.close()
        self._params = None
        self.states.close()
        for segment in self._segments:
            segment.close()

    def _launch(self) -> None:
        used = dict.fromkeys(name for stage in self.program.stages for name in stage.params)
        self._params = params = StoredParams.of(self.program.params, used)
        for number, device in enumerate(self.devices):
            binding = self.program.bindings[device]
            config = self._config(number, binding, params.layout, params.segment.fd)
            if runs_in_thread(binding):
                self._crew.hire(WorkerThread(config))
            else:
                fds = {config.inbound_fd, config.done_fd, config.frames_fd, config.params_fd, config.states_fd}
                fds.update(fd for routes in config.routes.values() for r in routes for fd in r.fds if fd is not None)
                self._crew.hire(WorkerProcess(config, worker_environment(binding, os.environ), sorted(fds)))

    def _config(self, number: int, binding: DeviceBinding, params: Layout, params_fd: int) -> WorkerConfig:
        own = binding.device_id
        stages = tuple(s for s in self.program.stages if own in s.devices)
        return WorkerConfig(
            worker=number,
            binding=binding,
            stages=stages,
            num_tokens={s.index: num_tokens(self.program, s.index) for s in stages},
            routes={s.index: self._routes(s.index, own) for s in stages},
            inbound_fd=self._crew.reading_end(own),
            done_fd=self._crew.done_write_fd,
            frames=self.layout,
            frames_fd=self._segments[0].fd,
            params=params,
            params_fd=params_fd,
            states=self.states.layout,
            states_fd=self.states.segment.fd,
            renewed={i: kept for i, kept in self._kept.items() if own in self.program.stages[i].devices},
        )

    def _routes(self, stage: int, own: str) -> tuple[Route, ...]:
        ends = self._crew.writing_ends()
        return tuple(
            Route(s, tuple(None if d == own else ends[d] for d in self.program.stages[s].devices))
            for s in self.program.successors(stage)
        )


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
