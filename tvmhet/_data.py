"""Where files lie: what is shipped, and what is kept between runs (compiled stages, measured kernels)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tvmhet.errors import BadInput

CACHE_DIR_VARIABLE = "TVMHET_CACHE_DIR"


def data_path(relative: str) -> Path:
    """Return the path of a shipped data file such as `devices.yaml` or `trained/gemm.ubj`.

    It lies inside an installed package, or in cost_models/ of a checkout.
    """
    installed = Path(__file__).parent / "_data" / relative
    return installed if installed.exists() else Path(__file__).parent.parent / "cost_models" / relative


def default_cache_dir() -> Path:
    """Return `$TVMHET_CACHE_DIR`, else `$XDG_CACHE_HOME/tvmhet`, else `~/.cache/tvmhet`."""
    if chosen := os.environ.get(CACHE_DIR_VARIABLE):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tvmhet"


@contextmanager
def keeping(path: Path) -> Iterator[None]:
    """Raise BadInput for whatever the system says against writing `path`: a full disk, a folder that is read only."""
    try:
        yield
    except OSError as error:
        raise BadInput(
            f"{str(path)!r} cannot be written: {error.strerror or error}",
            f"make room, or set {CACHE_DIR_VARIABLE} to a folder that can be written",
        ) from error
