"""A plan: which operators form which kernels, which stage and devices run them, what that should take, how sure it is.

Plain data with a JSON form that is safe to open from strangers. A plan is bound to one module by its `module_key`.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from tvmhet.errors import BadBundle, BadInput
from tvmhet.graph.placement import KernelPlacement, StagePlacement
from tvmhet.graph.rewrites import Batch, Merge, batch_from
from tvmhet.report.files import write_text

PLAN_SCHEMA = 1


@dataclass(frozen=True, slots=True)
class KernelPrediction:
    """Seconds of one kernel on its stage's device type, the 80 % interval, and where the figure comes from."""

    time_s: float
    low_s: float
    high_s: float
    source: str


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """One stage: its placement, what crosses its boundary, and its predicted times for one input.

    `inputs`, `weights` and `outputs` are value names. `compute_s` and `transfer_s` are of one input on one replica;
    `load_s` is their sum over the number of replicas. `memory_bytes` is the peak on one device. Each replica runs on
    `degree` of the placement's devices together (tensor split).
    """

    placement: StagePlacement
    predictions: tuple[KernelPrediction, ...]
    inputs: tuple[str, ...]
    weights: tuple[str, ...]
    outputs: tuple[str, ...]
    compute_s: float
    transfer_s: float
    load_s: float
    memory_bytes: int
    degree: int = 1

    @property
    def index(self) -> int:
        """Position in the order of stages."""
        return self.placement.index

    @property
    def kernels(self) -> tuple[KernelPlacement, ...]:
        """Kernels in execution order."""
        return self.placement.kernels

    @property
    def devices_text(self) -> str:
        """What runs the stage: "2 x v100", or "2 x 4 split v100" for two replicas of four devices each."""
        replicas = len(self.placement.devices) // self.degree
        split = f"{self.degree} split " if self.degree > 1 else ""
        return f"{replicas} x {split}{self.placement.device_type}"


@dataclass(frozen=True, slots=True)
class PlannedLine:
    """One direction of a line between regions: the bytes of one input that cross it, and the seconds it takes them."""

    name: str
    size_bytes: int
    load_s: float


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """One interval of the simulated run: `kind` is compute, receive or send; seconds from the start."""

    stage: int
    device: str
    input_index: int
    kind: str
    start_s: float
    finish_s: float


@dataclass(frozen=True, slots=True)
class TrainedStage:
    """What training adds to a stage. Seconds of passes are of one micro-batch on one replica; bytes of one device.

    `backward_s` includes the forward pass again where the stage recomputes. `exposed_s` is the part of the all-reduce
    that nothing hides. `in_flight` counts the micro-batches whose stash a replica holds at its peak. Stages of one
    `place` share their devices (interleaving). `share` is how many micro-batches the stage's replicas run together.
    """

    place: int
    recompute: bool
    share: int
    forward_s: float
    backward_s: float
    transfer_s: float
    all_reduce_s: float
    exposed_s: float
    update_s: float
    in_flight: int
    weight_bytes: int
    stash_bytes: int


