"""A model by the name a command line can give: a .onnx file, a .pt2 file, or "package.module:function".

The function takes no argument and returns `(torch module, example inputs)`, a torch module alone (then the inputs'
shapes must be given), a `Model`, or a Relax module.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tvmhet.errors import BadInput, BadModel

if TYPE_CHECKING:
    import onnx

    from tvmhet.ir.model import Model
    from tvmhet.ir.optimizers import Optimizer
    from tvmhet.ir.training_model import TrainingModel

_SHAPE = re.compile(r"(scalar|\d+(?:x\d+)*)(?::([a-z]\w*))?")


@dataclass(frozen=True, slots=True)
class InputShape:
    """Shape and dtype of one input; dtype None is float32, or what a file declares."""

    shape: tuple[int, ...]
    dtype: str | None = None


def parse_input_shape(text: str) -> InputShape:
    """Read "1x3x224x224:float32", "1x128:int64", "8" or "scalar:int32". Raises BadInput.

    >>> parse_input_shape("1x128:int64")
    InputShape(shape=(1, 128), dtype='int64')
    """
    match = _SHAPE.fullmatch(text.strip())
    if match is None:
        raise BadInput(f"input {text!r} is not a shape", "write dims joined by x, then the dtype: 1x3x224x224:float32")
    dims = () if match[1] == "scalar" else tuple(int(d) for d in match[1].split("x"))
    return InputShape(dims, match[2])


def load_model(source: str, inputs: Sequence[InputShape] = (), bind: Mapping[str, int] | None = None) -> Model:
    """Import the model that `source` names. `inputs` are in call order; `bind` gives named dims a value.

    Raises BadModel for a source that does not exist or returns no model, BadInput for inputs that do not fit.
    """
    bind = dict(bind or {})
    if source.endswith(".onnx"):
        return _from_onnx(source, inputs, bind)
    if source.endswith(".pt2"):
        from tvmhet.ir.importers import from_exported

        if inputs:
            raise BadInput(
                f"{source!r} has its shapes in the file", "leave --inputs out; --bind gives symbolic dims a value"
            )
        return from_exported(source, bind_shapes=bind)
    if ":" in source:
        return _from_function(source, inputs, bind)
    raise BadModel(
        f"the model is {source!r}",
        "give a .onnx file, a .pt2 file, or package.module:function such as tvmhet.zoo:resnet50",
    )


def random_inputs(shapes: Sequence[InputShape], seed: int = 0) -> list[Any]:
    """Return torch tensors: floats from a normal distribution, integers and truth values 0 or 1, which are indices of
    any table with two rows. Raises BadInput for a dtype that torch does not have."""
    import torch

    random = torch.Generator().manual_seed(seed)
    tensors = []
    for one in shapes:
        dtype = getattr(torch, one.dtype or "float32", None)
        if not isinstance(dtype, torch.dtype):
            raise BadInput(
                f"input dtype {one.dtype!r} is unknown", "use float32, float16, bfloat16, int64, int32, bool, ..."
            )
        if dtype.is_floating_point:
            tensors.append(torch.randn(one.shape, generator=random).to(dtype))
        else:
            tensors.append(torch.randint(0, 2, one.shape, generator=random).to(dtype))
    return tensors


def _from_onnx(source: str, inputs: Sequence[InputShape], bind: Mapping[str, int]) -> Model:
    from tvmhet.ir.importers import from_onnx
    from tvmhet.ir.onnx_import import load_onnx

    proto = load_onnx(source)
    return from_onnx(proto, shapes=_onnx_shapes(source, proto, inputs), bind_shapes=bind)


def _onnx_shapes(source: str, proto: onnx.ModelProto, inputs: Sequence[InputShape]) -> dict[str, tuple[int, ...]]:
    """Dims by input name for `inputs` in the file's order."""
    import onnx

    if not inputs:
        return {}
    weights = {w.name for w in proto.graph.initializer}
    declared = [i for i in proto.graph.input if i.name not in weights]
    if len(declared) != len(inputs):
        names = ", ".join(i.name for i in declared)
        raise BadInput(
            f"{source!r} has {len(declared)} inputs ({names}), --inputs gives {len(inputs)}", "give one per input"
        )
    for info, one in zip(declared, inputs, strict=True):
        dtype = onnx.helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type).name
        if one.dtype not in (None, dtype):
            raise BadInput(
                f"input {info.name!r} of {source!r} is {dtype}, --inputs says {one.dtype}", f"write :{dtype}"
            )
    return {info.name: one.shape for info, one in zip(declared, inputs, strict=True)}


