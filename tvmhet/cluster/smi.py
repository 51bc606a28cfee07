"""What nvidia-smi prints to a list of GPUs: the table, `-L`, or `--query-gpu=name,memory.total --format=csv`.

|   0  Tesla T4                       Off |   00000000:00:04.0 Off |                    0 |
| N/A   40C    P8              9W /  70W  |       0MiB / 15360MiB  |      0%      Default |

GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-...)

index, name, memory.total [MiB]
0, Tesla T4, 15360 MiB
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass

from tvmhet.errors import BadMarket

_LISTED = re.compile(r"GPU \d+: (.+?) \(UUID: [^)]*\)")
_SLICE = re.compile(r"MIG \S+\s+Device\s+\d+: \(UUID: [^)]*\)")
_ROW = re.compile(r"\|\s+\d+\s+(\S.*?)\s+(?:On|Off|N/A)\s*\|\s*[0-9A-Fa-f]+:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d.*")
_MEMORY = re.compile(r"\d+MiB\s*/\s*(\d+)MiB")
_SIZE = re.compile(r"(\d+)(?:\s*MiB)?")
_REMEDY = "use `nvidia-smi`, `nvidia-smi -L`, or `nvidia-smi --query-gpu=name,memory.total --format=csv`"


@dataclass(frozen=True, slots=True)
class ListedGpu:
    """One GPU: the line that names it, the driver's name of it, and its memory where that is printed."""

    line: int
    name: str
    memory_bytes: float | None = None


def is_smi(text: str) -> bool:
    """Whether nvidia-smi printed `text`."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return bool(lines) and (
        bool(_LISTED.match(lines[0])) or "memory.total" in lines[0] or any("NVIDIA-SMI" in line for line in lines[:3])
    )


def listed_gpus(text: str, source: str) -> list[ListedGpu]:
    """Return the GPUs in order. Raises BadMarket, naming the line, for text that lists none."""
    lines = [(n, line.strip()) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    first = lines[0][1]
    if _LISTED.match(first):
        found = list(_of_list(lines, source))
    elif "memory.total" in first:
        found = list(_of_query(lines, source))
    else:
        found = list(_of_table(lines))
    if not found:
        raise BadMarket(f"{source}: nvidia-smi lists no GPU", _REMEDY)
    return found


def _of_list(lines: list[tuple[int, str]], source: str) -> Iterator[ListedGpu]:
    for number, line in lines:
        match = _LISTED.fullmatch(line)
        if match is None and _SLICE.fullmatch(line):
            raise BadMarket(
                f"{source}:{number}: {line[:60]!r}: a GPU divided by MIG is not one device",
                "leave out that GPU and its parts, or describe a part: device_types: {name: {like: ..., memory: ...}}",
            )
        if match is None:
            raise _strange(source, number, line)
        yield ListedGpu(number, match[1])


def _of_query(lines: list[tuple[int, str]], source: str) -> Iterator[ListedGpu]:
    names = [c.split(" [")[0] for c in _cells(lines[0][1])]
    if "name" not in names:
        raise BadMarket(f"{source}:{lines[0][0]}: nvidia-smi was not asked for the name", _REMEDY)
    for number, line in lines[1:]:
        cells = _cells(line)
        size = _SIZE.fullmatch(cells[names.index("memory.total")]) if len(cells) == len(names) else None
        if size is None:
            raise _strange(source, number, line)
        yield ListedGpu(number, cells[names.index("name")], float(size[1]) * 2**20)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in next(csv.reader([line], skipinitialspace=True))]


def _of_table(lines: list[tuple[int, str]]) -> Iterator[ListedGpu]:
    for i, (number, line) in enumerate(lines):
        if match := _ROW.fullmatch(line):
            size = _MEMORY.search(lines[i + 1][1]) if i + 1 < len(lines) else None
            yield ListedGpu(number, match[1], None if size is None else float(size[1]) * 2**20)


def _strange(source: str, number: int, line: str) -> BadMarket:
    return BadMarket(f"{source}:{number}: {line[:60]!r} is not a line of nvidia-smi", _REMEDY)
