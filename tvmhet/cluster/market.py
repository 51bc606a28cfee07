"""A market: which machines can be rented, at what price, how many of each, and how they are joined.

market = Market.from_file("prices.yaml")          # also CSV, a SkyPilot catalogue, or what nvidia-smi prints
market = Market.shipped("aws")                    # the dated price file that comes with tvmhet
market.where(types=["l4", "t4"], spot=False).without("t4").with_price("l4", 0.5)

Whole instances are bought. A job that runs for hours also pays for starting them, for checkpoints and, on spot
instances, for interruptions; `Running` holds these.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tvmhet.cluster.catalog import catalog
from tvmhet.cluster.device import DeviceType
from tvmhet.cluster.document import suggest
from tvmhet.cluster.link import Link
from tvmhet.errors import BadMarket, UnknownDeviceType

#: Between instances where a price list does not say: 25 Gbit/s, as one-GPU cloud instances commonly offer.
DEFAULT_NETWORK = Link(30e-6, 25e9 / 8, "network")
#: Instances of one kind that may be rented where a price list does not say.
DEFAULT_LIMIT = 8


@dataclass(frozen=True, slots=True)
class InstanceOffer:
    """One kind of machine: `num_devices` devices of one type, its price per hour, and how many may be rented."""

    name: str
    device: DeviceType
    num_devices: int
    usd_per_h: float
    max_instances: int = DEFAULT_LIMIT
    spot: bool = False
    provider: str = ""
    region: str = ""
    link: str | Link = "auto"  # between the devices of one instance
    host_power_w: float = 0.0  # what the machine draws beyond its devices

    def __post_init__(self) -> None:
        if not (math.isfinite(self.usd_per_h) and self.usd_per_h >= 0):
            raise BadMarket(f"offer {self.name!r} costs {self.usd_per_h} USD/h", "a price is finite and 0 or more")
        if self.num_devices < 1:
            raise BadMarket(f"offer {self.name!r} has {self.num_devices} devices", "an instance has at least 1")
        if self.max_instances < 0:
            raise BadMarket(f"offer {self.name!r} is limited to {self.max_instances}", "a limit is 0 or more")
        if not (math.isfinite(self.host_power_w) and self.host_power_w >= 0):
            raise BadMarket(f"offer {self.name!r} draws {self.host_power_w} W", "a power is finite and 0 or more")

    @property
    def key(self) -> str:
        """What tells offers apart: provider, name, region, and "spot" for a spot price."""
        parts = (self.provider, self.name, self.region, "spot" if self.spot else "")
        return "/".join(p for p in parts if p)

    @property
    def power_w(self) -> float:
        """Watts of one instance at the devices' rated power."""
        return self.num_devices * self.device.power_w + self.host_power_w


@dataclass(frozen=True, slots=True)
class Running:
    """What a rented machine costs beyond the work: seconds to start, seconds per checkpoint and how often, in seconds.

    `interruptions_per_h` is how often one spot instance is taken away; the work since the last checkpoint is then lost
    and a new one is started.
    """

    startup_s: float = 0.0
    checkpoint_s: float = 0.0
    checkpoint_every_s: float = 3600.0
    interruptions_per_h: float = 0.0

    def __post_init__(self) -> None:
        values = (self.startup_s, self.checkpoint_s, self.interruptions_per_h)
        if any(not (math.isfinite(v) and v >= 0) for v in values) or not self.checkpoint_every_s > 0:
            raise BadMarket(
                f"start-up {self.startup_s} s, checkpoint {self.checkpoint_s} s every {self.checkpoint_every_s} s, "
                f"{self.interruptions_per_h} interruptions/h",
                "all are finite and 0 or more, and checkpoints are more than 0 s apart",
            )

    def hours(self, work_s: float, num_spot: int) -> float:
        """Return the expected hours from the first request for machines to the end of `work_s` seconds of work.

        An interruption of any spot instance stops the whole job. Infinite where interruptions eat all progress.
        """
        busy_s = work_s * (1.0 + self.checkpoint_s / self.checkpoint_every_s)
        lost_s = self.startup_s + min(self.checkpoint_every_s, work_s) / 2
        progress = 1.0 - num_spot * self.interruptions_per_h / 3600.0 * lost_s
        return math.inf if progress <= 0 else (self.startup_s + busy_s / progress) / 3600.0


