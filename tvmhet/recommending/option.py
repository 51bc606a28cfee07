"""An option: what one fleet takes and costs for a job, and how options are compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tvmhet.cluster.market import InstanceOffer, Running
from tvmhet.recommending.job import Goal, Job

_SAME = 1e-9  # relative difference up to which a limit counts as met


@dataclass(frozen=True, slots=True)
class Option:
    """Instances to rent and what they do for the job.

    `instances` are (offer, count); `pipelines` are (unit, copies), indices into the units of one search. `hours`,
    `usd` and `kwh` are of the whole job, None for a service. Power is the devices' rated power and the machines' own.
    `late_s`: how much later than by rate and latency a job's last input may end.
    """

    instances: tuple[tuple[InstanceOffer, int], ...]
    pipelines: tuple[tuple[int, int], ...]
    rate_per_s: float
    latency_s: float
    usd_per_h: float
    power_w: float
    hours: float | None = None
    usd: float | None = None
    kwh: float | None = None
    late_s: float = 0.0

    @property
    def devices(self) -> dict[str, int]:
        """Devices bought, by type."""
        out: dict[str, int] = {}
        for offer, count in self.instances:
            out[offer.device.name] = out.get(offer.device.name, 0) + count * offer.num_devices
        return out

    @property
    def is_homogeneous(self) -> bool:
        """Whether all devices are of one type."""
        return len(self.devices) == 1

    @property
    def num_spot(self) -> int:
        """Spot instances among them."""
        return sum(n for offer, n in self.instances if offer.spot)

    @property
    def short(self) -> str:
        """The devices as text: "2 x t4 + 3 x a100-sxm-40gb (1 spot)"."""
        spot: dict[str, int] = {}
        for offer, count in self.instances:
            if offer.spot:
                spot[offer.device.name] = spot.get(offer.device.name, 0) + count * offer.num_devices
        return " + ".join(f"{n} x {name}{_spot(n, spot.get(name, 0))}" for name, n in self.devices.items())

    @property
    def fleet(self) -> str:
        """The instances as text: "2 x gcp/n1-highmem-8 (t4)"."""
        return " + ".join(f"{n} x {o.key} ({o.num_devices} x {o.device.name})" for o, n in self.instances)

    def time(self) -> float:
        """Hours of the job; seconds per input of a service."""
        return 1.0 / self.rate_per_s if self.hours is None else self.hours

    def cost(self) -> float:
        """USD of the job; USD/h of a service."""
        return self.usd_per_h if self.usd is None else self.usd


def _spot(num: int, num_spot: int) -> str:
    return "" if not num_spot else " (spot)" if num_spot == num else f" ({num_spot} spot)"


def make_option(
    job: Job,
    running: Running,
    instances: Sequence[tuple[InstanceOffer, int]],
    pipelines: tuple[tuple[int, int], ...],
    rate_per_s: float,
    latency_s: float,
    late_s: float = 0.0,
) -> Option:
    """Return what these instances take and cost. `latency_s` is of the slowest pipeline, of training one iteration."""
    bought = tuple((o, n) for o, n in instances if n)
    usd_per_h = math.fsum([o.usd_per_h * n for o, n in bought])
    power_w = math.fsum([o.power_w * n for o, n in bought])
    if job.samples is None:
        return Option(bought, pipelines, rate_per_s, latency_s, usd_per_h, power_w)
    spot = sum(n for o, n in bought if o.spot)
    work_s = job.samples / rate_per_s + latency_s + late_s
    if job.global_batch is not None:
        work_s = math.ceil(job.samples / job.global_batch) * latency_s
    hours = running.hours(work_s, spot)
    kwh = power_w * hours / 1e3
    return Option(bought, pipelines, rate_per_s, latency_s, usd_per_h, power_w, hours, usd_per_h * hours, kwh, late_s)


def value(job: Job, option: Option) -> float:
    """Return what the job's goal makes least: see `tvmhet.recommending.job`."""
    per_input = 1.0 if job.throughput_per_s is not None else 1.0 / option.rate_per_s
    if job.goal is Goal.TIME:
        return option.time()
    if job.goal is Goal.PRICE:
        return option.usd_per_h * per_input if option.usd is None else option.usd
    return option.power_w * per_input if option.kwh is None else option.kwh


def measured(name: str, option: Option) -> float:
    """Return what the limit called `name` is on."""
    return _MEASURED[name](option)


_MEASURED: dict[str, Callable[[Option], float]] = {
    "deadline_h": lambda o: math.inf if o.hours is None else o.hours,
    "budget_usd": Option.cost,
    "throughput_per_s": lambda o: o.rate_per_s,
    "latency_ms": lambda o: o.latency_s * 1e3,
}


def meets(option: Option, limits: dict[str, float]) -> bool:
    """Does the option keep all these limits?"""
    return all(
        measured(n, option) >= v * (1 - _SAME) if n == "throughput_per_s" else measured(n, option) <= v * (1 + _SAME)
        for n, v in limits.items()
    )


def best(job: Job, options: Iterable[Option], limits: dict[str, float] | None = None) -> Option | None:
    """Return the option that keeps the limits (the job's own by default) and is best by its goal; None if none does.

    Ties go to the least cost, then (where cost is the goal of a job or of a given throughput: first) to the least time;
    then to fewer types and fewer machines.
    """
    limits = job.limits() if limits is None else limits
    kept = [(value(job, o), o) for o in options if meets(o, limits)]
    least = min((v for v, _ in kept), default=math.inf) * (1 + 10 * _SAME)
    return min((o for v, o in kept if v <= least), key=lambda o: _rank(job, o), default=None)


def _rank(job: Job, option: Option) -> tuple[float, float, float, int, int, str]:
    fixed = job.samples is not None or job.throughput_per_s is not None
    then = [_round(option.cost()), _round(option.time())]
    if job.goal is Goal.PRICE and fixed:
        then.reverse()
    count = sum(n for _, n in option.instances)
    return (_round(value(job, option)), then[0], then[1], len(option.devices), count, option.fleet)


def _round(number: float) -> float:
    return float(f"{number:.9e}")


def front(options: Iterable[Option]) -> list[Option]:
    """Return the options that no other beats in both time and cost, the cheapest first."""
    kept: list[Option] = []
    for option in sorted(options, key=lambda o: (_round(o.cost()), _round(o.time()), len(o.devices), o.fleet)):
        if not kept or option.time() < kept[-1].time() * (1 - _SAME):
            kept.append(option)
    return kept
