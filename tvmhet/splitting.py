"""What kernels take on several devices of one type together (tensor split), for planning.

    plan(..., splits=[2, 4])            in 2 and in 4 on every device type, predicted
    plan(..., splits="splits.yaml")     or a list of the same:
        - degree: 4
          device: h100-sxm-80gb         # every type where it is not given
          times_s:                      # measured, with their collectives; kernels by their operators
            "fc1+gelu": 12e-6
          backward_times_s:             # the same of their backward passes, for training
            "fc1+gelu": 25e-6

One device's part is a model of its own (graph/cutting.py), whose kernels are priced as any others; sums over the
devices are added as all-reduces, results of the model in parts as all-gathers: of GPUs by NCCL (cost/network.py), of
CPU devices as the runtime does them. What `build` makes of a split stage is in `tvmhet.team_plans`, of a training step
in `tvmhet.training_teams`.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import yaml
from numpy.typing import NDArray

from tvmhet.cluster.device import DeviceType
from tvmhet.cluster.groups import Group
from tvmhet.cluster.spec import ClusterSpec
from tvmhet.cluster.units import duration
from tvmhet.cost.network import Network
from tvmhet.cost.table import MEASURED, Entry, TimeTable
from tvmhet.errors import BadInput, NotSupported
from tvmhet.graph.cutting import Part, part_of
from tvmhet.graph.fusion import LegalKernel
from tvmhet.graph.opgraph import OpGraph
from tvmhet.solve import Problem, Split, with_splits
from tvmhet.times import Candidates, time_table

Table = Callable[[Candidates], TimeTable]
_CANNOT = Entry(math.inf, math.inf, math.inf, "cannot run", "it cannot be split")


@dataclass(frozen=True, slots=True)
class Wish:
    """A split to be planned with: how many devices, of which type ("": every one), and times that are known."""

    degree: int
    device: str = ""
    times_s: Mapping[str, float] = field(default_factory=dict)
    backward_times_s: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if type(self.degree) is not int or self.degree < 2:
            raise BadInput(f"a split over {self.degree!r} devices", "give a whole number, at least 2")
        for name, seconds in (*self.times_s.items(), *self.backward_times_s.items()):
            if not isinstance(seconds, int | float) or not 0 < seconds <= math.inf:
                raise BadInput(f"kernel {name!r} split in {self.degree} takes {seconds!r} s", "give seconds above 0")


@dataclass(frozen=True, slots=True)
class PricedSplit:
    """Each candidate kernel's time on `degree` devices of one type, and the tensors that each of them has whole.

    `backward_s` are seconds of the backward passes, in training. `part` is what one device runs; None if all is given.
    """

    device_type: str
    degree: int
    entries: tuple[Entry, ...]
    whole: frozenset[int]
    backward_s: tuple[float, ...] = ()
    part: Part | None = None


class Backward(Protocol):
    """What prices backward passes."""

    def backward(
        self, wish: Wish, part: Part | None, candidates: Candidates | None, device: DeviceType, ahead: Sequence[Entry]
    ) -> tuple[float, ...]:
        """Return the seconds of each kernel, given those of the forward pass."""


def wishes_of(splits: Sequence[Any] | str | Path) -> tuple[Wish, ...]:
    """Return what `plan(splits=)` was given. Raises BadInput."""
    rows: Any = _read(Path(splits)) if isinstance(splits, str | Path) else splits
    if not isinstance(rows, Sequence):
        raise BadInput(f"splits are {splits!r}", "give degrees such as [2, 4], or a file: see tvmhet.splitting")
    return tuple(_wish(row) for row in rows)


def _read(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise BadInput(f"splits file {str(path)!r} cannot be read: {error}", "give a YAML list") from error


def _wish(row: Any) -> Wish:
    if isinstance(row, Wish):
        return row
    if not isinstance(row, Mapping):
        return Wish(row)
    if unknown := sorted(set(row) - {"degree", "device", "times_s", "backward_times_s"}):
        raise BadInput(f"a split has the key {unknown[0]!r}", "give degree, device, times_s and backward_times_s")
    times = [_times(row, key) for key in ("times_s", "backward_times_s")]
    return Wish(row.get("degree", 0), str(row.get("device", "")), *times)


def _times(row: Mapping[str, Any], key: str) -> dict[str, float]:
    times = row.get(key) or {}
    if not isinstance(times, Mapping):
        raise BadInput(f"{key} of a split is {times!r}", "map kernels, by their operators, to seconds")
    return {str(k): _number(v) for k, v in times.items()}


def _number(value: Any) -> Any:
    try:
        return float(value)  # YAML takes 12e-6 for text
    except (TypeError, ValueError):
        return value


def scaled_to_part(table: TimeTable, candidates: Candidates, devices: Sequence[DeviceType]) -> Table:
    """Return what prices one device's part: a known time of the whole, times the cost models' part over whole."""
    ahead = time_table(candidates, devices, None)

    def price(part: Candidates) -> TimeTable:
        ratio = seconds_ratio(time_table(part, devices, None), ahead)
        out = TimeTable.empty(table.num_kernels, [d.name for d in devices])
        for column, device in enumerate(devices):
            known = [table.entry(k, device.name) for k in range(table.num_kernels)]
            scaled = {k: _scaled(e, r) for k, (e, r) in enumerate(zip(known, ratio[:, column].tolist(), strict=True))}
            out = out.with_entries(device.name, scaled)
        return out

    return price


def scaled_where_measured(
    price: Table, table: TimeTable, candidates: Candidates, devices: Sequence[DeviceType]
) -> Table:
    """Return what prices one device's part: as `price` does, or by `scaled_to_part` what was measured whole."""
    scale = scaled_to_part(table, candidates, devices)

    def both(part: Candidates) -> TimeTable:
        out, scaled = price(part), scale(part)
        for d in (d.name for d in devices):
            known = [k for k in range(table.num_kernels) if table.entry(k, d).source in MEASURED]
            out = out.with_entries(d, {k: scaled.entry(k, d) for k in known})
        return out

    return both


