"""What commands print: text as it is, views in the terminal's width."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

_MAX_COLUMNS, _FILE_COLUMNS = 120, 100


def show(*views: RenderableType) -> None:
    """Print text as it is; views in the terminal's width and colours, or 100 plain columns where it is no terminal."""
    from rich.console import Console

    from tvmhet.report.text import to_text

    terminal = sys.stdout.isatty()
    width = min(Console().width, _MAX_COLUMNS) if terminal else _FILE_COLUMNS
    for view in views:
        text = view.rstrip("\n") if isinstance(view, str) else to_text(view, width, colour=terminal)
        sys.stdout.write(text + "\n")
