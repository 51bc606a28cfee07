"""What measured kernels tell about the others: the belief, conditioned on all results at once, and nothing else."""

import math

import numpy as np
import pytest

import tvmhet
from tests.small_models import SMALL_MODELS
from tvmhet.candidates import candidate_kernels
from tvmhet.cluster import device_type
from tvmhet.cost.table import Entry, TimeTable
from tvmhet.errors import BadInput
from tvmhet.ir.prepare import prepare
from tvmhet.recommending.belief import Belief, generations
from tvmhet.recommending.inferring import with_results
from tvmhet.recommending.measurements import Measured
from tvmhet.recommending.uncertainty import KernelBelief, spread
from tvmhet.times import Candidates

DEVICES = [device_type(name) for name in ("h100-sxm-80gb", "h200-sxm-141gb", "l4")]
NAMES = [d.name for d in DEVICES]


@pytest.fixture(scope="module")
def candidates():
    graph = prepare(tvmhet.from_torch(*SMALL_MODELS["conv"]())).operator_graph
    return Candidates.of(graph, candidate_kernels(graph, ("tvm",)))


@pytest.fixture(params=["learned", "roofline"])
def source(request):
    return request.param


@pytest.fixture
def table(candidates, source):
    rng, made = np.random.default_rng(0), TimeTable.empty(len(candidates.keys), NAMES)
    for name in NAMES:
        seconds = {key: float(rng.uniform(1e-5, 1e-3)) for key in candidates.keys}
        entries = [Entry(seconds[key], seconds[key] / 1.3, seconds[key] * 1.5, source) for key in candidates.keys]
        made = made.with_entries(name, dict(enumerate(entries)))
    return made


def test_times_are_those_of_the_belief_conditioned_result_by_result(candidates, table, source):
    keys = sorted(set(candidates.keys))
    first = {key: candidates.keys.index(key) for key in keys}
    results = [
        Measured(name, keys[i], factor * table.entry(first[keys[i]], name).seconds)
        for name, i, factor in ((NAMES[0], 0, 1.4), (NAMES[0], 1, 0.8), (NAMES[2], 0, 1.1))
    ]
    rows = [
        KernelBelief(e.seconds, spread(e.seconds, e.low, e.high), n, candidates.descs[i].root.family, key, source)
        for n in NAMES
        for key, i in first.items()
        if (e := table.entry(i, n))
    ]
    made = generations(DEVICES)
    assert made[NAMES[0]] == made[NAMES[1]] != made[NAMES[2]]
    before = belief = Belief.of(rows, made)
    for m in results:
        belief = belief.after((m.device_type, m.key), m.seconds)
    found = with_results(table, candidates, DEVICES, results)
    measured = {(m.device_type, m.key): m.seconds for m in results}
    for j, (name, key) in enumerate(belief.pairs):
        entry, was = found.entry(first[key], name), table.entry(first[key], name)
        if (name, key) in measured:
            assert (entry.seconds, entry.source) == (measured[name, key], "measured")
            continue
        assert entry.seconds == pytest.approx(was.seconds * math.exp(belief.mean[j]))
        narrower = math.sqrt(belief.cov[j, j] / before.cov[j, j])
        assert math.log(entry.high / entry.low) == pytest.approx(narrower * math.log(was.high / was.low))
        assert narrower < 1 and entry.source == source and "3 measured kernels" in entry.note


def test_equal_kernels_are_corrected_alike_and_other_sources_stay(candidates, table):
    key = candidates.keys[0]
    given = Entry(1e-3, 1e-3, 1e-3, "given")
    cannot = Entry(math.inf, math.inf, math.inf, "cannot run", "no room")
    other = next(i for i, k in enumerate(candidates.keys) if k != key)
    table = table.with_entries(NAMES[1], {other: given}).with_entries(NAMES[2], {other: cannot})
    found = with_results(table, candidates, DEVICES, [Measured(NAMES[0], key, 2 * table.entry(0, NAMES[0]).seconds)])
    assert found.entry(other, NAMES[1]) == given
    assert found.entry(other, NAMES[2]) == cannot
    for name in NAMES:
        by_key = {}
        for i, k in enumerate(candidates.keys):
            if i != other:
                assert by_key.setdefault(k, found.entry(i, name).seconds) == found.entry(i, name).seconds
    again = with_results(table, candidates, DEVICES, [Measured(NAMES[1], candidates.keys[other], 5e-3)])
    assert again.entry(other, NAMES[1]).seconds == 5e-3  # what was given is no prediction: it tells nothing
    np.testing.assert_array_equal(np.delete(again.seconds, other, axis=0), np.delete(table.seconds, other, axis=0))


def test_a_kernel_that_is_absurdly_slow_tells_no_more_than_one_that_is_as_slow_as_may_be(candidates, table):
    e = table.entry(0, NAMES[0])
    most = e.seconds * math.exp(3 * spread(e.seconds, e.low, e.high))
    slow, absurd = (with_results(table, candidates, DEVICES, [Measured(NAMES[0], candidates.keys[0], s)]).seconds.copy()
                    for s in (most, 1000 * e.seconds))  # fmt: skip
    is_same = np.array([key == candidates.keys[0] for key in candidates.keys])
    np.testing.assert_allclose(slow[~is_same], absurd[~is_same])
    assert absurd[0, 0] == 1000 * e.seconds


def test_nothing_measured_changes_nothing(candidates, table):
    np.testing.assert_array_equal(with_results(table, candidates, DEVICES, []).seconds, table.seconds)
    with pytest.raises(BadInput, match="'z' is none of this model's"):
        with_results(table, candidates, DEVICES, [Measured("l4", "z", 1.0)])