@dataclass(frozen=True, slots=True)
class TrainingFigures:
    """One iteration at a global batch. `simulated_s` is the event-driven run of it, `bubble` as in its closed form."""

    global_batch: int
    microbatch_size: int
    num_microbatches: int
    schedule: str
    optimizer: str
    pipeline_s: float
    iteration_s: float
    simulated_s: float
    bubble: float
    backward_source: str
    stages: tuple[TrainedStage, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """A complete placement with its predictions and its bound.

    `objective_value` and `lower_bound` are seconds per input for "throughput", seconds of one input for "latency", USD
    per input for "cost".
    `whole_reason` says why the model was not cut, "" if it was. `usd_per_h` is the price of the devices used, 0 when
    no price is known. `steps` is the solver's work: repeatable where seconds are not. A plan for training has its
    figures in `training`; its objective is seconds (or USD) per iteration, its period and throughput are of one sample.
    `rewrites` are made in the module before its operators are fused: kernels and stages name the operators after them,
    and the lower bound is of plans with these operators. `lines` are those between regions that the plan uses. Stages
    with the same devices take turns there. `ran_s` is what the objective took when `profile` ran the plan as it is,
    scaled by what was learned of its kernels since; 0 where it did not run.
    """

    model: str
    module_key: str
    cluster_key: str
    tvm_version: str
    objective: str
    objective_value: float
    lower_bound: float
    status: str
    solver: str
    steps: int
    latency_s: float
    period_s: float
    usd_per_h: float
    stages: tuple[PlannedStage, ...]
    timeline: tuple[TimelineEvent, ...]
    notes: tuple[str, ...] = ()
    whole_reason: str = ""
    training: TrainingFigures | None = None
    rewrites: tuple[Batch, ...] = ()
    lines: tuple[PlannedLine, ...] = ()
    ran_s: float = 0.0

    @property
    def gap(self) -> float:
        """Relative distance of the objective above the lower bound; 0 when proved optimal."""
        return max(0.0, 1.0 - self.lower_bound / self.objective_value) if self.objective_value > 0 else 0.0

    @property
    def throughput_per_s(self) -> float:
        """Expected inputs per second with the pipeline full."""
        return 1.0 / self.expected_period_s if self.expected_period_s > 0 else float("inf")

    @property
    def expected_period_s(self) -> float:
        """Seconds between two inputs: as the plan ran, else `period_s`, which is predicted from its kernels."""
        return self.ran_s if self.ran_s > 0 and self.objective == "throughput" else self.period_s

    @property
    def expected_latency_s(self) -> float:
        """Seconds of one input: as the plan ran, else `latency_s`, which is predicted from its kernels."""
        return self.ran_s if self.ran_s > 0 and self.objective == "latency" else self.latency_s

    @property
    def num_kernels(self) -> int:
        """Kernels over all stages."""
        return sum(len(s.kernels) for s in self.stages)

    def teams(self) -> tuple[tuple[int, ...], ...]:
        """Return, stage by stage, which of `stages` run it: several where training has its replicas on unlike types."""
        figures = self.training

        def key(i: int) -> tuple[int, frozenset[str]]:
            alone = figures is None or figures.stages[i].share in (0, figures.num_microbatches)
            return i if alone else -1, frozenset(self.stages[i].placement.ops)

        return tuple(tuple(same) for _, same in groupby(range(len(self.stages)), key=key))

    def stage_of(self, op: str) -> PlannedStage:
        """Return the stage that runs the operator `op`, or the merged one that does its work. Raises BadInput with the
        nearest names.
        """
        now = self.called_now(op)
        for stage in self.stages:
            if now in stage.placement.ops:
                return stage
        names = [o for s in self.stages for o in s.placement.ops]
        near = difflib.get_close_matches(op, names, n=3, cutoff=0.3)
        mend = f"did you mean {' or '.join(near)}?" if near else f"names look like {', '.join(sorted(names)[:6])}"
        raise BadInput(f"the plan has no operator {op!r} among {len(names)}", mend)

    def called_now(self, op: str) -> str:
        """Return the name of the operator that does the work of `op` after the plan's rewrites."""
        for batch in self.rewrites:
            for rewrite in batch:
                if isinstance(rewrite, Merge):
                    op = next((f"{rewrite.members[0][m.index(op)]}_merged" for m in rewrite.members if op in m), op)
        return op

    def explain(self, op: str) -> str:
        """Say where the operator `op` runs, in which kernel, how long that takes and how that is known."""
        stage = self.stage_of(op)
        op = self.called_now(op)
        place = next(i for i, k in enumerate(stage.kernels) if op in k.ops)
        kernel, guess = stage.kernels[place], stage.predictions[place]
        with_ops = ", ".join(o for o in kernel.ops if o != op)
        return (
            f"{op} runs in stage {stage.index} on {stage.devices_text}, "
            + (f"fused with {with_ops}" if with_ops else "as a kernel of its own")
            + f", made by {kernel.maker}: {guess.time_s * 1e3:.3f} ms"
            + f" ({guess.low_s * 1e3:.3f} to {guess.high_s * 1e3:.3f} ms, {guess.source})"
        )

    def compare(self, other: Plan) -> str:
        """Say what differs between this plan and `other`: objective, stages, and operators that run elsewhere."""
        lines = [f"{'':12}{'this':>14}{'other':>14}"]
        rows = (
            ("latency", "ms", self.expected_latency_s * 1e3, other.expected_latency_s * 1e3),
            ("period", "ms", self.expected_period_s * 1e3, other.expected_period_s * 1e3),
            ("price", "USD/h", self.usd_per_h, other.usd_per_h),
        )
        lines += [f"{name:12}{mine:>11.3f} {unit:<5}{theirs:>8.3f} {unit}" for name, unit, mine, theirs in rows]
        lines.append(f"{'kernels':12}{self.num_kernels:>14}{other.num_kernels:>14}")
        where = {o: s.placement.device_type for s in other.stages for o in s.placement.ops}
        moved = [
            f"{o}: {s.placement.device_type} / {where[o]}"
            for s in self.stages
            for o in s.placement.ops
            if o in where and where[o] != s.placement.device_type
        ]
        lines.append(f"operators on another device type: {len(moved)}" + (", for example" if moved else ""))
        return "\n".join([*lines, *(f"  {line}" for line in moved[:8])])

    def to_json(self) -> str:
        """Return the plan as JSON text: sorted keys, no clock, the same bytes for the same plan."""
        tree = dataclasses.asdict(self)
        for stage in tree["stages"]:
            if stage["degree"] == 1:  # as most are, and as plans were before there were others
                del stage["degree"]
        if not self.ran_s:  # likewise
            del tree["ran_s"]
        return json.dumps({"schema": PLAN_SCHEMA, **tree}, indent=1, sort_keys=True) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON; the file appears whole or not at all."""
        write_text(Path(path), self.to_json())

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan. Raises BadBundle for a file that is missing, is not a plan, or has another schema."""
        try:
            text = Path(path).read_text()
        except OSError as error:
            raise BadBundle(f"plan file {str(path)!r} cannot be read: {error.strerror}", "check the path") from error
        return Plan.from_json(text, str(path))

    @staticmethod
    def from_json(text: str, where: str = "plan") -> Plan:
        """Return the plan that `to_json` wrote."""
        try:
            tree = json.loads(text)
            schema = tree.pop("schema")
            if schema != PLAN_SCHEMA:
                raise BadBundle(f"{where} has plan schema {schema}, this tvmhet reads {PLAN_SCHEMA}", "plan again")
            return _plan(tree)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, BadBundle):
                raise
            raise BadBundle(f"{where} is not a plan: {error!r}", "write it with Plan.save") from error

    def to_dot(self) -> str:
        """Return the stages and the tensors between them as Graphviz text."""
        from tvmhet.report.dot import plan_to_dot

        return plan_to_dot(self)

    def to_trace(self) -> dict[str, Any]:
        """Return the simulated run as a Chrome trace (open it in chrome://tracing or Perfetto)."""
        from tvmhet.report.trace import plan_to_trace

        return plan_to_trace(self)

    def to_html(self, path: str | Path) -> None:
        """Write one self-contained page: the table, the timeline and every kernel. It loads nothing from a network."""
        from tvmhet.report.html import plan_to_html

        write_text(Path(path), plan_to_html(self))

    def __str__(self) -> str:
        from tvmhet.report.table import plan_to_text

        return plan_to_text(self)


