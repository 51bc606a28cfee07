"""A torch module, its loss and an optimiser -> `TrainingModel`: the joint graph as Relax, every node checked.

    joint fx graph ──converters, each result against its fx metadata──► Relax ──normalise──► main with named inputs

While the module is normalised its parameters are plain inputs, so that no arithmetic on them is computed ahead.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram, ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.utils import _pytree as pytree

from tvmhet._tvm import from_exported_program
from tvmhet.errors import BadBatch, BadInput, BadModel, HetError, UnsupportedOperator
from tvmhet.ir.assigned_attributes import buffers_in_place
from tvmhet.ir.attrs import NUM_INPUT_ATTR
from tvmhet.ir.earlier_calls import require_calls_alike
from tvmhet.ir.host_randomness import without_draws
from tvmhet.ir.model import ENTRY, Model, from_torch_tensor
from tvmhet.ir.normalize import normalize
from tvmhet.ir.optimizers import Optimizer
from tvmhet.ir.plain_attributes import unchanged_by_calls
from tvmhet.ir.torch_call import CallForm
from tvmhet.ir.torch_definitions import Definition, definition_of
from tvmhet.ir.torch_import import checked_converters, with_reason
from tvmhet.ir.torch_optimizers import in_groups_only
from tvmhet.ir.training_converters import BACKWARD
from tvmhet.ir.training_model import TrainingModel
from tvmhet.ir.training_places import give_places
from tvmhet.ir.training_trace import JointGraph, fake_result, places_in, trace_joint

Loss = Callable[..., torch.Tensor]

#: What a step may compute in; None leaves the module's own dtypes.
_DTYPES: Mapping[str, torch.dtype | None] = {"float32": None, "bfloat16": torch.bfloat16}


def import_training(
    model: nn.Module,
    inputs: Sequence[torch.Tensor],
    form: CallForm,
    targets: Sequence[torch.Tensor] | None,
    loss: str | Loss,
    optimizer: Optimizer,
    dtype: str = "float32",
) -> TrainingModel:
    """Trace, convert and normalise one step. The module's values are shared until training starts, then copied.

    It is called with `inputs` as they stand in `form`, whose names are those of the batch. With dtype "bfloat16"
    forward and backward run in it and parameters, gradients and state stay float32. `targets` are examples of the
    loss's further arguments; for cross entropy and mean squared error they may be left out. `TrainingModel.at_batch`
    traces the step again, with examples of another size. Raises BadLoss, NoGradient, UnsupportedOperator, BadModel.
    """
    if dtype not in _DTYPES:
        raise BadInput(f"dtype is {dtype!r}", f"compute in one of {', '.join(_DTYPES)}")
    if absent := [n for n, p in model.named_parameters() if p.device.type == "meta"]:
        raise BadModel(
            f"parameter {absent[0]!r} of {type(model).__name__} is on torch's meta device, without values",
            "make the module on the CPU; only its forward pass can be planned without values",
        )
    given = None if targets is None else tuple(targets)
    same = unchanged_by_calls(model, partial(fake_result, model, inputs, form))
    made: set[str] = set()
    with _in_train_mode(model):
        with in_groups_only(model, optimizer), without_draws(model), same, buffers_in_place(model, made):
            function, targets = resolve_loss(loss, model, inputs, targets, form)
            traced = (model, inputs, targets, function, _DTYPES[dtype], form)
            trace, places = partial(trace_joint, *traced), partial(places_in, *traced)
            joint, names, constants, converted = _converted(trace, places, form.names)
        require_calls_alike(model, form.filled(inputs), made)
    normal = normalize(Model(converted))
    if normal.whole_reason:
        raise BadModel(
            f"the training step of {type(model).__name__} cannot be cut: {normal.whole_reason}",
            "give example inputs of fixed shapes, and no data-dependent control flow",
        )
    state = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    tensors = {relax: state[name] for relax, name in names.items()} | constants
    values = {relax: from_torch_tensor(tensor) for relax, tensor in tensors.items()}
    return TrainingModel(
        _with_weights(normal, values, len(inputs) + len(targets) + len(joint.noise), type(model).__name__),
        joint.num_batch,
        joint.noise,
        tuple(r for r, n in names.items() if n in set(joint.trained)),
        tuple(r for r, n in names.items() if n in set(joint.updated)),
        names,
        _state_dict(model, names, state),
        optimizer,
        cache(partial(_import_at, model, tuple(inputs), form, given, loss, optimizer, dtype)),
    )


def _import_at(
    model: nn.Module,
    inputs: Sequence[torch.Tensor],
    form: CallForm,
    targets: Sequence[torch.Tensor] | None,
    loss: str | Loss,
    optimizer: Optimizer,
    dtype: str,
    size: int,
) -> TrainingModel:
    """Import the step with examples of `size` samples, which repeat those given."""
    own = inputs[0].shape[0]

    def resized(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.ndim or tensor.shape[0] != own:
            raise BadBatch(
                f"an example of shape {tuple(tensor.shape)} does not hold {own} samples, so there is no other size",
                "give every input and target the samples as its first dim",
            )
        return tensor[torch.arange(size, device=tensor.device) % own]

    targets = None if targets is None else [resized(t) for t in targets]
    return import_training(model, [resized(x) for x in inputs], form, targets, loss, optimizer, dtype)


def _state_dict(model: nn.Module, names: Mapping[str, str], state: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the Relax name of each tensor in the module's state dict, tied ones by identity."""
    by_tensor = {id(state[name]): relax for relax, name in names.items()}
    entries = model.state_dict(keep_vars=True)
    return {key: by_tensor[id(value)] for key, value in entries.items() if id(value) in by_tensor}


