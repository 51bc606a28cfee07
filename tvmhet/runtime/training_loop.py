"""A device's own loop in training: its passes in their order, each as soon as what it waits for is there; then update.

    wait ─► F0 ─► F1 ─► B0 ─► ... ─► [exchange sums] ─► [exchange norms] ─► update into the other generation ─► done

What a forward pass keeps for its backward pass stays on the device. Gradients are summed there; replicas of a stage
exchange their sums through shared memory, and each updates its share of the parameters.
"""

from __future__ import annotations

import importlib
import math
import socket
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvmhet.runtime import vm
from tvmhet.runtime.arena import Segment
from tvmhet.runtime.messages import Failure, Token, send_object, write_token
from tvmhet.runtime.program import Array, DeviceBinding
from tvmhet.runtime.tensors import empty_aligned
from tvmhet.runtime.training_device import DeviceMemory, HostMemory
from tvmhet.runtime.training_gpu import GpuMemory
from tvmhet.runtime.training_mail import (
    BACKWARD,
    FORWARD,
    NORMED,
    NUM_KINDS,
    START,
    SUMMED,
    TURN,
    Mailbox,
    Stopped,
)
from tvmhet.runtime.training_memory import TrainingMemory
from tvmhet.runtime.training_noise import draw
from tvmhet.runtime.training_program import Action, TrainingProgram
from tvmhet.runtime.training_stage import OwnStage
from tvmhet.runtime.training_turns import NOBODY, Turns, shared_cores
from tvmhet.runtime.waiting import WaitClock

_UPDATE_RANK = 0  # after all passes
_CLIP_EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_'s


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    """Everything one worker needs. `program` comes without initial values; `outbound` are the other devices' pipes."""

    worker: int
    binding: DeviceBinding
    program: TrainingProgram
    memory: TrainingMemory
    memory_fd: int
    inbound_fd: int
    outbound: Mapping[str, int]
    done_fd: int

    @property
    def needs_library(self) -> bool:
        """Whether a function of this device calls the library."""
        own = self.binding.device_id
        stages = [s for s in self.program.stages if own in s.devices]
        return any(f.needs_library for s in stages for f in (*s.forward, *s.backward))


