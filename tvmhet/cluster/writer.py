"""A ClusterSpec back to a cluster file, and to the canonical text that its hash is taken of."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import yaml

from tvmhet.cluster.catalog import catalog
from tvmhet.cluster.device import DeviceType
from tvmhet.cluster.link import Link
from tvmhet.cluster.nodes import NodeClass
from tvmhet.cluster.units import Dimension, exact_quantity

if TYPE_CHECKING:
    from tvmhet.cluster.spec import ClusterSpec

_NOT_PLANNED = frozenset({"aliases", "sources", "notes"})  # fields of a device type that no plan depends on


def cluster_to_yaml(spec: ClusterSpec) -> str:
    """Return a cluster file that reads back as `spec` (its notes apart)."""
    known = _known_types(spec)
    values: dict[str, Any] = {}
    own = {n: d for n, d in known.items() if catalog().types.get(n) != d and not _is_core_variant(d)}
    if own:
        values["device_types"] = {n: device_to_values(d) for n, d in own.items()}
    if spec.nodes:
        values["nodes"] = [_node(n, known) for n in spec.nodes]
    if spec.network is not None:
        pairs = [{"nodes": [a, b], **_link(link)} for a, b, link in spec.network.pairs]
        values["network"] = {**_link(spec.network.link), **({"pairs": pairs} if pairs else {})}
        if spec.network.regions:
            values["network"]["regions"] = [{"between": [a, b], **_link(x)} for a, b, x in spec.network.regions]
    if spec.market:
        values["market"] = [
            {"type": o.device.name, "price": exact_quantity(o.usd_per_h, Dimension.PRICE), "max_count": o.max_count}
            | ({"provider": o.provider} if o.provider else {})
            | ({"region": o.region} if o.region else {})
            for o in spec.market
        ]
    return yaml.safe_dump(values, sort_keys=False, width=120)


def _known_types(spec: ClusterSpec) -> dict[str, DeviceType]:
    """Return the type that each name means in the file: declared there, the catalogue's, or as first used."""
    known = {t.name: t for t in spec.custom_types}
    for device in [d for n in spec.nodes for d, _ in n.devices] + [o.device for o in spec.market]:
        base = known.get(device.name, catalog().types.get(device.name))
        if base is None and _is_core_variant(device):
            base = catalog().find(device.name)
        known[device.name] = device if base is None or not _is_variant(device, base) else base
    return known


def _is_core_variant(device: DeviceType) -> bool:
    one_core = catalog().types.get(device.name.rsplit("-", 1)[0])
    return one_core is not None and device.is_cpu and _is_variant(device, one_core.with_cores(device.num_sms))


def _is_variant(device: DeviceType, base: DeviceType) -> bool:
    """Return whether `device` differs from `base` in nothing but what a node may say: memory and price."""
    price = base.usd_per_h if device.usd_per_h is None else device.usd_per_h
    return device == dataclasses.replace(base, memory_bytes=device.memory_bytes, usd_per_h=price)


def _node(node: NodeClass, known: Mapping[str, DeviceType]) -> dict[str, Any]:
    devices: dict[str, Any] = {}
    for device, count in node.devices:
        base = known[device.name]
        differs: dict[str, Any] = {}
        if device.memory_bytes != base.memory_bytes:
            differs["memory"] = exact_quantity(device.memory_bytes, Dimension.BYTES)
        if device.usd_per_h is not None and device.usd_per_h != base.usd_per_h:
            differs["price"] = exact_quantity(device.usd_per_h, Dimension.PRICE)
        devices[device.name] = {"count": count, **differs} if differs else count
    result: dict[str, Any] = {"name": node.name, "count": node.count, "devices": devices}
    if node.link != "auto":
        result["link"] = _link(node.link) if isinstance(node.link, Link) else node.link
    if node.host_link is not None:
        result["host_link"] = _link_or_class(node.host_link)
    return result | ({"region": node.region} if node.region else {})


def _link(link: Link) -> dict[str, str]:
    return {
        "bandwidth": exact_quantity(link.byte_per_s, Dimension.BYTE_RATE),
        "latency": exact_quantity(link.latency_s, Dimension.TIME),
    }


