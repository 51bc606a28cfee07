"""Element-wise operators before a convolution of 1 x 1, in one kernel with it.

    x ─┬► multiply ─► conv2d ─► add      {multiply} {conv2d add}      ==>      {multiply conv2d add}
    g ─┘

TVM's fusion rules take no producers into a product (`fusion.py`), since they would be computed again for every tile.
Ours, on CPUs, copy the pixels of a tile to a panel before all channels of the result are made of it
(`emit/cpu/contraction.py`): each element is read once, so that it may as well be computed then. Gates of
squeeze-and-excitation are such operators, and a norm and its activation in networks that have them before convolutions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tvmhet.graph.fusion import LegalKernel
from tvmhet.graph.operands import only_reader
from tvmhet.graph.opgraph import OpGraph, PatternKind

_ELEMENT_WISE = (PatternKind.ELEM_WISE, PatternKind.BROADCAST)
_MAX_OPS = 4


def with_prologues(graph: OpGraph, kernels: Sequence[LegalKernel]) -> tuple[LegalKernel, ...]:
    """Return, for each generated kernel with a convolution of 1 x 1, the kernel with element-wise operators before it.

    One after the other, up to four, each of the size of the image and read by the next alone.
    """
    found: dict[tuple[int, ...], None] = {}
    for kernel in kernels:
        convolutions = [i for i in kernel.ops if graph.operators[i].family == "nn.conv2d"]
        if kernel.maker == "tvm" and len(convolutions) == 1 and _by_pixel(graph, convolutions[0]):
            taken: tuple[int, ...] = ()
            for op in _before(graph, convolutions[0]):
                taken = (*taken, op)
                found[tuple(sorted({*kernel.ops, *taken}))] = None
    known = {kernel.ops for kernel in kernels if kernel.maker == "tvm"}
    return tuple(LegalKernel(ops, cpu_only=True) for ops in found if ops not in known)


def _by_pixel(graph: OpGraph, conv: int) -> bool:
    """Whether a convolution reads each element of its image once: windows of 1 x 1, side by side, of all channels.

    TVM drops axes of 1, so that a result of one channel or one pixel is no product.
    """
    op = graph.operators[conv]
    image, weight = (graph.tensors[t] for t in op.inputs)
    made = graph.tensors[op.outputs[0]]
    return (
        op.attrs["data_layout"] == "NCHW"
        and weight.shape[1:] == (image.shape[1], 1, 1)
        and made.shape[2:] == image.shape[2:]
        and all(int(step) == 1 for step in op.attrs["strides"])
        and min(made.shape[1], image.shape[1], image.shape[2] * image.shape[3]) > 1
        and image.dtype == "float32"
    )


def _before(graph: OpGraph, conv: int) -> Iterator[int]:
    """The operators before the image, the last first."""
    image = graph.tensors[graph.operators[conv].inputs[0]]
    reader = conv
    for _ in range(_MAX_OPS):
        op = image.producer
        if op < 0 or only_reader(graph, op) != reader:
            return
        operator = graph.operators[op]
        if operator.pattern not in _ELEMENT_WISE or len(operator.outputs) != 1:
            return
        yield op
        same = [t for t in operator.inputs if graph.tensors[t].shape == image.shape and graph.tensors[t].producer >= 0]
        if len(same) != 1:
            return
        image, reader = graph.tensors[same[0]], op
