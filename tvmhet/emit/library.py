"""Library kernels: torch functions that the Relax VM calls through DLPack.

    R.call_dps_packed("tvmhet.library", (spec, x, w, bias), out_ty=...)

`spec` is the JSON program of `tvmhet.graph.library`. It is compiled once per process into a plain Python function of
torch views; steps that torch has as one are folded first, and results are written into the VM's own memory. Importing
this module registers the packed function.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
import tvm_ffi

from tvmhet.emit.float32 import Step, Write
from tvmhet.emit.library_folds import fold
from tvmhet.emit.library_steps import FOLDED, STEPS, WRITES, Attrs
from tvmhet.errors import BadBundle
from tvmhet.ir.attrs import LIBRARY_FUNCTION

__all__ = ["STEPS", "WRITES", "compile_spec"]

Lookup = Callable[[Mapping[str, torch.Tensor]], Any]


def _step(family: str, attrs: Attrs) -> Step:
    return (FOLDED[family] if family in FOLDED else STEPS[family])(attrs)


def _lookup(argument: Any) -> Lookup:
    """Return how to find an argument among the values of a call: a tensor by name, a number, or a shape."""
    if isinstance(argument, str):
        return lambda values: values[argument]
    if isinstance(argument, dict):
        number = torch.tensor(float(argument["value"])).to(getattr(torch, argument["dtype"]))
        return lambda values: number
    if argument is None or isinstance(argument, list | int | float):
        return lambda values: argument
    raise ValueError(f"argument {argument!r} is no tensor, number or shape")


@lru_cache(maxsize=4096)
def compile_spec(spec: str) -> Write:
    """Return the function of a spec: (live-ins, out) -> None. Raises BadBundle for a spec this version cannot run."""
    try:
        steps = fold(json.loads(spec))
        before = [(s.result, _step(s.family, s.attrs), [_lookup(a) for a in s.arguments]) for s in steps[:-1]]
        last = steps[-1]
        make, finds = _step(last.family, last.attrs), [_lookup(a) for a in last.arguments]
        write = WRITES[last.family](last.attrs) if last.family in WRITES else None
    except (KeyError, ValueError, TypeError, IndexError) as error:
        raise BadBundle(f"library kernel {spec[:120]!r} cannot be run: {error!r}", "build the bundle again") from error

    def run(tensors: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        values = {f"i{n}": t for n, t in enumerate(tensors)}
        for name, step, names in before:
            values[name] = step([find(values) for find in names])
        given = [find(values) for find in finds]
        if write is not None:
            write(given, out)
        else:
            out.copy_(make(given))

    return run


@tvm_ffi.register_global_func(LIBRARY_FUNCTION, override=True)
def _library(spec: str, *tensors: Any) -> None:
    """Run one library kernel: live-ins, then the result to write. An error names the kernel's operators and shapes.

    Tensors from DLPack need no gradients, so torch records none, whatever its mode.
    """
    views = [torch.from_dlpack(t) for t in tensors]
    try:
        compile_spec(str(spec))(views[:-1], views[-1])
    except RuntimeError as error:
        raise RuntimeError(f"library kernel {_describe(str(spec), views[:-1])}: {error}") from error
    except IndexError as error:
        raise IndexError(f"library kernel {_describe(str(spec), views[:-1])}: {error}") from error


def _describe(spec: str, inputs: Sequence[torch.Tensor]) -> str:
    """`matmul+bias on (4, 8) float32, (8, 2) float32, ...`: what a person needs to find the operator in the model."""
    families = "+".join(str(family) for family, _, _ in json.loads(spec))
    return f"{families} on " + ", ".join(f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in inputs)
