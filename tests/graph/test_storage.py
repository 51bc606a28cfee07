"""graph/storage: TVM's reuse of storages, by hand on small graphs. Against TVM itself: tests/test_storage.py."""

import dataclasses

from tvmhet.graph.liveness import memory_use
from tvmhet.graph.opgraph import OpGraph
from tvmhet.graph.storage import stage_bytes, storage_bytes


def every(graph):
    return [[i] for i in range(len(graph.operators))]


def test_a_chain_takes_two_storages_and_its_result(make_graph):
    graph = make_graph([(), (0,), (1,), (2,), (3,)], sizes=[10, 20, 30, 40, 7], params=[(0, 2)])
    # t0: A of 10; t1: B of 20; t2 takes A, which grows to 30; t3 takes B, which grows to 40; t4 leaves
    assert storage_bytes(graph, every(graph)) == 30 + 40 + 7
    assert stage_bytes(graph, every(graph)) == 30 + 40 + 7 + 1000 + 100  # the parameter and the input


def test_the_smallest_that_holds_it_is_taken(make_graph):
    graph = make_graph([(), (), (0, 1), (2,), (3,)], sizes=[50, 20, 40, 20, 1])
    # t0: A of 50; t1: B of 20; t2: C of 40; t3 takes B of 20, not A of 50
    assert storage_bytes(graph, every(graph)) == 50 + 20 + 40 + 1


def test_storages_sixteen_times_off_are_left_alone(make_graph):
    for first, want in ((160, 160 + 1 + 1), (170, 170 + 1 + 10 + 1)):
        graph = make_graph([(), (0,), (1,), (2,)], sizes=[first, 1, 10, 1])
        assert storage_bytes(graph, every(graph)) == want


def test_dtypes_do_not_share(make_graph):
    graph = make_graph([(), (0,), (1,), (2,)], sizes=[10, 10, 10, 5])
    assert storage_bytes(graph, every(graph)) == 10 + 10 + 5
    tensors = list(graph.tensors)
    tensors[3] = dataclasses.replace(tensors[3], dtype="uint8")
    graph = OpGraph(graph.operators, tuple(tensors), graph.inputs, graph.outputs)
    assert storage_bytes(graph, every(graph)) == 30 + 5


def test_a_reshape_is_no_kernel(make_graph):
    graph = make_graph([(), (0,), (1,), (2,)], sizes=[10, 10, 10, 5])
    operators = list(graph.operators)
    operators[1] = dataclasses.replace(operators[1], family="reshape")
    graph = OpGraph(tuple(operators), graph.tensors, graph.inputs, graph.outputs)
    assert storage_bytes(graph, every(graph)) == 10 + 10 + 5  # t1 is t0, held until t2 is made


def test_what_stays_in_a_kernel_takes_none(make_graph):
    graph = make_graph([(), (0,), (1,)], sizes=[10, 20, 30])
    assert storage_bytes(graph, [[0, 1], [2]]) == 20 + 30
    assert storage_bytes(graph, [[0, 1, 2]]) == 30


def test_what_others_read_has_a_storage_of_its_own(make_graph):
    graph = make_graph([(), (0,), (1,), (2,), (0,)], sizes=[10, 10, 10, 10, 10])
    assert storage_bytes(graph, [[0], [1], [2], [3]]) == 10 + 10 + 10 + 10  # op4 reads t0 elsewhere


def test_never_less_than_is_live(random_graph):
    for seed in range(40):
        graph = random_graph(seed, 14)
        use = memory_use(graph, every(graph))
        held = storage_bytes(graph, every(graph))
        inputs = sum(graph.tensors[t].size_bytes for t in graph.inputs)
        assert use.activation_bytes - inputs <= held <= sum(t.size_bytes for t in graph.tensors if t.producer >= 0)
