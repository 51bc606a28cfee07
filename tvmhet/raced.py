"""Plans that ran one against the other, and what each took for an input, kept for later plans.

    race of a model on a cluster:   plan A   planned 1.93 ms   ran 1.81 ms
                                    plan B   planned 1.83 ms   ran 1.96 ms     the last race counts

What devices do to each other, and what the process that feeds them takes from their cores, is in no kernel's time, so
plans that are predicted nearly alike are told apart by running them (`tvmhet.racing`).
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tvmhet import _tvm
from tvmhet.cluster.spec import ClusterSpec
from tvmhet.cost.measure import Measurement
from tvmhet.cost.measured import KernelKey, MeasuredKernels
from tvmhet.emit.lower import lowering_version
from tvmhet.errors import BadBundle, HetError
from tvmhet.graph.placement import KernelPlacement, StagePlacement
from tvmhet.graph.rewrites import Batch, batch_from
from tvmhet.ir.prepare import Prepared
from tvmhet.kernel_keys import cpu_model
from tvmhet.plans import Plan
from tvmhet.proposing import Price, variant_of
from tvmhet.rewriting import Planner, Wanted
from tvmhet.solve import Objective, Problem, Solution, Status
from tvmhet.solve.ablate import Search, Solver
from tvmhet.solve.evaluate import StageChoice, evaluate

_SOLVER = "as it ran"
_BY_CHANCE = 0.05  # all of five to seven rounds, or seven of eight


@dataclass(frozen=True, slots=True)
class Placed:
    """What makes a plan the one that it is to run, whatever it is predicted to take."""

    rewrites: tuple[Batch, ...]
    stages: tuple[StagePlacement, ...]

    @classmethod
    def of(cls, plan: Plan) -> Placed:
        """Return the placement of a plan. Tuned schedules and kernels' names are left to the one who makes it again."""
        stages = tuple(
            replace(s.placement, kernels=tuple(KernelPlacement("", k.ops, k.maker) for k in s.kernels))
            for s in plan.stages
        )
        return cls(plan.rewrites, stages)

    @property
    def devices(self) -> frozenset[str]:
        """The devices that it uses."""
        return frozenset(d for s in self.stages for d in s.devices)


@dataclass(frozen=True, slots=True)
class Raced:
    """A plan that ran: seconds of an input as planned by the times known then, and as it took, round by round."""

    placed: Placed
    planned_s: float
    rounds_s: tuple[float, ...]

    @property
    def ran_s(self) -> float:
        """The median of its rounds."""
        return statistics.median(self.rounds_s)

    def is_surely_faster(self, other: Raced) -> bool:
        """Whether it was faster in so many of the rounds that both ran that chance would hardly do it (a sign test)."""
        faster = [a < b for a, b in zip(self.rounds_s, other.rounds_s, strict=False)]
        by_chance = sum(math.comb(len(faster), k) for k in range(sum(faster), len(faster) + 1)) * 0.5 ** len(faster)
        return by_chance <= _BY_CHANCE


def keep_race(
    database: MeasuredKernels, prepared: Prepared, cluster: ClusterSpec, wanted: Wanted, raced: Sequence[Raced]
) -> None:
    """Record a race of plans of one model on one cluster for one objective."""
    times_s = tuple(s for r in raced for s in (r.planned_s, *r.rounds_s))
    note = json.dumps([_tree(r) for r in raced], separators=(",", ":"))
    database.insert(_key(prepared, cluster, wanted), Measurement("ok", times_s, note=note))


def last_race(database: MeasuredKernels, prepared: Prepared, cluster: ClusterSpec, wanted: Wanted) -> tuple[Raced, ...]:
    """Return the last race that was recorded, in its order; none where there was none.

    Raises BadBundle for a record that is none of `keep_race`.
    """
    runs = database.runs(_key(prepared, cluster, wanted))
    if not runs:
        return ()
    last = runs[-1]
    try:
        return tuple(_raced(json.loads(last.note), last.times_s))
    except (ValueError, KeyError, TypeError, HetError) as error:
        raise BadBundle(
            f"the last race of plans in {str(database.path)!r} cannot be read: {error!r}",
            'plan without races: ablate="no-race", on the command line --ablate no-race; or use another database',
        ) from error


