"""A Relax function read as named calls over named tensors, and the way to rebuild any of its calls elsewhere.

    lv  = R.split(x, 2)            calls:   {"lv": R.split, "lv2": R.add}
    lv1 = lv[0]                    tensors: "x", "lv.0", "lv.1", "lv2"
    lv2 = R.add(lv1, lv[1])        reads("lv2") == ("lv.0", "lv.1")

Tuples, their fields and aliases are only names; a tensor's name is its call's variable, with `.i` for a tuple's field.
These are the names that `tvmhet.ExtractGraph` gives to operators and tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import tvm
from tvm import relax

from tvmhet._tvm import Constant
from tvmhet.errors import NotSupported
from tvmhet.ir.attrs import NUM_INPUT_ATTR

#: Operators whose legalisation turns a scalar constant into an immediate; all others take it as a tensor.
_TAKES_SCALARS = frozenset(
    (
        "relax.add", "relax.atan2", "relax.bitwise_and", "relax.bitwise_or", "relax.bitwise_xor", "relax.divide",
        "relax.equal", "relax.floor_divide", "relax.floor_mod", "relax.greater", "relax.greater_equal",
        "relax.left_shift", "relax.less", "relax.less_equal", "relax.log_add_exp", "relax.logical_and",
        "relax.logical_or", "relax.logical_xor", "relax.maximum", "relax.minimum", "relax.mod", "relax.multiply",
        "relax.not_equal", "relax.power", "relax.right_shift", "relax.subtract", "relax.astype", "relax.dequantize",
        "relax.eye", "relax.eye_like", "relax.full", "relax.full_like", "relax.quantize", "relax.tril", "relax.triu",
    )
)  # fmt: skip

Ref = str | tuple["Ref", ...]  # one tensor's name, or a tuple of them


def flatten(ref: Ref) -> Iterator[str]:
    """Yield the tensor names of `ref`, left to right."""
    if isinstance(ref, str):
        yield ref
    else:
        for field in ref:
            yield from flatten(field)


def _declare(name: str, ty: object) -> Ref:
    if isinstance(ty, relax.TupleType):
        return tuple(_declare(f"{name}.{i}", field) for i, field in enumerate(ty.fields))
    return name


class Bindings:
    """The calls of one pure function whose body is bindings of calls, tuples and tuple fields."""

    def __init__(self, func: relax.Function) -> None:
        self.func = func
        self.calls: dict[str, relax.Call] = {}
        self.results: dict[str, Ref] = {}  # call name -> its tensors
        self.types: dict[str, object] = {}  # tensor name -> its type
        self.producer: dict[str, str] = {}  # tensor name -> call name; absent for function parameters
        self._refs: dict[relax.Var, Ref] = {}
        for param in func.params:
            self._bind(param.name, param, None)
        for block in func.body.blocks:
            for binding in block.bindings:
                self._read(binding)
        self.output: Ref = self._ref(func.body.body)

    @property
    def param_names(self) -> tuple[str, ...]:
        """Names of the function's parameters, inputs first."""
        return tuple(p.name for p in self.func.params)

    @property
    def num_input(self) -> int:
        """How many parameters are inputs of each call; the rest are weights."""
        attrs = self.func.attrs
        return int(attrs[NUM_INPUT_ATTR]) if attrs and NUM_INPUT_ATTR in attrs else len(self.func.params)

    def reads(self, name: str) -> tuple[str, ...]:
        """Tensors that the call `name` reads, in order of first use, each once."""
        return tuple(dict.fromkeys(t for arg in self.calls[name].args for t in self._names(arg)))

    def tensor_constants(self, calls: Sequence[str]) -> tuple[relax.Expr, ...]:
        """Constants that stay tensors when `calls` are legalised, in order, each once.

        A scalar operand of arithmetic becomes a number in the code; of any other operator it is read from memory.
        """
        found: dict[relax.Expr, None] = {}
        for name in calls:
            call = self.calls[name]
            takes_numbers = isinstance(call.op, tvm.ir.Op) and str(call.op.name) in _TAKES_SCALARS
            for arg in call.args:
                for leaf in arg.fields if isinstance(arg, relax.Tuple) else (arg,):
                    if not isinstance(leaf, Constant) or not isinstance(leaf.ty, relax.TensorType):
                        continue
                    if leaf.ty.ndim != 0 or not takes_numbers:
                        found[leaf] = None
        return tuple(found)

    def rebuild(
        self, name: str, env: Mapping[str, relax.Expr], constants: Mapping[relax.Expr, relax.Expr] | None = None
    ) -> relax.Call:
        """Return the call `name` over the values that `env` gives to its tensors, and `constants` to its constants."""
        call = self.calls[name]
        args = [self._substitute(arg, env, constants or {}) for arg in call.args]
        return relax.Call(call.op, args, call.attrs, call.ty_args, call.span, ret_ty=call.ty)

    def _bind(self, name: str, var: relax.Var, call: relax.Call | None) -> None:
        name = self._unused(name)
        ref = _declare(name, var.ty)
        self._refs[var] = ref
        for tensor, ty in zip(flatten(ref), leaf_types(var.ty), strict=True):
            self.types[tensor] = ty
            if call is not None:
                self.producer[tensor] = name
        if call is not None:
            self.calls[name] = call
            self.results[name] = ref

    def _unused(self, name: str) -> str:
        """`name`, or `name~1`, ...: front ends reuse variable names, NameOperators makes them unique."""
        unused, i = name, 0
        while unused in self.types or unused in self.calls:
            i += 1
            unused = f"{name}~{i}"
        return unused

    def _read(self, binding: relax.Binding) -> None:
        if not isinstance(binding, relax.VarBinding):
            raise NotSupported(f"binding {binding.var.name!r} is a {type(binding).__name__}", "bind its shapes first")
        if isinstance(binding.value, relax.Call):
            self._bind(binding.var.name, binding.var, binding.value)
        else:
            self._refs[binding.var] = self._ref(binding.value)

    def _ref(self, expr: relax.Expr) -> Ref:
        if isinstance(expr, relax.Var):
            return self._refs[expr]
        if isinstance(expr, relax.Tuple):
            return tuple(self._ref(field) for field in expr.fields)
        if isinstance(expr, relax.TupleGetItem):
            return self._ref(expr.tuple_value)[expr.index]
        raise NotSupported(f"a {type(expr).__name__} stands outside an operator", "fold or lift constants first")

    def _names(self, expr: relax.Expr) -> Iterator[str]:
        if isinstance(expr, relax.Var) and expr in self._refs:
            yield from flatten(self._refs[expr])
        elif isinstance(expr, relax.Tuple):
            for field in expr.fields:
                yield from self._names(field)
        elif isinstance(expr, relax.TupleGetItem):
            yield from flatten(self._ref(expr))

    def _substitute(
        self, expr: relax.Expr, env: Mapping[str, relax.Expr], constants: Mapping[relax.Expr, relax.Expr]
    ) -> relax.Expr:
        if isinstance(expr, Constant):
            return constants.get(expr, expr)
        if isinstance(expr, relax.Var) and expr in self._refs:
            return build_ref(self._refs[expr], env)
        if isinstance(expr, relax.Tuple):
            return relax.Tuple([self._substitute(field, env, constants) for field in expr.fields])
        if isinstance(expr, relax.TupleGetItem):
            return build_ref(self._ref(expr), env)
        return expr


