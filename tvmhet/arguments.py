"""What users pass to `plan`, `build`, `profile` and `tune`, checked and read."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tvmhet.cluster.spec import ClusterSpec
from tvmhet.errors import BadInput, EmptyCluster
from tvmhet.graph.concurrent import CONCURRENT
from tvmhet.proposing import CHOICES, MERGE, RACE, RECOMPUTE
from tvmhet.solve import Objective
from tvmhet.solve.ablate import SEARCHES, Search, jointly
from tvmhet.solve.price_limits import PriceLimits

#: Ablations that leave out one kind of rewrite, branches at the same time, or what plans took when they ran.
LESSER_KINDS = {f"no-{kind}": CHOICES - {kind} for kind in (RECOMPUTE, MERGE, CONCURRENT, RACE)}
ABLATIONS = (*SEARCHES, "no-library", *LESSER_KINDS)


def check_cluster(cluster: object) -> None:
    """Raise BadInput for what is no cluster, EmptyCluster for one without devices."""
    if not isinstance(cluster, ClusterSpec):
        raise BadInput(
            f"the cluster is a {type(cluster).__name__}",
            "make it with ClusterSpec.from_file(path), ClusterSpec.from_local() or ClusterSpec.of({'a100': 2})",
        )
    if not cluster.groups():
        raise EmptyCluster(
            "the cluster has no device to run on" + (", only a market" if cluster.market else ""),
            "list nodes with devices and a count of at least 1",
        )


def objective_of(name: str) -> Objective:
    """Return the objective of that name. Raises BadInput."""
    known = [o.value for o in Objective]
    if name not in known:
        raise BadInput(f"objective {name!r} is unknown", f"use one of {', '.join(known)}")
    return Objective(name)


def price_limits(
    objective: Objective,
    cluster: ClusterSpec,
    deadline_s: float | None,
    budget_usd: float | None,
    throughput_per_s: float | None,
    samples: int | None,
) -> PriceLimits | None:
    """Return the limits of a price, None where the objective is another. Raises BadInput, also for missing prices."""
    if objective is not Objective.COST:
        given = {
            "deadline_s": deadline_s,
            "budget_usd": budget_usd,
            "throughput_per_s": throughput_per_s,
            "samples": samples,
        }
        if limited := [name for name, x in given.items() if x is not None]:
            raise BadInput(f"{limited[0]} was given and the objective is {objective.value!r}", 'use objective="cost"')
        return None
    if unpriced := sorted({g.device.name for g in cluster.groups() if g.num_devices and g.device.usd_per_h is None}):
        raise BadInput(
            f"the objective is cost, and {', '.join(unpriced)} {'has' if len(unpriced) == 1 else 'have'} no price",
            f"write it in the cluster file, as in devices: {{{unpriced[0]}: {{count: 1, price: 0.35 USD/h}}}}, or use "
            "cluster.with_prices({...})",
        )
    return PriceLimits(
        samples,
        math.inf if deadline_s is None else deadline_s,
        math.inf if budget_usd is None else budget_usd,
        throughput_per_s or 0.0,
    )


def ablation_of(name: str, makers: Sequence[str]) -> tuple[Search, Sequence[str], frozenset[str]]:
    """Return the search that an ablation asks for ("": the joint one), and the makers and rewrites that it leaves."""
    if name and name not in ABLATIONS:
        raise BadInput(f"ablation {name!r} is unknown", f"use one of {', '.join(ABLATIONS)}")
    if name in SEARCHES:
        return SEARCHES[name], makers, frozenset()
    if name != "no-library":
        return jointly, makers, LESSER_KINDS.get(name, CHOICES)
    if "tvm" not in makers:
        raise BadInput(f"no-library leaves none of the makers {tuple(makers)!r}", 'use makers=("tvm", "library")')
    return jointly, ("tvm",), CHOICES