def made_again(
    placed: Placed,
    prepared: Prepared,
    cluster: ClusterSpec,
    wanted: Wanted,
    price_on: Callable[[ClusterSpec], Price],
) -> Plan | None:
    """Return the plan of a placement by what is known now; None where it can no longer be made.

    `price_on` gives the times of kernels on a cluster: a plan of one device is priced as one that works alone.
    """
    own = cluster
    if len(placed.devices) == 1:
        used = placed.stages[0].device_type
        own = cluster.with_counts({name: int(name == used) for name in cluster.counts()})
    price = price_on(own)
    try:
        variant = variant_of(prepared, wanted.makers, price, placed.rewrites)
        group_of = {device: i for i, group in enumerate(own.groups()) for device in group.device_ids}
        choices = [
            StageChoice(tuple(variant.candidates.indices(s.kernels)), group_of[s.devices[0]], len(s.devices))
            for s in placed.stages
        ]
        plan = Planner(own, price, replace(wanted, search=_given(choices))).plan(variant)
    except (HetError, KeyError):  # a kernel that failed since, a candidate that is none any more, too little memory
        return None
    return replace(plan, cluster_key=cluster.content_hash())


def _given(choices: Sequence[StageChoice]) -> Search:
    """The search that finds certain stages. Nothing is known of how far they are from the best."""

    def found(problem: Problem, objective: Objective, _: Solver) -> Solution:
        stages, value = evaluate(problem, choices, objective)
        return Solution(stages, value, 0.0, Status.FEASIBLE, 0, _SOLVER)

    return found


def expected_s(plan: Plan, race: Sequence[Raced]) -> float:
    """Return what a plan is expected to take, after a race: what it took, scaled by what is known of its kernels since.

    A plan that did not run is expected to be as far from its prediction as the median of those that ran.
    """
    placed = Placed.of(plan)
    for raced in race:
        if raced.placed == placed:
            return raced.ran_s * plan.objective_value / raced.planned_s
    return plan.objective_value * statistics.median(r.ran_s / r.planned_s for r in race)


def _key(prepared: Prepared, cluster: ClusterSpec, wanted: Wanted) -> KernelKey:
    what = json.dumps(
        ["race by rounds", prepared.key, cluster.content_hash(), wanted.objective.value, sorted(wanted.makers)]
    )
    kinds = sorted({device.kind for device in cluster.device_types()})
    return KernelKey(
        kernel_hash=hashlib.sha256(what.encode()).hexdigest()[:32],
        target=json.dumps(kinds),
        device=cpu_model(),
        toolchain="pipelines, lowering " + ", ".join(str(lowering_version(kind)) for kind in kinds),
        tvm_version=_tvm.TVM_VERSION,
    )


def _tree(raced: Raced) -> dict[str, object]:
    placed = raced.placed
    return {
        "rounds": len(raced.rounds_s),
        "rewrites": [[asdict(rewrite) for rewrite in batch] for batch in placed.rewrites],
        "stages": [[s.device_type, s.devices, [[k.ops, k.maker] for k in s.kernels]] for s in placed.stages],
    }


def _raced(trees: Sequence[Mapping[str, Any]], times_s: Sequence[float]) -> Iterator[Raced]:
    """Yield the plans of a record. Raises ValueError unless the times are just those of their rounds."""
    start = 0
    for tree in trees:
        planned_s, *rounds_s = times_s[start : start + 1 + tree["rounds"]]
        if not rounds_s or len(rounds_s) != tree["rounds"]:
            raise ValueError(f"{len(rounds_s)} times of {tree['rounds']} rounds")
        start += 1 + len(rounds_s)
        yield Raced(_placed(tree), planned_s, tuple(rounds_s))
    if start == 0 or start != len(times_s):
        raise ValueError(f"{len(times_s)} times, of which {start} are of a plan")


def _placed(tree: Mapping[str, Any]) -> Placed:
    stages = tuple(
        StagePlacement(
            i, tuple(KernelPlacement("", tuple(ops), maker) for ops, maker in kernels), device_type, tuple(devices)
        )
        for i, (device_type, devices, kernels) in enumerate(tree["stages"])
    )
    return Placed(tuple(batch_from(batch) for batch in tree["rewrites"]), stages)