def seconds_ratio(part: TimeTable, whole: TimeTable) -> NDArray[np.float64]:
    """Return part over whole, shape (kernels, device types); inf where either cannot run."""
    runs = np.isfinite(part.seconds) & np.isfinite(whole.seconds)
    return np.where(runs, np.where(runs, part.seconds, 1.0) / np.where(runs, whole.seconds, 1.0), np.inf)


def _scaled(entry: Entry, ratio: float) -> Entry:
    """The time of a part; what was measured of the whole only calibrates it."""
    if not math.isfinite(entry.seconds):
        return entry
    if not math.isfinite(ratio):
        return Entry(math.inf, math.inf, math.inf, "cannot run", "the cost model has no time of its part")
    source = "calibrated" if entry.source in MEASURED else entry.source
    return Entry(entry.seconds * ratio, entry.low * ratio, entry.high * ratio, source)


def priced_splits(
    wishes: Sequence[Wish],
    graph: OpGraph,
    candidates: Candidates,
    cluster: ClusterSpec,
    price: Table,
    training: Backward | None = None,
    parts: Callable[[int], Part | None] | None = None,
) -> tuple[PricedSplit, ...]:
    """Return the wishes that some group of the cluster has devices for, priced by `price`, backward by `training`.

    `parts` gives one device's part by the degree, where it is not that of the graph alone.
    Raises BadInput for a device type that is not in the cluster, and for times of no kernel.
    """
    if wishes and graph.num_states:
        raise NotSupported(f"splits of a model with {graph.num_states} states", "leave the splits out")
    out: list[PricedSplit] = []
    names = kernel_names(candidates)
    for wish in wishes:
        if unused := [p for p in (*wish.times_s, *wish.backward_times_s) if not fnmatch.filter(names, p)]:
            raise BadInput(
                f"a time of kernel {unused[0]!r} split in {wish.degree}: the model has no such kernel",
                "name a kernel by its operators, joined by +: see explain() of a plan",
            )
        made = parts(wish.degree) if parts else part_of(graph, wish.degree, joins=training is None)
        cut = Candidates.of(made.graph, candidates.kernels) if made else None
        table = price(cut) if cut else None
        for device in _devices(wish, cluster):
            if not any(_in_machine(g, wish.degree) for g in cluster.groups() if g.device.name == device.name):
                continue
            entries = tuple(
                _entry(wish, made, table, device, k, candidates.kernels[k], name) for k, name in enumerate(names)
            )
            back = training.backward(wish, made, cut, device, entries) if training else ()
            if any(math.isfinite(e.seconds) for e in entries):
                whole = made.whole if made else frozenset()
                out.append(PricedSplit(device.name, wish.degree, entries, whole, back, made))
    seen = [(s.device_type, s.degree) for s in out]
    if len(set(seen)) < len(seen):
        raise BadInput("two splits of one device type have the same degree", "give each once")
    return tuple(out)


