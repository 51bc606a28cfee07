"""A market as the solver's groups, and what it finds as options.

    offer "g6.12xlarge", 4 x l4   ─►  group "inside":   1, 2 or 4 devices of one machine, joined by its own links
                                      group "across":   any number of devices, each in another machine

Inputs come over the market's network, from a gateway that is no device. Sizes inside a machine divide each other, so
pipelines fill machines without loss. Devices of different offers are joined by the network.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

import numpy as np

from tvmhet.cluster.groups import Group
from tvmhet.cluster.market import InstanceOffer, Market
from tvmhet.cluster.nodes import Network, NodeClass
from tvmhet.cluster.spec import ClusterSpec
from tvmhet.recommending.job import Goal, Job
from tvmhet.recommending.option import Option, make_option
from tvmhet.solve import Problem
from tvmhet.solve.fleet import Bundle, Fleet, FleetProblem, fleets
from tvmhet.solve.units import Unit, Units, find_units

_GATEWAY = NodeClass("gateway", ())
_SETS = 1000  # sets of devices that a unit search looks at where one device holds the model
_SETS_SCARCE = 300  # and where none does
_MOST = 8  # devices in a unit, unless the model fits no fewer
_LARGEST = 12  # devices in a unit, where the model fits no fewer than `_MOST`
_CHEAPER = 0.98  # a larger machine is kept for its price if its devices cost so much less
#: How much more than asked for is looked at too: what to rent if predictions prove too short.
MARGINS = (1.0, 1.05, 1.1, 1.2, 1.35, 1.5, 2.0)


@dataclass(frozen=True, slots=True)
class Space:
    """The groups that offers make: `cluster` holds them, `offer_of[g]` and `sizes[g]` say what a group stands for."""

    market: Market
    cluster: ClusterSpec
    groups: tuple[Group, ...]
    offer_of: tuple[int, ...]
    sizes: tuple[frozenset[int], ...]

    @property
    def offers(self) -> tuple[InstanceOffer, ...]:
        """The market's offers."""
        return self.market.offers


def make_space(market: Market, grouped: frozenset[str] | None = None, degrees: frozenset[int] = frozenset()) -> Space:
    """Return the groups of all offers with a limit above 0, with up to `_LARGEST` devices each.

    With `grouped` only those offers (by key) make groups; the others serve pipelines of one device. Pipelines may have
    teams of `degrees` devices, which divide each other.
    """
    nodes, offer_of, sizes = [_GATEWAY], [], []
    for i, offer in enumerate(market.offers):
        if grouped is not None and offer.key not in grouped:
            continue
        device = dataclasses.replace(offer.device, usd_per_h=offer.usd_per_h / offer.num_devices)
        if offer.max_instances and offer.num_devices > 1:
            nodes.append(NodeClass(f"{offer.key}/inside", ((device, offer.num_devices),), link=offer.link))
            offer_of.append(i)
            sizes.append(frozenset(_chain(offer.num_devices, degrees)))
        total = min(offer.max_instances * offer.num_devices, _LARGEST)
        if total and (offer.max_instances > 1 or offer.num_devices == 1):
            nodes.append(NodeClass(offer.key, ((device, 1),), count=total, link=offer.link))
            offer_of.append(i)
            sizes.append(frozenset(range(1, total + 1)))
    cluster = ClusterSpec(tuple(nodes), Network(market.network))
    return Space(market, cluster, cluster.groups(), tuple(offer_of), tuple(sizes))


