"""Kernels measured through a TVM RPC tracker: a tracker and a server in a process of their own on this machine."""

import pytest
import torch

import tvmhet
from tests.remote import one_server
from tvmhet.cluster import ClusterSpec, device_type
from tvmhet.cost.measure import KernelJob, TimerLimits
from tvmhet.cost.measure_rpc import RemoteTimer, Tracker
from tvmhet.cost.measured import MeasuredKernels
from tvmhet.errors import BadInput, MeasurementFailed, NotSupported

pytest.importorskip("tornado")  # TVM's tracker needs it
CPU = device_type("cpu-x86-64-v2")
KEY = "basic-core"


@pytest.fixture(scope="module")
def tracker():
    with one_server(CPU, KEY) as found:
        yield found


class Net(torch.nn.Module):
    def forward(self, x, w):
        return torch.softmax(torch.relu(x @ w), -1)


def test_a_model_is_profiled_there(tracker, tmp_path):
    model = tvmhet.from_torch(Net().eval(), (torch.randn(32, 64), torch.randn(64, 64)))
    cluster = ClusterSpec.of_device(CPU)
    database = tmp_path / "measured.db"
    report = tvmhet.profile(model, cluster=cluster, budget_s=120, makers=("tvm",), database=database, tracker=tracker)
    assert report.complete and not report.failed and report.measured[CPU.name] >= 2
    with MeasuredKernels(database) as measured:
        assert measured.num_runs() >= 2
    plan = tvmhet.plan(model, cluster=cluster, makers=("tvm",), database=database)
    assert {p.source for s in plan.stages for p in s.predictions} == {"measured"}


def test_only_registered_keys_are_there(tracker):
    assert tracker.timers([device_type("cpu-x86-64-v3"), device_type("t4")], TimerLimits()) == {}
    assert isinstance(tracker.timers([CPU], TimerLimits())[CPU.name], RemoteTimer)


def test_what_cannot_be_loaded_is_a_status(tracker, tmp_path):
    timer = tracker.timers([CPU], TimerLimits(time_limit_s=10))[CPU.name]
    assert timer.measure(KernelJob(tmp_path / "gone.so", ())).status == "build_error"
    (tmp_path / "text.so").write_text("no library")
    run = timer.measure(KernelJob(tmp_path / "text.so", ()))
    assert run.status == "build_error" and run.note


def test_another_processor_is_refused(tracker, monkeypatch):
    monkeypatch.setattr("tvm.get_global_func", lambda name: lambda: "another-core")
    with pytest.raises(NotSupported, match="times belong to a processor"):
        tracker.timers([CPU], TimerLimits())


def test_library_kernels_are_refused(tracker):
    model = tvmhet.from_torch(Net().eval(), (torch.randn(4, 4), torch.randn(4, 4)))
    with pytest.raises(NotSupported, match="library kernels cannot be measured"):
        tvmhet.profile(model, cluster=ClusterSpec.of_device(CPU), tracker=tracker)


@pytest.mark.parametrize("text", ["", "host", "host:", ":9190", "host:port", "host:99999"])
def test_bad_addresses(text):
    with pytest.raises(BadInput, match="HOST:PORT"):
        Tracker.parse(text)


def test_no_tracker(monkeypatch):
    def refuse(host, port):
        raise RuntimeError(f"Failed to connect to server {host}:{port}")

    monkeypatch.setattr("tvm.rpc.connect_tracker", refuse)
    with pytest.raises(MeasurementFailed, match=r"no tracker answers at 127\.0\.0\.1:9"):
        Tracker("127.0.0.1", 9).timers([CPU], TimerLimits())
