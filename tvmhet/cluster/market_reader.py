"""A price list's text to a Market. The format is told from the text, errors name the line.

date: 2025-04-21
source: where the prices come from
network: {bandwidth: 25 Gbit/s, latency: 30 us}          # between instances
running: {startup: 120 s, checkpoint: 30 s, checkpoint_every: 1 h, interruptions_per_h: 0.05}
device_types: {l4-half: {like: l4, memory: 12 GiB}}      # as in a cluster file
offers:
  - {name: g6.xlarge, type: l4, devices: 1, price: 0.80 USD/h, max_instances: 8, provider: aws}
  - {name: g6.12xlarge, type: l4, devices: 4, price: 4.60 USD/h, spot_price: 1.84 USD/h, link: pcie4, host_power: 300 W}

A cluster file with `market:` is read too: each of its entries is an instance of one device.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Annotated

from pydantic import BeforeValidator, Field

from tvmhet._data import data_path
from tvmhet.cluster.catalog import Catalog, catalog
from tvmhet.cluster.document import KEY, Document, StrictModel, read_yaml, suggest, validate
from tvmhet.cluster.link import Link
from tvmhet.cluster.market import DEFAULT_LIMIT, DEFAULT_NETWORK, InstanceOffer, Market, Running
from tvmhet.cluster.market_tables import FOREIGN_PRICE, is_table, table_market
from tvmhet.cluster.reader import read_cluster
from tvmhet.cluster.schema import ByteRate, DeviceEntry, LinkField, Power, Seconds
from tvmhet.cluster.spec import ClusterSpec
from tvmhet.cluster.units import Dimension, parse_quantity
from tvmhet.errors import BadMarket, HetError


def _read_price(value: object) -> float:
    """Return USD per hour. Other currencies are refused: nobody can tell at which rate they would convert."""
    if isinstance(value, str) and (match := FOREIGN_PRICE.fullmatch(value)):
        raise BadMarket(
            f"{KEY} is {value!r}, in {match[1]}, but prices are compared in USD/h",
            "convert every price to USD/h at one rate",
        )
    return parse_quantity(value, Dimension.PRICE, KEY, zero_ok=True)


_Price = Annotated[float, BeforeValidator(_read_price)]


class _OfferEntry(StrictModel):
    """One kind of instance; `spot_price` adds the same as a spot offer."""

    name: str | None = None
    type: str
    devices: Annotated[int, Field(ge=1)] = 1
    price: _Price | None = None
    spot_price: _Price | None = None
    max_instances: Annotated[int, Field(ge=0)] | None = None
    provider: str = ""
    region: str = ""
    link: LinkField | None = None
    host_power: Power | None = None


class _NetworkEntry(StrictModel):
    """The network between instances."""

    bandwidth: ByteRate
    latency: Seconds


class _RunningEntry(StrictModel):
    """What running costs beyond the work."""

    startup: Seconds = 0.0
    checkpoint: Seconds = 0.0
    checkpoint_every: Seconds = 3600.0
    interruptions_per_h: Annotated[float, Field(ge=0)] = 0.0


class _MarketEntry(StrictModel):
    """The whole of a price file."""

    date: str = ""
    source: str = ""
    network: _NetworkEntry | None = None
    running: _RunningEntry = _RunningEntry()
    device_types: dict[str, DeviceEntry] = Field(default_factory=dict)
    offers: list[_OfferEntry]


def read_market(text: str, source: str, max_instances: int = DEFAULT_LIMIT) -> Market:
    """Return the market that `text` describes; `source` names it in errors."""
    if is_table(text):
        return table_market(text, source, max_instances)
    document = read_yaml(text, source)
    if document.values is None:
        raise BadMarket(f"{source}: the file is empty", "list instances under offers:")
    if isinstance(document.values, dict) and "market" in document.values and "offers" not in document.values:
        return _from_cluster(read_cluster(text, source), source)
    return _market(document, max_instances)


@lru_cache(maxsize=1)
def _shipped() -> Market:
    path = data_path("prices.yaml")
    return read_market(path.read_text(encoding="utf-8"), path.name)


def shipped_market(provider: str | None) -> Market:
    """Return the shipped price file, or one provider's part. Raises BadMarket for a provider it does not have."""
    whole = _shipped()
    known = sorted({o.provider for o in whole.offers})
    if provider is not None and provider.lower() not in known:
        raise BadMarket(f"the shipped prices have no provider {provider!r}", suggest(provider.lower(), known))
    return whole if provider is None else whole.where(providers=[provider])


def _from_cluster(spec: ClusterSpec, source: str) -> Market:
    """One instance of one device for each entry under `market:` of a cluster file."""
    offers = tuple(
        InstanceOffer(o.device.name, o.device, 1, o.usd_per_h, o.max_count, False, o.provider, o.region)
        for o in spec.market
    )
    network = spec.network.link if spec.network is not None else DEFAULT_NETWORK
    return Market(offers, network, source=source)


def _market(document: Document, max_instances: int) -> Market:
    entry = validate(document, _MarketEntry)
    known = catalog()
    for name, device in entry.device_types.items():
        try:
            known = known.with_types({name: known.build(name, device)})
        except HetError as e:
            raise document.error(e, ("device_types", name)) from e
    offers: list[InstanceOffer] = []
    for i, offer in enumerate(entry.offers):
        try:
            offers += _offers(offer, known, max_instances)
        except HetError as e:
            raise document.error(e, ("offers", i)) from e
    network = DEFAULT_NETWORK
    if entry.network is not None:
        network = Link(entry.network.latency, entry.network.bandwidth, "network")
    r = entry.running
    running = Running(r.startup, r.checkpoint, r.checkpoint_every, r.interruptions_per_h)
    try:
        return Market(tuple(offers), network, running, entry.date, entry.source or document.source)
    except HetError as e:
        raise document.error(e, ("offers",)) from e


def _offers(entry: _OfferEntry, known: Catalog, max_instances: int) -> Iterator[InstanceOffer]:
    device = known.find(entry.type)
    if entry.price is None and entry.spot_price is None:
        raise BadMarket(f"the offer of {entry.type!r} has no price", "add price: 0.80 USD/h or spot_price: ...")
    link: str | Link = "auto"
    if entry.link is not None:
        link = entry.link.link_class if entry.link.link_class in ("auto", "nvlink") else known.link_of(entry.link)
    for price, spot in ((entry.price, False), (entry.spot_price, True)):
        if price is not None:
            yield InstanceOffer(
                entry.name or (device.name if entry.devices == 1 else f"{entry.devices}x{device.name}"),
                device,
                entry.devices,
                price,
                max_instances if entry.max_instances is None else entry.max_instances,
                spot,
                entry.provider,
                entry.region,
                link or "auto",
                entry.host_power or 0.0,
            )
