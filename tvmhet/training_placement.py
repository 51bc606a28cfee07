"""Where and when a training step runs: stages of forward operators, replicas, micro-batches, schedule, recomputing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvmhet.errors import BadInput, NotSupported
from tvmhet.plans import Plan, PlannedStage, TrainedStage
from tvmhet.runtime.training_program import Action
from tvmhet.solve.schedules import (
    Schedule,
    deal,
    interleaved_order,
    lags,
    linear_order,
    passes_of_replica,
    span,
)


@dataclass(frozen=True, slots=True)
class TrainingPlacement:
    """Where a step runs: forward operators by stage, the devices of each stage's replicas, what is recomputed, when.

    `shares` says, by stage, how many of the micro-batches each replica runs; the replicas of a stage without shares, or
    all where there are none, take them in turn. In the interleaved schedule, stage i runs on the devices of stage i
    modulo the number of places. `degrees` says, by stage, over how many devices it is split: each replica is a team of
    so many, which follow each other in `devices`; without them no stage is split.
    """

    stages: tuple[tuple[str, ...], ...]
    devices: tuple[tuple[str, ...], ...]
    recompute: tuple[bool, ...]
    schedule: Schedule
    num_microbatches: int
    shares: tuple[tuple[int, ...], ...] = ()
    degrees: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if {len(self.devices), len(self.recompute)} != {len(self.stages)} or not all(self.devices):
            raise BadInput(
                f"{len(self.stages)} stages, {len(self.devices)} device lists, {len(self.recompute)} recompute flags",
                "give one of each per stage, with at least one device",
            )
        self._check_degrees()
        self._check_shares()
        if (most := max(map(self.num_replicas, range(len(self.stages))), default=0)) > self.num_microbatches:
            raise BadInput(f"{most} replicas share {self.num_microbatches} micro-batches", "use fewer replicas")
        used = [d for devices in dict.fromkeys(self.devices) for d in devices]
        if len(used) != len(set(used)) or (
            self.schedule is not Schedule.INTERLEAVED and len(set(self.devices)) != len(self.stages)
        ):
            raise BadInput("a device serves two stages", 'only schedule "interleaved" puts several stages on a device')

    def _check_degrees(self) -> None:
        if self.degrees and len(self.degrees) != len(self.stages):
            raise BadInput(f"{len(self.degrees)} degrees for {len(self.stages)} stages", "give one per stage, or none")
        for k, (degree, devices) in enumerate(zip(self.degrees, self.devices, strict=False)):
            if type(degree) is not int or degree < 1 or len(devices) % degree:
                raise BadInput(
                    f"stage {k} is split over {degree!r} of its {len(devices)} devices", "give whole teams of devices"
                )

    def _check_shares(self) -> None:
        if self.shares and len(self.shares) != len(self.stages):
            raise BadInput(f"{len(self.shares)} lists of shares for {len(self.stages)} stages", "give one per stage")
        for k, shares in enumerate(self.shares):
            right = sum(shares) == self.num_microbatches and len(shares) == self.num_replicas(k) and min(shares) > 0
            if shares and not right:
                raise BadInput(
                    f"the {self.num_replicas(k)} replicas of stage {k} have shares {shares} of "
                    f"{self.num_microbatches} micro-batches",
                    "give each a share, at least 1, that add up to all micro-batches, or the stage none",
                )

    @classmethod
    def of_plan(cls, plan: Plan) -> TrainingPlacement:
        """Read a plan for training. Raises BadInput for a plan for inference.

        NotSupported for unlike replicas of which one is split and another not, or over more devices. Of a stage's
        unlike replicas, some of which recompute, all do.
        """
        if plan.training is None:
            raise BadInput("the plan is one for inference", 'plan with mode="training"')
        count = plan.training.num_microbatches
        parts_of = list(zip(plan.stages, plan.training.stages, strict=True))
        stages = [[parts_of[i] for i in team] for team in plan.teams()]
        shares = tuple(_shares(parts) for parts in stages)
        degrees = tuple(_degree([s for s, _ in parts]) for parts in stages)
        return cls(
            tuple(parts[0][0].placement.ops for parts in stages),
            tuple(tuple(d for s, _ in parts for d in s.placement.devices) for parts in stages),
            tuple(any(trained.recompute for _, trained in parts) for parts in stages),
            Schedule(plan.training.schedule),
            count,
            shares if any(shares) else (),
            degrees if any(d > 1 for d in degrees) else (),
        )

    @property
    def team_sizes(self) -> tuple[int, ...]:
        """The devices of each replica, by stage: 1 where it is not split."""
        return self.degrees or (1,) * len(self.stages)

    def num_replicas(self, stage: int) -> int:
        """Return how many replicas a stage has."""
        return len(self.devices[stage]) // self.team_sizes[stage]

    def teams(self, stage: int) -> tuple[tuple[str, ...], ...]:
        """Return the devices of each replica of a stage."""
        size, devices = self.team_sizes[stage], self.devices[stage]
        return tuple(devices[i : i + size] for i in range(0, len(devices), size))

    def replica_shares(self, stage: int) -> tuple[int, ...]:
        """Return how many micro-batches each replica of a stage runs."""
        if self.shares and self.shares[stage]:
            return self.shares[stage]
        replicas = self.num_replicas(stage)
        return tuple(passes_of_replica(self.num_microbatches, replicas, r) for r in range(replicas))

    def microbatches(self, stage: int) -> tuple[tuple[int, ...], ...]:
        """Return the micro-batches of each replica of a stage."""
        return deal(self.replica_shares(stage))

    def orders(self) -> dict[str, tuple[Action, ...]]:
        """Return the passes of each device in order."""
        if self.schedule is Schedule.INTERLEAVED:
            return self._interleaved()
        lag = lags(self.schedule, [self._span(k) for k in range(len(self.stages))], self.num_microbatches)
        return {
            device: tuple(Action(p.backward, k, p.microbatch) for p in linear_order(own, lag[k]))
            for k in range(len(self.stages))
            for team, own in zip(self.teams(k), self.microbatches(k), strict=True)
            for device in team
        }

    def _span(self, stage: int) -> int:
        if self.shares and self.shares[stage]:
            return span(self.shares[stage])
        return self.num_replicas(stage)

    def _interleaved(self) -> dict[str, tuple[Action, ...]]:
        places = list(dict.fromkeys(self.devices))
        if len(self.stages) % len(places) or any(self.num_replicas(k) > 1 for k in range(len(self.stages))):
            raise BadInput(
                f"{len(self.stages)} stages are interleaved on {len(places)} places",
                "give every device the same number of stages, without replicas",
            )
        chunks = len(self.stages) // len(places)
        every = tuple(range(self.num_microbatches))
        return {
            device: tuple(
                Action(p.backward, p.chunk * len(places) + d, p.microbatch)
                for p in interleaved_order(every, d, len(places), chunks)
            )
            for d, place in enumerate(places)
            for device in place
        }


def _degree(parts: Sequence[PlannedStage]) -> int:
    """Return over how many devices the replicas of a stage are split."""
    if len(degrees := {s.degree for s in parts}) > 1:
        raise NotSupported(
            f"unlike replicas, stages {', '.join(str(s.index) for s in parts)} of the plan, are split over "
            f"{', '.join(str(s.degree) for s in parts)} devices",
            "plan without splits, or without unlike_replicas",
        )
    return degrees.pop()


def _shares(parts: Sequence[tuple[PlannedStage, TrainedStage]]) -> tuple[int, ...]:
    """Return the share of each replica of a stage; () where they are of one group."""
    if len(parts) == 1:
        return ()
    return tuple(
        passes_of_replica(trained.share, len(s.placement.devices) // s.degree, r)
        for s, trained in parts
        for r in range(len(s.placement.devices) // s.degree)
    )
