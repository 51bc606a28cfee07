"""graph/storage: which tensors share a storage, by hand on small graphs. Against what runs: tests/test_storage.py."""

import dataclasses
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from tvmhet.graph.liveness import memory_use
from tvmhet.graph.opgraph import OpGraph
from tvmhet.graph.storage import ALIGNMENT_BYTES, Life, place_tensors, share_storages, stage_bytes, storage_bytes


def kib(*sizes):
    return [size * 1024 for size in sizes]


def every(graph):
    return [[i] for i in range(len(graph.operators))]


def test_a_chain_takes_two_storages_and_its_result(make_graph):
    graph = make_graph([(), (0,), (1,), (2,), (3,)], sizes=kib(1, 2, 3, 4, 1), params=[(0, 2)])
    # t3 of 4: at 0; t2 of 3, alive with t3: behind it; t1 of 2: at 0; t0 of 1: where t4 will be, which leaves
    assert storage_bytes(graph, every(graph)) == sum(kib(3, 4, 1))
    assert stage_bytes(graph, every(graph)) == sum(kib(3, 4, 1)) + 1000 + 100  # the parameter and the input


END = 50  # after every step
K = ALIGNMENT_BYTES


def places(lives, end):
    where, sizes = place_tensors(lives, end)
    return [tuple(p) for p in where], sizes


def shared(lives, end):
    where, sizes = share_storages(lives, end)
    assert all(p.offset == 0 for p in where)
    return [p.storage for p in where], sizes


def test_tensors_lie_side_by_side_where_the_larger_one_was():
    # 3 and 3, alive together with each other and with the first's end: behind it, then where it was
    assert places([Life(0, 1, 4 * K), Life(1, 3, 2 * K), Life(2, 3, 2 * K)], END) == (
        [(0, 0), (0, 4 * K), (0, 0)],
        [6 * K],
    )


def test_the_smallest_gap_is_taken():
    # between the first and the third are 2 K, before the first none, behind the third no end
    lives = [Life(0, 9, 4 * K), Life(0, 1, 2 * K), Life(0, 9, 2 * K), Life(2, 9, K)]
    assert places(lives, END) == ([(0, 0), (0, 4 * K), (0, 6 * K), (0, 4 * K)], [8 * K])


def test_tensors_begin_at_multiples_and_end_anywhere():
    assert places([Life(0, 1, 10), Life(0, 1, 9), Life(0, 1, 8)], END) == ([(0, 0), (0, K), (0, 2 * K)], [2 * K + 8])


def test_what_leaves_has_a_storage_of_its_size_and_others_lie_there_before():
    """Logits after wide layers: two of those beside each other where the logits, which end anywhere, will be."""
    lives = [Life(0, 1, K), Life(1, 2, K), Life(2, 3, 3 * K), Life(3, 4, 2 * K + 8), Life(4, 4, 8)]
    assert places(lives, 4) == ([(0, 0), (0, K), (2, 0), (0, 0), (1, 0)], [2 * K + 8, 8, 3 * K])


def test_nothing_lies_across_two_results():
    lives = [Life(0, 0, 2 * K), Life(1, 2, K), Life(1, 2, K)]
    assert places(lives, 2) == ([(2, 0), (0, 0), (1, 0)], [K, K, 2 * K])


def test_tensors_without_bytes_lie_somewhere():
    assert places([Life(0, 0, 0), Life(0, 1, 0)], 1) == ([(0, 0), (0, 0)], [0])
    assert places([Life(0, 0, 0)], END) == ([(0, 0)], [0])
    assert places([], END) == ([], [])


def test_the_smallest_storage_that_is_free_is_taken():
    # 50: A, 40: B, 20 while A alone is taken: B; 20 while neither is: B
    assert shared([Life(0, 2, 50), Life(1, 1, 40), Life(2, 2, 20), Life(3, 3, 20)], END) == ([0, 1, 1, 1], [50, 40])


def test_a_result_is_a_place_for_what_was_there_before_it():
    """Logits after wide layers; and a small result is put into no larger storage, which it would keep."""
    lives = [Life(0, 1, 40), Life(1, 2, 40), Life(2, 3, 40), Life(3, 4, 90), Life(4, 4, 8)]
    assert shared(lives, 4) == ([0, 2, 3, 0, 1], [90, 8, 40, 40])
    assert shared([Life(0, 1, 90), Life(2, 3, 8)], 3) == ([1, 0], [8, 90])


def test_a_small_tensor_leaves_the_large_storage_to_the_next_large_one():
    """Wide results between narrow ones, as in ConvNeXt. In the order of time the third would take the first's 36."""
    lives = [Life(0, 1, 36), Life(1, 4, 9), Life(2, 3, 9), Life(3, 4, 36), Life(4, 5, 9)]
    assert shared(lives, END) == ([0, 1, 2, 0, 2], [36, 9, 9])


def test_a_tensor_that_was_read_at_a_step_is_still_there_while_the_step_writes():
    assert shared([Life(0, 1, 8), Life(1, 2, 8)], END) == ([0, 1], [8, 8])
    assert shared([Life(0, 1, 8), Life(2, 2, 8)], END) == ([0, 0], [8])
    assert places([Life(0, 1, 8), Life(1, 2, 8)], END) == ([(0, 0), (0, K)], [K + 8])
    assert places([Life(0, 1, 8), Life(2, 2, 8)], END) == ([(0, 0), (0, 0)], [8])


