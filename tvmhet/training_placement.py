"""Where and when a training step runs: stages of forward operators, replicas, micro-batches, schedule, recomputing."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

from tvmhet.errors import BadInput
from tvmhet.plans import Plan, TrainingFigures
from tvmhet.runtime.training_program import Action
from tvmhet.solve.schedules import Schedule, interleaved_order, linear_order, passes_of_replica, windows


@dataclass(frozen=True, slots=True)
class TrainingPlacement:
    """Where a step runs: forward operators by stage, the devices of each stage's replicas, what is recomputed, when.

    Micro-batches go to the replicas of a stage in turn. In the interleaved schedule, stage i runs on the devices of
    stage i modulo the number of places. Where the whole model is one stage, its replicas may be on unlike types, and
    `shares` says how many of the micro-batches each of them runs.
    """

    stages: tuple[tuple[str, ...], ...]
    devices: tuple[tuple[str, ...], ...]
    recompute: tuple[bool, ...]
    schedule: Schedule
    num_microbatches: int
    shares: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.shares and (
            len(self.stages) != 1
            or len(self.shares) != len(self.devices[0])
            or sum(self.shares) != self.num_microbatches
            or min(self.shares) < 1
        ):
            raise BadInput(
                f"{len(self.stages)} stages, and shares {self.shares} of {self.num_microbatches} micro-batches",
                "give the replicas of one stage a share each, at least 1, that add up to all micro-batches",
            )
        if {len(self.devices), len(self.recompute)} != {len(self.stages)} or not all(self.devices):
            raise BadInput(
                f"{len(self.stages)} stages, {len(self.devices)} device lists, {len(self.recompute)} recompute flags",
                "give one of each per stage, with at least one device",
            )
        if most := [d for d in self.devices if len(d) > self.num_microbatches]:
            raise BadInput(f"{len(most[0])} replicas share {self.num_microbatches} micro-batches", "use fewer replicas")
        used = [d for devices in dict.fromkeys(self.devices) for d in devices]
        if len(used) != len(set(used)) or (
            self.schedule is not Schedule.INTERLEAVED and len(set(self.devices)) != len(self.stages)
        ):
            raise BadInput("a device serves two stages", 'only schedule "interleaved" puts several stages on a device')

    @classmethod
    def of_plan(cls, plan: Plan) -> TrainingPlacement:
        """Read a plan for training. Raises BadInput for a plan for inference.

        Of unlike replicas, some of which recompute, all do: they share one stage.
        """
        if plan.training is None:
            raise BadInput("the plan is one for inference", 'plan with mode="training"')
        if any(s.share not in (0, plan.training.num_microbatches) for s in plan.training.stages):
            return cls._of_replicas(plan, plan.training)
        return cls(
            tuple(s.placement.ops for s in plan.stages),
            tuple(s.placement.devices for s in plan.stages),
            tuple(s.recompute for s in plan.training.stages),
            Schedule(plan.training.schedule),
            plan.training.num_microbatches,
        )

    @classmethod
    def _of_replicas(cls, plan: Plan, figures: TrainingFigures) -> TrainingPlacement:
        """Join the stages of a plan that each hold the whole model."""
        shares = [
            passes_of_replica(trained.share, len(s.placement.devices), r)
            for s, trained in zip(plan.stages, figures.stages, strict=True)
            for r in range(len(s.placement.devices))
        ]
        return cls(
            (plan.stages[0].placement.ops,),
            (tuple(d for s in plan.stages for d in s.placement.devices),),
            (any(s.recompute for s in figures.stages),),
            Schedule(figures.schedule),
            figures.num_microbatches,
            tuple(shares),
        )

    def microbatches(self, stage: int) -> tuple[tuple[int, ...], ...]:
        """Return the micro-batches of each replica of a stage."""
        if self.shares:
            ends = tuple(accumulate(self.shares, initial=0))
            return tuple(tuple(range(a, b)) for a, b in pairwise(ends))
        replicas = len(self.devices[stage])
        return tuple(
            tuple(range(r, self.num_microbatches, replicas))[: passes_of_replica(self.num_microbatches, replicas, r)]
            for r in range(replicas)
        )

    def orders(self) -> dict[str, tuple[Action, ...]]:
        """Return the passes of each device in order."""
        if self.schedule is Schedule.INTERLEAVED:
            return self._interleaved()
        replicas = [len(d) for d in self.devices]
        held = (1,) if self.shares else windows(self.schedule, replicas, self.num_microbatches)
        return {
            device: tuple(Action(p.backward, k, p.microbatch) for p in linear_order(own, held[k]))
            for k, devices in enumerate(self.devices)
            for device, own in zip(devices, self.microbatches(k), strict=True)
        }

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
