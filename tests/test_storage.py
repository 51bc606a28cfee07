"""The memory that a plan states, against what TVM allocates for the same stage: in its plan, and when it runs."""

from itertools import pairwise

import pytest
import torch
import tvm
from tvm import relax

import tvmhet
from tvmhet import zoo
from tvmhet.cluster import ClusterSpec
from tvmhet.deploy import rewrite
from tvmhet.emit.lower import kernel_passes, make_target, vm_passes
from tvmhet.emit.run_together import run_together
from tvmhet.emit.schedule import ScheduleReport
from tvmhet.errors import Infeasible
from tvmhet.graph.liveness import memory_use
from tvmhet.graph.storage import storage_bytes
from tvmhet.ir.prepare import prepare

CLUSTER = ClusterSpec.of({"cpu-x86-64-v2": 1})
_PAGE_BYTES = 4096


def planned(mod):
    """Bytes that the VM's pooled allocator takes: a storage is free when it and its tensors are, and taken again by
    one of as many pages."""
    for p in (*kernel_passes(), *vm_passes(False)):
        mod = p(mod)
        if p.info.name == "KillAfterLastUse":
            break
    held, free, pages, users, owner = 0, {}, {}, {}, {}
    for binding in (b for block in mod["main"].body.blocks for b in block.bindings):
        name = getattr(getattr(binding.value, "op", None), "name", "")
        if not isinstance(binding.value, tvm.ir.Call) or not name.startswith(("relax.memory.", "relax.reshape")):
            continue
        first, var = binding.value.args[0], binding.var
        if name == "relax.memory.alloc_storage":
            pages[var] = -(-int(first.values[0]) // _PAGE_BYTES)
            users[var], owner[var] = {var}, var
            if free.get(pages[var], 0):
                free[pages[var]] -= 1
            else:
                held += pages[var] * _PAGE_BYTES
        elif name in ("relax.memory.alloc_tensor", "relax.reshape") and first in owner:
            owner[var] = owner[first]
            users[owner[var]].add(var)
        elif name.startswith("relax.memory.kill") and first in owner:
            users[owner[first]].discard(first)
            if not users[owner[first]]:
                free[pages[owner[first]]] = free.get(pages[owner[first]], 0) + 1
    return held


def stage(model, example, makers):
    """Return (graph, kernels, module) of a model's plan on one device, its stage memory checked for its parts."""
    imported = tvmhet.from_torch(model, example)
    prepared = prepare(imported)
    plan = tvmhet.plan(imported, cluster=CLUSTER, objective="latency", makers=makers)
    graph = prepared.graph
    kernels = [[graph.index(op) for op in k.ops] for k in plan.stages[0].kernels]
    outside = sum(t.size_bytes for t in graph.tensors if t.producer < 0 and t.consumers)
    assert plan.stages[0].memory_bytes == outside + storage_bytes(graph, kernels)
    with make_target(CLUSTER.device_types()[0].target):
        return graph, kernels, rewrite(prepared, plan)[0]


class Net(torch.nn.Module):
    """Branches, a reshape, a transpose that moves nothing, a result read again; tensors of 0.1 to 1 MB."""

    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.Conv2d(16, 16, 3, padding=1)
        self.c, self.fc = torch.nn.Conv2d(16, 4, 3, stride=2), torch.nn.Linear(15 * 15, 300)

    def forward(self, x):
        h = torch.relu(self.a(x))
        h = torch.relu(self.b(h)) + h
        h = self.c(h)
        kept = self.fc(h.reshape(x.shape[0], 4, 225))
        return torch.softmax(kept, -1).sum(1), kept.permute(0, 2, 1)


@pytest.mark.parametrize("makers", [("tvm",), ("tvm", "library")])
def test_a_small_net(makers):
    graph, kernels, mod = stage(Net().eval(), (torch.randn(8, 3, 32, 32),), makers)
    with make_target(CLUSTER.device_types()[0].target):
        assert storage_bytes(graph, kernels) == pytest.approx(planned(mod), rel=0.05)


class Fork(torch.nn.Module):
    """Two branches of three convolutions at few pixels, which gain nothing of a second core one after another."""

    def __init__(self):
        super().__init__()
        sizes = (64, 96, 128, 80)
        self.branches = torch.nn.ModuleList(
            torch.nn.Sequential(*(torch.nn.Conv2d(i, o, 3, padding=1) for i, o in pairwise(sizes))) for _ in range(2)
        )

    def forward(self, x):
        x = torch.relu(x)
        return torch.cat([branch(x) for branch in self.branches], 1)


def test_what_lies_between_kernels_of_branches_is_counted():
    imported = tvmhet.from_torch(Fork().eval(), (torch.randn(1, 64, 8, 8),))
    cluster = ClusterSpec.of({"cpu-x86-64-v3-2core": 1})
    prepared = prepare(imported)
    plan = tvmhet.plan(imported, cluster=cluster, objective="latency", makers=("tvm", "concurrent"))
    assert "concurrent" in {k.maker for k in plan.stages[0].kernels}
    target = make_target(cluster.device_types()[0].target)
    with target:
        mod = tvm.transform.Sequential(kernel_passes())(rewrite(prepared, plan)[0])
        held = planned(run_together(mod, target, ScheduleReport()))
    outside = sum(t.size_bytes for t in prepared.graph.tensors if t.producer < 0 and t.consumers)
    assert plan.stages[0].memory_bytes - outside == pytest.approx(held, rel=0.05)


def test_what_runs_allocates_it():
    """Every allocation of the running VM, as its instrument sees them."""
    graph, kernels, mod = stage(Net().eval(), (torch.randn(8, 3, 32, 32),), ("tvm",))
    target = make_target(CLUSTER.device_types()[0].target)
    with target:
        lowered = tvm.transform.Sequential([*kernel_passes(), *vm_passes(False)])(mod)
    machine = relax.VirtualMachine(tvm.compile(lowered, target=target, relax_pipeline=None), tvm.cpu())
    taken = []

    def watch(func, name, before_run, returned, *args):
        if before_run and name == "vm.builtin.alloc_storage":
            taken.append(int(args[1][0]))

    machine.set_instrument(watch)
    args = [tvm.runtime.tensor(torch.rand(*map(int, p.ty.shape)).numpy()) for p in mod["main"].params]
    machine["main"](*args)
    assert len(taken) == 3  # the two that leave, and one for all others
    assert storage_bytes(graph, kernels) == pytest.approx(sum(taken), rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet50", "bert_base", "mobilenet_v3", "dlrm"])
def test_the_zoo(name):
    model, example = zoo.get(name)
    graph, kernels, mod = stage(model, example, ("tvm", "library"))
    with make_target(CLUSTER.device_types()[0].target):
        assert storage_bytes(graph, kernels) == pytest.approx(planned(mod), rel=0.01)


def tight(limit_bytes, count=1):
    """A node of `count` devices with so much memory."""
    text = f"nodes: [{{devices: {{cpu-x86-64-v2: {{count: {count}, memory: {limit_bytes} B}}}}, link: shm}}]"
    return ClusterSpec.from_yaml(text)


def test_a_device_without_room_for_the_products_of_a_transposed_convolution_is_refused():
    model = tvmhet.from_torch(torch.nn.ConvTranspose2d(16, 8, 4, 2, 1).eval(), (torch.randn(2, 16, 12, 12),))
    needed = tvmhet.plan(model, cluster=CLUSTER, makers=("tvm",)).stages[0].memory_bytes
    assert tvmhet.plan(model, cluster=tight(needed), makers=("tvm",)).stages[0].memory_bytes == needed
    with pytest.raises(Infeasible):
        tvmhet.plan(model, cluster=tight(needed - 1), makers=("tvm",))


def test_a_plan_keeps_within_what_is_allocated_not_only_what_is_live():
    """Memory between what is live and what TVM allocates: one device is refused, two share the model."""
    model = tvmhet.from_torch(Net().eval(), (torch.randn(8, 3, 32, 32),))
    graph = prepare(model).graph
    whole = tvmhet.plan(model, cluster=CLUSTER, objective="latency", makers=("tvm",)).stages[0]
    live = memory_use(graph, [[graph.index(op) for op in k.ops] for k in whole.kernels]).peak_bytes
    limit = (live + whole.memory_bytes) // 2
    assert live < limit < whole.memory_bytes
    try:
        alone = tvmhet.plan(model, cluster=tight(limit), objective="latency", makers=("tvm",))
        assert all(s.memory_bytes <= limit for s in alone.stages)  # other kernels, other storages
    except Infeasible as error:
        assert "memory" in error.problem
    plan = tvmhet.plan(model, cluster=tight(limit, 2), objective="latency", makers=("tvm",))
    assert all(s.memory_bytes <= limit for s in plan.stages)
