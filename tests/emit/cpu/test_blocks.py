"""Rules ask how many blocks of a kernel reduce before they schedule anything: as many as are left of it then."""

from __future__ import annotations

import itertools

import pytest
import tvm
from tvm.relax import op

from tests.emit.cpu.kernels import kernel
from tvmhet.emit.cpu.blocks import around_reduction, blocks_of, num_reductions

MAKES = {
    "sum": lambda axes: lambda x: op.sum(x, axes),
    "mean": lambda axes: lambda x: op.nn.relu(op.mean(x, axes, keepdims=True)),
    "softmax": lambda axes: lambda x: op.nn.softmax(x, axes[0]),
    "none": lambda axes: lambda x: op.nn.relu(op.add(x, x)),
}


@pytest.mark.parametrize("name", MAKES)
def test_reductions_of_one_element_are_none(name):
    for shape in itertools.product((1, 3), repeat=3):
        for axes in ([0], [2], [0, 2], [1, 2]):
            func = kernel(MAKES[name](axes), shape)
            infos = blocks_of(tvm.s_tir.Schedule(func))
            assert infos is not None
            assert num_reductions(func) == sum(info.is_reduction for info in infos)


def test_every_rule_gets_a_schedule_of_its_own():
    func = kernel(lambda x, w, b: op.nn.relu(op.add(op.matmul(x, w), b)), (4, 8), (8, 6), (6,))
    (one, infos, place), (other, _, _) = around_reduction(func), around_reduction(func)
    assert [info.is_reduction for info in infos] == [True, False] and place == 0
    before = str(other.mod)
    one.unroll(one.get_loops(infos[place].block)[0])
    assert str(one.mod) != before == str(other.mod) == str(around_reduction(func)[0].mod)
    assert around_reduction(kernel(lambda x: op.nn.softmax(x, -1), (4, 8))) is None  # two of them
