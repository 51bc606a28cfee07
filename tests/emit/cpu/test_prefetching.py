"""What products ask for in advance: every line of the next panel, and nothing beyond the tensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import tvm
import tvm_ffi
from hypothesis import assume, example, given
from hypothesis import strategies as st
from tvm import tirx
from tvm.relax import op

from tests.emit.cpu.kernels import check, few, kernel, scheduled, target
from tvmhet._tvm import TensorLoad
from tvmhet.emit.cpu.blocks import CpuTarget
from tvmhet.emit.cpu.contraction import choose_tile
from tvmhet.emit.cpu.panels import columns_of

_LINE = 16  # elements
_OPERATIONS = {
    tirx.Add: lambda a, b: a + b,
    tirx.Sub: lambda a, b: a - b,
    tirx.Mul: lambda a, b: a * b,
    tirx.FloorDiv: lambda a, b: a // b,
    tirx.FloorMod: lambda a, b: a % b,
    tirx.Min: min,
}
Asked = tuple[dict[str, int], str, int]  # where loops are, whose element, which


def value_of(expr: Any, at: Mapping[Any, int]) -> int:
    if hasattr(expr, "value"):
        return int(expr.value)
    if isinstance(expr, tirx.Var):
        return next(v for var, v in at.items() if var.same_as(expr))
    return _OPERATIONS[type(expr)](value_of(expr.a, at), value_of(expr.b, at))


def asked(func: Any) -> list[Asked]:
    """Run a kernel's loops, and note what each prefetch asks for."""

    def visit(stmt: Any, at: Mapping[Any, int]) -> Iterator[Asked]:
        if isinstance(stmt, tirx.SeqStmt):
            yield from itertools.chain.from_iterable(visit(s, at) for s in stmt.seq)
        elif isinstance(stmt, tirx.For) and prefetches_in(stmt):
            for i in range(int(stmt.extent)):
                yield from visit(stmt.body, {**at, stmt.loop_var: i})
        elif isinstance(stmt, tirx.Evaluate):
            for call in prefetches_in(stmt):
                load = call.args[0].args[0]
                place = 0
                for index, extent in zip(load.indices, load.source.shape, strict=True):
                    place = place * int(extent) + value_of(index, at)
                yield {str(v.name): i for v, i in at.items()}, str(load.source.name), place

    return list(visit(func.body.block.body, {}))


def prefetches_in(stmt: Any) -> list[Any]:
    found: list[Any] = []

    def visit(call: Any) -> None:
        if str(getattr(call.op, "name", "")) == "tirx.prefetch":
            assert isinstance(call.args[0].args[0], TensorLoad)
            found.append(call)

    tvm_ffi.structural_walk(stmt, (tvm.ir.Call, visit))
    return found


def of_panels(k: int, n: int) -> Any:
    """x @ w of panels [n // T, k, T], as `PackWeights` makes it."""
    return lambda x, w: op.matmul(x, op.reshape(op.permute_dims(w, [1, 0, 2]), [k, n]))


