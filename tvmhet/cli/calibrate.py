"""tvmhet calibrate: fit the cost model of a device type to a few kernels measured on it."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
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
    count: Annotated[int, typer.Option(metavar="N", min=1, max=2000, help="Kernels to measure.")] = 20,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the kernels that would be measured.")] = False,
    list_file: Annotated[
        Path | None, typer.Option("--list", metavar="FILE", help="Write the kernels, to measure them elsewhere.")
    ] = None,
    measurements: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help='Read kernels measured elsewhere: lines of --list with "seconds" added.'),
    ] = None,
    nccl_tests: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Read what all_reduce_perf or another of nccl-tests printed.")
    ] = None,
    exchange: Annotated[
        str, typer.Option(metavar="OP:GPUS", help="What --nccl-tests measured, among how many GPUs.")
    ] = "all_reduce:8",
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
    if sum((dry_run, *(file is not None for file in (list_file, measurements, nccl_tests)))) > 1:
        raise BadInput("calibrate has more than one of --dry-run, --list, --measurements, --nccl-tests", "give one")
    check_folders(list_file, out)
    from tvmhet.cluster.device_file import find_device

    kind = find_device(device)
    if dry_run or list_file:
        _write_list(kind, count, list_file)
    elif nccl_tests:
        _keep_exchanges(kind, nccl_tests, exchange, out)
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
    from tvmhet.cost.calibration import error_of, fitted, read_measured, stored_path

    path = out or stored_path(device)
    if path.is_file() and not measured.exchanges:  # what was read of exchanges before stays
        measured = replace(measured, exchanges=read_measured(path, device).exchanges)
    measured.write(path)
    if not measured.descs:
        show(f"{len(measured.exchanges)} exchanges in {path}")
        return
    model = LearnedModel.load(device)
    before = error_of(model, measured.descs, measured.seconds)
    after = error_of(fitted(model, measured), measured.descs, measured.seconds)
    show(
        f"{len(measured.descs)} kernels ({_families(measured.descs)}) in {path}",
        f"mean error over them {before:.1%} before, {after:.1%} when fitted to them; on other kernels it is larger",
    )


def _keep_exchanges(device: DeviceType, report: Path, exchange: str, out: Path | None) -> None:
    from tvmhet.cost.calibration import MeasuredOps, read_measured, stored_path
    from tvmhet.cost.network import OPERATIONS, read_nccl_tests
    from tvmhet.cost.operators import ExchangeDesc

    operation, _, count = exchange.partition(":")
    if operation not in OPERATIONS or not count.isdecimal():
        raise BadInput(f"--exchange is {exchange!r}", f"write OP:GPUS, OP one of {', '.join(OPERATIONS)}")
    try:
        sizes, seconds = read_nccl_tests(report.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"the report {str(report)!r} cannot be read: {error}", "give what nccl-tests printed") from error
    rows = tuple((ExchangeDesc(operation, int(count), float(b)), float(s)) for b, s in zip(sizes, seconds, strict=True))
    path = out or stored_path(device)
    known = read_measured(path, device) if path.is_file() else MeasuredOps(device.name, (), ())
    other = tuple(e for e in known.exchanges if (e[0].operation, e[0].num_devices) != (operation, int(count)))
    replace(known, exchanges=other + rows).write(path)
    show(f"{len(rows)} exchanges ({operation} among {count}) in {path}; predictions of {device.name} use them")


def _families(descs: Sequence[KernelDesc]) -> str:
    names = [d.root.family for d in descs]
    return ", ".join(f"{names.count(name)} {name}" for name in sorted(set(names)))