@contextmanager
def _in_train_mode(model: nn.Module) -> Iterator[None]:
    """Put a module that is in eval mode into train mode meanwhile; one in train mode stays as its parts are set."""
    before = {m: m.training for m in model.modules()}
    try:
        if not model.training:
            model.train()
        yield
    finally:
        for module, training in before.items():
            module.training = training


def resolve_loss(
    loss: str | Loss,
    model: nn.Module,
    inputs: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor] | None,
    form: CallForm | None = None,
) -> tuple[Loss, tuple[torch.Tensor, ...]]:
    """Return the loss as a function, and example targets. Names: "cross_entropy" (classes last), "mse", "output".

    "output" takes what the module returns as the loss, or its entry or attribute `loss`.
    """
    if isinstance(loss, str):
        if loss not in _LOSSES:
            raise BadInput(f"loss {loss!r} is unknown", f"use one of {', '.join(_LOSSES)}, or a function")
        function, example = _LOSSES[loss]
        if targets is not None or function is _own_loss:
            return function, tuple(targets or ())
        result = fake_result(model, inputs, form)
        if not isinstance(result, torch.Tensor):
            raise BadInput(
                f"the model returns a {type(result).__name__}, and loss {loss!r} is of one tensor",
                "wrap the model so that it returns that tensor, or give the loss as a function, with targets",
            )
        return function, example(result)
    return loss, tuple(targets or ())