class TrainingLoop:
    """The stages of one device."""

    def __init__(self, config: TrainingConfig, control: socket.socket) -> None:
        if config.needs_library:
            importlib.import_module("tvmhet.emit.library")
        self._config, self._control, self._program = config, control, config.program
        self._device = config.binding.device_id
        memory = Segment.attach(config.memory_fd, config.memory.size_bytes).memory
        layout, views = config.memory, _views
        self._frames = [views(layout.frame(memory, m)) for m in range(layout.num_microbatches)]
        states = [layout.state_of(memory, g) for g in (0, 1)]
        self._sums = views(layout.sums_of(memory))
        self._board = layout.board_of(memory)
        self._scalars = views({n: self._board[n] for n in self._program.scalars})
        self._times, self._update_times = (self._board[f"{n}.{self._device}"] for n in ("times", "updates"))
        self._stash_peak, self._memory_peak = (self._board[f"{n}.{self._device}"] for n in ("stash", "memory"))
        self._waits = WaitClock()
        self._mailbox = Mailbox(config.inbound_fd)
        self._order = self._program.orders[self._device]
        urgencies = self._program.urgencies()
        self._ranks = [-urgencies[a] for a in self._order]  # who waits for a core with the lowest goes first
        self._readers = {a: self._program.readers(a) for a in self._order}
        self._memory: DeviceMemory = HostMemory() if config.binding.kind == "llvm" else GpuMemory(config.binding)
        self._own = {
            s.index: OwnStage(s, s.devices.index(self._device), config.binding, states[0], self._memory)
            for s in self._program.stages
            if self._device in s.devices
        }
        read = frozenset(n for own in self._own.values() for n in own.reads)
        self._state = self._memory.hold([views(s) for s in states], read & states[0].keys(), self._written_elsewhere())
        self._constants = self._memory.lend(_only(views(layout.constants_of(memory)), read), "constants")
        shares = [(s.index, r) for s in self._program.stages for r in range(len(s.shares))]
        self._share_number = {share: i for i, share in enumerate(shares)}
        self._turns = self._own_turns()
        shared_bytes = sum(layout.shared_bytes(self._program, self._device))
        self._memory.limit(self._program.memory_bytes[self._device], shared_bytes)

    def _written_elsewhere(self) -> frozenset[str]:
        """The names of what other devices renew."""
        return frozenset(
            name
            for stage in self._program.stages
            for replica, device in enumerate(stage.devices)
            if device != self._device
            for name in stage.renewed_by(replica)
        )

    def _own_turns(self) -> Turns:
        shared = shared_cores(self._program.bindings)
        cores = [core for core in self._config.binding.cores if core in shared]
        devices = self._program.devices

        def wait(core: int) -> None:
            self._mailbox.wait_once(TURN + NUM_KINDS * core, 0, self._serial)

        def hand(device: int, core: int) -> None:
            self._tell(TURN, core, 0, self._serial, [devices[device]])

        rows = [self._board[f"turns.{core}"] for core in cores]
        return Turns(rows, cores, devices.index(self._device), self._config.memory_fd, wait, hand)

    def run(self) -> None:
        """Serve until told to stop, or until a step fails: the parent then ends all workers."""
        step = 0
        while True:
            try:
                step = self._mailbox.next_step(step)
                self._step(step)
            except Stopped:
                return
            except Exception as error:
                text = traceback.format_exc(limit=-3)
                send_object(self._control, Failure(None, step, text, needs_memory=vm.is_out_of_memory(error)))
                return
            write_token(self._config.done_fd, Token(START, self._config.worker, step, False))

    def _step(self, step: int) -> None:
        """Run one step; `step` is the serial number that its tokens carry."""
        self._number, generation, self._seed, restores = map(int, self._board["step"])
        self._state.begin(generation, restores)
        self._serial = step
        held = peak = 0
        self._waited_s = self._waits.seconds()
        for own in self._own.values():
            own.begin()
        for row, action in enumerate(self._order):
            self._mailbox.check()
            self._await(action)
            self._turns.take(self._ranks[row])
            self._start(row)
            held += self._backward(action) if action.backward else self._forward(action)
            self._end(row)
            peak = max(peak, held)
            kind = BACKWARD if action.backward else FORWARD
            self._tell(kind, action.stage, action.microbatch, step, self._readers[action])
            self._turns.give(self._ready(row + 1))
        self._turns.take(_UPDATE_RANK)
        self._start(-1)
        self._finish(step)
        self._end(-1)
        self._turns.give()
        self._stash_peak[0] = peak
        self._memory_peak[0] = self._memory.used_bytes()

    def _start(self, row: int) -> None:
        waited = self._waits.seconds()
        self._times[row] = time.monotonic(), 0.0, waited, waited - self._waited_s

    def _end(self, row: int) -> None:
        self._waited_s = self._waits.seconds()
        self._times[row, 1:3] = time.monotonic(), self._waited_s - self._times[row, 2]

    def _await(self, action: Action) -> None:
        for token in self._awaited(action):
            self._mailbox.wait(*token)

    def _ready(self, row: int) -> int:
        """Return the rank of this device's pass `row`, NOBODY if it has none or must wait for it."""
        if row == len(self._order) or not all(self._mailbox.has(*t) for t in self._awaited(self._order[row])):
            return NOBODY
        return self._ranks[row]

    def _awaited(self, action: Action) -> Iterator[tuple[int, int, int]]:
        """The tokens of other devices without which a pass cannot start."""
        for before in self._program.waits_for(action):
            stage = self._program.stages[before.stage]
            if stage.devices[stage.replica_of(before.microbatch)] != self._device:
                kind = BACKWARD if before.backward else FORWARD
                yield kind + NUM_KINDS * before.stage, before.microbatch, self._serial

    def _exchanged(self, kind: int, stage: int, replica: int) -> None:
        """Wait for what another device adds to the update; those that share its cores may go on meanwhile."""
        token = kind + NUM_KINDS * stage, replica, self._serial
        if not self._mailbox.has(*token):
            self._turns.give()
            self._mailbox.wait(*token)
            self._turns.take(_UPDATE_RANK)

    def _tell(self, kind: int, stage: int, frame: int, step: int, devices: Sequence[str]) -> None:
        for device in devices:
            write_token(self._config.outbound[device], Token(kind + NUM_KINDS * stage, frame, step, False))

    def _forward(self, action: Action) -> int:
        """Run a forward pass; return the bytes that it keeps."""
        own, m = self._own[action.stage], action.microbatch
        frame = self._frames[m]
        noise = self._memory.lend(self._noise(own.reads, m), action[1:])
        given = self._memory.lend(_only(frame, own.forward.inputs), action[1:])
        before = {n: own.buffers.get(n, self._state.current[n]) for n in own.renewed}
        results = own.forward(given, noise, before, self._state.current, self._constants)
        for name, value in results.items():
            if name in frame:
                vm.copy(value, frame[name])
            if name in own.stage.buffers:
                own.buffers[own.stage.buffers[name]] = value
        made = {n: v for n, v in results.items() if n not in frame} if self._memory.is_shared else {**given, **results}
        held_bytes = own.keep(m, {**noise, **before, **made})
        self._memory.finish()
        return held_bytes

    def _backward(self, action: Action) -> int:
        """Run a backward pass; return the bytes that it gives back, negative."""
        own, m = self._own[action.stage], action.microbatch
        frame, (stash, held_bytes) = self._frames[m], own.release(m)
        given = self._memory.lend(_only(frame, [n for n in own.backward.inputs if n not in stash]), action[1:])
        results = own.backward(stash, given, own.sums, self._state.current, self._constants)
        for name, value in results.items():
            if name in own.sums:
                own.sums[name] = value
            else:
                vm.copy(value, frame[name])
        self._memory.finish()
        self._memory.take_back(action[1:])
        return -held_bytes

    def _noise(self, names: frozenset[str], microbatch: int) -> dict[str, Any]:
        return {
            noise.spec.name: vm.host_view(draw(noise, self._seed, i, self._number, microbatch))
            for i, noise in enumerate(self._program.noise)
            if noise.spec.name in names
        }

    def _finish(self, step: int) -> None:
        """Exchange sums and norms where there are several, then update into the other generation."""
        totals = {k: self._reduced(own, step) for k, own in self._own.items()}
        numbers = self._memory.lend({**self._scalars, **self._clipped_scale(totals, step)}, "numbers")
        row = 0
        for k, own in self._own.items():
            for update in own.updates:
                start = time.monotonic()
                for name, value in update(numbers, totals[k], self._state.current).items():
                    self._state.renew(name, value)
                self._update_times[row] = time.monotonic() - start
                row += 1
            if own.replica == 0:
                for name, value in own.buffers.items():
                    self._state.renew(name, value)
        self._memory.finish()
        self._memory.take_back("numbers")

    def _reduced(self, own: OwnStage, step: int) -> Mapping[str, Any]:
        """Return the gradients' sums over all micro-batches, for this replica's share."""
        if len(own.stage.devices) == 1:
            return own.sums
        for name, value in own.sums.items():
            vm.copy(value, self._sums[f"{name}@{own.replica}"])
        self._memory.finish()
        others = [d for d in own.stage.devices if d != self._device]
        self._tell(SUMMED, own.stage.index, own.replica, step, others)
        for r in range(len(own.stage.devices)):
            if r != own.replica:
                self._exchanged(SUMMED, own.stage.index, r)
        if own.reduce is None:
            return {}
        totals = own.reduce(self._memory.lend(_only(self._sums, own.reduce.inputs), "sums"))
        self._memory.take_back("sums")
        return totals

    def _clipped_scale(self, totals: Mapping[int, Mapping[str, Any]], step: int) -> dict[str, Any]:
        """Return `scale` so that the norm of all gradients is at most `max_norm`, as torch's clip_grad_norm_."""
        if self._program.max_norm is None:
            return {}
        for k, own in self._own.items():
            number = self._share_number[k, own.replica]
            self._board["norms"][number] = 0.0 if own.norm is None else self._number_of(own.norm(totals[k])["norm"])
            self._tell(NORMED, k, own.replica, step, [d for d in self._program.devices if d != self._device])
        for k, r in self._share_number:
            if self._program.stages[k].devices[r] != self._device:
                self._exchanged(NORMED, k, r)
        mean = float(self._board["scale"])
        norm = math.sqrt(float(self._board["norms"].sum())) * mean
        clipped = empty_aligned(self._config.memory.board.specs[1])
        clipped[...] = mean * min(1.0, self._program.max_norm / (norm + _CLIP_EPSILON))
        return {"scale": vm.host_view(clipped)}

    def _number_of(self, tensor: Any) -> float:
        """Return the one number of a float32 tensor."""
        held = empty_aligned(self._config.memory.board.specs[1])
        vm.copy(tensor, vm.host_view(held))
        self._memory.finish()
        return float(held)


def _views(arrays: Mapping[str, Array]) -> dict[str, Any]:
    return {name: vm.host_view(array) for name, array in arrays.items()}


def _only(tensors: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {n: tensors[n] for n in names if n in tensors}
