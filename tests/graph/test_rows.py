"""graph/rows: row kernels against the definition of one, and what both code generators make of them."""

import itertools

import pytest
import torch
from torch import nn

from tests.emit.cpu.kernels import target
from tests.emulated_cuda import A100
from tests.emulated_cuda.kernels import check_stages
from tests.graph.test_fusion import escaping
from tvmhet.emit.lower import scheduled_kernels
from tvmhet.emit.schedule import ScheduleReport
from tvmhet.graph.fusion import LegalKernel, legal_kernels
from tvmhet.graph.opgraph import PatternKind
from tvmhet.graph.placement import KernelPlacement
from tvmhet.graph.rows import row_kernels
from tvmhet.ir.extract import extract
from tvmhet.ir.importers import from_torch
from tvmhet.ir.kernel_module import kernels_module
from tvmhet.ir.transform.name_operators import NameOperators

ALONG = {"mean", "sum", "max", "min", "nn.softmax", "nn.log_softmax", "nn.layer_norm"}


class Blocks(nn.Module):
    """Everything that row kernels are made of: one function of (tensor, tensor) each."""

    def __init__(self, make, size):
        super().__init__()
        self.make, self.norm = make, nn.LayerNorm(size)
        self.weight = nn.Parameter(torch.rand(size))

    def forward(self, x, y):
        return self.make(self, x, y)


def root_mean_square(m, x, y):
    return m.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def by_hand(m, x, y):
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


def standardised(m, x, y):
    d = x - x.mean(-1, keepdim=True)
    return d / torch.sqrt((d * d).mean(-1, keepdim=True) + 1e-5)


MAKE = {
    "root mean square": root_mean_square,
    "softmax by hand": by_hand,
    "standardised": standardised,
    "residual, layer norm": lambda m, x, y: m.norm(x + y),
    "layer norm, gelu, residual": lambda m, x, y: torch.nn.functional.gelu(m.norm(x * 2.0)) + y,
    "masked softmax": lambda m, x, y: torch.softmax(torch.where(y > 0.5, x * 0.125, -1e9), -1),
    "unit length": lambda m, x, y: x / torch.sqrt((x * x).sum(-1, keepdim=True)),
    "log of softmax of sums": lambda m, x, y: torch.log_softmax(x + y, -1),
    "transposed layer norm": lambda m, x, y: m.norm(x.transpose(-1, -2)),
    "mean, reduced": lambda m, x, y: torch.sigmoid((x + y).mean(-1)),
}
SHAPES = {"transposed layer norm": (3, 40, 21)}


def model(name, shape=(3, 7, 40)):
    shape = SHAPES.get(name, shape)
    size = shape[-2] if name.startswith("transposed") else shape[-1]
    return NameOperators()(from_torch(Blocks(MAKE[name], size), (torch.rand(shape), torch.rand(shape))).mod)


def along(graph, op):
    """The leading axes of what an operator works along, by its attributes alone; None if it works along no axis."""
    operator = graph.operators[op]
    if operator.family not in ALONG:
        return None
    shape = graph.tensors[operator.inputs[0]].shape
    axes = operator.attrs.get("axis", operator.attrs.get("axes"))
    axes = {int(a) % len(shape) for a in (axes if hasattr(axes, "__iter__") else [axes])}
    first = min(axes)
    return shape[:first] if axes == set(range(first, len(shape))) else None


def is_row_kernel(graph, ops, rows):
    """The definition: one result is read outside, all tensors inside are by rows, no axis moves between them."""
    inside = set(ops)
    if escaping(graph, ops) != [ops[-1]] or not any(along(graph, op) == rows for op in ops):
        return False
    for op in ops:
        operator = graph.operators[op]
        anchor = along(graph, op) == rows
        plain = operator.pattern in (PatternKind.ELEM_WISE, PatternKind.BROADCAST)
        first = operator.family == "permute_dims" and all(along(graph, s) == rows for s in graph.successors(op))
        if not (anchor or plain or first):
            return False
        made = graph.tensors[operator.outputs[0]]
        if not anchor and made.shape[: len(rows)] != rows:
            return False
        for t in operator.inputs:
            tensor = graph.tensors[t]
            if tensor.producer not in inside:
                continue
            if tensor.shape[: len(rows)] != rows:
                return False
            if (operator.inputs[0] != t) if anchor else (len(tensor.shape) != len(made.shape)):
                return False
    return True


