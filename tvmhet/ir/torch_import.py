"""torch.export program -> `Model`: convert each fx node, and compare what came out with what torch said.

    fx node ──converter──► Relax expression
       └── shape, dtype ══ must equal ══ its shape, dtype

TVM's torch front end is silently wrong in places (a wrong shape for `z[:, i, j]`, a wrong dtype for `ints * 0.5`), so
every node is checked where it is made and an error names it. `torch_converters` holds our own converters. An operator
without one, or whose conversion fails, is written out in simpler operators (`torch_definitions`) and tried again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import tvm
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from tvm import relax

from tvmhet._tvm import drop_unfinished, exported_program_importer, from_exported_program
from tvmhet.errors import BadModel, HetError, UnsupportedOperator
from tvmhet.ir.attrs import NUM_INPUT_ATTR, NUM_STATE_ATTR
from tvmhet.ir.fx_node import describe
from tvmhet.ir.model import ENTRY, Model
from tvmhet.ir.torch_complex import with_real_pairs
from tvmhet.ir.torch_converters import CONVERTERS, KEPT_OPERATORS
from tvmhet.ir.torch_defined_linear import CHECKS, without_checks
from tvmhet.ir.torch_definitions import definition_of
from tvmhet.ir.torch_program import with_tensors_only
from tvmhet.ir.torch_results import structure_of
from tvmhet.ir.torch_states import changed_constants_as_buffers, states_as_inputs

Converter = Callable[[fx.Node, Any], Any]
_REMEDY = "replace it in the model; for inference, from_onnx may take its ONNX export"


def import_exported(program: torch.export.ExportedProgram) -> Model:
    """Convert an exported program; parameters stay inputs, buffers that a call changes become states, others constants.

    Those on the meta device keep their sizes only; see `Model.has_values`.
    Raises UnsupportedOperator (the operator and where it stands) and BadModel.
    """
    try:
        changed_constants_as_buffers(program)
        program = _written_out(program, _decompositions())
    except Exception as error:
        raise BadModel(
            f"torch cannot write the exported program in core operators: {_first_line(error)}",
            "from_onnx may take the model's ONNX export",
        ) from error
    has_values = not _give_storage(program)
    with_real_pairs(program)
    structure = structure_of(program)
    states = states_as_inputs(program)
    with_tensors_only(program)
    mod = _convert(program)
    mod, values = relax.frontend.detach_params(mod)
    if states:
        mod.update_func(mod.get_global_var(ENTRY), mod[ENTRY].with_attr(NUM_STATE_ATTR, len(states)))
    main = mod[ENTRY]
    names = [str(v.name) for v in main.params[int(main.attrs[NUM_INPUT_ATTR]) :]]
    params = dict(zip(names, values.get(ENTRY, ()), strict=True))
    return Model(mod, params, has_values=has_values, structure=structure, states=states)


def _give_storage(program: torch.export.ExportedProgram) -> bool:
    """Put tensors on the meta device into memory; were there any?

    Parameters get memory that nobody touches, so that it stays virtual; buffers and constants, whose values are part of
    the code, become zeros.
    """
    made: dict[int, torch.Tensor] = {}
    for tensors in (program.state_dict, program.constants):
        for name, value in tensors.items():
            if not isinstance(value, torch.Tensor) or value.device.type != "meta":
                continue
            if id(value) not in made:
                is_param = isinstance(value, torch.nn.Parameter)
                make = torch.empty if is_param else torch.zeros
                tensor = make(value.shape, dtype=value.dtype, device="cpu")
                made[id(value)] = torch.nn.Parameter(tensor, requires_grad=False) if is_param else tensor
            tensors[name] = made[id(value)]
    return bool(made)


def _convert(program: torch.export.ExportedProgram) -> tvm.IRModule:
    """Convert a program; operators that cannot be are written out, each once, and the program is converted again."""
    written: set[Any] = set()
    while True:
        try:
            return _convert_once(program)
        except (UnsupportedOperator, BadModel) as error:
            refused = {n.target for n in _calls(program) if str(n.target) in error.operators}
            defined = {o: d for o in refused - written if (d := definition_of(o)) is not None}
            if not defined:
                raise _of_unknown_shape(program) or error from None
            written |= defined.keys()
            _let_views_copy(program)
            try:
                program = _written_out(program, defined)
            except Exception as reason:  # a definition that does not hold for these arguments
                raise _of_unknown_shape(program) or with_reason(error, reason) from None


def _let_views_copy(program: torch.export.ExportedProgram) -> None:
    """Make views reshapes: what a definition returns may lie otherwise in memory than the operator's result did."""
    for node in _calls(program):
        if node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default


def with_reason(error: HetError, reason: BaseException | None) -> HetError:
    """Return the error of an operator with what its definition says that it does not take, if it says so."""
    if not isinstance(reason, NotImplementedError):
        return error
    return type(error)(f"{error.problem}; not supported: {_first_line(reason)}", error.remedy)


def _of_unknown_shape(program: torch.export.ExportedProgram) -> UnsupportedOperator | None:
    """What to say of the first operator whose result has a shape that depends on values, if there is one."""
    for node in _calls(program):
        found = node.meta.get("val")
        values = found if isinstance(found, tuple | list) else [found]
        if any(isinstance(v, torch.Tensor) and free_unbacked_symbols(v) for v in values):
            return UnsupportedOperator(
                f"operator {describe(node)} makes a tensor whose shape depends on values, which has no plan",
                "keep shapes fixed: a mask in place of a selection, or all experts on all tokens",
            )
    return None


