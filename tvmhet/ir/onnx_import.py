"""ONNX model -> `Model`. Large weights never pass through TVM: they become inputs, their values stay in numpy.

    initializer w (4 MiB)    ──►  parameter w of main,  params["w"] = its values
    initializer axes (8 B)   ──►  a constant in the code, so that shapes are known

`bind_small_integers` prepares the graph. The result types are compared with those that the file declares.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tvm
from tvm import relax

from tvmhet._tvm import drop_unfinished, onnx_convert_map, relax_from_onnx
from tvmhet.errors import BadInput, BadModel, MissingPackage, UnsupportedOperator
from tvmhet.ir.attrs import NUM_INPUT_ATTR
from tvmhet.ir.model import ENTRY, Model, from_numpy
from tvmhet.ir.onnx_nodes import operator_set
from tvmhet.ir.onnx_refused import refusal
from tvmhet.ir.transform.bind_small_integers import bind_small_integers
from tvmhet.ir.transform.define_onnx_operators import define_onnx_operators
from tvmhet.ir.transform.fold_onnx_shapes import fold_onnx_shapes
from tvmhet.ir.transform.inline_onnx_functions import has_definition, inline_onnx_functions
from tvmhet.ir.transform.unroll_onnx_loops import MAX_STEPS, unroll_onnx_loops
from tvmhet.ir.transform.unroll_onnx_recurrent import unroll_onnx_recurrent

if TYPE_CHECKING:
    import onnx

_HANDLED_BY_TVM = {"If", "Constant"}
_LOOPS = {"Loop", "Scan"}


def load_onnx(source: str | Path | onnx.ModelProto) -> onnx.ModelProto:
    """Return the model proto, read from a file where a path is given. Raises MissingPackage and BadModel."""
    try:
        import onnx
    except ImportError as error:
        raise MissingPackage("reading ONNX needs the package onnx", "pip install 'tvmhet[onnx]'") from error
    if isinstance(source, onnx.ModelProto):
        proto, what = source, "the ONNX model given"
    elif not isinstance(source, str | Path):
        raise BadModel(
            f"the ONNX model is a {type(source).__name__}", "give the path of an .onnx file, or a ModelProto"
        )
    else:
        path = Path(source)
        what = f"ONNX file {str(path)!r}"
        if not path.is_file():
            raise BadModel(f"{what} does not exist", "give the path of an .onnx file")
        try:
            proto = onnx.load(path)
        except Exception as error:
            raise BadModel(
                f"{what} ({path.stat().st_size} bytes) cannot be read: {_first_line(error)}",
                "export it again; large models need their external data files beside the .onnx file",
            ) from error
    if not proto.graph.output:
        raise BadModel(
            f"{what} has {len(proto.graph.node)} nodes and no output", "give a file with an ONNX model in it"
        )
    return proto


def import_onnx(
    proto: onnx.ModelProto,
    *,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    constants: Mapping[str, np.ndarray] | None = None,
) -> Model:
    """Convert an ONNX model; see `from_onnx` for the arguments and errors."""
    _check_names(proto, shapes or {}, constants or {})
    light, weights = bind_small_integers(proto, constants or {})
    _set_shapes(light, shapes or {})
    empty = _name_empty_dims(light)
    mod = _convert(light)
    if empty:
        mod = relax.transform.BindSymbolicVars(dict.fromkeys(empty, 0), ENTRY)(mod)
    main = _with_tensors(mod[ENTRY])
    num_inputs = len(main.params) - len(weights)
    params = {str(p.name): from_numpy(w) for p, w in zip(main.params[num_inputs:], weights, strict=True)}
    out = tvm.IRModule({g: f for g, f in mod.functions_items()})
    out.update_func(out.get_global_var(ENTRY), main.with_attr(NUM_INPUT_ATTR, num_inputs))
    _check_outputs(proto, main)
    return Model(out, params)


def _with_tensors(main: relax.Function) -> relax.Function:
    """Return the function with tensors of integers for the shapes among its results, as ONNX has them."""

    def tensor(value: relax.Expr) -> relax.Expr:
        if not isinstance(value.ty, relax.ShapeType) or value.ty.values is None:
            return value
        sizes = [getattr(size, "value", None) for size in value.ty.values]
        if None in sizes:
            return relax.op.shape_to_tensor(value)
        return relax.const(np.array(sizes, "int64"), "int64")

    result = main.body.body
    fields = list(result.ty.fields) if isinstance(result.ty, relax.TupleType) else [result.ty]
    if not any(isinstance(ty, relax.ShapeType) for ty in fields):
        return main
    builder = relax.BlockBuilder()
    with builder.function(ENTRY, list(main.params)):
        body = builder.normalize(main.body)
        result = builder.emit(body)
        many = [relax.TupleGetItem(result, i) for i in range(len(fields))]
        made = relax.Tuple([tensor(builder.emit(v)) for v in many]) if len(many) > 1 else tensor(result)
        builder.emit_func_output(builder.emit(made))
    return builder.get()[ENTRY]


def _check_names(proto: onnx.ModelProto, shapes: Mapping[str, Any], constants: Mapping[str, Any]) -> None:
    known = [i.name for i in proto.graph.input]
    for name in (*shapes, *constants):
        if name not in known:
            raise BadInput(f"the ONNX model has no input {name!r}; its inputs are {known}", "use one of these names")


def _set_shapes(proto: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]]) -> None:
    for info in proto.graph.input:
        if info.name in shapes:
            info.type.tensor_type.shape.ClearField("dim")
            for size in shapes[info.name]:
                info.type.tensor_type.shape.dim.add().dim_value = size


def _name_empty_dims(proto: onnx.ModelProto) -> list[str]:
    """Give dims of 0 elements a name, to be bound after the conversion: TVM takes 0 for a size that is not known."""
    dims = [d for i in proto.graph.input for d in i.type.tensor_type.shape.dim]
    empty = [d for d in dims if d.HasField("dim_value") and d.dim_value == 0]
    for i, dim in enumerate(empty):
        dim.dim_param = f"no_elements_{i}"
    return [d.dim_param for d in empty]


def _convert(proto: onnx.ModelProto) -> tvm.IRModule:
    """Convert a model whose weights are inputs. An operator that fails is tried once more by its ONNX definition."""
    expanded: set[str] = set()
    opset = operator_set(proto)
    known = onnx_convert_map()
    proto = _written_out(inline_onnx_functions(proto))
    while True:
        missing = {n.op_type for n in proto.graph.node if n.op_type not in known or _is_partial(n)}
        missing -= _HANDLED_BY_TVM | expanded
        if defined := {name for name in missing if has_definition(name, opset)}:
            expanded |= defined
            proto = _written_out(_inlined(proto, defined))
            continue
        _check_supported(proto.graph, known)
        proto = fold_onnx_shapes(proto)
        _check_converted_rightly(proto.graph)
        try:
            return _convert_once(proto)
        except _ConversionFailed as error:
            name = error.operator
            if name in expanded or not has_definition(name, opset):
                raise UnsupportedOperator(error.problem, error.remedy) from error.__cause__
            expanded.add(name)
            proto = _written_out(_inlined(proto, {name}))


def _written_out(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Replace what TVM lacks and can be written in simpler operators."""
    return unroll_onnx_recurrent(define_onnx_operators(_without_control_flow(proto)))


