"""Device types and clusters as tables for people, and as plain values for programs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.table import Table

from tvmhet.cluster.device import DeviceType
from tvmhet.cluster.spec import ClusterSpec
from tvmhet.cluster.units import duration, gib, rate
from tvmhet.cluster.writer import device_to_dict


def devices_table(types: Iterable[DeviceType]) -> Table:
    """Return one row per device type; rates are dense peaks, links one direction, "-" is a rate the type lacks."""
    table = Table(title="device types (dense peaks, links in one direction)")
    table.add_column("type", no_wrap=True)
    table.add_column("target", no_wrap=True)
    for name in ("SMs", "memory", "bandwidth", "L2", "float32", "float16", "int8", "host link", "NVLink", "power"):
        table.add_column(name, justify="right", no_wrap=True)
    for device in types:
        table.add_row(*_row(device))
    return table


def _row(d: DeviceType) -> tuple[str, ...]:
    nvlink = "-" if d.nvlink_byte_per_s is None else rate(d.nvlink_byte_per_s, "B/s")
    return (
        d.name,
        str(d.target.get("arch") or d.target.get("mcpu") or d.kind),
        str(d.num_sms),
        gib(d.memory_bytes),
        rate(d.dram_byte_per_s, "B/s"),
        gib(d.l2_bytes),
        *(_peak(d, dtype) for dtype in ("float32", "float16", "int8")),
        d.host_link or rate(d.host_byte_per_s, "B/s"),
        f"{nvlink} bridge" if d.nvlink_is_bridge else nvlink,
        f"{d.power_w:.0f} W" if d.power_w else "-",
    )


def _peak(device: DeviceType, dtype: str) -> str:
    return rate(device.peak_flop_per_s[dtype], "FLOP/s") if dtype in device.peak_flop_per_s else "-"


def device_sheet(device: DeviceType) -> Table:
    """Return everything known of one device type: a row per figure, with its source."""
    table = Table(title=f"{device.name} ({device.architecture or device.kind})")
    for name in ("figure", "value", "source"):
        table.add_column(name)
    figures = {
        "sms": str(device.num_sms),
        "base_clock": rate(device.base_clock_hz, "Hz") if device.base_clock_hz else "-",
        "boost_clock": rate(device.clock_hz, "Hz"),
        "memory": gib(device.memory_bytes),
        "bandwidth": rate(device.dram_byte_per_s, "B/s"),
        "l2": gib(device.l2_bytes),
        **{d: rate(r, "FLOP/s") for d, r in device.peak_flop_per_s.items()},
        "launch": duration(device.launch_s),
        "power": f"{device.power_w:.0f} W" if device.power_w else "-",
        "host_link": f"{device.host_link} {rate(device.host_byte_per_s, 'B/s')}".strip(),
        "nvlink": rate(device.nvlink_byte_per_s, "B/s") if device.nvlink_byte_per_s else "-",
        "price": f"{device.usd_per_h} USD/h" if device.usd_per_h is not None else "-",
    }
    for key, value in figures.items():
        if value != "-":
            table.add_row(key, value, device.sources.get(key, "-"))
    table.caption = device.notes or None
    return table


def devices_json(types: Iterable[DeviceType]) -> list[dict[str, Any]]:
    """Return all fields of each type, in SI units, ready for `json.dumps`."""
    return [device_to_dict(d) for d in types]


def cluster_table(spec: ClusterSpec) -> Table:
    """Return one row per group of interchangeable devices; notes of a detected cluster are the caption."""
    table = Table(title="cluster")
    for name in ("group", "machines"):
        table.add_column(name, no_wrap=True)
    for name in ("devices", "memory", "float32", "bandwidth", "peer link", "host link", "USD/h each"):
        table.add_column(name, justify="right", no_wrap=True)
    for g in spec.groups():
        peer, host = spec.link(g, g), spec.host_link(g)
        table.add_row(
            g.name,
            ", ".join(g.machines) if len(g.machines) <= 2 else f"{g.machines[0]} ... {g.machines[-1]}",
            str(g.num_devices),
            gib(g.memory_bytes),
            _peak(g.device, "float32"),
            rate(g.device.dram_byte_per_s, "B/s"),
            f"{rate(peer.byte_per_s, 'B/s')}, {duration(peer.latency_s)}" if g.num_devices > 1 else "-",
            f"{rate(host.byte_per_s, 'B/s')}, {duration(host.latency_s)}",
            f"{g.usd_per_h:.2f}" if g.device.usd_per_h is not None else "-",
        )
    table.caption = "; ".join(spec.notes) or None
    return table
