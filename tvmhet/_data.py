"""Where the shipped data files lie: inside an installed package, or in cost_models/ of a checkout."""

from __future__ import annotations

from pathlib import Path


def data_path(relative: str) -> Path:
    """Return the path of a shipped data file such as `devices.yaml` or `trained/gemm.ubj`."""
    installed = Path(__file__).parent / "_data" / relative
    return installed if installed.exists() else Path(__file__).parent.parent / "cost_models" / relative
