"""tvmhet: fusion, device type and count for every part of a model, decided together, on Apache TVM.

    mod = tvmhet.from_torch(model, example_inputs)
    lib = tvmhet.build(mod, cluster=tvmhet.ClusterSpec.from_file("cluster.yaml"))
    y = lib(x)

Names are loaded at first use: `import tvmhet` is quick, `tvmhet.build` imports TVM.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "ClusterSpec": "tvmhet.cluster",
    "DeviceType": "tvmhet.cluster",
    "HetError": "tvmhet.errors",
    "HetModule": "tvmhet.module",
    "HetTrainer": "tvmhet.training",
    "Market": "tvmhet.cluster",
    "Model": "tvmhet.ir.model",
    "OpGraph": "tvmhet.graph.opgraph",
    "Plan": "tvmhet.plans",
    "TrainingModel": "tvmhet.ir.training_model",
    "build": "tvmhet.pipeline",
    "device_type": "tvmhet.cluster",
    "device_types": "tvmhet.cluster",
    "extract_graph": "tvmhet.pipeline",
    "from_exported": "tvmhet.ir.importers",
    "from_onnx": "tvmhet.ir.importers",
    "from_relax": "tvmhet.ir.importers",
    "from_torch": "tvmhet.ir.importers",
    "load": "tvmhet.module",
    "load_trainer": "tvmhet.training",
    "plan": "tvmhet.pipeline",
    "profile": "tvmhet.profile_tune",
    "recommend": "tvmhet.recommending",
    "tune": "tvmhet.profile_tune",
    "with_state": "tvmhet.ir.state",
}

if TYPE_CHECKING:
    from tvmhet.cluster import ClusterSpec, DeviceType, Market, device_type, device_types
    from tvmhet.errors import HetError
    from tvmhet.graph.opgraph import OpGraph
    from tvmhet.ir.importers import from_exported, from_onnx, from_relax, from_torch
    from tvmhet.ir.model import Model
    from tvmhet.ir.state import with_state
    from tvmhet.ir.training_model import TrainingModel
    from tvmhet.module import HetModule, load
    from tvmhet.pipeline import build, extract_graph, plan
    from tvmhet.plans import Plan
    from tvmhet.profile_tune import profile, tune
    from tvmhet.recommending import recommend
    from tvmhet.training import HetTrainer, load_trainer

__all__ = [
    "ClusterSpec",
    "DeviceType",
    "HetError",
    "HetModule",
    "HetTrainer",
    "Market",
    "Model",
    "OpGraph",
    "Plan",
    "TrainingModel",
    "build",
    "device_type",
    "device_types",
    "extract_graph",
    "from_exported",
    "from_onnx",
    "from_relax",
    "from_torch",
    "load",
    "load_trainer",
    "plan",
    "profile",
    "recommend",
    "tune",
    "with_state",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tvmhet' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