def _link_or_class(link: Link) -> str | dict[str, str]:
    return link.name if catalog().links.get(link.name) == link else _link(link)


def device_to_values(device: DeviceType) -> dict[str, Any]:
    """Return the values of a `device_types` entry that describes `device` completely."""
    usable = device.memory_bytes if device.memory_bytes != device.nominal_memory_bytes else None
    quantities = {
        "base_clock": (device.base_clock_hz, Dimension.FREQUENCY),
        "boost_clock": (device.clock_hz, Dimension.FREQUENCY),
        "memory": (device.nominal_memory_bytes, Dimension.BYTES),
        "usable_memory": (usable, Dimension.BYTES),
        "memory_bus": (device.memory_bus_bits, Dimension.WIDTH),
        "memory_pin_rate": (device.memory_bit_per_s, Dimension.BIT_RATE),
        "bandwidth": (device.dram_byte_per_s, Dimension.BYTE_RATE),
        "l2": (device.l2_bytes, Dimension.BYTES),
        "shared_per_sm": (device.shared_bytes_per_sm or None, Dimension.BYTES),
        "launch": (device.launch_s, Dimension.TIME),
        "power": (device.power_w or None, Dimension.POWER),
        "price": (device.usd_per_h, Dimension.PRICE),
    }
    values: dict[str, Any] = {"aliases": list(device.aliases)} if device.aliases else {}
    values |= {"architecture": device.architecture} if device.architecture else {}
    values |= {"target": dict(device.target), "sms": device.num_sms, "lanes_per_sm": device.lanes_per_sm}
    values |= {"max_threads_per_sm": device.max_threads_per_sm} if device.max_threads_per_sm else {}
    values |= {k: exact_quantity(v, dim) for k, (v, dim) in quantities.items() if v is not None}
    values |= {"inline_ecc": True} if device.inline_ecc else {}
    values["rates"] = {d: exact_quantity(r, Dimension.FLOP_RATE) for d, r in device.peak_flop_per_s.items()}
    values["host_link"] = _link_or_class(Link(device.host_latency_s, device.host_byte_per_s, device.host_link))
    if device.nvlink_byte_per_s:
        form = "bridge" if device.nvlink_is_bridge else "built-in"
        rate = exact_quantity(device.nvlink_byte_per_s, Dimension.BYTE_RATE)
        values["nvlink"] = {"bandwidth": rate, "form": form}
    values |= {k: v for k in ("time_table", "notes") if (v := getattr(device, k))}
    return values | ({"source": dict(device.sources)} if device.sources else {})


def device_to_dict(device: DeviceType) -> dict[str, Any]:
    """Return all fields of a device type as JSON-ready values in SI units."""
    result: dict[str, Any] = {}
    for f in dataclasses.fields(device):
        value = getattr(device, f.name)
        result[f.name] = (
            dict(value) if isinstance(value, Mapping) else list(value) if isinstance(value, tuple) else value
        )
    return result


def canonical(spec: ClusterSpec) -> str:
    """Return one text per meaning: JSON with sorted keys of everything a plan depends on."""

    def device(d: DeviceType) -> dict[str, Any]:
        return {k: v for k, v in device_to_dict(d).items() if k not in _NOT_PLANNED}

    def link(one: Link | str | None) -> Any:
        return [one.latency_s, one.byte_per_s] if isinstance(one, Link) else one

    network = spec.network and {
        "link": link(spec.network.link),
        "pairs": [[a, b, link(x)] for a, b, x in spec.network.pairs],
        **({"regions": [[a, b, link(x)] for a, b, x in spec.network.regions]} if spec.network.regions else {}),
    }
    nodes = [
        {
            "name": n.name,
            "count": n.count,
            "devices": [[device(d), c] for d, c in n.devices],
            "link": link(n.link),
            "host_link": link(n.host_link),
            **({"region": n.region} if n.region else {}),
        }
        for n in spec.nodes
    ]
    market = [[device(o.device), o.usd_per_h, o.max_count, o.provider, o.region] for o in spec.market]
    return json.dumps({"nodes": nodes, "network": network, "market": market}, sort_keys=True, allow_nan=False)
