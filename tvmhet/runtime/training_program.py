"""A compiled, placed training step as the runtime sees it: stages of three functions, who runs what in which order.

    stage 0 on a, stage 1 on b, 2 micro-batches:     a: F0 F1 B0 B1 update      b: F0 B0 F1 B1 update

Plain data, checked once; no TVM here. Values are the tensors that cross a stage's boundary, once per micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from tvmhet.errors import BadGraph
from tvmhet.runtime.program import Array, DeviceBinding, ValueSpec

#: A function that returns an empty tuple: calling it makes the VM let go of the last results of `main`.
RELEASE_FUNCTION = "release"


@dataclass(frozen=True, slots=True)
class Function:
    """A Relax VM executable whose `main` takes `inputs` and returns a tuple of `outputs`, both by name.

    It also has a `RELEASE_FUNCTION`. `cubins` is a file of machine code for the CUDA source in the library.
    """

    library: Path
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    needs_library: bool = False
    cubins: Path | None = None


@dataclass(frozen=True, slots=True)
class Share:
    """The parameters of a stage that one replica updates. `reduce` adds up the replicas' sums of their gradients.

    Functions are None where there is nothing to do; sums of replica r are called `sum.<parameter>@<r>`. Each of
    `updates` renews some of the parameters, so that new values of all are never there at once.
    """

    parameters: tuple[str, ...]
    reduce: Function | None
    norm: Function | None
    updates: tuple[Function, ...]


@dataclass(frozen=True, slots=True)
class TrainingStage:
    """One stage on its replicas; replica r runs `forward[r]` and `backward[r]` of `microbatches[r]` on `devices[r]`.

    It updates `shares[r]`. Replicas on unlike device types have functions that are compiled apart.
    A forward pass waits for those of the stages `after_forward`, a backward pass for those of `after_backward`.
    `parameters` live here, with their gradients; `buffers` maps a result of `forward` to the buffer it renews. It is
    (a part of) the stage `planned` of the placement.
    """

    index: int
    devices: tuple[str, ...]
    microbatches: tuple[tuple[int, ...], ...]
    forward: tuple[Function, ...]
    backward: tuple[Function, ...]
    shares: tuple[Share, ...]
    parameters: tuple[str, ...]
    buffers: Mapping[str, str]
    after_forward: tuple[int, ...]
    after_backward: tuple[int, ...]
    planned: int

    def replica_of(self, microbatch: int) -> int:
        """Return which replica runs a micro-batch."""
        return next(r for r, own in enumerate(self.microbatches) if microbatch in own)

    def renewed_by(self, replica: int) -> tuple[str, ...]:
        """Return what of the state a replica renews: its share, the first one also the buffers."""
        made = [name for update in self.shares[replica].updates for name in update.outputs]
        return (*made, *(self.buffers.values() if replica == 0 else ()))


class Action(NamedTuple):
    """One pass of one micro-batch through one stage."""

    backward: bool
    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Noise:
    """An input of random numbers: "uniform" on [0, 1) or "normal"."""

    spec: ValueSpec
    kind: Literal["uniform", "normal"]


@dataclass(frozen=True)
class TrainingProgram:
    """A whole placed training step. `memory_bytes` is each device's limit.

    `values` cross stages, one set per micro-batch; `batch` are those that the caller gives, in order. `state` holds the
    initial parameters, buffers and the optimiser's tensors, which a step renews; `constants` stay. `orders` lists each
    device's passes. Raises BadGraph for passes that are missing or that would wait for each other for ever.
    """

    values: Mapping[str, ValueSpec]
    batch: tuple[str, ...]
    noise: tuple[Noise, ...]
    loss: str
    stages: tuple[TrainingStage, ...]
    state: Mapping[str, Array]
    constants: Mapping[str, Array]
    scalars: tuple[str, ...]
    orders: Mapping[str, tuple[Action, ...]]
    bindings: Mapping[str, DeviceBinding]
    num_microbatches: int
    memory_bytes: Mapping[str, int]
    max_norm: float | None = None

    def __post_init__(self) -> None:
        _check_orders(self)

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices in use, in order of their first stage."""
        return tuple(dict.fromkeys(d for s in self.stages for d in s.devices))

    def updates_of(self, device: str) -> tuple[Function, ...]:
        """Return the functions that a device updates parameters with, in their order."""
        return tuple(f for s in self.stages if device in s.devices for f in s.shares[s.devices.index(device)].updates)

    def waits_for(self, action: Action) -> tuple[Action, ...]:
        """Return the passes that must have ended before `action` can start."""
        stage, m = self.stages[action.stage], action.microbatch
        if not action.backward:
            return tuple(Action(False, s, m) for s in stage.after_forward)
        return (Action(False, action.stage, m), *(Action(True, s, m) for s in stage.after_backward))

    def urgencies(self) -> dict[Action, int]:
        """Return what each pass and the longest chain of passes behind it weigh: 1 for forward, 2 for backward."""
        behind: dict[Action, list[Action]] = {}
        for order in self.orders.values():
            for previous, action in zip((None, *order), order, strict=False):
                for before in (*self.waits_for(action), *([previous] if previous else [])):
                    behind.setdefault(before, []).append(action)
        out: dict[Action, int] = {}
        for action in reversed(self.sequence()):
            out[action] = 1 + action.backward + max((out[a] for a in behind.get(action, ())), default=0)
        return out

    def sequence(self) -> list[Action]:
        """Return all passes in an order in which they can run; those that would wait for ever are missing."""
        done: dict[Action, None] = {}
        at = dict.fromkeys(self.orders, 0)
        moved = True
        while moved:
            moved = False
            for device, order in self.orders.items():
                while at[device] < len(order) and all(a in done for a in self.waits_for(order[at[device]])):
                    done[order[at[device]]] = None
                    at[device] += 1
                    moved = True
        return list(done)

    def readers(self, action: Action) -> tuple[str, ...]:
        """Return the devices, apart from its own, that wait for `action`."""
        waiting = []
        for stage in self.stages:
            replica = stage.replica_of(action.microbatch)
            for backward in (False, True):
                if action in self.waits_for(Action(backward, stage.index, action.microbatch)):
                    waiting.append(stage.devices[replica])
        own = self.stages[action.stage]
        here = own.devices[own.replica_of(action.microbatch)]
        return tuple(dict.fromkeys(d for d in waiting if d != here))


def _check_orders(program: TrainingProgram) -> None:
    """Play the orders; every pass must come once, on its device, and none may wait for ever."""
    due = {
        Action(backward, s.index, m): s.devices[r]
        for s in program.stages
        for r, own in enumerate(s.microbatches)
        for m in own
        for backward in (False, True)
    }
    listed = {a: device for device, order in program.orders.items() for a in order}
    num_listed = sum(len(order) for order in program.orders.values())
    if listed != due or num_listed != len(due) or len(due) != 2 * len(program.stages) * program.num_microbatches:
        raise BadGraph(
            f"the devices' orders hold {num_listed} passes, {len(due)} are due, and they differ",
            "list every forward and backward pass once, on the device of its replica",
        )
    done = set(program.sequence())
    if stuck := next((a for a in listed if a not in done), None):
        raise BadGraph(f"device {listed[stuck]!r} would wait for ever at {stuck}", "reorder the passes of the devices")
