"""graph/liveness: memory of a kernel sequence, against a simulation that allocates and frees tensor by tensor."""

import random

import pytest

from tvmhet.errors import BadGraph
from tvmhet.graph.liveness import memory_use


def test_a_chain(make_graph):
    graph = make_graph([(), (0,), (1,), (2,)], sizes=[10, 20, 30, 40], params=[(0, 2), (3,)])
    use = memory_use(graph, [[0], [1], [2], [3]], [0, 5, 0, 0])
    assert use.param_bytes == 2000
    assert use.live_bytes == (100 + 10, 100 + 10 + 20 + 5, 100 + 20 + 30, 100 + 30 + 40)
    assert use.peak_bytes == 2170


def test_a_tensor_inside_a_kernel_takes_none(make_graph):
    graph = make_graph([(), (0,), (1,)], sizes=[10, 20, 30])
    assert memory_use(graph, [[0, 1], [2]]).live_bytes == (120, 150)
    assert memory_use(graph, [[0, 1, 2]]).live_bytes == (130,)


def test_a_stage_keeps_what_others_read(make_graph):
    graph = make_graph([(), (0,), (1,), (0,)], sizes=[10, 20, 30, 40])
    use = memory_use(graph, [[1], [2]])  # op0 runs elsewhere: its result is a live-in
    assert use.live_bytes == (10 + 20, 10 + 20 + 30)
    use = memory_use(graph, [[0], [3]])  # t0 is read by op1 elsewhere: a live-out
    assert use.live_bytes == (110, 150)


def test_no_kernels(make_graph):
    use = memory_use(make_graph([()]), [])
    assert (use.peak_bytes, use.live_bytes) == (0, ())


@pytest.mark.parametrize("seed", range(30))
def test_equals_allocating_and_freeing(random_graph, seed):
    graph, rng = random_graph(seed, 12), random.Random(seed)
    stage = sorted(rng.sample(range(12), 8))
    kernels, work = [[op] for op in stage], [rng.randint(0, 9) for _ in stage]
    in_stage = set(stage)
    live_ins = [t for t in graph.tensors if t.producer not in in_stage and in_stage & set(t.consumers)]
    held = {t.name for t in live_ins if not t.is_param}
    size = {t.name: t.size_bytes for t in graph.tensors}
    live = []
    for i, op in enumerate(stage):
        held.add(f"t{op}")
        live.append(sum(size[t] for t in held) + work[i])
        for t in graph.tensors:
            done = t.producer in in_stage and set(t.consumers) <= set(stage[: i + 1])
            if done and not t.is_output:
                held.discard(t.name)
    use = memory_use(graph, kernels, work)
    assert list(use.live_bytes) == live
    assert use.param_bytes == graph.param_bytes(in_stage)


def test_bad_sequences(make_graph):
    graph = make_graph([(), (0,)])
    with pytest.raises(BadGraph, match="'op0' is in two kernels"):
        memory_use(graph, [[0], [0, 1]])
    with pytest.raises(BadGraph, match="kernel 0 reads 'op0', which the later kernel 1 makes"):
        memory_use(graph, [[1], [0]])
    with pytest.raises(BadGraph, match="1 workspaces for 2 kernels"):
        memory_use(graph, [[0], [1]], [0])
