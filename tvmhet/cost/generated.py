"""How many times longer a TVM-generated kernel takes than the library's, where none was measured."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import yaml

from tvmhet._data import data_path
from tvmhet.cost.model import KernelDesc
from tvmhet.errors import BadModel


def generated_ratio(kind: str, desc: KernelDesc) -> float:
    """Return the ratio for the family of `desc` on devices of `kind`; 1 for library kernels.

    The ratios and what is assumed in them: `cost_models/generated.yaml`. Raises BadModel if the kind is not there.
    """
    if desc.maker == "library":
        return 1.0
    ratios = _ratios().get(kind)
    if ratios is None:
        raise BadModel(f"generated.yaml has no ratios for device kind {kind!r}", "add them")
    return ratios.get(desc.root.family, ratios["default"])


@lru_cache(maxsize=1)
def _ratios() -> Mapping[str, Mapping[str, float]]:
    tree: dict[str, dict[str, float]] = yaml.safe_load(data_path("generated.yaml").read_text())["ratio"]
    return tree
