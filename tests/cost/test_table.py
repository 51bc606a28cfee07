"""cost/table: who wins, and what is refused."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvmhet.cost.measure import Measurement
from tvmhet.cost.table import SOURCES, Entry, TimeTable, measured_entry
from tvmhet.errors import BadInput, BadTime


def roofline(*seconds):
    """Entries of kernels 0, 1, ..., each within half and twice its time."""
    return {k: Entry(s, s / 2, s * 2, "roofline") for k, s in enumerate(seconds)}


@pytest.fixture
def table():
    """Two kernels on two device types, priced by roofline."""
    empty = TimeTable.empty(2, ["cpu", "gpu"])
    return empty.with_entries("cpu", roofline(1.0, 2.0)).with_entries("gpu", roofline(0.1, 0.2))


def test_an_empty_table_says_so():
    entry = TimeTable.empty(1, ["cpu"]).entry(0, "cpu")
    assert entry == Entry(math.inf, math.inf, math.inf, "none", "not priced yet")


def test_entries_fill_in(table):
    assert table.seconds.tolist() == [[1.0, 0.1], [2.0, 0.2]]
    assert table.entry(1, "gpu") == Entry(0.2, 0.1, 0.4, "roofline")


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
    table = table.with_entries("cpu", {0: measured_entry(Measurement("ok", (3.0, 5.0, 4.0)))})
    entry = table.with_entries("cpu", roofline(9.0, 9.0)).entry(0, "cpu")
    assert (entry.seconds, entry.low, entry.high, entry.source) == (4.0, 3.0, 5.0, "measured")


@pytest.mark.parametrize("status", ["timeout", "crash", "build_error", "wrong"])
def test_a_failed_measurement_is_never_chosen(table, status):
    table = table.with_entries("gpu", {1: measured_entry(Measurement(status, note="SIGSEGV"))})
    assert table.entry(1, "gpu").seconds == math.inf
    assert table.entry(1, "gpu").note == f"{status} when measured: SIGSEGV"
    assert table.with_entries("gpu", roofline(0.1, 0.1)).entry(1, "gpu").seconds == math.inf


def test_a_busy_machine_is_said():
    assert measured_entry(Measurement("ok", (1.0,), busy=True)).note == "measured on a busy machine"


@pytest.mark.parametrize("bad", [math.nan, -1.0, 0.0, -math.inf])
def test_bad_times(table, bad):
    with pytest.raises(BadTime, match="time"):
        Entry(bad, bad, bad, "given")
    seconds = table.seconds.copy()
    seconds[1, 0] = bad
    with pytest.raises(BadTime, match="kernel 1 on 'cpu'"):
        TimeTable(table.device_types, seconds, table.low, table.high, table.rank, {})


def test_inf_needs_a_reason(table):
    with pytest.raises(BadTime, match="inf without a reason"):
        Entry(math.inf, math.inf, math.inf, "cannot run")
    seconds = table.seconds.copy()
    seconds[0, 1] = math.inf
    with pytest.raises(BadTime, match="kernel 0 on 'gpu' has time inf without a reason"):
        TimeTable(table.device_types, seconds, table.low, table.high, table.rank, {})


def test_tables_are_frozen(table):
    before = table.seconds.copy()
    table.with_entries("cpu", {0: measured_entry(Measurement("ok", (3.0,)))})
    assert (table.seconds == before).all()
    with pytest.raises(ValueError, match="read-only"):
        table.seconds[0, 0] = 1.0


def test_unknown_names(table):
    with pytest.raises(BadInput, match="no device type 'tpu'"):
        table.entry(0, "tpu")
    with pytest.raises(BadInput, match="no kernel 2"):
        table.entry(2, "cpu")
    with pytest.raises(BadTime, match="'rumour' is unknown"):
        Entry(1.0, 1.0, 1.0, "rumour")
    with pytest.raises(BadInput, match="repeat"):
        TimeTable.empty(1, ["cpu", "cpu"])
