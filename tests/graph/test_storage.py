"""graph/storage: which tensors share a storage, by hand on small graphs. Against what runs: tests/test_storage.py."""

import dataclasses
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from tvmhet.graph.liveness import memory_use
from tvmhet.graph.opgraph import OpGraph
from tvmhet.graph.storage import Life, share, stage_bytes, storage_bytes


def every(graph):
    return [[i] for i in range(len(graph.operators))]


def test_a_chain_takes_two_storages_and_its_result(make_graph):
    graph = make_graph([(), (0,), (1,), (2,), (3,)], sizes=[10, 20, 30, 40, 7], params=[(0, 2)])
    # t3 of 40: A; t2 of 30, alive with t3: B; t1 of 20: A; t0 of 10: B; t4 leaves
    assert storage_bytes(graph, every(graph)) == 30 + 40 + 7
    assert stage_bytes(graph, every(graph)) == 30 + 40 + 7 + 1000 + 100  # the parameter and the input


END = 50  # after every step


def test_the_smallest_that_is_free_is_taken():
    # 50: A, 40: B, 20 while A alone is taken: B; 20 while neither is: B
    assert share([Life(0, 2, 50), Life(1, 1, 40), Life(2, 2, 20), Life(3, 3, 20)], END) == ([0, 1, 1, 1], [50, 40])


def test_a_result_is_a_place_for_what_was_there_before_it():
    """Logits after wide layers; and a small result is put into no larger storage, which it would keep."""
    lives = [Life(0, 1, 40), Life(1, 2, 40), Life(2, 3, 40), Life(3, 4, 90), Life(4, 4, 8)]
    assert share(lives, 4) == ([0, 2, 3, 0, 1], [90, 8, 40, 40])
    assert share([Life(0, 1, 90), Life(2, 3, 8)], 3) == ([1, 0], [8, 90])


def test_a_small_tensor_leaves_the_large_storage_to_the_next_large_one():
    """Wide results between narrow ones, as in ConvNeXt. In the order of time the third would take the first's 36."""
    lives = [Life(0, 1, 36), Life(1, 4, 9), Life(2, 3, 9), Life(3, 4, 36), Life(4, 5, 9)]
    assert share(lives, END) == ([0, 1, 2, 0, 2], [36, 9, 9])


def test_a_tensor_that_was_read_at_a_step_is_still_there_while_the_step_writes():
    assert share([Life(0, 1, 8), Life(1, 2, 8)], END) == ([0, 1], [8, 8])
    assert share([Life(0, 1, 8), Life(2, 2, 8)], END) == ([0, 0], [8])


def _life(first, length, size_bytes):
    return Life(first, first + length, size_bytes)


some_lives = st.lists(st.builds(_life, st.integers(0, 30), st.integers(0, 9), st.integers(0, 99)), max_size=25)


@given(some_lives, st.integers(31, END))
def test_no_two_are_in_one_storage_at_a_time(lives, end):
    """Whatever is alive at the end, of which each has its own storage, no larger than itself."""
    numbers, sizes = share(lives, end)
    ended = [(x.size_bytes, number) for x, number in zip(lives, numbers, strict=True) if x.last >= end]
    assert len({number for _, number in ended}) == len(ended) and all(sizes[n] == size for size, n in ended)
    for (a, i), (b, j) in combinations(zip(lives, numbers, strict=True), 2):
        assert i != j or a.last < b.first or b.last < a.first
    assert all(life.size_bytes <= sizes[number] for life, number in zip(lives, numbers, strict=True))
    live = [sum(x.size_bytes for x in lives if x.first <= step <= x.last) for step in range(41)]
    assert max(live) <= sum(sizes) <= sum(x.size_bytes for x in lives)


@given(some_lives, st.integers(1, 50))
def test_tensors_of_one_size_take_no_more_than_are_alive(lives, size_bytes):
    """Where all are as large, the order is that of time, and intervals take as many storages as meet at a step."""
    alike = [x._replace(size_bytes=size_bytes) for x in sorted(lives)]
    live = [sum(x.first <= step <= x.last for x in alike) for step in range(41)]
    assert share(alike, END)[1] == [size_bytes] * max(live)


def test_dtypes_share(make_graph):
    graph = make_graph([(), (0,), (1,), (2,)], sizes=[10, 10, 10, 5])
    assert storage_bytes(graph, every(graph)) == 10 + 10 + 5
    tensors = list(graph.tensors)
    tensors[3] = dataclasses.replace(tensors[3], dtype="uint8")
    graph = OpGraph(graph.operators, tuple(tensors), graph.inputs, graph.outputs)
    assert storage_bytes(graph, every(graph)) == 10 + 10 + 5


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
    assert storage_bytes(graph, [[0], [1], [2], [3]]) == 10 + 10 + 10  # op4 reads t0 elsewhere; t1 is where t3 comes


def test_never_less_than_is_live(random_graph):
    for seed in range(40):
        graph = random_graph(seed, 14)
        use = memory_use(graph, every(graph))
        held = storage_bytes(graph, every(graph))
        inputs = sum(graph.tensors[t].size_bytes for t in graph.inputs)
        assert use.activation_bytes - inputs <= held <= sum(t.size_bytes for t in graph.tensors if t.producer >= 0)
