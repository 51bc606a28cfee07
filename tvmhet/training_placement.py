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
    modulo the number of places.
    """

    stages: tuple[tuple[str, ...], ...]
    devices: tuple[tuple[str, ...], ...]
    recompute: tuple[bool, ...]
    schedule: Schedule
    num_microbatches: int
    shares: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if {len(self.devices), len(self.recompute)} != {len(self.stages)} or not all(self.devices):
            raise BadInput(
                f"{len(self.stages)} stages, {len(self.devices)} device lists, {len(self.recompute)} recompute flags",
                "give one of each per stage, with at least one device",
            )
        self._check_shares()
        if most := [d for d in self.devices if len(d) > self.num_microbatches]:
            raise BadInput(f"{len(most[0])} replicas share {self.num_microbatches} micro-batches", "use fewer replicas")
        used = [d for devices in dict.fromkeys(self.devices) for d in devices]
        if len(used) != len(set(used)) or (
            self.schedule is not Schedule.INTERLEAVED and len(set(self.devices)) != len(self.stages)
        ):
            raise BadInput("a device serves two stages", 'only schedule "interleaved" puts several stages on a device')

    def _check_shares(self) -> None:
        if self.shares and len(self.shares) != len(self.stages):
            raise BadInput(f"{len(self.shares)} lists of shares for {len(self.stages)} stages", "give one per stage")
        for k, shares in enumerate(self.shares):
            right = sum(shares) == self.num_microbatches and len(shares) == len(self.devices[k]) and min(shares) > 0
            if shares and not right:
                raise BadInput(
                    f"the {len(self.devices[k])} replicas of stage {k} have shares {shares} of "
                    f"{self.num_microbatches} micro-batches",
                    "give each a share, at least 1, that add up to all micro-batches, or the stage none",
                )

    @classmethod
    def of_plan(cls, plan: Plan) -> TrainingPlacement:
        """Read a plan for training. Raises BadInput for a plan for inference, NotSupported for one with split stages.

        Of a stage's unlike replicas, some of which recompute, all do.
        """
        if plan.training is None:
            raise BadInput("the plan is one for inference", 'plan with mode="training"')
        if split := [s for s in plan.stages if s.degree > 1]:
            raise NotSupported(
                f"stage {split[0].index} of the plan is split over {split[0].degree} devices: "
                "no training step is made for that yet",
                "plan without splits, or use the plan's figures only",
            )
        count = plan.training.num_microbatches
        parts_of = list(zip(plan.stages, plan.training.stages, strict=True))
        stages = [[parts_of[i] for i in team] for team in plan.teams()]
        shares = tuple(_shares(parts) for parts in stages)
        return cls(
            tuple(parts[0][0].placement.ops for parts in stages),
            tuple(tuple(d for s, _ in parts for d in s.placement.devices) for parts in stages),
            tuple(any(trained.recompute for _, trained in parts) for parts in stages),
            Schedule(plan.training.schedule),
            count,
            shares if any(shares) else (),
        )

    def replica_shares(self, stage: int) -> tuple[int, ...]:
        """Return how many micro-batches each replica of a stage runs."""
        if self.shares and self.shares[stage]:
            return self.shares[stage]
        replicas = len(self.devices[stage])
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
            for k, devices in enumerate(self.devices)
            for device, own in zip(devices, self.microbatches(k), strict=True)
        }

    def _span(self, stage: int) -> int:
        if self.shares and self.shares[stage]:
            return span(self.shares[stage])
        return len(self.devices[stage])

    def _interleaved(self) -> dict[str, tuple[Action, ...]]:
        places = list(dict.fromkeys(self.devices))
        if len(self.stages) % len(places) or any(len(p) > 1 for p in places):
            raise BadInput(
                f"{len(self.stages)} stages are interleaved on {len(places)} places",
                "give every device the same number of stages, without replicas",
            )
        chunks = len(self.stages) // len(places)
        every = tuple(range(self.num_microbatches))
        return {
            place[0]: tuple(
                Action(p.backward, p.chunk * len(places) + d, p.microbatch)
                for p in interleaved_order(every, d, len(places), chunks)
            )
            for d, place in enumerate(places)
        }


def _shares(parts: Sequence[tuple[PlannedStage, TrainedStage]]) -> tuple[int, ...]:
    """Return the share of each replica of a stage; () where they are of one group."""
    if len(parts) == 1:
        return ()
    return tuple(
        passes_of_replica(trained.share, len(s.placement.devices), r)
        for s, trained in parts
        for r in range(len(s.placement.devices))
    )
