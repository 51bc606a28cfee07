"""Where in a model's own code an error of its tracing arose: the innermost frame that is not torch's.

GuardOnDataDependentSymNode ...   ──►   " at model.py:12 in Gate.forward: `if x.sum() > 0:`"
"""

from __future__ import annotations

import linecache
from pathlib import Path
from types import FrameType

import torch

_TORCH = str(Path(torch.__file__).parent)
_TVMHET = str(Path(__file__).parent.parent)


def place_of(error: BaseException) -> str:
    """Return " at <file>:<line> in <class>.<function>: `<source>`", or "" where no frame is the model's."""
    found, trace = "", error.__traceback__
    while trace is not None:
        frame, line = trace.tb_frame, trace.tb_lineno
        file = frame.f_code.co_filename
        if not file.startswith((_TORCH, _TVMHET, "<")):
            source = linecache.getline(file, line).strip()
            found = f" at {Path(file).name}:{line} in {_function(frame)}" + (f": `{source}`" if source else "")
        trace = trace.tb_next
    return found


def _function(frame: FrameType) -> str:
    owner = frame.f_locals.get("self")
    name = frame.f_code.co_name
    return f"{type(owner).__name__}.{name}" if isinstance(owner, torch.nn.Module) else name
