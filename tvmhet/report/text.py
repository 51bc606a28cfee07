"""Rich views as plain text of a given width, and the few shapes that all reports share."""

from __future__ import annotations

import io
from collections.abc import Iterable

from rich import box
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

WIDTH = 100


def to_text(view: RenderableType, width: int, colour: bool = False) -> str:
    """Render in at most `width` columns, without blanks at line ends; colour codes only where asked for.

    Names are shown as they are: square brackets and colons in them are no markup.
    """
    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=colour,
        force_jupyter=False,  # in a notebook, rich would show the text instead of writing it to `file`
        color_system="standard" if colour else None,
        markup=False,
        emoji=False,
        highlight=False,
        legacy_windows=False,
    )
    console.print(view)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()).strip("\n")


def new_table(*columns: str) -> Table:
    """Return an empty table; a column whose name ends in ">" holds numbers and is set flush right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in columns:
        if name.endswith(">"):
            table.add_column(name[:-1], justify="right", no_wrap=True)
        else:
            table.add_column(name, overflow="fold")
    return table


def notes_view(notes: Iterable[str], style: str = "") -> list[RenderableType]:
    """Return one indented line per note."""
    return [indented(f"note: {note}", style) for note in notes]


def indented(line: str, style: str = "") -> RenderableType:
    """Return a line set in by two columns, also where it wraps."""
    return Padding(Text(line, style=style), (0, 0, 0, 2))


def pairs(lines: Iterable[tuple[str, str]]) -> RenderableType:
    """Return "label  text" lines with the texts flush."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="cyan")
    grid.add_column()
    for label, text in lines:
        grid.add_row(label, Text(text))
    return Padding(grid, (0, 0, 0, 2))
