"""CUDA kernels of a warp per result, and of our other rules, emulated: they write nothing beside, in any order."""

import pytest
from tvm.relax import op

from tests import emulated_cuda
from tests.emit import test_short_reductions, test_vectors
from tests.emit.cpu.kernels import kernel
from tests.emulated_cuda.kernels import check_kernels
from tvmhet.emit.block_reductions import block_reduction
from tvmhet.emit.lower import make_target
from tvmhet.emit.schedule import ScheduleReport
from tvmhet.emit.warp_reductions import warp_reduction


def product(x, w, b):
    return op.add(op.nn.conv2d(x, w), b)


def gate(x, w, b, image):
    return op.multiply(product(x, w, b), image)


def operands(num, channels, out, *image):
    shapes = [(num, channels, 1, 1), (out, channels, 1, 1), (1, out, 1, 1)]
    return [*shapes, (num, out, *image)] if image else shapes


CASES = {
    "one image": (operands(1, 240, 96), product),
    "several": (operands(3, 33, 13), lambda x, w, b: op.nn.relu(product(x, w, b))),
    "over an image": (operands(1, 72, 20, 5, 7), gate),
    "of few channels over an image": (operands(1, 24, 72, 28, 28), gate),
    "over images of one pixel": (operands(2, 64, 9, 1, 1), gate),
    "alone": (operands(2, 40, 16)[:2], op.nn.conv2d),
    "a sum": ([(9, 100, 1)], lambda x: op.sum(x, axis=1)),
}
LEFT = {
    "short": (operands(1, 7, 96), product),
    "of pixels": ([(1, 64, 3, 3), (8, 64, 1, 1)], op.nn.conv2d),
    "rows": ([(9, 100)], lambda x: op.sum(x, axis=1)),
    "all": ([(100, 1)], lambda x: op.sum(x)),
    "many": ([(130, 64, 1, 1), (130, 64, 1, 1)], op.nn.conv2d),
    "no reduction": ([(9, 100, 1)], op.exp),
    "softmax": ([(9, 100, 1)], lambda x: op.nn.softmax(x, axis=1)),
}


def emulate(cases, rule, rtol=1e-5):
    """Run kernels on an emulated GPU: what they write beside their results, or in another order of threads, shows."""
    emulated_cuda.install()
    report = ScheduleReport()
    funcs = {f"kernel{i}": kernel(make, *shapes) for i, (shapes, make) in enumerate(cases)}
    check_kernels(funcs, make_target(emulated_cuda.A100), report, rtol)
    assert report.applied == {rule: len(cases)}


def test_a_warp_each():
    emulate(CASES.values(), "warp reduction")


def test_a_thread_each():
    emulate(test_short_reductions.CASES.values(), "short reduction")


def test_four_values_a_thread():
    emulate([(shapes, make) for shapes, make, _ in test_vectors.CASES.values()], "vectors")


EXTREMES = {
    "rows": ([(9, 1000)], lambda x: op.max(x, axis=1)),
    "rows of two axes": ([(3, 7, 20, 33)], lambda x: op.min(x, axis=[2, 3], keepdims=True)),
    "all": ([(5000,)], op.max),
    "of what is computed": ([(4, 300), (300,)], lambda x, y: op.max(op.subtract(x, y), axis=-1)),
    "a product": ([(6, 70)], lambda x: op.prod(x, axis=1)),
}
NO_BLOCK = {
    "short": ([(6, 31)], lambda x: op.max(x, axis=1)),
    "columns": ([(70, 6)], lambda x: op.max(x, axis=0)),
    "more kernels": ([(6, 70)], lambda x: op.exp(op.max(x, axis=1))),
    "a place": ([(6, 70)], lambda x: op.argmax(x, axis=1)),
}


def test_a_block_each():
    emulate(EXTREMES.values(), "block reduction")


@pytest.mark.parametrize("name", NO_BLOCK)
def test_a_block_is_for_rows_alone(name):
    shapes, make = NO_BLOCK[name]
    assert block_reduction(kernel(make, *shapes)) is None


@pytest.mark.parametrize("name", LEFT)
def test_others_are_left(name):
    shapes, make = LEFT[name]
    assert warp_reduction(kernel(make, *shapes)) is None
