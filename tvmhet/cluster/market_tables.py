"""Tables as other tools write them to a Market: CSV, SkyPilot's catalogues, and what nvidia-smi prints.

    InstanceType,vCPUs,MemoryGiB,AcceleratorName,AcceleratorCount,Price,SpotPrice,Region,...     SkyPilot
    name,type,devices,price,spot_price,max_instances,provider,region                             our own CSV
    GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-...)                                                 nvidia-smi (smi.py)

A SkyPilot catalogue lists an instance once for each zone; the cheapest zone's price stands, and accelerators that
tvmhet has no figures for are left out, with a note. What nvidia-smi lists is there already and costs nothing.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Mapping, Sequence

from tvmhet.cluster.catalog import catalog, normalise
from tvmhet.cluster.device import DeviceType
from tvmhet.cluster.document import suggest
from tvmhet.cluster.market import InstanceOffer, Market
from tvmhet.cluster.smi import is_smi, listed_gpus
from tvmhet.errors import BadMarket, HetError, UnknownDeviceType

#: A price in another currency than USD, and which.
FOREIGN_PRICE = re.compile(r"\s*[-+\d._eE]+\s*((?!USD)[A-Z]{3}|[€£¥])\s*/\s*h(?:our)?\s*")
_CURRENCY = "((?!USD)[A-Z]{3}|[€£¥])"
_FOREIGN_CELL = re.compile(rf"{_CURRENCY}\s*[\d.]+.*|[\d.]+\s*{_CURRENCY}(?:\s*/\s*h(?:our)?)?")  # with or without "/h"
_SIZE = re.compile(r"'SizeInMiB':\s*(\d+)")
_OWN = ("name", "type", "devices", "price", "spot_price", "max_instances", "provider", "region", "currency")
_SKY = ("InstanceType", "AcceleratorName", "AcceleratorCount", "Price")
#: SkyPilot's names whose memory is not the one that the bare name means in the catalogue.
_SKY_NAMES = {"a100": "a100-sxm-40gb", "v100": "v100-sxm2-16gb", "h100-sxm": "h100-sxm-80gb", "p100": "p100-pcie-16gb"}
_MEMORY_TOLERANCE = 0.15  # drivers and firmware keep a part of the nominal memory


def is_table(text: str) -> bool:
    """Whether `text` is one of the tables; else it is YAML."""
    first = next((line for line in text.splitlines() if line.strip()), "")
    fields = {f.strip() for f in first.split(",")}
    columns = ":" not in first and len(fields) > 1 and bool(fields & {*_OWN, *_SKY})
    return is_smi(text) or columns


def table_market(text: str, source: str, max_instances: int) -> Market:
    """Return the market of a table. Raises BadMarket, naming the line, for what is not one."""
    if is_smi(text):
        return _inventory(text, source)
    rows = csv.DictReader(io.StringIO(text), skipinitialspace=True)
    names = [f.strip() for f in rows.fieldnames or ()]
    if set(_SKY) <= set(names):
        return _skypilot(rows, source, max_instances)
    return _own(rows, names, source, max_instances)


def device_called(name: str, memory_bytes: float | None = None) -> DeviceType:
    """Return the catalogue's type for a marketing name such as "NVIDIA A100-SXM4-80GB" or "Tesla T4".

    A name that is cut short ("Tesla V100-SXM2...") stands for those that begin so; the memory tells which.
    Where the memory is known, a type of the same name but another memory is not taken: raises UnknownDeviceType.
    """
    slug = re.sub(r"^(nvidia|tesla|geforce)-", "", re.sub(r"^nvidia-", "", normalise(name)))
    cut = slug.rstrip(".-") if slug.endswith("...") else None  # what nvidia-smi makes of a long name
    found = [
        t
        for n, t in catalog().types.items()
        if n == catalog().aliases.get(slug, slug) or (cut is not None and n.startswith(cut))
    ]
    if memory_bytes is not None:
        family = [t for t in catalog().types.values() if t.name.split("-")[0] == slug.split("-")[0] and not t.is_cpu]
        found = [t for t in [*found, *family] if abs(t.nominal_memory_bytes / memory_bytes - 1) <= _MEMORY_TOLERANCE]
    if found:
        return found[0]
    size = "" if memory_bytes is None else f" with {memory_bytes / 2**30:.0f} GiB"
    raise UnknownDeviceType(f"unknown device type {name!r}{size}", suggest(slug, catalog().types))


def _inventory(text: str, source: str) -> Market:
    """The GPUs of one machine, as nvidia-smi lists them: they are owned, so each costs 0 USD/h."""
    counts: dict[str, tuple[DeviceType, int]] = {}
    for gpu in listed_gpus(text, source):
        try:
            device = device_called(gpu.name, gpu.memory_bytes)
        except UnknownDeviceType as e:
            raise UnknownDeviceType(f"{source}:{gpu.line}: {e.problem}", e.remedy) from e
        counts[device.name] = (device, counts.get(device.name, (device, 0))[1] + 1)
    offers = tuple(InstanceOffer(d.name, d, n, 0.0, 1, provider="owned") for d, n in counts.values())
    return Market(offers, source=source, notes=("these devices are owned: they cost nothing to use",))


def _number(text: str | None, what: str, where: str) -> float | None:
    """A cell as a number, None where it is empty. Raises BadMarket for a text that is not one, or below 0."""
    cleaned = (text or "").strip().removesuffix("/h").removesuffix("USD").removeprefix("USD").removeprefix("$").strip()
    if foreign := _FOREIGN_CELL.fullmatch(cleaned):
        raise BadMarket(
            f"{where}: {what} is {text!r}, in {foreign[1] or foreign[2]}, but prices are compared in USD/h",
            "convert every price to USD/h at one rate",
        )
    if not cleaned:
        return None
    try:
        value = float(cleaned)
    except ValueError:
        raise BadMarket(f"{where}: {what} is {text!r}", "give a number, prices in USD/h") from None
    if not 0 <= value < float("inf"):
        raise BadMarket(f"{where}: {what} is {text!r}", "give a finite number, 0 or more")
    return value


def _skypilot(rows: csv.DictReader[str], source: str, max_instances: int) -> Market:
    cheapest: dict[tuple[str, bool], InstanceOffer] = {}
    unknown: set[str] = set()
    for row in rows:
        name, where = (row["AcceleratorName"] or "").strip(), f"{source}:{rows.line_num}"
        if not name:
            continue
        size = _SIZE.search(row.get("GpuInfo") or "")
        slug = _SKY_NAMES.get(normalise(name), name)
        try:
            device = device_called(slug, float(size[1]) * 2**20 if size else None)
        except UnknownDeviceType:
            unknown.add(name)
            continue
        count = _number(row["AcceleratorCount"], "AcceleratorCount", where) or 1.0
        if count != int(count):
            continue  # a share of a device cannot be planned for
        for column, spot in (("Price", False), ("SpotPrice", True)):
            price = _number(row.get(column), column, where)
            if price is None:
                continue
            region = (row.get("Region") or "").strip()
            offer = InstanceOffer(
                row["InstanceType"] or name, device, int(count), price, max_instances, spot, "", region
            )
            best = cheapest.get((offer.name, spot))
            if best is None or price < best.usd_per_h:
                cheapest[offer.name, spot] = offer
    if not cheapest:
        raise BadMarket(
            f"{source}: no accelerator of the catalogue is offered (unknown: {', '.join(sorted(unknown)) or 'none'})",
            "see `tvmhet devices` for the known types",
        )
    notes = (f"left out, no figures known: {', '.join(sorted(unknown))}",) if unknown else ()
    return Market(tuple(cheapest.values()), source=source, notes=notes)


def _own(rows: csv.DictReader[str], names: Sequence[str], source: str, max_instances: int) -> Market:
    if strange := [n for n in names if n not in _OWN]:
        raise BadMarket(f"{source}:1: unknown column {strange[0]!r}", suggest(strange[0], _OWN))
    if "type" not in names or not {"price", "spot_price"} & set(names):
        raise BadMarket(f"{source}:1: the columns are {', '.join(names)}", "at least type and price are needed")
    offers: list[InstanceOffer] = []
    currencies: dict[str, int] = {}
    for row in rows:
        line = rows.line_num
        currency = (row.get("currency") or "USD").strip().upper()
        currencies.setdefault(currency, line)
        if len(currencies) > 1 or currency != "USD":
            both = " and ".join(f"{c} (line {n})" for c, n in currencies.items())
            raise BadMarket(
                f"{source}:{line}: prices are in {both}; they are compared in USD/h",
                "convert every price to USD/h at one rate",
            )
        try:
            offers += _own_row(row, f"{source}:{line}", max_instances)
        except HetError as e:
            at = "" if e.problem.startswith(source) else f"{source}:{line}: "
            raise type(e)(f"{at}{e.problem}", e.remedy) from e
    return Market(tuple(offers), source=source)


def _own_row(row: Mapping[str, str], where: str, max_instances: int) -> Iterator[InstanceOffer]:
    device = catalog().find(row["type"] or "")
    count, limit = (_number(row.get(c), c, where) for c in ("devices", "max_instances"))
    prices = [(_number(row.get(c), c, where), c == "spot_price") for c in ("price", "spot_price")]
    if all(p is None for p, _ in prices):
        raise BadMarket(f"the offer of {row['type']!r} has no price", "fill in price or spot_price")
    for value, what in ((count, "devices"), (limit, "max_instances")):
        if value is not None and value != int(value):
            raise BadMarket(f"{what} is {value}", "give a whole number")
    for price, spot in prices:
        if price is not None:
            devices = 1 if count is None else int(count)
            yield InstanceOffer(
                (row.get("name") or "").strip() or (device.name if devices == 1 else f"{devices}x{device.name}"),
                device,
                devices,
                price,
                max_instances if limit is None else int(limit),
                spot,
                (row.get("provider") or "").strip(),
                (row.get("region") or "").strip(),
            )
