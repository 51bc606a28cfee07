"""tvmhet devices: what clusters may name."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from tvmhet.cli.options import JsonOpt
from tvmhet.cli.output import show
from tvmhet.errors import HetError


def devices(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="One device type, with its sources.")] = None,
    as_json: JsonOpt = False,
) -> None:
    """List the device types that clusters may name, and what this machine has."""
    from tvmhet.cluster import device_type, device_types
    from tvmhet.report.devices import device_head, device_sheet, devices_json, devices_table

    types = device_types() if name is None else (device_type(name),)
    if as_json:
        show(json.dumps(devices_json(types), indent=1, sort_keys=True))
    elif name is not None:
        show(device_head(types[0]), device_sheet(types[0]))
    else:
        show("device types: dense peaks, links in one direction, * with a bridge", devices_table(types))
        _this_machine()


def _this_machine() -> None:
    from tvmhet.cluster import ClusterSpec
    from tvmhet.report.devices import cluster_table
    from tvmhet.report.text import notes_view

    try:
        here = ClusterSpec.from_local()
    except HetError as error:
        show(f"this machine: {error.problem}")
    else:
        show("\nthis machine (--cluster local)", cluster_table(here), *notes_view(here.notes))
