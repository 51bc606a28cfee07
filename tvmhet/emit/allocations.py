"""How a lowered function takes memory: storages, and tensors that lie in them.

s = relax.memory.alloc_storage(shape(64), device, scope, dtype)
a = relax.memory.alloc_tensor(s, offset, shape(4, 4), dtype, device)
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax

STORAGE, TENSOR = (tvm.ir.Op.get(f"relax.memory.alloc_{kind}") for kind in ("storage", "tensor"))
_SIZES_AT = {STORAGE: 0, TENSOR: 2}


def allocates(value: Any, op: tvm.ir.Op) -> bool:
    """Whether a step allocates a storage, or a tensor, as `op` says."""
    return isinstance(value, relax.Call) and value.op == op


def sizes(value: Any) -> list[Any]:
    """Return the sizes that an allocation names: bytes of a storage, dims of a tensor; none of any other step."""
    return [size for op, at in _SIZES_AT.items() if allocates(value, op) for size in value.args[at].values]