def _chain(size: int, degrees: frozenset[int] = frozenset()) -> list[int]:
    """Divisors of `size`, each a divisor of the next: from the size itself down by its smallest factors, those of
    `degrees` among them.

    >>> _chain(6), _chain(6, frozenset({2}))
    ([1, 3, 6], [1, 2, 6])
    """
    chain = [size]
    while chain[-1] > 1:
        n = chain[-1]
        down_to = max((d for d in degrees if d < n and n % d == 0), default=1)
        chain.append(n // next(f for f in range(2, n + 1) if n // down_to % f == 0))
    return chain[::-1]


def units_of(problem: Problem, space: Space, latency_limit_s: float = math.inf) -> Units:
    """Return the units of the space: of a few devices of any offers; of more where no few hold the model; and of as
    many of one offer as it has where they make teams, or where one does not hold the model or does not answer in time.
    """
    total = sum(o.max_instances * o.num_devices for o in space.offers)
    any_size = all(s == frozenset(range(1, max(s) + 1)) for s in space.sizes) and len(space.groups) == len(space.offers)
    teams = {g.team_of for g in problem.groups if g.team_of >= 0}

    def search(most: int, wide: Set[int]) -> Units:
        most = min(most, total)
        found = find_units(
            problem,
            max_devices=most,
            sizes=space.sizes,
            alone_up_to=[max(sizes) if g in wide else 0 for g, sizes in enumerate(space.sizes)],
            latency_limit_s=latency_limit_s,
        )
        return dataclasses.replace(found, complete=found.complete and any_size and most == total)

    most = _most(len(space.groups), _SETS)
    found = search(most, teams)
    alone = {space.groups[u.devices.index(1)].device.name for u in found.units if sum(u.devices) == 1}
    wide = teams | {g for g, group in enumerate(space.groups) if group.device.name not in alone}
    if not alone and latency_limit_s == math.inf:
        most = _most(len(space.groups), _SETS_SCARCE)
    elif wide == teams:
        return found
    found = search(most, wide)
    while not found.units and latency_limit_s == math.inf and most < min(total, _LARGEST):
        most = min(2 * most, _LARGEST)
        found = search(most, wide)
    return found


def _most(groups: int, sets: int) -> int:
    """The most devices of which there are no more than so many sets."""
    return max(d for d in range(1, _MOST + 1) if d == 1 or math.comb(groups + d, d) <= sets)


def options_of(space: Space, job: Job, units: Sequence[Unit]) -> tuple[tuple[Option, ...], bool]:
    """Return the options worth a look, each type's alone among them; and whether there can be no other.

    A pipeline of one device runs alike on any offer of its type, also on those that make no group.
    """
    rows = [(u, _demand(space, unit)) for u, unit in enumerate(units)]
    for o in sorted(set(range(len(space.offers))) - set(space.offer_of)):
        name = space.offers[o].device.name
        alike = (u for u, unit in enumerate(units) if _is_single(space, unit, name))
        rows += [(u, tuple(int(i == o) for i in range(len(space.offers)))) for u in list(alike)[:1]]
    demand = tuple(d for _, d in rows)
    bundles = tuple(Bundle(o.num_devices, o.max_instances, _cost(o, job)) for o in space.offers)
    problem = FleetProblem(demand, tuple(units[u].rate_per_s for u, _ in rows), bundles)
    rates = _asked_rates(space, job)
    hourly = job.budget_usd is not None and job.is_service and job.goal is not Goal.ENERGY
    costs = [job.budget_usd / m for m in MARGINS] if hourly and job.budget_usd else []
    found, complete = fleets(problem, rates, costs)
    every = {f.instances: f for f in found}
    if not complete:  # the whole search may miss one type's best fleets; the narrow ones find them
        for kind in {o.device.name for o in space.offers}:
            mine = frozenset(i for i, o in enumerate(space.offers) if o.device.name == kind)
            for fleet in fleets(problem.only(mine), rates, costs)[0]:
                every.setdefault(fleet.instances, fleet)
    unit_of = [u for u, _ in rows]
    return tuple(_option(space, job, units, every[n], unit_of) for n in sorted(every)), complete


def _is_single(space: Space, unit: Unit, name: str) -> bool:
    return sum(unit.devices) == 1 and space.groups[unit.devices.index(1)].device.name == name


def _cost(offer: InstanceOffer, job: Job) -> float:
    return offer.power_w if job.goal is Goal.ENERGY else offer.usd_per_h


def _demand(space: Space, unit: Unit) -> tuple[int, ...]:
    used = np.zeros(len(space.offers), int)
    for group, count in enumerate(unit.devices):
        used[space.offer_of[group]] += count
    return tuple(int(n) for n in used)


def _asked_rates(space: Space, job: Job) -> list[float]:
    """Rates that the limits ask for; where spot instances make it vary, the one without interruptions."""
    asked = [job.throughput_per_s * m for m in MARGINS] if job.throughput_per_s is not None else []
    if job.deadline_h is not None and job.samples is not None:
        running = space.market.running
        work_s = (job.deadline_h * 3600 - running.startup_s) / (1 + running.checkpoint_s / running.checkpoint_every_s)
        asked += [m * job.samples / work_s for m in (1.001, *MARGINS)] if work_s > 0 else []
    return asked


def _option(space: Space, job: Job, units: Sequence[Unit], fleet: Fleet, unit_of: Sequence[int]) -> Option:
    """The option of a fleet, whose rows stand for units."""
    copies: dict[int, int] = {}
    for row, n in fleet.units:
        copies[unit_of[row]] = copies.get(unit_of[row], 0) + n
    bought = tuple(zip(space.offers, fleet.instances, strict=True))
    latency_s, late_s = max(units[u].latency_s for u in copies), max(units[u].late_s for u in copies)
    pipelines = tuple(sorted(copies.items()))
    return make_option(job, space.market.running, bought, pipelines, fleet.rate_per_s, latency_s, late_s)


def pick_offers(
    market: Market, limit: int, rate_of: Callable[[str], float]
) -> tuple[Market, frozenset[str] | None, str]:
    """Return the offers of the types that cost least for what they do, about `limit` of them to make groups of (None:
    all), and what was left out.

    `rate_of` gives the results per second of one device of a type, 0 where the model does not fit. Of each type the
    smallest machine stays, a larger one if its devices cost less, and the largest if one device does not hold the
    model; of the types those that no other beats in both speed and price per device, then those with the best price
    per result, and the one with the most memory.
    """
    if len(market.offers) <= limit:
        return market, None, ""
    per_type: dict[str, list[InstanceOffer]] = {}
    for offer in market.offers:
        per_type.setdefault(offer.device.name, []).append(offer)
    rate = {n: rate_of(n) for n in per_type}
    chosen: dict[str, list[InstanceOffer]] = {}
    for name, offers in per_type.items():
        small = min(offers, key=lambda o: (o.num_devices, o.usd_per_h, o.key))
        cheap = min(offers, key=lambda o: (o.usd_per_h / o.num_devices, o.num_devices, o.key))
        mine = [small]
        if cheap.usd_per_h / cheap.num_devices < _CHEAPER * small.usd_per_h / small.num_devices:
            mine.append(cheap)
        if not rate[name]:
            mine.append(max(offers, key=lambda o: (o.num_devices, -o.usd_per_h, o.key)))
        chosen[name] = list(dict.fromkeys(mine))
    price = {n: min(o.usd_per_h / o.num_devices for o in c) for n, c in chosen.items()}

    def rank(n: str) -> tuple[int, float, str]:
        beaten = any(
            rate[m] >= rate[n] and price[m] <= price[n] and (rate[m], -price[m]) != (rate[n], -price[n]) for m in chosen
        )
        return (int(beaten), price[n] / rate[n] if rate[n] else math.inf, n)

    names = sorted(chosen, key=rank)
    roomy = max(names, key=lambda n: (chosen[n][0].device.memory_bytes, n))
    kept: list[InstanceOffer] = list(chosen[roomy])
    for name in names:
        if name != roomy and len(kept) + len(chosen[name]) <= limit:
            kept += chosen[name]
    left = sorted({n for n in chosen} - {o.device.name for o in kept})
    types = {o.device.name for o in kept}
    shown = tuple(o for o in market.offers if o.device.name in types)
    lacking = ", ".join(left) or "none"
    note = f"{len(shown)} of {len(market.offers)} offers were compared; not compared types: {lacking}"
    return dataclasses.replace(market, offers=shown), frozenset(o.key for o in kept), note
