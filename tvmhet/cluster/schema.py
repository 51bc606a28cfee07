"""The shape of a cluster file and of devices.yaml. Quantities arrive as text with units and leave in SI units."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from tvmhet.cluster.document import KEY, StrictModel, shown
from tvmhet.cluster.units import Dimension, parse_quantity
from tvmhet.errors import BadClusterFile


def _quantity(dimension: Dimension, zero_ok: bool = False) -> BeforeValidator:
    def read(value: Any) -> float:
        return parse_quantity(value, dimension, KEY, zero_ok)

    return BeforeValidator(read)


Bytes = Annotated[float, _quantity(Dimension.BYTES)]
BytesOrZero = Annotated[float, _quantity(Dimension.BYTES, zero_ok=True)]
ByteRate = Annotated[float, _quantity(Dimension.BYTE_RATE)]
BitRate = Annotated[float, _quantity(Dimension.BIT_RATE)]
Seconds = Annotated[float, _quantity(Dimension.TIME, zero_ok=True)]
Frequency = Annotated[float, _quantity(Dimension.FREQUENCY)]
FlopRate = Annotated[float, _quantity(Dimension.FLOP_RATE)]
Power = Annotated[float, _quantity(Dimension.POWER)]
Price = Annotated[float, _quantity(Dimension.PRICE, zero_ok=True)]
Width = Annotated[float, _quantity(Dimension.WIDTH)]


def _from_scalar(key: str, kind: type, short: str, full: str) -> BeforeValidator:
    """Let a mapping be written short, as the value of its main `key`; `short` and `full` are examples."""

    def read(value: Any) -> Any:
        if isinstance(value, kind) and not isinstance(value, bool):
            return {key: value}
        if not isinstance(value, dict):
            what = {int: "a whole number", str: "a name"}[kind]
            raise BadClusterFile(
                f"{KEY} is {shown(value)}; it must be {what} or a mapping", f"write {KEY}: {short}, or {KEY}: {full}"
            )
        return value

    return BeforeValidator(read)


class LinkEntry(StrictModel):
    """A link: a class by name, or its own bandwidth and latency."""

    link_class: str | None = None
    bandwidth: ByteRate | None = None
    latency: Seconds | None = None


class LinkClassEntry(StrictModel):
    """A named link class of devices.yaml. Without a bandwidth it takes the device type's own."""

    bandwidth: ByteRate | None = None
    latency: Seconds
    source: dict[str, str]


LinkField = Annotated[LinkEntry, _from_scalar("link_class", str, "pcie4", "{bandwidth: 25 GB/s, latency: 5 us}")]


class NvlinkEntry(StrictModel):
    """NVLink of a device type: one direction, all links together; a bridge joins two cards only."""

    bandwidth: ByteRate
    form: Literal["built-in", "bridge"]


class DeviceEntry(StrictModel):
    """A device type. Without `like`, a target, memory, bandwidth and a float32 rate are needed."""

    like: str | None = None
    aliases: list[str] = Field(default_factory=list)
    architecture: str = ""
    target: dict[str, Any] | None = None
    sms: Annotated[int, Field(ge=1)] | None = None
    cores: Annotated[int, Field(ge=1)] | None = None
    lanes_per_sm: Annotated[int, Field(ge=0)] | None = None
    base_clock: Frequency | None = None
    boost_clock: Frequency | None = None
    memory: Bytes | None = None
    usable_memory: Bytes | None = None
    memory_bus: Width | None = None
    memory_pin_rate: BitRate | None = None
    inline_ecc: bool | None = None
    bandwidth: ByteRate | None = None
    l2: BytesOrZero | None = None
    shared_per_sm: Bytes | None = None
    max_threads_per_sm: Annotated[int, Field(ge=1)] | None = None
    rates: dict[str, FlopRate] = Field(default_factory=dict)
    launch: Seconds | None = None
    power: Power | None = None
    host_link: LinkField | None = None
    nvlink: NvlinkEntry | None = None
    price: Price | None = None
    time_table: str | None = None
    source: dict[str, str] = Field(default_factory=dict)
    notes: str = ""


class CatalogEntry(StrictModel):
    """The whole of devices.yaml."""

    version: Literal[1]
    sources: dict[str, str]
    links: dict[str, LinkClassEntry]
    defaults: dict[str, DeviceEntry]
    devices: dict[str, DeviceEntry]


class CountEntry(StrictModel):
    """How many devices of a type a node has, and what differs from the type there."""

    count: Annotated[int, Field(ge=0)]
    memory: Bytes | None = None
    price: Price | None = None
    cores: Annotated[int, Field(ge=1)] | None = None


CountField = Annotated[CountEntry, _from_scalar("count", int, "2", "{count: 2, memory: 12 GiB}")]


class NodeEntry(StrictModel):
    """`count` machines that are alike."""

    name: Annotated[str, Field(min_length=1, pattern=r"^[A-Za-z0-9_.-]+$")] | None = None
    count: Annotated[int, Field(ge=1)] = 1
    devices: dict[str, CountField]
    link: LinkField | None = None
    host_link: LinkField | None = None
    region: Annotated[str, Field(min_length=1, pattern=r"^[A-Za-z0-9_.-]+$")] = ""


class PairEntry(StrictModel):
    """The network between two kinds of node, where it differs."""

    nodes: Annotated[list[str], Field(min_length=2, max_length=2)]
    bandwidth: ByteRate
    latency: Seconds


class RegionLineEntry(StrictModel):
    """The line between two regions, one direction, shared by all transfers between them."""

    between: Annotated[list[str], Field(min_length=2, max_length=2)]
    bandwidth: ByteRate
    latency: Seconds


class NetworkEntry(StrictModel):
    """The network between nodes; bandwidth is one node's, one direction."""

    bandwidth: ByteRate
    latency: Seconds
    pairs: list[PairEntry] = Field(default_factory=list)
    regions: list[RegionLineEntry] = Field(default_factory=list)


class OfferEntry(StrictModel):
    """A device type that can be rented."""

    type: str
    price: Price
    max_count: Annotated[int, Field(ge=0)]
    provider: str = ""
    region: str = ""


class ClusterEntry(StrictModel):
    """The whole of a cluster file."""

    nodes: list[NodeEntry] = Field(default_factory=list)
    network: NetworkEntry | None = None
    market: list[OfferEntry] = Field(default_factory=list)
    device_types: dict[str, DeviceEntry] = Field(default_factory=dict)