def _plan(tree: Mapping[str, Any]) -> Plan:
    fields = dict(tree)
    fields["stages"] = tuple(_stage(s) for s in fields["stages"])
    fields["timeline"] = tuple(TimelineEvent(**e) for e in fields["timeline"])
    fields["notes"] = tuple(fields["notes"])
    fields["lines"] = tuple(PlannedLine(**x) for x in fields.get("lines", ()))
    fields["rewrites"] = tuple(batch_from(batch) for batch in fields.get("rewrites", ()))
    if fields.get("training") is not None:
        fields["training"] = _training(fields["training"])
    return Plan(**fields)


def _training(tree: Mapping[str, Any]) -> TrainingFigures:
    return TrainingFigures(**{**tree, "stages": tuple(TrainedStage(**s) for s in tree["stages"])})


def _stage(tree: Mapping[str, Any]) -> PlannedStage:
    fields = dict(tree)
    place = dict(fields["placement"])
    kernels = tuple(KernelPlacement(k["name"], tuple(k["ops"]), k["maker"], k["spec"]) for k in place["kernels"])
    fields["placement"] = StagePlacement(place["index"], kernels, place["device_type"], tuple(place["devices"]))
    fields["predictions"] = tuple(KernelPrediction(**p) for p in fields["predictions"])
    for name in ("inputs", "weights", "outputs"):
        fields[name] = tuple(fields[name])
    return PlannedStage(**fields)