@pytest.mark.parametrize("name", MAKE)
def test_each_is_a_row_kernel_and_the_largest_of_each_result_is_found(name):
    graph = extract(model(name))
    known = tuple(legal_kernels(graph))
    found = {k.ops for k in row_kernels(graph, known)}
    all_rows = {rows for op in range(len(graph.operators)) if (rows := along(graph, op))}
    every = {
        ops
        for size in range(2, len(graph.operators) + 1)
        for ops in itertools.combinations(range(len(graph.operators)), size)
        for rows in all_rows
        if is_row_kernel(graph, ops, rows)
    }
    assert found <= every
    assert not found & {k.ops for k in known}
    for sink in {ops[-1] for ops in every}:
        largest = max((ops for ops in every if ops[-1] == sink), key=len)
        assert largest in found | {k.ops for k in known}


def test_root_mean_square_is_one_kernel_and_each_rest_of_it():
    graph = extract(model("root mean square"))
    assert [op.family for op in graph.operators] == ["power", "mean", "add", "rsqrt", "multiply", "multiply"]
    assert [k.ops for k in row_kernels(graph, ())] == [
        (0, 1), (0, 1, 2), (0, 1, 2, 3), (0, 1, 2, 3, 4), (0, 1, 2, 3, 4, 5),
        (1, 2), (1, 2, 3), (1, 2, 3, 4), (1, 2, 3, 4, 5),
    ]  # fmt: skip
    assert row_kernels(graph, [LegalKernel((0, 1)), LegalKernel((1, 2), "library")])[-4].ops == (1, 2)


def test_what_is_read_elsewhere_is_not_taken_in():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(16)

        def forward(self, x, y):
            total = x + y
            return total + self.norm(total)

    graph = extract(NameOperators()(from_torch(Residual(), (torch.rand(4, 16), torch.rand(4, 16))).mod))
    assert [k.ops for k in row_kernels(graph, ())] == [(0, 1, 2), (1, 2)]


@pytest.mark.parametrize("shape", [(16, 16), (4, 4, 4)])
def test_a_reduced_row_that_is_broadcast_along_another_axis_is_not_taken_in(shape):
    class Moved(nn.Module):
        def forward(self, x):
            return x + x.sum(-1)  # of row i: added to column i

    graph = extract(NameOperators()(from_torch(Moved(), (torch.rand(shape),)).mod))
    assert row_kernels(graph, ()) == ()


def test_long_rows_and_leading_axes_are_left_alone():
    class Long(nn.Module):
        def forward(self, x, y):
            return torch.softmax(x + 1.0, -1), torch.softmax(y + 1.0, 0)

    args = torch.rand(2, 9000), torch.rand(8, 16)
    assert row_kernels(extract(NameOperators()(from_torch(Long(), args).mod)), ()) == ()


def largest(mod):
    """The module of one kernel: all operators of the model."""
    graph = extract(mod)
    names = tuple(op.name for op in graph.operators)
    assert tuple(range(len(names))) in {k.ops for k in (*row_kernels(graph, ()), *legal_kernels(graph))}
    return kernels_module(mod, [KernelPlacement(names[-1], names, "tvm")])


@pytest.mark.parametrize("name", MAKE)
def test_on_a_cpu_one_rule_takes_each(name):
    report = ScheduleReport()
    with target():
        scheduled_kernels(largest(model(name)), target(), report)
    assert str(report) == f"1 kernels: 1 {'columns' if name == 'transposed layer norm' else 'rows'}"


@pytest.mark.slow
def test_on_a_gpu_each_is_one_kernel_and_right():
    report = check_stages([largest(model(name)) for name in MAKE], A100, 1e-5)
    assert sum(report.applied.values()) == len(MAKE)
    assert set(report.applied) == {"GeneralReduction", "Reduction"}


def test_on_a_gpu_rows_of_one_element_are_right():
    """A sum of one element is no reduction to dlight, which made log(0) the first value of its logarithm."""

    def log_of_sum(m, x, y):
        return torch.exp(x * y).sum(-1, keepdim=True).log() + 1.0

    mod = NameOperators()(from_torch(Blocks(log_of_sum, 1), (torch.rand(5, 1), torch.rand(5, 1))).mod)
    assert check_stages([largest(mod)], A100, 1e-5).applied
