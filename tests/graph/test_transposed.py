"""What a transposed convolution holds in memory is what its kernel asks for, and counts in a plan."""

import pytest
import torch
from torch import nn

import tvmhet
from tvmhet.emit.workspace import workspaces
from tvmhet.graph.fusion import LegalKernel, legal_kernels
from tvmhet.graph.transposed import between_bytes
from tvmhet.ir.prepare import prepare
from tvmhet.planning_problem import _workspace_bytes
from tvmhet.training_deploy import fused_kernels

TARGET = {"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 1}
LAYERS = {
    "overlapping windows": (nn.ConvTranspose2d(16, 8, 4, 2, 1), (2, 16, 12, 12), 2 * 8 * 16 * 144 * 4),
    "groups, gaps in the window": (nn.ConvTranspose1d(16, 8, 4, 4, 0, 0, 2, True, 2), (1, 16, 50), 8 * 7 * 50 * 4),
    "steps of one": (nn.ConvTranspose2d(16, 8, 3, 1, 1), (1, 16, 12, 12), 0),
    "by channel": (nn.ConvTranspose2d(16, 16, 16, 8, 4, groups=16), (1, 16, 12, 12), 0),
}


def prepared(name):
    layer, shape, wanted = LAYERS[name]
    model = prepare(tvmhet.from_torch(nn.Sequential(layer, nn.ReLU()).eval(), (torch.randn(*shape),)))
    return model, wanted


@pytest.mark.parametrize("name", LAYERS)
def test_products_are_what_the_kernel_takes(name):
    model, wanted = prepared(name)
    graph = model.graph
    whole = max(legal_kernels(graph), key=lambda k: len(k.ops))
    assert between_bytes(graph, whole) == _workspace_bytes(graph, whole) == wanted
    assert between_bytes(graph, LegalKernel(whole.ops, "library")) == 0
    if wanted:
        ((*taken,),) = workspaces(fused_kernels(model.mod, graph, [whole]), TARGET)
        assert max(taken) == wanted


def test_a_plan_counts_them():
    """Beside the image, the parameters and the result."""
    layer, shape, wanted = LAYERS["overlapping windows"]
    x = torch.randn(*shape)
    held = sum(t.numel() for t in (x, layer(x), *layer.parameters())) * x.element_size()
    plan = tvmhet.plan(
        tvmhet.from_torch(layer.eval(), (x,)), cluster=tvmhet.ClusterSpec.of({"cpu-x86-64-v3": 1}), makers=("tvm",)
    )
    assert plan.stages[0].memory_bytes == held + wanted