def _cross_entropy(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(y.reshape(-1, y.shape[-1]), target.reshape(-1))


def _own_loss(y: Any) -> Any:
    if isinstance(y, Mapping):
        return y.get("loss", y)
    return getattr(y, "loss", y)


def _classes_like(y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (torch.zeros(tuple(y.shape[:-1]), dtype=torch.int64),)


_LOSSES: Mapping[str, tuple[Loss, Callable[[torch.Tensor], tuple[torch.Tensor, ...]]]] = {
    "cross_entropy": (_cross_entropy, _classes_like),
    "mse": (nn.functional.mse_loss, lambda y: (torch.zeros(tuple(y.shape), dtype=y.dtype),)),
    "output": (_own_loss, lambda y: ()),  # has no targets
}


def _name_placeholders(
    joint: JointGraph, given: Sequence[str | None]
) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Rename the placeholders to what they are; return parameters and buffers, and constants, by their new name."""
    holders = joint.graph.graph.find_nodes(op="placeholder")
    wanted = _batch_names(joint.num_batch, given) + [f"noise{i}" for i in range(len(joint.noise))]
    wanted += [_identifier(f"p_{name}") for name in joint.parameters]
    wanted += [_identifier(f"b_{name}") for name in joint.buffers]
    wanted += [f"fixed{i}" for i in range(len(joint.constants))]
    first = joint.num_batch + len(joint.noise)
    for node in {n for n in joint.graph.graph.nodes if n.name in given} - set(holders):
        node.name = f"{node.name}_made"
    fresh = list(_unique(wanted, {n.name for n in joint.graph.graph.nodes} - {h.name for h in holders}))
    for holder, name in zip(holders, fresh, strict=True):
        holder.name = holder.target = name
    state = (*joint.parameters, *joint.buffers)
    rest = first + len(state)
    return dict(zip(fresh[first:rest], state, strict=True)), dict(zip(fresh[rest:], joint.constants, strict=True))


def _batch_names(count: int, given: Sequence[str | None]) -> list[str]:
    """Return names of `count` inputs and targets: those of the inputs that have one, and `target` after these."""
    targets = [f"target{i}" for i in range(count - len(given))] if any(given) else [None] * (count - len(given))
    names = [*given, *(["target"] if targets == ["target0"] else targets)]
    return [name or f"x{i}" for i, name in enumerate(names)]


def _identifier(name: str) -> str:
    return re.sub(r"\W", "_", name)


def _unique(wanted: Iterable[str], taken: set[str]) -> Iterable[str]:
    for name in wanted:
        unused, i = name, 0
        while unused in taken:
            i += 1
            unused = f"{name}_{i}"
        taken.add(unused)
        yield unused


def _converted(
    trace: Callable[..., JointGraph], places: Callable[[], dict[str, list[str]]], given: Sequence[str | None]
) -> tuple[JointGraph, dict[str, str], dict[str, torch.Tensor], Any]:
    """Trace and convert; operators that cannot be are written out, each once, and the step is traced again.

    Return the graph, what `_name_placeholders` does, and the Relax module.
    """
    joint, written = trace(), dict[Any, Definition]()
    while True:
        names, constants = _name_placeholders(joint, given)
        try:
            return joint, names, constants, _convert(joint.graph)
        except (UnsupportedOperator, BadModel) as found:
            error = found  # handled below, so that it is no context of what tracing raises then
        refused = {n.target for n in joint.graph.graph.nodes if str(n.target) in error.operators}
        defined = {o: d for o in refused - written.keys() if (d := definition_of(o)) is not None}
        if not defined:
            raise _placed(error, joint.graph, places)
        written |= defined
        try:
            joint = trace(definitions=written)
        except HetError as reason:  # a definition that does not hold for these arguments
            raise with_reason(_placed(error, joint.graph, places), reason.__cause__) from None


def _placed(error: HetError, graph: fx.GraphModule, places: Callable[[], dict[str, list[str]]]) -> HetError:
    """Return what converting `graph` raised once more, with the module of the operator that cannot be converted."""
    with suppress(Exception):  # this only explains; where the module cannot be run again, the error stays as it is
        give_places(graph.graph, places())
    try:
        _convert(graph)
    except (UnsupportedOperator, BadModel) as placed:
        return placed
    return error


def _convert(graph: fx.GraphModule) -> Any:
    """Return the Relax module of a functional graph all of whose placeholders are inputs."""
    program = _as_program(graph)
    return from_exported_program(
        program,
        keep_params_as_input=True,
        run_ep_decomposition=False,
        custom_convert_map=checked_converters(program, BACKWARD),
    )


def _as_program(graph: fx.GraphModule) -> ExportedProgram:
    """Wrap a graph as the exported program that TVM's front end takes."""
    holders = graph.graph.find_nodes(op="placeholder")
    (output,) = graph.graph.find_nodes(op="output")
    signature = ExportGraphSignature(
        [InputSpec(InputKind.USER_INPUT, TensorArgument(n.name), n.target) for n in holders],
        [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(n.name), None) for n in output.args[0]],
    )
    call = ModuleCallSignature([], [], _structure((tuple(holders), {})), _structure(tuple(output.args[0])))
    return ExportedProgram(graph, graph.graph, signature, {}, {}, [ModuleCallEntry("", call)], constants={})


def _structure(value: Any) -> pytree.TreeSpec:
    return pytree.tree_flatten(value)[1]


def _with_weights(model: Model, values: Mapping[str, Any], num_inputs: int, name: str) -> Model:
    """Make weights of the inputs after the first `num_inputs`; their values come before the lifted constants'."""
    mod = model.mod.clone()
    mod.update_func(mod.get_global_var(ENTRY), model.main.with_attr(NUM_INPUT_ATTR, num_inputs))
    return replace(model, mod=mod, params={**values, **model.params}, name=name)