def _life(first, length, size_bytes):
    return Life(first, first + length, size_bytes)


def some_lives(largest):
    return st.lists(st.builds(_life, st.integers(0, 30), st.integers(0, 9), st.integers(0, largest)), max_size=25)


def live_bytes(lives):
    return max(sum(x.size_bytes for x in lives if x.first <= step <= x.last) for step in range(41))


def check_results(lives, where, sizes, end):
    """Whatever is alive at the end has its own storage, no larger than itself."""
    ended = [(x.size_bytes, p) for x, p in zip(lives, where, strict=True) if x.last >= end]
    assert len({p.storage for _, p in ended}) == len(ended)
    assert all(p.offset == 0 and sizes[p.storage] == size for size, p in ended)


@given(some_lives(99), st.integers(31, END))
def test_no_two_are_in_one_storage_at_a_time(lives, end):
    where, sizes = share_storages(lives, end)
    check_results(lives, where, sizes, end)
    for (a, i), (b, j) in combinations(zip(lives, where, strict=True), 2):
        assert i != j or a.last < b.first or b.last < a.first
    assert all(p.offset == 0 and x.size_bytes <= sizes[p.storage] for x, p in zip(lives, where, strict=True))
    assert live_bytes(lives) <= sum(sizes) <= sum(x.size_bytes for x in lives)


@given(some_lives(4 * K), st.integers(31, END))
def test_no_two_lie_in_one_place_at_a_time(lives, end):
    where, sizes = place_tensors(lives, end)
    check_results(lives, where, sizes, end)
    for (a, p), (b, q) in combinations(zip(lives, where, strict=True), 2):
        apart = p.offset + a.size_bytes <= q.offset or q.offset + b.size_bytes <= p.offset
        assert p.storage != q.storage or apart or a.last < b.first or b.last < a.first
    assert all(p.offset % K == 0 for p in where)
    assert all(p.offset + x.size_bytes <= sizes[p.storage] for x, p in zip(lives, where, strict=True))
    assert live_bytes(lives) <= sum(sizes) <= sum(-(-x.size_bytes // K) * K for x in lives)


@given(some_lives(99), st.integers(1, 50))
def test_tensors_of_one_size_take_no_more_than_are_alive(lives, size_bytes):
    """Where all are as large, the order is that of time, and intervals take as many places as meet at a step."""
    alike = [x._replace(size_bytes=size_bytes) for x in sorted(lives)]
    live = max(sum(x.first <= step <= x.last for x in alike) for step in range(41))
    assert share_storages(alike, END)[1] == [size_bytes] * live
    assert place_tensors(alike, END)[1] == ([K * (live - 1) + size_bytes] if live else [])


def test_dtypes_share(make_graph):
    graph = make_graph([(), (0,), (1,), (2,)], sizes=kib(2, 2, 2, 1))
    assert storage_bytes(graph, every(graph)) == sum(kib(2, 2, 1))
    tensors = list(graph.tensors)
    tensors[3] = dataclasses.replace(tensors[3], dtype="uint8")
    graph = OpGraph(graph.operators, tuple(tensors), graph.inputs, graph.outputs)
    assert storage_bytes(graph, every(graph)) == sum(kib(2, 2, 1))


def test_a_reshape_is_no_kernel(make_graph):
    graph = make_graph([(), (0,), (1,), (2,)], sizes=kib(2, 2, 2, 1))
    operators = list(graph.operators)
    operators[1] = dataclasses.replace(operators[1], family="reshape")
    graph = OpGraph(tuple(operators), graph.tensors, graph.inputs, graph.outputs)
    assert storage_bytes(graph, every(graph)) == sum(kib(2, 2, 1))  # t1 is t0, held until t2 is made


def test_what_stays_in_a_kernel_takes_none(make_graph):
    graph = make_graph([(), (0,), (1,)], sizes=kib(2, 4, 6))
    assert storage_bytes(graph, [[0, 1], [2]]) == sum(kib(4, 6))
    assert storage_bytes(graph, [[0, 1, 2]]) == sum(kib(6))


def test_what_others_read_has_a_storage_of_its_own(make_graph):
    graph = make_graph([(), (0,), (1,), (2,), (0,)], sizes=kib(2, 2, 2, 2, 2))
    assert storage_bytes(graph, [[0], [1], [2], [3]]) == sum(
        kib(2, 2, 2)
    )  # op4 reads t0 elsewhere; t1 is where t3 comes


def test_never_less_than_is_live(random_graph):
    for seed in range(40):
        graph = random_graph(seed, 14)
        use = memory_use(graph, every(graph))
        held = storage_bytes(graph, every(graph))
        made = [t for t in graph.tensors if t.producer >= 0]
        inputs = sum(graph.tensors[t].size_bytes for t in graph.inputs)
        assert use.activation_bytes - inputs <= held <= sum(-(-t.size_bytes // K) * K for t in made)
