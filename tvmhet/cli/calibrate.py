"""tvmhet calibrate: fit the cost model of a device type to a few kernels measured on it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tvmhet.cli.options import check_folders
from tvmhet.cli.output import show
from tvmhet.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tvmhet.cluster.device import DeviceType
    from tvmhet.cost.calibration import MeasuredOps
    from tvmhet.cost.model import KernelDesc


def calibrate(
    device: Annotated[str, typer.Option("--device", metavar="NAME|FILE.yaml", help="The device type to calibrate.")],
    count: Annotated[int, typer.Option(metavar="N", min=1, max=200, help="Kernels to measure.")] = 20,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the kernels that would be measured.")] = False,
    list_file: Annotated[
        Path | None, typer.Option("--list", metavar="FILE", help="Write the kernels, to measure them elsewhere.")
    ] = None,
    measurements: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help='Read kernels measured elsewhere: lines of --list with "seconds" added.'),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep the times here, not in the user's data folder.")
    ] = None,
) -> None:
    """Measure the kernels that tell most about a device type and keep their times; later predictions use them.

    The device is measured if this machine has one (CPU types, CUDA). For one
    elsewhere, write the kernels with --list, time each there with its vendor's
    library, add "seconds" (or "ms", "us") to each line, and give the file back
    as --measurements. Times are kept in the user's data folder, where `predict`
    and `plan` find them, or in --out for `predict --calibration`.
    """
    if sum((dry_run, list_file is not None, measurements is not None)) > 1:
        raise BadInput("calibrate has more than one of --dry-run, --list, --measurements", "give one")
    check_folders(list_file, out)
    from tvmhet.cluster.device_file import find_device

    kind = find_device(device)
    if dry_run or list_file:
        _write_list(kind, count, list_file)
    else:
        _keep(kind, _measured(kind, count, measurements), out)


def _write_list(device: DeviceType, count: int, file: Path | None) -> None:
    from tvmhet.calibrating import choose
    from tvmhet.cost.record import record_of

    lines = [json.dumps(record_of(desc)) for desc in choose(device, count)]
    if file is None:
        show("\n".join(lines))
        return
    file.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    show(f'{len(lines)} kernels in {file}; add "seconds" to each line, then: tvmhet calibrate --measurements')


def _measured(device: DeviceType, count: int, file: Path | None) -> MeasuredOps:
    from tvmhet.calibrating import choose, measure
    from tvmhet.cost.calibration import read_measured
    from tvmhet.progress import progress_bar

    if file is not None:
        return read_measured(file, device)
    with progress_bar(f"measure on {device.name}", sys.stderr.isatty()) as tell:
        run = measure(device, choose(device, count), tell)
    show(*(f"failed: {text}" for text in run.failed), *(f"note: {text}" for text in run.notes))
    return run.measured


def _keep(device: DeviceType, measured: MeasuredOps, out: Path | None) -> None:
    from tvmhet.cost.boosted import LearnedModel
    from tvmhet.cost.calibration import error_of, fitted, stored_path

    model = LearnedModel.load(device)
    before = error_of(model, measured.descs, measured.seconds)
    path = out or stored_path(device)
    measured.write(path)
    after = error_of(fitted(model, measured), measured.descs, measured.seconds)
    show(
        f"{len(measured.descs)} kernels ({_families(measured.descs)}) in {path}",
        f"mean error over them {before:.1%} before, {after:.1%} when fitted to them; on other kernels it is larger",
    )


def _families(descs: Sequence[KernelDesc]) -> str:
    names = [d.root.family for d in descs]
    return ", ".join(f"{names.count(name)} {name}" for name in sorted(set(names)))
