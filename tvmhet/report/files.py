"""Write a report's file whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from tvmhet.errors import BadInput


def write_text(path: Path, text: str) -> None:
    """Write `text` beside `path` and rename it, so that no reader sees half of it. Raises BadInput where it cannot."""
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    except OSError as error:
        raise BadInput(
            f"{str(path)!r} cannot be written: {error.strerror}", "give a path in a folder that exists"
        ) from error
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).chmod(0o666 & ~_umask())
        os.replace(temporary, path)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise BadInput(f"{str(path)!r} cannot be written: {error.strerror}", "give the path of a file") from error
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
