"""A cluster file's text, or its values, to a ClusterSpec. Every error names the place.

device_types:                                  # your own; the catalogue's are known by slug or alias
  a100-half: {like: a100, memory: 40 GiB, price: 1.10 USD/h}
nodes:
  - name: big                                  # machines big-0 and big-1
    count: 2
    devices: {a100: 4, cpu-x86-64-v3: {count: 1, cores: 8, memory: 64 GiB}}
    link: nvlink                               # or auto (the default), pcie3..5, shm, {bandwidth, latency}
    host_link: pcie4                           # the default is the device type's own
    region: east                               # of all nodes or none
  - devices: {t4: 4, l4: 0}                    # 0: may not be used
    region: west
network:                                       # one machine's, one direction
  bandwidth: 100 Gbit/s
  latency: 5 us
  pairs: [{nodes: [big, node1], bandwidth: 10 Gbit/s, latency: 30 us}]
  regions:                                     # one line that all transfers between them share, each direction
    - {between: [east, west], bandwidth: 5 Gbit/s, latency: 40 ms}
market:                                        # what could be rented
  - {type: h100, price: 2.49 USD/h, max_count: 8, provider: example, region: west}
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from tvmhet.cluster.catalog import Catalog, catalog
from tvmhet.cluster.device import DeviceType
from tvmhet.cluster.document import Document, Path, read_yaml, suggest, validate
from tvmhet.cluster.link import Link
from tvmhet.cluster.nodes import Network, NodeClass, Offer
from tvmhet.cluster.schema import ClusterEntry, CountEntry, DeviceEntry, LinkEntry, NetworkEntry, NodeEntry
from tvmhet.cluster.spec import ClusterSpec
from tvmhet.errors import BadClusterFile, BadInput, EmptyCluster, HetError

T = TypeVar("T")


def read_cluster(text: str, source: str) -> ClusterSpec:
    """Return the cluster that YAML `text` describes; `source` names it in errors."""
    document = read_yaml(text, source)
    if document.values is None:
        raise EmptyCluster(f"{source}: the file is empty", "list the machines under nodes:")
    return _Reader(document).read()


def cluster_from(values: Mapping[str, Any]) -> ClusterSpec:
    """Return the cluster that a cluster file's values describe."""
    return _Reader(Document("<values>", values, {})).read()


@dataclasses.dataclass(slots=True)
class _Reader:
    """One reading: the document, and the catalogue with the file's own types in front."""

    document: Document
    catalog: Catalog = dataclasses.field(default_factory=catalog)

    def read(self) -> ClusterSpec:
        entry = validate(self.document, ClusterEntry)
        custom = self._device_types(entry.device_types)
        nodes = tuple(self._node(i, node) for i, node in enumerate(entry.nodes))
        network = self._network(entry.network, nodes) if entry.network else None
        market = []
        for i, offer in enumerate(entry.market):
            device = self._at(("market", i, "type"), partial(self.catalog.find, offer.type))
            market.append(Offer(device, offer.price, offer.max_count, offer.provider, offer.region))
        return self._at((), lambda: ClusterSpec(nodes, network, tuple(market), custom))

    def _at(self, path: Path, make: Callable[[], T]) -> T:
        """Return what `make` returns; its errors get the place of `path` put in front."""
        try:
            return make()
        except BadInput as e:
            raise BadClusterFile(f"{self.document.at(path)}: {e.problem}", e.remedy) from e
        except HetError as e:
            raise type(e)(f"{self.document.at(path)}: {e.problem}", e.remedy) from e

    def _device_types(self, entries: Mapping[str, DeviceEntry]) -> tuple[DeviceType, ...]:
        """Return the file's own types. `like` may name one that stands before, or the catalogue's of the same name."""
        made: dict[str, DeviceType] = {}
        for name, entry in entries.items():
            device = self._at(("device_types", name), partial(self.catalog.build, name, entry))
            made[name] = device
            self.catalog = self.catalog.with_types({name: device})
        return tuple(made.values())

    def _node(self, index: int, entry: NodeEntry) -> NodeClass:
        path: Path = ("nodes", index)
        devices: dict[str, tuple[DeviceType, int]] = {}
        named: dict[str, str] = {}
        for name, count in entry.devices.items():
            where = (*path, "devices", name)
            device = self._at(where, partial(self._device, name, count))
            if device.name in devices:
                raise BadClusterFile(
                    f"{self.document.at(where)}: {name!r} is the type {device.name!r}, which {named[device.name]!r} "
                    "already names in this node",
                    "add the two counts up, or define a variant under device_types",
                )
            devices[device.name], named[device.name] = (device, count.count), name
        link: str | Link = "auto"
        if entry.link is not None:
            link = self._at((*path, "link"), lambda: self._node_link(entry.link, [d for d, _ in devices.values()]))
        host = None if entry.host_link is None else self._at((*path, "host_link"), lambda: self._host(entry.host_link))
        name = entry.name or f"node{index}"
        given = tuple(devices.values())
        return self._at(path, lambda: NodeClass(name, given, entry.count, link, host, entry.region))

    def _device(self, name: str, entry: CountEntry) -> DeviceType:
        device = self.catalog.find(name)
        if entry.cores is not None:
            device = device.with_cores(entry.cores)
        if entry.memory is not None:
            device = dataclasses.replace(device, memory_bytes=int(entry.memory))
        return device if entry.price is None else dataclasses.replace(device, usd_per_h=entry.price)

    def _node_link(self, entry: LinkEntry | None, devices: list[DeviceType]) -> str | Link:
        assert entry is not None
        if entry.link_class == "auto":
            return "auto"
        link = self.catalog.link_of(entry)
        if entry.link_class == "nvlink" and not any(d.nvlink_byte_per_s for d in devices):
            raise BadClusterFile(
                f"link is nvlink, but none of {', '.join(d.name for d in devices)} has NVLink",
                "use a class such as pcie4, or leave link out",
            )
        return entry.link_class or link

    def _host(self, entry: LinkEntry | None) -> Link:
        assert entry is not None
        if entry.link_class in ("auto", "nvlink"):
            raise BadClusterFile(
                f"host_link is {entry.link_class!r}, which joins devices, not a device and its host",
                "use a class such as pcie4, or {bandwidth: ..., latency: ...}",
            )
        return self.catalog.link_of(entry)

    def _network(self, entry: NetworkEntry, nodes: tuple[NodeClass, ...]) -> Network:
        names = {n.name for n in nodes}
        pairs = []
        for i, pair in enumerate(entry.pairs):
            for j, name in enumerate(pair.nodes):
                if name not in names:
                    place = self.document.at(("network", "pairs", i, "nodes", j))
                    raise BadClusterFile(f"{place}: no node is named {name!r}", suggest(name, names))
            pairs.append((pair.nodes[0], pair.nodes[1], Link(pair.latency, pair.bandwidth, "network")))
        lines = tuple(
            (x, y, Link(r.latency, r.bandwidth, "network"))
            for r in entry.regions
            for x, y in [(r.between[0], r.between[1])]
        )
        return Network(Link(entry.latency, entry.bandwidth, "network"), tuple(pairs), lines)