def _written_out(program: torch.export.ExportedProgram, definitions: Any) -> torch.export.ExportedProgram:
    """Replace operators by their definitions, without torch's warnings of its own internals."""
    with warnings.catch_warnings(), without_checks():
        warnings.simplefilter("ignore", FutureWarning)
        return program.run_decompositions(definitions)


def _convert_once(program: torch.export.ExportedProgram) -> tvm.IRModule:
    try:
        return from_exported_program(
            program,
            keep_params_as_input=True,
            unwrap_unit_return_tuple=True,
            run_ep_decomposition=False,
            custom_convert_map=checked_converters(program),
        )
    except HetError as error:
        drop_unfinished(error)
        raise
    except Exception as error:
        drop_unfinished(error)
        raise BadModel(
            f"the exported program cannot be converted: {_first_line(error)}", "from_onnx may take its ONNX export"
        ) from error


def _decompositions() -> Any:
    """Core ATen decompositions, without those that hide an operator TVM has (linear, attention, pooling)."""
    table = torch.export.default_decompositions()
    for operator in KEPT_OPERATORS:
        table.pop(operator, None)
    table.update(CHECKS)
    return table


def checked_converters(
    program: torch.export.ExportedProgram, extra: Mapping[str, Converter] | None = None
) -> dict[str, Converter]:
    """Return a checked converter for every operator of the program; raise for those that have none.

    `extra` comes before our own converters, those before TVM's.
    """
    own = {**CONVERTERS, **(extra or {})}
    stock: dict[str, Any] = exported_program_importer()().convert_map
    converters: dict[str, Converter] = {}
    stock_of: dict[int, Mapping[str, Any]] = {}

    def stock_convert(node: fx.Node, importer: Any) -> Any:
        if id(importer) not in stock_of:
            stock_of[id(importer)] = importer.create_convert_map()
        return stock_of[id(importer)][node.target.__name__](node)

    missing: dict[Any, fx.Node] = {}
    importers: list[Any] = []
    for node in _calls(program):
        name = node.target.__name__
        if name not in own and name not in stock:
            missing.setdefault(node.target, node)
        converters[name] = _checked(own.get(name, stock_convert), importers)
    if missing:
        first = next(iter(missing.values()))
        error = UnsupportedOperator(f"operator {describe(first)} has no conversion to Relax", _REMEDY)
        error.operators = tuple(map(str, missing))
        raise error
    return converters


def _calls(program: torch.export.ExportedProgram) -> list[fx.Node]:
    """Return the calls of operators, those inside branches too."""
    graphs = [m.graph for m in program.graph_module.modules() if isinstance(m, fx.GraphModule)]
    return [n for graph in graphs for n in graph.nodes if n.op == "call_function"]


def _checked(convert: Converter, importers: list[Any]) -> Converter:
    """Convert and check. TVM leaves the importer out inside branches: it is the one seen first, in `importers`."""

    def run(node: fx.Node, importer: Any = None) -> Any:
        if importer is not None:
            importers.append(importer)
        try:
            result = convert(node, importers[-1])
            _check_result(node, result)
        except HetError:
            raise
        except Exception as error:
            unconverted = UnsupportedOperator(
                f"operator {describe(node)} cannot be converted: {_first_line(error)}", _REMEDY
            )
            unconverted.operators = (str(node.target),)
            raise unconverted from error
        return result

    return run


def _check_result(node: fx.Node, result: Any) -> None:
    """Compare rank, static dims and dtype of a tensor result with the fx metadata; tuples field by field."""
    expected = node.meta.get("val")
    if isinstance(expected, torch.Tensor) and isinstance(result, relax.Expr):
        _check_tensor(node, expected, result.ty, "")
    elif isinstance(expected, tuple | list) and isinstance(getattr(result, "ty", None), relax.TupleType):
        for i, (want, got) in enumerate(zip(expected, result.ty.fields, strict=False)):
            if isinstance(want, torch.Tensor) and _is_read(node, i):
                _check_tensor(node, want, got, f" result {i}")


def _is_read(node: fx.Node, index: int) -> bool:
    return any(u.target.__name__ != "getitem" or u.args[1] == index for u in node.users if u.op == "call_function")


def _check_tensor(node: fx.Node, want: torch.Tensor, got: Any, part: str) -> None:
    if not isinstance(got, relax.TensorType):
        return
    dtype = exported_program_importer()._convert_data_type(str(want.dtype))
    shape = _dims(got)
    agree = shape is None or (
        len(shape) == want.dim()
        and all(g is None or not isinstance(w, int) or g == w for g, w in zip(shape, want.shape, strict=True))
    )
    if not agree or str(got.dtype) != dtype:
        error = BadModel(
            f"operator {describe(node)}{part} converts to {shape} {got.dtype}; torch says {list(want.shape)} {dtype}",
            "the front end converts this operator wrongly: rewrite it in the model, or use from_onnx",
        )
        error.operators = (str(node.target),)
        raise error


def _dims(ty: Any) -> list[int | None] | None:
    if not isinstance(ty.shape, relax.ShapeExpr):
        return None if ty.ndim < 0 else [None] * ty.ndim
    return [int(d) if hasattr(d, "value") else None for d in ty.shape.values]


def _first_line(error: Exception) -> str:
    """Return the error's first line; our converters' own NotImplementedError say all in their text."""
    kind = "" if isinstance(error, NotImplementedError) else f"{type(error).__name__}: "
    text = str(error).strip()
    return f"{kind}{text.splitlines()[0] if text else type(error).__name__}"[:300]
