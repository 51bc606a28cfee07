"""A device type from a file of its own: one entry as in devices.yaml, for a device that is not in the catalogue.

    my-gpu:
      architecture: Ada
      target: {kind: cuda, arch: sm_89}
      sms: 46
      lanes_per_sm: 128
      boost_clock: 2475 MHz
      memory: 12 GiB
      bandwidth: 504 GB/s
      l2: 36 MiB
      rates: {float32: 29.1 TFLOP/s, float16: 116.6 TFLOP/s, bfloat16: 116.6 TFLOP/s}
      power: 200 W

An entry may start from a known type: `my-gpu: {like: l4, sms: 48}`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tvmhet.cluster.catalog import catalog
from tvmhet.cluster.device import DeviceType
from tvmhet.cluster.document import Document, read_yaml, validate
from tvmhet.cluster.schema import DeviceEntry
from tvmhet.errors import BadClusterFile, HetError

_SUFFIXES = (".yaml", ".yml", ".json")
#: Keys that a file may put around its entry, as devices.yaml and cluster files do.
_WRAPPERS = ("devices", "device_types")
#: Figures that a predicted GPU needs beyond those that every device type needs: a default would be a silent guess.
_NEEDED = {"cuda": ("sms", "lanes_per_sm", "boost_clock", "l2", "power")}


def find_device(name: str) -> DeviceType:
    """Return the catalogue's type of this name, or the one that the file of this name (.yaml, .yml, .json) describes.

    Raises UnknownDeviceType for a name, BadClusterFile or BadQuantity with file and line for a file.
    """
    return read_device(Path(name)) if name.lower().endswith(_SUFFIXES) else catalog().find(name)


def read_device(path: Path) -> DeviceType:
    """Return the one device type that a file describes. Raises BadClusterFile or BadQuantity with file and line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadClusterFile(f"{path}: cannot be read: {error}", "give a YAML file with one device entry") from error
    document = read_yaml(text, str(path))
    under, name = _place(document, path)
    values: Any = document.values
    for key in under:
        values = values[key]
    if isinstance(values, dict) and under == ():
        values = {k: v for k, v in values.items() if k != "name"}
    entry = validate(document, DeviceEntry, values, under)
    try:
        _check_figures(name, entry)
        return catalog().build(name, entry)
    except HetError as error:
        raise document.error(error, under) from error


def _place(document: Document, path: Path) -> tuple[tuple[str, ...], str]:
    """Return where in the file the entry stands and the type's name: the key before it, `name:`, or the file's name."""
    values = document.values
    if not isinstance(values, dict) or not values:
        raise BadClusterFile(f"{path}: no device entry", "write `my-gpu:` and its figures below, as in devices.yaml")
    wrapper = next((w for w in _WRAPPERS if isinstance(values.get(w), dict)), None)
    if wrapper is None and set(values) & set(DeviceEntry.model_fields):
        return (), str(values.get("name", path.stem))
    entries = values if wrapper is None else values[wrapper]
    under: tuple[str, ...] = () if wrapper is None else (wrapper,)
    if len(entries) != 1:
        raise BadClusterFile(f"{path}: {len(entries)} device entries, {', '.join(map(str, entries))}", "leave one")
    name = next(iter(entries))
    return (*under, name), str(name)


def _check_figures(name: str, entry: DeviceEntry) -> None:
    kind = str((entry.target or {}).get("kind", ""))
    missing = [key for key in _NEEDED.get(kind, ()) if getattr(entry, key) is None] if entry.like is None else []
    if missing:
        raise BadClusterFile(
            f"device type {name!r} has no {', '.join(missing)}",
            "add them from the data sheet, or start from a known type with `like:`; predictions need them",
        )
