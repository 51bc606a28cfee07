"""The device types and link classes of devices.yaml, read once, and found by slug or alias.

`Catalog.build` is also how a cluster file's own device types are made: an entry like another inherits its figures,
an entry on its own gets the file's defaults, and every figure keeps its source.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from tvmhet._data import data_path
from tvmhet.cluster.device import DeviceType
from tvmhet.cluster.document import read_yaml, suggest, validate
from tvmhet.cluster.link import Link
from tvmhet.cluster.schema import CatalogEntry, DeviceEntry, LinkEntry
from tvmhet.cluster.units import gib
from tvmhet.errors import BadClusterFile, UnknownDeviceType

_CORES = re.compile(r"(.+)-(\d+)core")
_NUMBER = re.compile(r"\d\d+")

# key in YAML -> field of DeviceType; all are numbers (a missing one is None)
_FIELDS = {
    "sms": "num_sms",
    "lanes_per_sm": "lanes_per_sm",
    "base_clock": "base_clock_hz",
    "boost_clock": "clock_hz",
    "memory": "nominal_memory_bytes",
    "usable_memory": "memory_bytes",
    "memory_bus": "memory_bus_bits",
    "memory_pin_rate": "memory_bit_per_s",
    "bandwidth": "dram_byte_per_s",
    "l2": "l2_bytes",
    "shared_per_sm": "shared_bytes_per_sm",
    "max_threads_per_sm": "max_threads_per_sm",
    "launch": "launch_s",
    "power": "power_w",
    "price": "usd_per_h",
}
_COUNTS = frozenset({"memory", "usable_memory", "memory_bus", "l2", "shared_per_sm"})
_ZERO_IF_UNKNOWN = frozenset({"lanes_per_sm", "shared_per_sm", "max_threads_per_sm", "power"})


@dataclass(frozen=True, slots=True)
class Catalog:
    """Device types by slug, slugs by alias, link classes by name, sources by key."""

    types: Mapping[str, DeviceType]
    aliases: Mapping[str, str]
    links: Mapping[str, Link]  # of a class without a bandwidth of its own, the rate is infinite
    sources: Mapping[str, str]
    defaults: Mapping[str, DeviceEntry]

    def find(self, name: str) -> DeviceType:
        """Return the type with this slug or alias; case, spaces, underscores and a leading NVIDIA do not matter.

        "<cpu type>-<n>core" is n such cores. Raises UnknownDeviceType with the nearest names.
        """
        slug = normalise(name)
        for spelt in (slug, slug.removeprefix("nvidia-"), slug.removeprefix("nvidia-").removeprefix("geforce-")):
            if (found := self.aliases.get(spelt, spelt)) in self.types:
                return self.types[found]
        if match := _CORES.fullmatch(slug):
            return self.find(match[1]).with_cores(int(match[2]))
        raise UnknownDeviceType(f"unknown device type {name!r}", self._remedy(slug))

    def _remedy(self, slug: str) -> str:
        """The nearest names, of which only those count that begin alike or have the same long number."""
        bare = slug.removeprefix("nvidia-")
        alike = sorted(
            n for n in {*self.types, *self.aliases} if n[:1] == bare[:1] or _number(n) == _number(bare) != ""
        )
        if near := difflib.get_close_matches(bare, alike, n=3, cutoff=0.5):
            names = " or ".join(repr(n) for n in near)
            return f"did you mean {names}? (a type that is not listed is described in a file)"
        entry = f"{slug}: {{target: ..., memory: ..., bandwidth: ..., rates: {{float32: ...}}}}"
        return (
            "none of the table that `tvmhet devices` prints is like it; describe it from its data sheet: "
            f"device_types: {{{entry}}}, or with like: and a listed type"
        )

    def link_class(self, name: str) -> Link:
        """Return the link class called `name`. Raises BadClusterFile with the nearest names."""
        if name in self.links:
            return self.links[name]
        raise BadClusterFile(f"unknown link class {name!r}", suggest(name, self.links))

    def with_types(self, types: Mapping[str, DeviceType]) -> Catalog:
        """Return a catalogue in which `types` come before the ones of the same name here."""
        aliases = {a: t.name for t in types.values() for a in (*t.aliases, t.name)}
        return dataclasses.replace(self, types={**self.types, **types}, aliases={**self.aliases, **aliases})

    def build(self, name: str, entry: DeviceEntry) -> DeviceType:
        """Return the device type that `entry` describes. Raises BadClusterFile for what it lacks."""
        if entry.like is not None:
            return self._varied(name, entry, self.find(entry.like))
        missing = [k for k in ("target", "memory", "bandwidth") if getattr(entry, k) is None]
        missing += [] if "float32" in entry.rates else ["rates.float32"]
        if missing:
            raise BadClusterFile(
                f"device type {name!r} has no {', '.join(missing)}", "add them, or start from a known type with `like:`"
            )
        kind = str((entry.target or {}).get("kind"))
        if kind not in self.defaults:
            raise BadClusterFile(
                f"device type {name!r} has target kind {kind!r}",
                f"use target: {{kind: ...}} with one of {sorted(self.defaults)}",
            )
        given = entry.model_fields_set
        filled = entry.model_copy(
            update={k: getattr(self.defaults[kind], k) for k in self.defaults[kind].model_fields_set - given}
        )
        default = entry.source.get("default", "the cluster file")
        marks = {k: "default" for k in self.defaults[kind].model_fields_set - given}
        return self._varied(
            name, filled.model_copy(update={"source": {"default": default, **marks, **entry.source}}), None
        )

    def _varied(self, name: str, entry: DeviceEntry, base: DeviceType | None) -> DeviceType:
        """Return `base` with the figures that `entry` gives; a new type where there is no base."""
        numbers: dict[str, object] = {}
        for key, field in _FIELDS.items():
            value = getattr(entry, key)
            if value is not None:
                numbers[field] = int(value) if key in _COUNTS else value
            elif base is None:
                numbers[field] = 0 if key in _ZERO_IF_UNKNOWN else None
        told = dict(base.sources) if base else {}
        if entry.memory is not None and entry.usable_memory is None:
            numbers["memory_bytes"] = numbers["nominal_memory_bytes"]
            told.pop("usable_memory", None)
        values: dict[str, object] = {"name": name, "aliases": tuple(entry.aliases), **numbers}
        if entry.target is not None:
            values |= {"target": entry.target, "kind": str(entry.target.get("kind"))}
        if entry.host_link is not None:
            host = self.link_of(entry.host_link)
            values |= {"host_link": host.name, "host_byte_per_s": host.byte_per_s, "host_latency_s": host.latency_s}
        if entry.nvlink is not None:
            bridge = entry.nvlink.form == "bridge"
            values |= {"nvlink_byte_per_s": entry.nvlink.bandwidth, "nvlink_is_bridge": bridge}
        for key in ("architecture", "notes", "time_table"):
            if getattr(entry, key):
                values[key] = getattr(entry, key)
        if entry.inline_ecc is not None:
            values["inline_ecc"] = entry.inline_ecc
        values["peak_flop_per_s"] = {**(base.peak_flop_per_s if base else {}), **entry.rates}
        values["sources"] = {**told, **self._sources(entry)}
        if base is not None:
            device = dataclasses.replace(base, **values)  # type: ignore[arg-type]
        else:
            device = DeviceType(**{"peer_byte_per_s": 0.0, **values})  # type: ignore[arg-type]
        if device.memory_bytes > device.nominal_memory_bytes:
            usable, nominal = gib(device.memory_bytes), gib(device.nominal_memory_bytes)
            raise BadClusterFile(
                f"device type {name!r} has a usable_memory of {usable}, more than its memory, {nominal}",
                "give at most its memory, or leave usable_memory out: then all memory is used",
            )
        built_in = device.nvlink_byte_per_s if not device.nvlink_is_bridge else None
        device = dataclasses.replace(device, peer_byte_per_s=built_in or device.host_byte_per_s)
        return device if entry.cores is None else dataclasses.replace(device.with_cores(entry.cores), name=name)

    def link_of(self, entry: LinkEntry) -> Link:
        """Return the link that an entry names or spells out. Raises BadClusterFile when it is only half given."""
        if entry.link_class is not None:
            return self.link_class(entry.link_class)
        if entry.bandwidth is None or entry.latency is None:
            lacking = "bandwidth" if entry.bandwidth is None else "latency"
            raise BadClusterFile(
                f"a link has no {lacking}", "give both, for example {bandwidth: 25 GB/s, latency: 5 us}"
            )
        return Link(entry.latency, entry.bandwidth)

    def _sources(self, entry: DeviceEntry) -> dict[str, str]:
        """Return a full citation for each figure that `entry` gives: by key, and for rates by dtype."""
        given = [k for k in (*_FIELDS, "target", "host_link", "nvlink") if getattr(entry, k) is not None]
        result = {}
        for key in [*given, *entry.rates]:
            source = entry.source.get(key) or (entry.source.get("rates") if key in entry.rates else None)
            source = source or entry.source.get("default", "the cluster file")
            result[key] = self.sources.get(source, source)
        return result


def _number(name: str) -> str:
    """The first number in a name where it has two digits or more: a model's."""
    found = _NUMBER.search(name)
    return found[0] if found else ""


def normalise(name: str) -> str:
    """Return a name as slugs are spelt: lower case, words joined by hyphens."""
    return re.sub(r"[\s_]+", "-", name.strip().lower())


@lru_cache(maxsize=1)
def catalog() -> Catalog:
    """Return the shipped catalogue; the file is read on the first call."""
    path = data_path("devices.yaml")
    entries = validate(read_yaml(path.read_text(encoding="utf-8"), path.name), CatalogEntry)
    links = {n: Link(e.latency, e.bandwidth or float("inf"), n) for n, e in entries.links.items()}
    empty = Catalog({}, {}, links, entries.sources, entries.defaults)
    return empty.with_types({name: empty.build(name, entry) for name, entry in entries.devices.items()})


def device_type(name: str) -> DeviceType:
    """Return the catalogue's device type of this name or alias. Raises UnknownDeviceType with the nearest names.

    >>> device_type("A100").name
    'a100-sxm-80gb'
    """
    return catalog().find(name)


def device_types() -> tuple[DeviceType, ...]:
    """Return all device types of the catalogue, in the file's order."""
    return tuple(catalog().types.values())