def never_used(wishes: Sequence[Wish], splits: Sequence[PricedSplit]) -> tuple[str, ...]:
    """Say which wishes no plan could use."""
    known = {(s.device_type, s.degree) for s in splits}
    lost = [w for w in wishes if not any(w.degree == d for _, d in known)]
    why = "nothing of the model can be cut so, or no machine's devices can be parted into such teams"
    return tuple(f"no split over {w.degree} devices: {why}" for w in lost)


def _devices(wish: Wish, cluster: ClusterSpec) -> list[DeviceType]:
    types = cluster.device_types()
    if not wish.device:
        return list(types)
    named = [t for t in types if wish.device in (t.name, *t.aliases)]
    if not named:
        raise BadInput(
            f"a split over {wish.degree} devices of {wish.device!r}",
            f"name a type of the cluster: {', '.join(t.name for t in types) or 'it has none'}",
        )
    return named


def _in_machine(group: Group, degree: int) -> bool:
    """Do teams fill each machine of the group, so that none reaches over two?"""
    return group.num_devices > 0 and (group.num_devices // len(group.machines)) % degree == 0


def kernel_names(candidates: Candidates) -> list[str]:
    """Return how given times name each kernel: its operators, joined by +."""
    return ["+".join(candidates.names[o] for o in k.ops) for k in candidates.kernels]


def given_entry(times_s: Mapping[str, float], name: str, degree: int) -> Entry | None:
    """Return the time that was given for a kernel, by the first pattern of its name."""
    for pattern, seconds in times_s.items():
        if fnmatch.fnmatchcase(name, pattern):
            return Entry(seconds, seconds, seconds, "given", f"split in {degree}")
    return None


def _entry(
    wish: Wish, part: Part | None, table: TimeTable | None, device: DeviceType, k: int, kernel: LegalKernel, name: str
) -> Entry:
    """The time that was given or is predicted; none of a kernel with branches, or that reads sums still to be added."""
    if kernel.branches or (part is not None and not part.can_run(kernel.ops)):
        return _CANNOT
    return given_entry(wish.times_s, name, wish.degree) or _predicted(part, table, device, k, kernel)


def _predicted(part: Part | None, table: TimeTable | None, device: DeviceType, k: int, kernel: LegalKernel) -> Entry:
    """The time of one device's part, and of adding up its sums and joining results of the model."""
    if part is None or table is None:
        return _CANNOT
    entry = table.entry(k, device.name)
    if not math.isfinite(entry.seconds):
        return entry
    added = sum(all_reduce_s(device, part.degree, size) for size in part.summed_bytes(kernel.ops))
    added += sum(all_gather_s(device, part.degree, size) for size in part.joined_bytes(kernel.ops))
    return replace(entry, seconds=entry.seconds + added, low=entry.low + added, high=entry.high + added)


@lru_cache(maxsize=4096)
def all_reduce_s(device: DeviceType, degree: int, size_bytes: int) -> float:
    """Return the predicted seconds in which devices of one machine add up tensors of so many bytes."""
    if device.is_cpu:
        return added_by_host_s(device, degree, size_bytes)
    return float(Network.load().exchange("all_reduce", device, degree, [size_bytes]).seconds[0])


@lru_cache(maxsize=4096)
def all_gather_s(device: DeviceType, degree: int, size_bytes: int) -> float:
    """Return the predicted seconds in which devices of one machine join parts to a tensor of so many bytes."""
    if device.is_cpu:
        return joined_by_host_s(device, degree, size_bytes)
    return float(Network.load().exchange("all_gather", device, degree, [size_bytes]).seconds[0])


def added_by_host_s(device: DeviceType, degree: int, size_bytes: float) -> float:
    """Return the seconds in which each device writes its tensor to the host's memory and reads those of all."""
    return device.host_latency_s + (degree + 1) * size_bytes / device.host_byte_per_s


def joined_by_host_s(device: DeviceType, degree: int, size_bytes: float) -> float:
    """Return the seconds in which each device writes its part to the host's memory, and one reads the whole."""
    return device.host_latency_s + (1 / degree + 1) * size_bytes / device.host_byte_per_s


def longer_through_host_s(part: Part | None, ops: Sequence[int], device: DeviceType, *, trains: bool = False) -> float:
    """Return how much longer what operators that are split exchange takes by the host than by NCCL, in seconds.

    In both passes if it `trains`.
    """
    if part is None:
        return 0.0
    degree = part.degree
    sums = (*part.summed_bytes(ops), *(part.flowing_back_bytes(ops) if trains else ()))
    wholes = part.joined_bytes(ops)
    longer = [added_by_host_s(device, degree, n) - all_reduce_s(device, degree, n) for n in sums]
    longer += [joined_by_host_s(device, degree, n) - all_gather_s(device, degree, n) for n in wholes]
    return sum(max(0.0, s) for s in longer)


def host_note(stage: int, degree: int, longer_s: float, unit: str) -> str:
    """Return what a plan says of a stage that is split over GPUs."""
    return (
        f"stage {stage} is split over {degree} devices: what they exchange is expected to take what NCCL takes; build "
        f"passes it through the host's memory, which takes {duration(longer_s)} longer {unit}"
    )


def split_problem(
    problem: Problem, groups: Sequence[Group], splits: Sequence[PricedSplit], graph: OpGraph
) -> tuple[Problem, list[PricedSplit]]:
    """Return the problem with the splits of its groups, and the split of each group of teams, in order.

    Raises BadInput as `splits_of_groups`.
    """
    if not splits:
        return problem, []
    problem = with_whole_weights(problem, splits, graph)
    chosen = splits_of_groups(groups, splits)
    made = [Split(g, s.degree, tuple(e.seconds for e in s.entries)) for g, s in chosen]
    return with_splits(problem, made), [s for _, s in chosen]


def with_whole_weights(problem: Problem, splits: Sequence[PricedSplit], graph: OpGraph) -> Problem:
    """Return the problem, its parameters whole that any split holds whole."""
    whole = whole_of(splits)
    weights = [i for i, t in enumerate(graph.tensors) if t.is_param and t.consumers]  # as make_problem lists them
    return replace(
        problem,
        weights=tuple(replace(w, is_whole=t in whole) for w, t in zip(problem.weights, weights, strict=True)),
    )


def whole_of(splits: Sequence[PricedSplit]) -> frozenset[int]:
    """Return the tensors that the devices of some split have whole."""
    return frozenset[int]().union(*(s.whole for s in splits))


def splits_of_groups(groups: Sequence[Group], splits: Sequence[PricedSplit]) -> list[tuple[int, PricedSplit]]:
    """Return the splits of each group, smaller degrees first.

    Degrees of a group divide each other, so that teams fill machines; others are refused (BadInput).
    """
    chosen = [
        (g, s)
        for g, group in enumerate(groups)
        for s in sorted(splits, key=lambda s: s.degree)
        if group.device.name == s.device_type and _in_machine(group, s.degree)
    ]
    for (g, a), (h, b) in pairwise(chosen):
        if g == h and b.degree % a.degree:
            raise BadInput(
                f"splits in {a.degree} and in {b.degree} of {groups[g].name!r}", "give degrees that divide each other"
            )
    return chosen
