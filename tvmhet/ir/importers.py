"""The doors by which a model comes in: torch, an exported program, ONNX, or any Relax module. All give a `Model`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
import tvm
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_map

from tvmhet.errors import BadInput, BadModel, HetError
from tvmhet.ir.assigned_attributes import exported_with_states
from tvmhet.ir.earlier_calls import attributes_put_back, require_calls_alike
from tvmhet.ir.host_randomness import without_draws
from tvmhet.ir.model import Model
from tvmhet.ir.normalize import normalize
from tvmhet.ir.onnx_import import import_onnx, load_onnx
from tvmhet.ir.optimizers import Optimizer
from tvmhet.ir.relax_import import import_relax
from tvmhet.ir.state import with_sessions
from tvmhet.ir.torch_call import Arguments, form_of
from tvmhet.ir.torch_dims import names_of_dims, rename_dims
from tvmhet.ir.torch_import import import_exported
from tvmhet.ir.torch_known_values import KnownValues, with_known_values
from tvmhet.ir.torch_optimizers import chosen_optimizer
from tvmhet.ir.torch_place import place_of
from tvmhet.ir.torch_states import changed_buffers
from tvmhet.ir.training_model import TrainingModel

if TYPE_CHECKING:
    import numpy as np
    import onnx

    from tvmhet.ir.training_import import Loss

__all__ = ["Model", "TrainingModel", "as_model", "from_exported", "from_onnx", "from_relax", "from_torch"]


@overload
def from_torch(
    model: torch.nn.Module,
    example_inputs: Sequence[Any] | Mapping[str, Any],
    *,
    dynamic_shapes: Any = None,
    bind_shapes: Mapping[str, int] | None = None,
    num_sessions: int = 1,
    mode: Literal["inference"] = "inference",
) -> Model: ...
@overload
def from_torch(
    model: torch.nn.Module,
    example_inputs: Sequence[Any] | Mapping[str, Any],
    *,
    mode: Literal["training"],
    loss: str | Loss | None,
    optimizer: str | Optimizer | torch.optim.Optimizer = "sgd",
    example_targets: Sequence[torch.Tensor] | None = None,
    dtype: str = "float32",
    **options: Any,
) -> TrainingModel: ...
def from_torch(
    model: torch.nn.Module,
    example_inputs: Sequence[Any] | Mapping[str, Any],
    *,
    dynamic_shapes: Any = None,
    bind_shapes: Mapping[str, int] | None = None,
    num_sessions: int = 1,
    mode: Literal["inference", "training"] = "inference",
    loss: str | Loss | None = None,
    optimizer: str | Optimizer | torch.optim.Optimizer = "sgd",
    example_targets: Sequence[torch.Tensor] | None = None,
    dtype: str = "float32",
    **options: Any,
) -> Model | TrainingModel:
    """Import a torch module through torch.export, or its training step through AOTAutograd.

    `example_inputs` are the positional arguments of one call, or a mapping of keyword ones, by whose names what is
    built is then called, too; `dynamic_shapes` is torch.export's, and `bind_shapes` gives symbolic dims a value after
    the import, by the names of their torch.export.Dim. What a call changes of the module's buffers are states, of which
    each of `num_sessions` sessions has its own (`HetModule.sessions`). A module made under `torch.device("meta")` takes
    no memory and can be planned, not built.

    With `mode="training"` the inputs are one micro-batch; `loss` is "cross_entropy" (classes last), "mse", "output"
    (the module returns its loss) or a function of the module's result and the targets, whose `example_targets` it then
    needs. `optimizer` is a name (sgd, adam, adamw, rmsprop, adagrad, lion) whose `options` are such as lr=0.1, or one
    of torch.optim that was made for the model's parameters: its groups keep their options, and what is in none is not
    trained. With dtype="bfloat16" a step computes in bfloat16, on copies of float32 parameters, and updates those. A
    module in eval mode is traced in train mode, one in train mode as its submodules are set.

    Raises BadInput when the module does not take these inputs, BadModel when it cannot be exported, UnsupportedOperator
    when an operator has no conversion, BadLoss and NoGradient in training.
    """
    model = _plain_module(model)
    args, kwargs = _checked_arguments(model, example_inputs)
    if mode == "training":
        if loss is None:
            raise BadInput("mode is 'training' and there is no loss", 'give loss="cross_entropy" or a function')
        if dynamic_shapes or bind_shapes or num_sessions != 1:
            raise BadInput(
                "mode is 'training' and shapes are not fixed, or sessions are asked for",
                "leave out dynamic_shapes, bind_shapes and num_sessions",
            )
        from tvmhet.ir.training_import import import_training  # it loads torch's compiler: 1.4 s of CPU

        form, tensors = form_of(model, args, kwargs)
        chosen = chosen_optimizer(optimizer, options, model)
        return import_training(model, tensors, form, example_targets, loss, chosen, dtype)
    if mode != "inference":
        raise BadInput(f"mode is {mode!r}", 'use "inference" or "training"')
    if loss is not None or options or dtype != "float32":
        given = ", ".join(["loss"] * (loss is not None) + ["dtype"] * (dtype != "float32") + sorted(options))
        remedy = 'use mode="training" for a step with its loss; inference takes dynamic_shapes and bind_shapes'
        raise BadInput(f"mode is 'inference' and {given} was given", remedy)
    absent = _is_absent(model)
    try:
        with torch.no_grad(), torch.device("meta") if absent else nullcontext(), without_draws(model):
            program = _exported(model, *(_on_meta((args, kwargs)) if absent else (args, kwargs)), dynamic_shapes)
    except HetError:
        raise
    except Exception as error:
        raise BadModel(
            f"torch.export cannot trace {type(model).__name__}{place_of(error)}: {_first_line(error)}",
            "return tensors, in tuples or dicts; models of transformers take use_cache=False"
            if "is not a known type" in str(error)
            else "remove data-dependent control flow, or export the model to ONNX and use from_onnx",
        ) from error
    names = names_of_dims(program, model, args, kwargs, dynamic_shapes) if dynamic_shapes else {}
    imported = with_sessions(import_exported(program), num_sessions)
    imported = replace(imported, mod=rename_dims(imported.mod, names), name=type(model).__name__)
    return normalize(imported, bind_shapes=bind_shapes)


def _is_absent(model: torch.nn.Module) -> bool:
    """Whether the module was made on the meta device: parameters with sizes and no values, for planning."""
    return any(p.device.type == "meta" for p in model.parameters())


def _on_meta(arguments: Arguments) -> Arguments:
    args, kwargs = tree_map(lambda a: a.to("meta") if isinstance(a, torch.Tensor) else a, arguments)
    return args, kwargs


def from_exported(
    program: torch.export.ExportedProgram | str | Path,
    *,
    bind_shapes: Mapping[str, int] | None = None,
    num_sessions: int = 1,
) -> Model:
    """Import an exported program, or the .pt2 file it was saved to. Raises BadModel for a file that is none.

    `bind_shapes` names symbolic dims as the program does (s77); the error for another name says where each stands.
    `num_sessions` is that of `from_torch`.
    """
    if isinstance(program, str | Path):
        path = Path(program)
        if not path.is_file():
            raise BadModel(f"model file {str(path)!r} does not exist", "give the path of a .pt2 file")
        try:
            program = torch.export.load(path)
        except Exception as error:
            raise BadModel(
                f"model file {str(path)!r} ({path.stat().st_size} bytes) is no exported program: {_first_line(error)}",
                "write it with torch.export.save, with the torch release that reads it",
            ) from error
    return normalize(with_sessions(import_exported(program), num_sessions), bind_shapes=bind_shapes)


def from_onnx(
    model: str | Path | onnx.ModelProto,
    *,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    constants: Mapping[str, np.ndarray] | None = None,
    bind_shapes: Mapping[str, int] | None = None,
) -> Model:
    """Import an ONNX file or model.

    `shapes` replaces the declared dims of inputs, by input name; `bind_shapes` gives a named dim its value wherever it
    stands; `constants` fixes the value of inputs that are no data (axes, shapes, counts). Initializers become
    parameters, the small ones constants. Raises MissingPackage without the package onnx, BadModel for a file that is
    missing, broken or converts to other types than it declares, UnsupportedOperator, BadInput for unknown names.
    """
    return normalize(import_onnx(load_onnx(model), shapes=shapes, constants=constants), bind_shapes=bind_shapes)


def from_relax(
    mod: tvm.IRModule,
    params: Mapping[str, Any] | None = None,
    *,
    bind_shapes: Mapping[str, int] | None = None,
    entry: str | None = None,
) -> Model:
    """Take any Relax module; its entry is the function `entry`, by default `main` or its only public function.

    `params` gives the values of parameters by name (numpy, torch or TVM tensors, for a tuple of them as it is nested);
    the function's other parameters are its inputs, tuples tensor by tensor. Without it, the values are those that a
    front end left in the attribute `params`, if any. Constants in the code become parameters; other functions that
    `main` calls become part of it. Raises BadModel for a module that is not well formed or has no entry, BadInput for
    values that do not fit.
    """
    return normalize(import_relax(mod, params, entry), bind_shapes=bind_shapes)


def _exported(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any
) -> torch.export.ExportedProgram:
    """Export; a module that asks for values is traced once more with those that do not depend on the inputs."""
    left: set[str] = set()

    def traced() -> torch.export.ExportedProgram:
        with attributes_put_back(model, left):
            return torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes)

    def export() -> torch.export.ExportedProgram:
        return exported_with_states(model, traced, left)

    asked: set[str] = set()
    program = with_known_values(model, export, asked)
    if _has_sizes_of_values(program):
        with suppress(Exception), KnownValues(model) as mode:
            program, asked = export(), mode.asked
    if frozen := sorted(asked & changed_buffers(program)):
        raise BadModel(
            f"{type(model).__name__} asks for the value of its buffer {frozen[0]!r}, which its calls change",
            "compute with the tensor: torch.where in place of `if`, index_copy_ in place of a slice at a number",
        )
    if not _is_absent(model):
        require_calls_alike(model, (args, kwargs), left)
    return program


def _has_sizes_of_values(program: torch.export.ExportedProgram) -> bool:
    """Does the size of some tensor depend on values, or on those of a mask?"""
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and free_unbacked_symbols(value):
            return True
        is_index = node.target is torch.ops.aten.index.Tensor
        if is_index and any(i and i.meta["val"].dtype == torch.bool for i in node.args[1]):
            return True
    return False


def _plain_module(model: Any) -> torch.nn.Module:
    """Return the module, of one that torch.compile made the one inside. Raises BadInput for what is none."""
    if isinstance(model, torch.jit.ScriptModule):
        raise BadInput(f"the model is a {type(model).__name__} of TorchScript", "give the module that it was made of")
    if not isinstance(model, torch.nn.Module):
        raise BadInput(f"the model is a {type(model).__name__}", "give a torch.nn.Module with a forward method")
    inside = getattr(model, "_orig_mod", None)
    return inside if isinstance(inside, torch.nn.Module) else model


def _checked_arguments(model: torch.nn.Module, inputs: Any) -> Arguments:
    """Return the inputs by position or by name, checked before the export, whose own error is long."""
    if not isinstance(inputs, torch.Tensor | Sequence | Mapping) or isinstance(inputs, str):
        raise BadInput(
            f"the example inputs are a {type(inputs).__name__}",
            "give a tuple of the tensors of one call, or a mapping of them by name",
        )
    kwargs = dict(inputs) if isinstance(inputs, Mapping) else {}
    args = () if kwargs else (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        named = f" by name ({', '.join(kwargs)})" if kwargs else ""
        raise BadInput(
            f"{type(model).__name__}.forward does not take {len(args) + len(kwargs)} example inputs{named}: {error}",
            "give example_inputs as the tuple of positional arguments of one call, or as a mapping of keyword ones",
        ) from error
    return args, kwargs


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"[:300]


def as_model(model: object, bind_shapes: Mapping[str, int] | None = None) -> Model:
    """Return the model, or a Relax module as one, with shapes bound. Raises BadInput for anything else."""
    if isinstance(model, tvm.IRModule):
        return from_relax(model, bind_shapes=bind_shapes)
    if not isinstance(model, Model):
        raise BadInput(
            f"the model is a {type(model).__name__}", "import it first: from_torch, from_onnx, or pass an IRModule"
        )
    return normalize(model, bind_shapes=bind_shapes) if bind_shapes else model