def leaf_types(ty: object) -> Iterator[object]:
    """Yield the types of the tensors in `ty`, left to right."""
    if isinstance(ty, relax.TupleType):
        for field in ty.fields:
            yield from leaf_types(field)
    else:
        yield ty


def build_ref(ref: Ref, env: Mapping[str, relax.Expr]) -> relax.Expr:
    """Return the expression of `ref` over the values of `env`."""
    return env[ref] if isinstance(ref, str) else relax.Tuple([build_ref(field, env) for field in ref])


@dataclass(frozen=True, slots=True)
class Emitter:
    """Emits calls into the dataflow block that `builder` has open.

    Of a tuple only the tensors in `used` are taken apart; those in `returned` become outputs of the block.
    """

    builder: relax.BlockBuilder
    used: frozenset[str]
    returned: frozenset[str]

    def emit(self, call: relax.Expr, ref: Ref, name: str) -> dict[str, relax.Expr]:
        """Emit `call` as variable `name`; return the values of its tensors `ref`."""
        env: dict[str, relax.Expr] = {}
        if isinstance(ref, str):
            env[ref] = self._bind(call, ref, name)
        else:
            self._take_apart(self.builder.emit(call, name_hint=name), ref, env)
        return env

    def _bind(self, value: relax.Expr, tensor: str, name: str) -> relax.Expr:
        emit = self.builder.emit_output if tensor in self.returned else self.builder.emit
        return emit(value, name_hint=name)

    def _take_apart(self, value: relax.Expr, ref: tuple[Ref, ...], env: dict[str, relax.Expr]) -> None:
        for i, field in enumerate(ref):
            item = relax.TupleGetItem(value, i)
            if isinstance(field, str):
                if field in self.used or field in self.returned:
                    env[field] = self._bind_field(item, field)
            elif any(t in self.used or t in self.returned for t in flatten(field)):
                self._take_apart(self.builder.emit(item), field, env)

    def _bind_field(self, item: relax.Expr, tensor: str) -> relax.Var:
        """Bind a field of a tuple as `split.1`, past the builder, which would write split_1: a name that a call has."""
        item = self.builder.normalize(item)
        var = (relax.Var if tensor in self.returned else relax.DataflowVar)(tensor, item.ty)
        self.builder.emit_normalized(relax.VarBinding(var, item))
        return var


