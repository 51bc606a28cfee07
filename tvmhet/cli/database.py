"""tvmhet database: what was measured, to a file and back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tvmhet.cli.options import check_folders
from tvmhet.cli.output import show
from tvmhet.errors import BadInput

if TYPE_CHECKING:
    from tvmhet.cost.measured import MeasuredKernels


def database(
    export: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write every run: JSON lines, or Parquet for a .parquet name.")
    ] = None,
    import_file: Annotated[
        Path | None, typer.Option("--import", metavar="FILE", help="Add the runs of an exported file.")
    ] = None,
    path: Annotated[Path | None, typer.Option(metavar="DB", help="Another database than the user's own.")] = None,
) -> None:
    """Show, export or import the measured kernels that plans use."""
    check_folders(export)
    if export is not None and import_file is not None:
        raise BadInput("database has --export and --import", "give one")
    from tvmhet.cost.measured import MeasuredKernels
    from tvmhet.cost.runs_file import export_runs, import_runs

    with MeasuredKernels(path) as measured:
        if export is not None:
            show(f"{export_runs(measured, export)} runs in {export}")
        elif import_file is not None:
            count = import_runs(measured, import_file)
            show(f"{count.new} new runs, {count.known} known, {count.bad} rows that are no runs")
        else:
            show(*_summary(measured))


def _summary(measured: MeasuredKernels) -> list[str]:
    lines = [f"{measured.num_runs()} runs in {measured.path}"]
    lines += [f"  {device}: {count} {status}" for (device, status), count in measured.counts().items()]
    return lines + [f"  put aside: {reason}" for reason in measured.quarantined()]
