"""A progress bar on standard error, or nothing: callers only say how far they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Report = Callable[[int, int, str], None]  # done, total, what is at hand


@contextmanager
def progress_bar(label: str, show: bool) -> Iterator[Report]:
    """Yield `report(done, total, name)`, drawn as a bar if `show`."""
    if not show:
        yield lambda done, total, name: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(label), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[name]}"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=None, name="")
        yield lambda done, total, name: bar.update(task, completed=done, total=total, name=name)