def live_ins(bindings: Bindings, calls: Sequence[str]) -> tuple[str, ...]:
    """Tensors that `calls` read and none of them makes, in order of first use."""
    inside = set(calls)
    reads = dict.fromkeys(t for name in calls for t in bindings.reads(name))
    return tuple(t for t in reads if bindings.producer.get(t) not in inside)


def live_outs(bindings: Bindings, calls: Sequence[str], readers: Mapping[str, frozenset[str]]) -> tuple[str, ...]:
    """Tensors that `calls` make and that another call or the function's result reads, in order of production."""
    inside = set(calls)
    returned = set(flatten(bindings.output))
    return tuple(
        t
        for name in calls
        for t in flatten(bindings.results[name])
        if t in returned or not readers.get(t, frozenset()) <= inside
    )


def readers_of(bindings: Bindings) -> dict[str, frozenset[str]]:
    """Return, for each tensor, the calls that read it."""
    out: dict[str, set[str]] = {}
    for name in bindings.calls:
        for tensor in bindings.reads(name):
            out.setdefault(tensor, set()).add(name)
    return {tensor: frozenset(names) for tensor, names in out.items()}


def outline(
    bindings: Bindings,
    calls: Sequence[str],
    ins: Sequence[str],
    outs: Sequence[str],
    *,
    constants: Sequence[relax.Expr] = (),
    always_tuple: bool = False,
) -> relax.Function:
    """Return a function of `ins`, then of `constants`, that makes `outs` by running `calls` in order.

    Several results are returned as a tuple, one as a tensor unless `always_tuple`. The function is private.
    """
    builder = relax.BlockBuilder()
    params = [relax.Var(name, bindings.types[name]) for name in ins]
    env: dict[str, relax.Expr] = dict(zip(ins, params, strict=True))
    lifted = {c: relax.Var(f"constant{i}", c.ty) for i, c in enumerate(constants)}
    params += lifted.values()
    used = frozenset(t for name in calls for t in bindings.reads(name))
    emitter = Emitter(builder, used, frozenset(outs))
    with builder.function("outlined", params, private=True):
        with builder.dataflow():
            for name in calls:
                env |= emitter.emit(bindings.rebuild(name, env, lifted), bindings.results[name], name)
        result = env[outs[0]] if len(outs) == 1 and not always_tuple else relax.Tuple([env[t] for t in outs])
        builder.emit_func_output(result)
    return builder.get()["outlined"]


def rebuild_main(
    mod: tvm.IRModule,
    bindings: Bindings,
    emit: Callable[[Emitter, dict[str, relax.Expr]], None],
    params: Sequence[relax.Var] | None = None,
    results: Sequence[str] | None = None,
) -> tvm.IRModule:
    """Return `mod` with a new `main` whose dataflow block `emit` fills.

    `emit(emitter, env)` gets fresh parameters in `env` and leaves every tensor of the result there. It may add
    functions to the emitter's builder. Attributes of `main` are kept, and its parameters and results unless others are
    given; other results are those of a tuple.
    """
    builder = relax.BlockBuilder(mod)
    params = [relax.Var(p.name, p.ty) for p in bindings.func.params] if params is None else list(params)
    env: dict[str, relax.Expr] = {p.name: p for p in params}
    emitter = Emitter(builder, frozenset(readers_of(bindings)), frozenset(flatten(bindings.output)))
    with builder.function("main_rebuilt", params):
        with builder.dataflow():
            emit(emitter, env)
        builder.emit_func_output(build_ref(bindings.output if results is None else tuple(results), env))
    built = builder.get()
    main = built["main_rebuilt"].without_attr("global_symbol")
    for key, value in (bindings.func.attrs or {}).items():
        main = main.with_attr(key, value)
    out = tvm.IRModule(
        {g: f for g, f in built.functions_items() if g.name_hint not in ("main", "main_rebuilt")}, attrs=mod.attrs
    )
    out["main"] = main
    return out
