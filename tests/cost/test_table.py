"""cost/table: who wins, what is refused, and what reports are told."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvmhet.cost.measure import Measurement
from tvmhet.cost.model import Predictions
from tvmhet.cost.table import SOURCES, Entry, TimeTable, measured_entry
from tvmhet.errors import BadInput, BadTime


def predictions(*seconds, source="roofline", in_range=True):
    s = np.array(seconds)
    return Predictions(s, s / 2, s * 2, np.full(len(s), in_range), (source,) * len(s))


@pytest.fixture
def table():
    """Two kernels on two device types, priced by roofline."""
    empty = TimeTable.empty(2, ["cpu", "gpu"])
    return empty.with_predictions("cpu", predictions(1.0, 2.0)).with_predictions("gpu", predictions(0.1, 0.2))


def test_an_empty_table_says_so():
    entry = TimeTable.empty(1, ["cpu"]).entry(0, "cpu")
    assert entry == Entry(math.inf, math.inf, math.inf, "none", "not priced yet")


def test_predictions_fill_in(table):
    assert table.seconds.tolist() == [[1.0, 0.1], [2.0, 0.2]]
    assert table.entry(1, "gpu") == Entry(0.2, 0.1, 0.4, "roofline")


def test_predictions_for_some_kernels(table):
    table = table.with_predictions("cpu", predictions(9.0, source="learned", in_range=False), kernels=[1])
    assert table.entry(0, "cpu").source == "roofline"
    assert table.entry(1, "cpu") == Entry(9.0, 4.5, 18.0, "learned", "outside the range the model was fitted on")
    with pytest.raises(BadTime, match="1 predictions for 2 kernels"):
        table.with_predictions("cpu", predictions(1.0))


entries = st.tuples(st.sampled_from(SOURCES[1:]), st.floats(1e-9, 1e3))


@given(st.lists(entries, min_size=1, max_size=8))
def test_the_highest_source_wins_and_of_equals_the_last(said):
    table = TimeTable.empty(1, ["cpu"])
    for source, s in said:
        table = table.with_entries("cpu", {0: Entry(s, s, s, source)})
    best = max(SOURCES.index(source) for source, _ in said)
    expected = [s for source, s in said if SOURCES.index(source) == best][-1]
    assert table.entry(0, "cpu") == Entry(expected, expected, expected, SOURCES[best])


def test_a_measurement_always_wins(table):
    table = table.with_measurements("cpu", {0: Measurement("ok", (3.0, 5.0, 4.0))})
    for later in (
        table.with_predictions("cpu", predictions(9.0, 9.0, source="transfer")),
        table.override("cpu", {0: 9.0}),
    ):
        entry = later.entry(0, "cpu")
        assert (entry.seconds, entry.low, entry.high, entry.source) == (4.0, 3.0, 5.0, "measured")
    assert table.override("cpu", {0: 9.0}).entry(0, "cpu").note == "given by the user: 9 s, not used"


@pytest.mark.parametrize("status", ["timeout", "crash", "build_error", "wrong"])
def test_a_failed_measurement_is_never_chosen(table, status):
    table = table.with_measurements("gpu", {1: Measurement(status, note="SIGSEGV")})
    assert table.entry(1, "gpu").seconds == math.inf
    assert table.entry(1, "gpu").note == f"{status} when measured: SIGSEGV"
    assert table.with_predictions("gpu", predictions(0.1, 0.1)).entry(1, "gpu").seconds == math.inf


def test_a_busy_machine_is_said():
    assert measured_entry(Measurement("ok", (1.0,), busy=True)).note == "measured on a busy machine"


def test_override(table):
    table = table.override("gpu", {0: 0.5, 1: math.inf}, note="my tests")
    assert table.entry(0, "gpu") == Entry(0.5, 0.5, 0.5, "given", "my tests")
    assert table.entry(1, "gpu").seconds == math.inf
    assert table.with_predictions("gpu", predictions(7.0, 7.0)).entry(0, "gpu").seconds == 0.5


def test_with_failure(table):
    table = table.with_failure("cpu", [1], "no float8 units")
    assert table.entry(1, "cpu") == Entry(math.inf, math.inf, math.inf, "cannot run", "no float8 units")
    assert table.override("cpu", {1: 2.0}).entry(1, "cpu").note == "no float8 units; given by the user: 2 s, not used"
    measured = table.with_measurements("cpu", {1: Measurement("ok", (1.0,))})
    assert measured.with_failure("cpu", [1], "no float8 units").entry(1, "cpu").seconds == 1.0


@pytest.mark.parametrize("bad", [math.nan, -1.0, 0.0, -math.inf])
def test_bad_times(table, bad):
    with pytest.raises(BadTime, match="time"):
        table.override("cpu", {0: bad})
    seconds = table.seconds.copy()
    seconds[1, 0] = bad
    with pytest.raises(BadTime, match="kernel 1 on 'cpu'"):
        TimeTable(table.device_types, seconds, table.low, table.high, table.rank, {})


def test_inf_needs_a_reason(table):
    with pytest.raises(BadTime, match="inf without a reason"):
        table.override("cpu", {0: math.inf}, note="")
    seconds = table.seconds.copy()
    seconds[0, 1] = math.inf
    with pytest.raises(BadTime, match="kernel 0 on 'gpu' has time inf without a reason"):
        TimeTable(table.device_types, seconds, table.low, table.high, table.rank, {})


def test_tables_are_frozen(table):
    before = table.seconds.copy()
    table.with_measurements("cpu", {0: Measurement("ok", (3.0,))})
    assert (table.seconds == before).all()
    with pytest.raises(ValueError, match="read-only"):
        table.seconds[0, 0] = 1.0


def test_shares(table):
    table = table.with_measurements("cpu", {0: Measurement("ok", (3.0,))})
    assert table.share_by_source([(0, "cpu"), (1, "cpu")]) == {"measured": 0.6, "roofline": 0.4}
    assert table.num_by_source() == {"measured": 1, "roofline": 3}
    with pytest.raises(BadTime, match="kernel 1 was chosen for 'cpu', where it has no time: too big"):
        table.with_failure("cpu", [1], "too big").share_by_source([(1, "cpu")])


def test_unknown_names(table):
    with pytest.raises(BadInput, match="no device type 'tpu'"):
        table.entry(0, "tpu")
    with pytest.raises(BadInput, match="no kernel 2"):
        table.entry(2, "cpu")
    with pytest.raises(BadTime, match="'rumour' is unknown"):
        Entry(1.0, 1.0, 1.0, "rumour")
    with pytest.raises(BadInput, match="repeat"):
        TimeTable.empty(1, ["cpu", "cpu"])