def _without_control_flow(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Leave one branch of an If and the steps of a loop where they can be known: their operators must be seen."""
    while any(n.op_type in {"If", *_LOOPS} for n in proto.graph.node):
        folded = fold_onnx_shapes(proto)
        proto = unroll_onnx_loops(folded)
        if proto is folded:
            break
    return proto


def _is_partial(node: onnx.NodeProto) -> bool:
    """True for operators of which TVM makes only the first of the results that the model asks for."""
    return node.op_type == "LayerNormalization" and sum(1 for o in node.output if o) > 1


def _inlined(proto: onnx.ModelProto, operators: Collection[str]) -> onnx.ModelProto:
    """Inline standard operators; raise UnsupportedOperator where onnx cannot write one out."""
    try:
        return inline_onnx_functions(proto, operators)
    except RuntimeError as error:
        index, node = next((i, n) for i, n in enumerate(proto.graph.node) if n.op_type in operators)
        raise UnsupportedOperator(
            f"ONNX operator {_describe(node, index)} has no conversion to Relax, and onnx cannot write it out in "
            f"simpler operators: {_first_line(error)}",
            "replace it in the model, or import the model from torch",
        ) from error


def _check_supported(graph: onnx.GraphProto, known: Collection[str]) -> None:
    for i, node in enumerate(graph.node):
        if node.op_type in _LOOPS:
            raise UnsupportedOperator(
                f"ONNX operator {_describe(node, i)} is a loop whose number of steps is not known at import, is 0, or "
                f"is above {MAX_STEPS}",
                "fix what it depends on with constants={name: value}, or import the model from torch",
            )
        if node.op_type not in known and node.op_type not in _HANDLED_BY_TVM:
            raise UnsupportedOperator(
                f"ONNX operator {_describe(node, i)} has no conversion to Relax",
                "replace it in the model, or import the model from torch",
            )


def _check_converted_rightly(graph: onnx.GraphProto) -> None:
    initializers = {i.name: i for i in graph.initializer}
    inputs = {i.name for i in graph.input} - set(initializers)
    for i, node in enumerate(graph.node):
        if what := refusal(node, initializers, inputs):
            raise UnsupportedOperator(
                f"ONNX operator {_describe(node, i)} would be converted wrongly: TVM ignores {what}",
                "replace it in the model, or import the model from torch",
            )


class _ConversionFailed(UnsupportedOperator):
    """Carries the type of the operator that failed."""

    def __init__(self, operator: str, problem: str, remedy: str) -> None:
        super().__init__(problem, remedy)
        self.operator = operator


def _convert_once(proto: onnx.ModelProto) -> tvm.IRModule:
    """Run TVM's front end, without its prints and warnings; name the node it fails on."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return relax_from_onnx(proto)
    except Exception as error:
        drop_unfinished(error)
        _raise_checker_error(proto, error)
        node = _failing_node(error)
        if node is None:
            raise BadModel(
                f"the ONNX model cannot be converted: {_first_line(error)}", "check it with onnx.checker"
            ) from error
        index = next((i for i, n in enumerate(proto.graph.node) if n is node or n == node), 0)
        raise _ConversionFailed(
            node.op_type,
            f"ONNX operator {_describe(node, index)} cannot be converted: {_first_line(error)}",
            "fix its small integer inputs with constants={name: values}, or its dims with shapes={name: dims}",
        ) from error


def _raise_checker_error(proto: onnx.ModelProto, cause: Exception) -> None:
    """Prefer onnx's own words for a model that is not valid ONNX."""
    import onnx

    try:
        onnx.checker.check_model(proto)
    except onnx.checker.ValidationError as error:
        raise BadModel(f"the ONNX model is not valid: {_first_line(error)}", "export it again") from cause


def _failing_node(error: BaseException) -> Any:
    """Return the ONNX node that TVM's front end was converting, read from the frames of its traceback."""
    node, trace = None, error.__traceback__
    while trace is not None:
        candidate = trace.tb_frame.f_locals.get("node")
        node = candidate if hasattr(candidate, "op_type") else node
        trace = trace.tb_next
    return node


def _describe(node: onnx.NodeProto, index: int) -> str:
    return f"{node.op_type} (node {node.name or f'#{index}'!r} making {list(node.output)[:3]})"


def _check_outputs(proto: onnx.ModelProto, main: relax.Function) -> None:
    """Compare each result's rank, static dims and dtype with what the file declares."""
    import onnx

    ret = main.ret_ty
    types = list(ret.fields) if isinstance(ret, relax.TupleType) else [ret]
    if len(types) != len(proto.graph.output):
        return  # sequences and optionals: nothing is declared field by field
    for info, ty in zip(proto.graph.output, types, strict=True):
        declared = info.type.tensor_type
        if not isinstance(ty, relax.TensorType) or not declared.HasField("shape") or not declared.elem_type:
            continue
        dtype = onnx.helper.tensor_dtype_to_np_dtype(declared.elem_type).name
        want = [d.dim_value if d.HasField("dim_value") else None for d in declared.shape.dim]
        got = _dims(ty)
        agree = got is None or (
            len(got) == len(want) and all(g is None or w is None or g == w for g, w in zip(got, want, strict=True))
        )
        if not agree or str(ty.dtype) != dtype:
            raise BadModel(
                f"output {info.name!r} converts to {got} {ty.dtype}; the file declares {want} {dtype}",
                "the front end converts an operator wrongly: rewrite it in the model, or import from torch",
            )


def _dims(ty: Any) -> list[int | None] | None:
    if not isinstance(ty.shape, relax.ShapeExpr):
        return None if ty.ndim < 0 else [None] * ty.ndim
    return [int(d) if hasattr(d, "value") else None for d in ty.shape.values]


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"[:300]
