"""A torch module and its loss -> one functional fx graph of forward and backward, traced without computing anything.

    (inputs, targets), noise, parameters, buffers  ──►  (loss, a gradient per trained parameter, new buffers)

AOTAutograd traces the joint graph; the decompositions leave operators whose backward is plain arithmetic. Random
operators become inputs ("noise"), so that a step is a pure function and a seed fixes it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import fx, nn
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._export.utils import _compiling_state_context
from torch._functorch import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.stateless import _reparametrize_module

from tvmhet.errors import BadModel, HetError, NoGradient
from tvmhet.ir.torch_call import CallForm, arguments_of
from tvmhet.ir.torch_complex import pair_nodes
from tvmhet.ir.torch_defined_linear import CHECKS, without_checks
from tvmhet.ir.torch_known_values import with_known_values
from tvmhet.ir.torch_place import place_of
from tvmhet.ir.training_gradients import missing_gradient
from tvmhet.ir.training_loss import WithLoss
from tvmhet.ir.training_places import places_of_calls
from tvmhet.ir.training_random import FROM_NOISE, base_name, lift_randomness
from tvmhet.ir.training_strided import replace_strided
from tvmhet.ir.training_tied import name_in_module, with_one_name_each
from tvmhet.ir.training_variance import VARIANCES

_aten = torch.ops.aten

#: Beyond the core set: composite operators whose backward TVM lacks or gets wrong, taken apart into arithmetic.
_TAKEN_APART = (
    "native_layer_norm", "native_layer_norm_backward", "native_group_norm", "native_group_norm_backward",
    "native_batch_norm", "native_batch_norm_backward", "_native_batch_norm_legit",
    "_native_batch_norm_legit_functional", "cudnn_batch_norm", "native_dropout", "native_dropout_backward",
    "_softmax_backward_data", "_log_softmax_backward_data", "gelu_backward", "threshold_backward", "silu_backward",
    "tanh_backward", "sigmoid_backward", "logit_backward", "elu_backward", "leaky_relu_backward",
    "hardswish_backward", "hardsigmoid_backward", "hardtanh_backward", "softplus_backward", "nll_loss_forward",
    "nll_loss_backward", "nll_loss2d_forward", "nll_loss2d_backward", "mse_loss", "mse_loss_backward",
    "smooth_l1_loss", "smooth_l1_loss_backward", "binary_cross_entropy", "binary_cross_entropy_backward",
    "embedding_dense_backward", "select_backward", "slice_backward", "_unsafe_index", "index_add", "addmm", "baddbmm",
    "t", "unbind", "stack", "split", "masked_fill", "zero", "new_empty", "new_empty_strided", "lift_fresh",
    "_thnn_fused_lstm_cell", "norm", "bernoulli",
)  # fmt: skip

_NO_OPS = ("detach", "alias", "lift_fresh_copy")


@dataclass(frozen=True, slots=True)
class JointGraph:
    """The functional graph and what its placeholders and results are, in order.

    `graph` takes batch, noise, parameters, buffers, constants; it returns the loss, the gradients of `trained`, the new
    values of `updated`. Names of parameters and buffers are torch's. Constants are tensors that the module keeps
    outside its state.
    """

    graph: fx.GraphModule
    num_batch: int
    noise: tuple[str, ...]  # distribution of each noise input
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    constants: tuple[torch.Tensor, ...]
    trained: tuple[str, ...]
    updated: tuple[str, ...]


def trace_joint(
    model: nn.Module,
    inputs: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    loss: Callable[..., Any],
    dtype: torch.dtype | None = None,
    form: CallForm | None = None,
    definitions: Mapping[Any, Callable[..., Any]] = MappingProxyType({}),
) -> JointGraph:
    """Trace one step of `model` in the mode (train or eval) that it is in, computed in `dtype` if given (`run_in`).

    It is called with `inputs` in order, or as they stand in `form`. Operators that have one of `definitions` are
    written out by it. Raises BadLoss for a loss that is no scalar, NoGradient naming the operator without one and its
    module or for a module without parameters to train, BadModel for a module that cannot be traced.
    """
    _check_parameters(model)
    stepped, batch = WithLoss(model, loss, len(inputs), dtype, form), (*inputs, *targets)
    try:
        named = with_one_name_each(stepped)
        graph, signature = with_known_values(named, lambda: _trace(named, batch, definitions))
    except Exception as error:
        _explain(error, stepped, batch)
    assert isinstance(graph, fx.GraphModule)
    return _arrange(graph, signature, len(inputs) + len(targets))


def _check_parameters(model: nn.Module) -> None:
    if not any(p.requires_grad for p in model.parameters()):
        count = len(list(model.parameters()))
        raise NoGradient(
            f"none of the {count} parameters of {type(model).__name__} needs a gradient, so there is nothing to train",
            "set requires_grad on those to be trained" if count else "give a module with parameters",
        )
    if held := [name for name, t in (*model.named_parameters(), *model.named_buffers()) if t.is_complex()]:
        raise BadModel(
            f"parameter or buffer {held[0]!r} is complex, which training does not take",
            "hold torch.view_as_real of it, or compute it in forward",
        )


def _trace(
    stepped: nn.Module, batch: Sequence[torch.Tensor], definitions: Mapping[Any, Callable[..., Any]]
) -> tuple[Any, Any]:
    """Trace on fake tensors, attention as products and softmax, LSTM cells as arithmetic."""
    with (
        _without_unused(stepped, batch),
        _faked(stepped) as mode,
        sdpa_kernel(SDPBackend.MATH),
        torch.backends.mkldnn.flags(enabled=False),
        _traced_once(),
        without_checks(),
    ):
        graph, signature = aot_autograd.aot_export_module(
            stepped,
            [mode.from_tensor(x) for x in batch],
            decompositions={**_decompositions(), **definitions},
            trace_joint=True,
            output_loss_index=0,
        )
        return graph, signature


@contextmanager
def _traced_once() -> Iterator[None]:
    """Let AOTAutograd copy its joint graph without gradients of it.

    The copy's results are gradients already, and some operators in it have none (slice_scatter of complex tensors).
    """
    copy = aot_autograd.make_fx

    def without_gradients(*args: Any, **options: Any) -> Callable[..., Any]:
        traced: Callable[..., Any] = torch.no_grad()(copy(*args, **options))
        return traced

    aot_autograd.make_fx = without_gradients
    try:
        yield
    finally:
        aot_autograd.make_fx = copy


@contextmanager
def _without_unused(stepped: nn.Module, batch: Sequence[torch.Tensor]) -> Iterator[None]:
    """Freeze meanwhile the parameters that the loss does not depend on: they have no gradient, as in torch."""
    unused = [p for p, gradient in _with_gradients(stepped, batch) if gradient is None]
    try:
        for p in unused:
            p.requires_grad_(False)
        yield
    finally:
        for p in unused:
            p.requires_grad_(True)


def _with_gradients(
    stepped: nn.Module, batch: Sequence[torch.Tensor]
) -> list[tuple[nn.Parameter, torch.Tensor | None]]:
    """Return the parameters to train, each with its gradient, without values; None where the loss does not read it."""
    wanted = {name: p for name, p in stepped.named_parameters() if p.requires_grad}
    with _faked(stepped) as mode, sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
        fakes = dict(stepped.named_parameters())
        (loss,) = stepped(*(mode.from_tensor(x) for x in batch))
        given = [fakes[name] for name in wanted]
        found = torch.autograd.grad(loss, given, allow_unused=True) if loss.requires_grad else ()
    return list(zip(wanted.values(), found, strict=False))


@contextmanager
def _faked(module: nn.Module) -> Iterator[FakeTensorMode]:
    """Give the module parameters and buffers without values meanwhile, all of one mode; its own stay untouched.

    Models may ask torch.compiler.is_exporting() before they look at values: it is true.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    fakes = {name: mode.from_tensor(value) for name, value in state.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of its own internals
        with _compiling_state_context(), mode, _reparametrize_module(module, fakes, tie_weights=True):
            yield mode


def _decompositions() -> dict[Any, Callable[..., Any]]:
    table = dict(core_aten_decompositions())
    table.update(get_decompositions([getattr(_aten, name) for name in _TAKEN_APART]))
    table.update(FROM_NOISE)
    table.update(VARIANCES)
    table.update(CHECKS)
    return table


def _explain(error: Exception, stepped: WithLoss, batch: Sequence[torch.Tensor]) -> Any:
    """Raise our own error for whatever tracing raised."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, HetError):
            raise cause from None
        cause = cause.__cause__ or cause.__context__
    if (found := missing_gradient(stepped, batch)) is not None:
        raise found from error
    if "marked as the loss, but it does not require gradients" in str(error):
        raise NoGradient(
            "the loss depends on no parameter that needs a gradient",
            "compute it from what the module returns, without detach() or torch.no_grad()",
        ) from error
    if "gradients_to_parameters" in str(error) and (pair := _one_gradient(stepped, batch)):
        raise BadModel(
            f"parameters {pair[0]!r} and {pair[1]!r} have one and the same gradient, as where only their sum is used; "
            "torch cannot trace that",
            f"train their sum as one parameter, or use 1.0 * {pair[1]}",
        ) from error
    raise _untraceable(stepped.model, error) from error


def _one_gradient(stepped: WithLoss, batch: Sequence[torch.Tensor]) -> tuple[str, str] | None:
    """Return the names of two parameters of the model that have the same tensor as their gradient."""
    names = {id(p): name for name, p in stepped.model.named_parameters()}
    first: dict[int, str] = {}
    for p, gradient in _with_gradients(stepped, batch):
        if gradient is not None and (name := names[id(p)]) != first.setdefault(id(gradient), name):
            return first[id(gradient)], name
    return None


def _untraceable(model: nn.Module, error: Exception) -> BadModel:
    """Return what is said of a module that torch cannot trace, with the line of its own code."""
    text = str(error).strip()
    return BadModel(
        f"the training step of {type(model).__name__} cannot be traced{place_of(error)}: {type(error).__name__}: "
        f"{text.splitlines()[0][:300] if text else ''}",
        "remove data-dependent control flow, shapes that depend on values, and in-place changes of inputs",
    )


def _arrange(graph: fx.GraphModule, signature: Any, num_batch: int) -> JointGraph:
    """Order and name the placeholders, lift randomness, drop identities, order the results."""
    holders = {n.name: n for n in graph.graph.nodes if n.op == "placeholder"}
    batch = [holders[name] for name in signature.user_inputs]
    parameters = [(_torch_name(name), holders[n]) for n, name in signature.inputs_to_parameters.items()]
    buffers = [(_torch_name(name), holders[n]) for n, name in signature.inputs_to_buffers.items()]
    assert len(batch) == num_batch
    made = {str(n): n for n in graph.graph.find_nodes(op="output")[0].all_input_nodes}
    gradient_of = {_torch_name(target): made[g] for g, target in _gradients(signature)}
    new_buffer = {_torch_name(target): made[n] for n, target in signature.buffers_to_mutate.items()}
    trained = tuple(name for name, _ in parameters if name in gradient_of)
    updated = tuple(name for name, _ in buffers if name in new_buffer)
    (output,) = graph.graph.find_nodes(op="output")
    loss = made[signature.user_outputs[0]]  # torch misnames `loss_output` where buffers change
    output.args = ((loss, *(gradient_of[n] for n in trained), *(new_buffer[n] for n in updated)),)
    replace_strided(graph.graph)
    _drop_identities(graph.graph)
    pair_nodes(graph.graph)
    graph.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    noise, constants = lift_randomness(graph.graph), _lift_constants(graph)
    state = [n for _, n in (*parameters, *buffers)]
    _reorder(graph.graph, [*batch, *(n for n, _ in noise), *state, *(n for n, _ in constants)])
    graph.recompile()
    return JointGraph(
        graph,
        num_batch,
        tuple(kind for _, kind in noise),
        tuple(name for name, _ in parameters),
        tuple(name for name, _ in buffers),
        tuple(value for _, value in constants),
        trained,
        updated,
    )


def _torch_name(name: str) -> str:
    """The module's own name of a parameter or buffer."""
    return name_in_module(name).removeprefix("model.")


def _gradients(signature: Any) -> list[tuple[str, str]]:
    return list(signature.backward_signature.gradients_to_parameters.items())


def _drop_identities(graph: fx.Graph) -> None:
    for node in [n for n in graph.nodes if n.op == "call_function"]:
        same = node.args[0] if base_name(node) in _NO_OPS else None
        if node.target is _aten.copy.default and _alike(*node.args):
            same = node.args[1]  # a copy into a tensor of the same kind is the value copied
        if same is not None:
            node.replace_all_uses_with(same)
            graph.erase_node(node)


def _alike(a: fx.Node, b: fx.Node) -> bool:
    return bool(a.meta["val"].shape == b.meta["val"].shape and a.meta["val"].dtype == b.meta["val"].dtype)


def _lift_constants(graph: fx.GraphModule) -> list[tuple[fx.Node, torch.Tensor]]:
    """Replace each tensor that the graph holds by a placeholder; return them with their values."""
    lifted: dict[str, tuple[fx.Node, torch.Tensor]] = {}
    first = next(iter(graph.graph.nodes))
    for node in graph.graph.find_nodes(op="get_attr"):
        value = getattr(graph, node.target)
        if node.target not in lifted:
            with graph.graph.inserting_before(first):
                holder = graph.graph.placeholder(f"constant_{len(lifted)}")
            holder.meta["val"] = value
            lifted[node.target] = holder, value.detach()
        node.replace_all_uses_with(lifted[node.target][0])
        graph.graph.erase_node(node)
    return list(lifted.values())


def _reorder(graph: fx.Graph, holders: Sequence[fx.Node]) -> None:
    """Put the placeholders first, in the order given."""
    anchor = next(n for n in graph.nodes if n.op != "placeholder")
    for node in holders:
        anchor.prepend(node)


def places_in(
    model: nn.Module,
    inputs: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    loss: Callable[..., Any],
    dtype: torch.dtype | None = None,
    form: CallForm | None = None,
) -> dict[str, list[str]]:
    """Return where the operators of `trace_joint`'s forward pass stand: see `places_of_calls`."""
    stepped = WithLoss(model, loss, len(inputs), dtype, form)
    named = with_one_name_each(stepped)

    def found() -> dict[str, list[str]]:
        with _faked(named) as mode:
            batch = [mode.from_tensor(x) for x in (*inputs, *targets)]
            return places_of_calls(stepped, lambda: named(*batch))

    return with_known_values(named, found)


def fake_result(model: nn.Module, inputs: Sequence[torch.Tensor], form: CallForm | None) -> Any:
    """Return what the module returns for these inputs, as tensors without values. Raises BadModel."""
    named = with_one_name_each(model)

    def result() -> Any:
        with _faked(named) as mode, torch.no_grad():
            args, kwargs = arguments_of([mode.from_tensor(x) for x in inputs], form)
            return named(*args, **kwargs)

    try:
        return with_known_values(named, result)
    except Exception as error:
        raise _untraceable(model, error) from error