@dataclass(frozen=True, slots=True)
class Market:
    """Offers, the network between instances, and what running costs. `date` and `source` say how far to trust it.

    Raises BadMarket when there is no offer, or two offers have one key.
    """

    offers: tuple[InstanceOffer, ...]
    network: Link = DEFAULT_NETWORK
    running: Running = field(default_factory=Running)
    date: str = ""
    source: str = ""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not any(o.max_instances for o in self.offers):
            raise BadMarket("the market offers nothing", "list at least one offer with a limit of 1 or more")
        keys = [o.key for o in self.offers]
        if twice := sorted({k for k in keys if keys.count(k) > 1}):
            raise BadMarket(f"two offers are called {twice[0]!r}", "give each its own name, provider or region")

    @staticmethod
    def from_file(path: str | Path, *, max_instances: int = DEFAULT_LIMIT) -> Market:
        """Read a price list: YAML, CSV, a SkyPilot catalogue, or what nvidia-smi printed.

        `max_instances` is the limit of offers that give none. Raises BadMarket, BadQuantity or UnknownDeviceType with
        the line.
        """
        from tvmhet.cluster.market_reader import read_market

        file = Path(path)
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            reason = e.strerror if isinstance(e, OSError) else "not UTF-8 text"
            raise BadMarket(f"{file}: cannot be read: {reason}", "give the path of a price list") from e
        return read_market(text, file.name, max_instances)

    @staticmethod
    def from_text(text: str, *, max_instances: int = DEFAULT_LIMIT) -> Market:
        """Read a price list from its text, in any of the formats of `from_file`."""
        from tvmhet.cluster.market_reader import read_market

        return read_market(text, "<text>", max_instances)

    @staticmethod
    def shipped(provider: str | None = None) -> Market:
        """Return the dated price file that comes with tvmhet, whole or one provider's.

        >>> len({o.provider for o in Market.shipped().offers}) > 3
        True
        """
        from tvmhet.cluster.market_reader import shipped_market

        return shipped_market(provider)

    def device_types(self) -> tuple[DeviceType, ...]:
        """Return the device types on offer, each once, in order."""
        return tuple({o.device.name: o.device for o in self.offers}.values())

    def where(
        self,
        *,
        types: Iterable[str] | None = None,
        providers: Iterable[str] | None = None,
        regions: Iterable[str] | None = None,
        spot: bool | None = None,
    ) -> Market:
        """Return the offers that match. Raises BadMarket where none does, UnknownDeviceType for an unknown type."""
        slugs = None if types is None else {self._slug(t) for t in types}
        where = None if providers is None else {p.lower() for p in providers}
        places = None if regions is None else set(regions)
        kept = tuple(
            o
            for o in self.offers
            if (slugs is None or o.device.name in slugs)
            and (where is None or o.provider.lower() in where)
            and (places is None or o.region in places)
            and (spot is None or o.spot == spot)
        )
        if not kept:
            have = ", ".join(sorted({o.provider for o in self.offers if o.provider})) or "no named provider"
            raise BadMarket(
                f"none of {len(self.offers)} offers matches types={slugs and sorted(slugs)}, "
                f"providers={where and sorted(where)}, regions={places and sorted(places)}, spot={spot}",
                f"it has {', '.join(d.name for d in self.device_types())} from {have}",
            )
        return dataclasses.replace(self, offers=kept)

    def without(self, device_type: str) -> Market:
        """Return the market with this type sold out. Raises BadMarket if nothing is left."""
        slug = self._slug(device_type)
        left = tuple(o for o in self.offers if o.device.name != slug)
        if not left:
            raise BadMarket(f"without {slug!r} the market offers nothing", "keep at least one type")
        return dataclasses.replace(self, offers=left)

    def with_price(self, device_type: str, factor: float) -> Market:
        """Return the market with all prices of a type multiplied by `factor`."""
        slug = self._slug(device_type)
        changed = (
            dataclasses.replace(o, usd_per_h=o.usd_per_h * factor) if o.device.name == slug else o for o in self.offers
        )
        return dataclasses.replace(self, offers=tuple(changed))

    def with_network(self, link: Link) -> Market:
        """Return the market with another network between instances."""
        return dataclasses.replace(self, network=link)

    def _slug(self, name: str) -> str:
        mine = {o.device.name for o in self.offers}
        try:
            slug = name if name in mine else catalog().find(name).name
        except UnknownDeviceType:
            raise UnknownDeviceType(f"the market has no device type {name!r}", suggest(name, mine)) from None
        if slug not in mine:
            raise UnknownDeviceType(f"the market has no device type {name!r} ({slug})", suggest(slug, mine))
        return slug