def _from_function(source: str, inputs: Sequence[InputShape], bind: Mapping[str, int]) -> Model:
    """Call the function and import what it returns."""
    return _imported(source, find_function(source)(), inputs, bind)


def _imported(source: str, made: Any, inputs: Sequence[InputShape], bind: Mapping[str, int]) -> Model:
    import torch
    import tvm

    from tvmhet.ir.importers import from_relax, from_torch
    from tvmhet.ir.model import Model
    from tvmhet.ir.normalize import normalize

    module, examples = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if isinstance(module, torch.nn.Module):
        return from_torch(module, _examples(source, inputs, examples), bind_shapes=bind)
    if inputs:
        raise BadInput(f"{source} returns a {type(made).__name__} with shapes of its own", "leave --inputs out")
    if isinstance(made, tvm.IRModule):
        return from_relax(made, bind_shapes=bind)
    if isinstance(made, Model):
        return normalize(made, bind_shapes=bind) if bind else made
    raise BadModel(
        f"{source} returned a {type(made).__name__}", "return (torch module, example inputs), a Model or a Relax module"
    )


def _examples(source: str, inputs: Sequence[InputShape], examples: Any) -> Any:
    given = random_inputs(inputs) if inputs else examples
    if given is None:
        raise BadInput(f"{source} returns a torch module without example inputs", "give --inputs 1x3x224x224:float32")
    return given


@dataclass(frozen=True, slots=True)
class StepOptions:
    """How a step is trained: a loss by name (None: the function returns a step), an optimiser as plans call it."""

    loss: str | None
    optimizer: str
    lr: float


def load_step(source: str, inputs: Sequence[InputShape], options: StepOptions) -> Model | TrainingModel:
    """Import the training step of "package.module:function", or its forward pass where no loss is given.

    The function returns what `load_model` says, or a `TrainingModel`. Raises BadInput for a loss of what is no torch
    module, or beside a step that has one.
    """
    import torch

    from tvmhet.ir.importers import from_torch
    from tvmhet.ir.training_model import TrainingModel

    made = find_function(source)() if ":" in source else None
    module, examples = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if isinstance(made, TrainingModel) and options.loss is None:
        return made
    if options.loss is None:
        return _imported(source, made, inputs, {})
    if not isinstance(module, torch.nn.Module):
        what = "a file" if made is None else f"a {type(made).__name__}"
        raise BadInput(
            f"--loss is {options.loss!r} and {source!r} is {what}",
            "give package.module:function of a function that returns (torch module, example inputs)",
        )
    optimizer, dtype = _optimizer(options)
    given = _examples(source, inputs, examples)
    return from_torch(module, given, mode="training", loss=options.loss, optimizer=optimizer, dtype=dtype)


def _optimizer(options: StepOptions) -> tuple[Optimizer, str]:
    """Return the optimiser and what the step computes in."""
    from tvmhet.ir.optimizers import Adagrad, AdamW, Lion, RmsProp, Sgd

    name, _, narrow = options.optimizer.partition("-")
    made: dict[str, Optimizer] = {
        "sgd": Sgd(options.lr),
        "momentum": Sgd(options.lr, momentum=0.9),
        "adamw": AdamW(options.lr),
        "rmsprop": RmsProp(options.lr),
        "adagrad": Adagrad(options.lr),
        "lion": Lion(options.lr),
    }
    if name not in made or narrow not in ("", "bf16"):
        raise BadInput(
            f"optimizer {options.optimizer!r} is unknown", f"use one of {', '.join(made)}, or one with -bf16"
        )
    return made[name], "bfloat16" if narrow else "float32"


def find_function(source: str) -> Any:
    """Return the function "package.module:function"; modules of the current folder count. Raises BadModel."""
    module_name, _, name = source.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and not module_name.startswith(error.name):
            raise  # the module is there, and imports something that is not
        raise BadModel(
            f"there is no Python module {module_name!r}", "give package.module:function, from a folder on the path"
        ) from error
    found = getattr(module, name, None)
    if not callable(found):
        own = ", ".join(_own_functions(module)[:12])
        raise BadModel(f"module {module_name!r} has no function {name!r}", f"it has {own or 'none'}")
    return found


def _own_functions(module: ModuleType) -> list[str]:
    """What a module offers to be called: of `__all__`, else what it defines itself."""
    names = getattr(module, "__all__", None) or [
        n for n, x in vars(module).items() if getattr(x, "__module__", "") == module.__name__
    ]
    return sorted(n for n in names if not n.startswith("_") and callable(getattr(module, n, None)))
