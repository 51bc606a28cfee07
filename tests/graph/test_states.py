"""What a planner knows of states: memory, what two devices would exchange, and what a GPU copies."""

import numpy as np
import torch

import tvmhet
from tests.stateful import Decoder, Recurrent, step
from tvmhet.candidates import candidate_kernels
from tvmhet.cluster.spec import ClusterSpec
from tvmhet.graph.states import copied_bytes, handed_back, kept_bytes
from tvmhet.ir.prepare import prepare
from tvmhet.ir.state import with_sessions
from tvmhet.planning_problem import make_problem
from tvmhet.times import Candidates, time_table


def recurrent(**more):
    imported = tvmhet.from_torch(Recurrent().eval(), (torch.zeros(2, 8), torch.zeros(2, 8)))
    return tvmhet.with_state(imported, {"memory": 0}, **more)


def test_a_reader_and_what_renews_are_joined_by_what_they_would_exchange():
    graph = prepare(recurrent()).operator_graph
    ((now, after),) = graph.states
    reader, renewer = graph.tensors[now].consumers[0], graph.tensors[after].producer
    assert reader < renewer and handed_back(graph) == [(reader, renewer, 64)]
    cluster = ClusterSpec.of({"t4": 2})
    kernels = candidate_kernels(graph, ("tvm",))
    seconds = np.ones((len(kernels), 1))
    problem = make_problem(graph, kernels, seconds, cluster, cluster.groups(), {})
    assert [e.size_bytes for e in problem.edges if (e.src, e.dsts) == (reader, (renewer,))] == [64]
    assert not [
        e for e in problem.edges if e.src == -1 and e.size_bytes == 64 and reader in e.dsts
    ]  # not from the host
    returned = {graph.tensors[t].producer for t in graph.returned}
    assert {e.src for e in problem.edges if e.is_output} == returned and renewer not in returned


def test_a_side_reader_orders_nothing():
    """It reads the old value and leads nowhere near the new one."""

    class Side(torch.nn.Module):
        def forward(self, memory, x):
            return torch.exp(x), memory.tanh() * 2

    imported = tvmhet.from_torch(Side(), (torch.zeros(4), torch.zeros(4)))
    graph = prepare(tvmhet.with_state(imported, {"memory": 0})).operator_graph
    assert handed_back(graph) == []


def test_other_sessions_are_counted_twice_and_copies_where_sessions_alternate():
    graphs = [prepare(recurrent(num_sessions=n)).operator_graph for n in (1, 2, 5)]
    every = range(len(graphs[0].operators))
    assert [kept_bytes(g, every) for g in graphs] == [0, 2 * 64, 8 * 64]
    assert [copied_bytes(g, every) for g in graphs] == [64, 128, 128]
    assert [kept_bytes(g, []) for g in graphs] == [copied_bytes(g, []) for g in graphs] == [0, 0, 0]


def test_a_gpu_is_charged_for_its_copies_and_a_cpu_is_not():
    model = tvmhet.from_torch(Decoder(layers=1, dim=64, heads=2, length=4096).eval(), step(1, 0))
    devices = ClusterSpec.of({"t4": 1, "cpu-x86-64-v3": 1}).device_types()
    tables = []
    for n in (1, 2):
        graph = prepare(with_sessions(model, n)).operator_graph
        candidates = Candidates.of(graph, candidate_kernels(graph, ("tvm",)))
        tables.append((candidates, time_table(candidates, devices, None)))
    (candidates, one), (_, two) = tables
    renews = [bool(n) for n in candidates.copied_bytes]
    assert any(renews) and not all(renews)
    for device in devices:
        column = one.column(device.name)
        longer = two.seconds[:, column] > one.seconds[:, column]
        runs = np.isfinite(one.seconds[:, column])
        assert (longer[runs] == (np.array(renews)[runs] & (not device.is_cpu))).all()
    k = next(i for i, r in enumerate(renews) if r and np.isfinite(one.seconds[i, one.column("t4")]))
    assert "to copy what the next call reads" in one.entry(k, "t4").note