@few
@example(16, 16, 3, 2)  # each core has half of the rows of three panels
@given(st.sampled_from([8, 16, 20, 33, 48]), st.sampled_from([5, 16, 31]), st.integers(2, 7), st.sampled_from([1, 2]))
def test_while_a_panel_is_read_every_line_of_the_next_is_asked_for(rows, k, tiles, num_cores):
    cpu = CpuTarget.of(target("x86-64-v3"))
    n = 24 * tiles
    columns = columns_of(rows, n, cpu, cpu.lanes("float32"))
    tile = choose_tile(rows, n, cpu, cpu.lanes("float32"), within=columns)
    num_tiles, tiles = -(-rows // tile.rows), n // columns
    shares = tile.num_shares(tiles, num_tiles, False, replace(cpu, num_cores=num_cores))
    assume(tile.columns == columns and num_tiles > shares and tiles > 1)
    func = kernel(of_panels(k, tiles * columns), (rows, k), (tiles, k, columns))
    with patch("tvmhet.emit.cpu.blocks._MIN_PRODUCTS", 1):  # however small, cores share it
        rule, fast = scheduled(func, num_cores=num_cores)
    found = asked(fast)
    assert rule == "contraction" and found and {name for _, name, _ in found} == {"x1"}
    size = tiles * k * columns
    assert all(0 <= place < size for _, _, place in found)
    outer = next(iter(found[0][0]))  # over panels, and before them over shares of rows if cores have those
    turns = {at[outer] for at, _, _ in found}
    for turn in turns:
        tile = turn % tiles
        lines = {place // _LINE for at, _, place in found if at[outer] == turn}
        end = min((tile + 2) * k * columns, size) // _LINE * _LINE  # shares of less than a line may leave out the last
        assert {place // _LINE for place in range((tile + 1) * k * columns, end)} <= lines


def test_one_tile_of_rows_asks_for_what_is_read_soon():
    k, columns, tiles = 200, 32, 6
    _, fast = scheduled(kernel(of_panels(k, tiles * columns), (2, k), (tiles, k, columns)))
    found = asked(fast)
    names = list(found[0][0])
    for at, _, place in found:
        panel, step = (at[names[0]], at[names[-1]]) if len(names) > 1 else (0, at[names[0]])
        read = (panel * k + step) * columns
        assert read <= place <= read + (16 << 10) // 4 + columns or place == tiles * k * columns - 1
    assert {place // _LINE for _, _, place in found} >= set(
        range((16 << 10) // 4 // _LINE, tiles * k * columns // _LINE)
    )


@few
@given(st.sampled_from([16, 32, 40]), st.sampled_from([16, 40]), st.sampled_from([48, 72, 100]))
def test_rows_that_a_panel_will_be_packed_from_are_asked_for(rows, k, n):
    rule, fast = scheduled(kernel(lambda x, w: op.matmul(x, op.permute_dims(w)), (rows, k), (n, k)))
    found = asked(fast)
    assert rule == "contraction" and found and {name for _, name, _ in found} == {"x1"}
    assert all(0 <= place < n * k for _, _, place in found)
    outer = next(iter(found[0][0]))
    width = math.ceil(n / (1 + max(at[outer] for at, _, _ in found)))
    width = next(w for w in range(width, n + 1) if w % 8 == 0)
    first = {place // _LINE for at, _, place in found if at[outer] == 0}
    assert {place // _LINE for place in range(width * k, min(2 * width, n) * k)} <= first


@pytest.mark.parametrize(
    ("make", "shapes"),
    [
        (lambda x, w: op.matmul(x, w), [(128, 64), (64, 96)]),  # short rows across k
        (lambda x, w: op.matmul(x, w), [(8, 64), (64, 96)]),  # not packed at all
        (lambda x, w: op.matmul(x, op.permute_dims(w)), [(8, 64), (96, 64)]),  # packed, for few rows
        (lambda x, w: op.nn.conv2d(x, w, padding=1), [(1, 8, 14, 14), (16, 8, 3, 3)]),
        (lambda x, w: op.matmul(x, op.permute_dims(op.nn.relu(w))), [(128, 64), (96, 64)]),
        (of_panels(64, 24), [(32, 64), (1, 64, 24)]),  # there is no next one
        (of_panels(64, 48), [(128, 64), (2, 64, 24)]),  # of more tiles of rows than columns few would have a share
    ],
)
def test_nothing_is_asked_for_where_it_does_not_pay(make, shapes):
    _, fast = scheduled(kernel(make, *shapes))
    assert not asked(fast)


def test_a_product_of_panels_is_right():
    check(of_panels(40, 96), (33, 40), (4, 40, 24), rule="contraction")
    check(lambda x, w: op.matmul(x, op.permute_dims(w)), (33, 40), (100, 40), rule="contraction")


def test_nothing_is_asked_for_in_double_precision():
    turned = kernel(lambda x, w: op.matmul(x, op.permute_dims(w)), (32, 40), (72, 40), dtype="float64")
    assert not asked(scheduled(turned)[1])
