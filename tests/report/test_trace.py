"""Chrome traces: one track per device, microseconds, nothing that overlaps on one track."""

import dataclasses
import itertools
import json

import pytest

from tests.report.plans import measured, two_stages, whole
from tvmhet.errors import BadInput
from tvmhet.plans import TimelineEvent
from tvmhet.report.trace import plan_to_trace, run_to_trace, save_trace


def complete_events(trace):
    return [e for e in trace["traceEvents"] if e["ph"] == "X"]


def track_names(trace):
    return [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"]


def assert_no_overlap(trace):
    for _, group in itertools.groupby(complete_events(trace), key=lambda e: (e["pid"], e["tid"])):
        events = list(group)
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-3 for a, b in itertools.pairwise(events))


def test_simulated_run_has_one_track_per_device_in_stage_order():
    trace = plan_to_trace(two_stages())
    assert track_names(trace) == ["node0/v100-sxm2-16gb:0", "node0/v100-sxm2-16gb:1", "node0/t4:0"]
    assert len(complete_events(trace)) == len(two_stages().timeline)
    assert_no_overlap(trace)


def test_times_are_microseconds():
    event = next(e for e in complete_events(two_stages().to_trace()) if e["cat"] == "compute")
    assert event["name"] == "stage 0, input 0"
    assert event["ts"] == pytest.approx(200.0) and event["dur"] == pytest.approx(16000.0)


def test_a_device_that_overlaps_gets_a_track_per_kind():
    both = (
        TimelineEvent(0, "node0/t4:0", 0, "compute", 0.0, 0.002),
        TimelineEvent(0, "node0/t4:0", 1, "receive", 0.001, 0.003),
    )
    trace = plan_to_trace(two_stages(timeline=both))
    assert track_names(trace)[-2:] == ["node0/t4:0 (compute)", "node0/t4:0 (receive)"]
    assert_no_overlap(trace)


def test_a_plan_without_times_has_no_events():
    assert complete_events(plan_to_trace(whole())) == []


def test_a_run_starts_at_zero_and_is_split_into_load_compute_store():
    events = complete_events(run_to_trace(measured()))
    assert min(e["ts"] for e in events) == 0.0
    first = [e for e in events if e["args"]["input"] == 3 and e["args"]["stage"] == 0]
    assert [e["cat"] for e in first] == ["load", "compute", "store"]
    assert first[1]["dur"] == pytest.approx(17100, rel=1e-3)


def test_a_run_with_its_plan_shows_both_as_processes():
    trace = run_to_trace(measured(), two_stages())
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names == {1: "predicted: resnet_toy", 2: "measured: resnet_toy"}
    assert {e["pid"] for e in complete_events(trace)} == {1, 2}


def test_a_run_without_events_is_an_empty_trace():
    assert complete_events(run_to_trace(dataclasses.replace(measured(), timeline=()))) == []


def test_saved_trace_reads_back(tmp_path):
    path = tmp_path / "trace.json"
    save_trace(plan_to_trace(two_stages()), path)
    assert json.loads(path.read_text()) == plan_to_trace(two_stages())
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_missing_is_named(tmp_path):
    with pytest.raises(BadInput, match=r"gone.*No such file"):
        save_trace({}, tmp_path / "gone" / "trace.json")


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text("old")
    with pytest.raises(TypeError):
        save_trace({"traceEvents": object()}, path)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
