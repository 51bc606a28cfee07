"""Device types and clusters as tables for people, and as plain values for programs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.table import Table

from tvmhet.cluster.device import DeviceType
from tvmhet.cluster.spec import ClusterSpec
from tvmhet.cluster.units import duration, gib, rate
from tvmhet.cluster.writer import device_to_dict
from tvmhet.report.text import new_table


def devices_table(types: Iterable[DeviceType]) -> Table:
    """Return one row per device type; rates are dense peaks, links one direction, "-" is a figure the type lacks."""
    table = new_table("type", "\ntarget", "\nSMs>", "memory\nGiB>", "DRAM\nGB/s>", "float32\nTFLOP/s>",
                      "float16\nTFLOP/s>", "int8\nTOP/s>", "host\nlink", "NVLink\nGB/s>", "power\nW>")  # fmt: skip
    for device in types:
        table.add_row(*_row(device))
    return table


def _row(d: DeviceType) -> tuple[str, ...]:
    nvlink = "-" if d.nvlink_byte_per_s is None else _number(d.nvlink_byte_per_s / 1e9)
    return (
        d.name,
        str(d.target.get("arch") or d.target.get("mcpu") or d.kind),
        str(d.num_sms),
        _number(d.nominal_memory_bytes / 2**30),
        _number(d.dram_byte_per_s / 1e9),
        *(_peak(d, dtype) for dtype in ("float32", "float16", "int8")),
        d.host_link or _number(d.host_byte_per_s / 1e9) + " GB/s",
        f"{nvlink}*" if d.nvlink_is_bridge and nvlink != "-" else nvlink,
        f"{d.power_w:.0f}" if d.power_w else "-",
    )


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _peak(device: DeviceType, dtype: str) -> str:
    """The dense peak in TFLOP/s (TOP/s)."""
    return _number(device.peak_flop_per_s[dtype] / 1e12) if dtype in device.peak_flop_per_s else "-"


def device_sheet(device: DeviceType) -> Table:
    """Return everything known of one device type: a row per figure, with its source."""
    table = new_table("figure", "value", "source")
    for key, value in _figures(device).items():
        if value != "-":
            table.add_row(key, value, device.sources.get(key, "-"))
    return table


def _figures(device: DeviceType) -> dict[str, str]:
    """Figures as text, by the key that `sources` uses; "-" is not known."""
    return {
        "sms": str(device.num_sms),
        "base_clock": rate(device.base_clock_hz, "Hz") if device.base_clock_hz else "-",
        "boost_clock": rate(device.clock_hz, "Hz"),
        "memory": gib(device.nominal_memory_bytes),
        "usable_memory": gib(device.memory_bytes),
        "bandwidth": rate(device.dram_byte_per_s, "B/s"),
        "l2": gib(device.l2_bytes),
        **{d: rate(r, "FLOP/s") for d, r in device.peak_flop_per_s.items()},
        "launch": duration(device.launch_s),
        "power": f"{device.power_w:.0f} W" if device.power_w else "-",
        "host_link": f"{device.host_link} {rate(device.host_byte_per_s, 'B/s')}".strip(),
        "nvlink": rate(device.nvlink_byte_per_s, "B/s") if device.nvlink_byte_per_s else "-",
        "price": f"{device.usd_per_h} USD/h" if device.usd_per_h is not None else "-",
    }


def device_head(device: DeviceType) -> str:
    """Return the line above a type's sheet: name, architecture, target, other names, notes."""
    target = " ".join(str(device.target[k]) for k in ("kind", "arch", "mcpu") if k in device.target)
    also = f"; also called {', '.join(device.aliases)}" if device.aliases else ""
    notes = f"\n{device.notes}" if device.notes else ""
    return f"{device.name}: {device.architecture or device.kind} ({target}){also}{notes}"


def devices_json(types: Iterable[DeviceType]) -> list[dict[str, Any]]:
    """Return all fields of each type, in SI units, ready for `json.dumps`."""
    return [device_to_dict(d) for d in types]


def cluster_table(spec: ClusterSpec) -> Table:
    """Return one row per group of interchangeable devices with its links, then one per shared line between regions.

    `spec.notes` are the caller's to show.
    """
    table = new_table("devices", "machines", "memory>", "float32\nTFLOP/s>", "DRAM\nGB/s>", "peer\nlink>",
                      "host\nlink>", "USD/h\neach>")  # fmt: skip
    for g in spec.groups():
        peer, host = spec.link(g, g), spec.host_link(g)
        table.add_row(
            f"{g.num_devices} x {g.name}",
            ", ".join(g.machines) if len(g.machines) <= 2 else f"{g.machines[0]} … {g.machines[-1]}",
            gib(g.memory_bytes),
            _peak(g.device, "float32"),
            _number(g.device.dram_byte_per_s / 1e9),
            f"{rate(peer.byte_per_s, 'B/s')}\n{duration(peer.latency_s)}" if g.num_devices > 1 else "-",
            f"{rate(host.byte_per_s, 'B/s')}\n{duration(host.latency_s)}",
            f"{g.usd_per_h:.2f}" if g.device.usd_per_h is not None else "-",
        )
    names = {-1: "driver", **{i: g.name for i, g in enumerate(spec.groups())}}
    for wire in spec.wires(spec.groups()):
        ways = [f"{names[a]} to {names[b]}" for a, b in sorted(wire.ways)]
        shown = "\n".join(ways[:3]) + ("\n…" if len(ways) > 3 else "")
        table.add_row(f"line {wire.name}", shown, "", "", "", f"{rate(wire.byte_per_s, 'B/s')}\nshared", "", "")
    return table
