"""Tuning through a TVM RPC tracker: trials run there, and results are compared there."""

from dataclasses import replace

import pytest
import torch

import tvmhet
from tests.remote import one_server
from tests.tuning.small import ALONE, CPU, campaign
from tvmhet.cost.measure_rpc import RemoteTimer
from tvmhet.cost.measured import MeasuredKernels
from tvmhet.emit.compiler import CompilerProcess
from tvmhet.tuning import search
from tvmhet.tuning.search import ScheduleSearch, ranking_model
from tvmhet.tuning.trial import TrialRunner
from tvmhet.tuning.workload import make_workload

pytest.importorskip("tornado")  # TVM's tracker needs it


@pytest.fixture(scope="module")
def tracker():
    with one_server(CPU, CPU.name) as found:
        yield found


@pytest.mark.slow
def test_trials_run_behind_the_tracker_and_wrong_results_are_seen(tracker, tmp_path, monkeypatch):
    monkeypatch.setattr(search, "_POPULATION", 16)
    with MeasuredKernels(tmp_path / "a.db") as database, CompilerProcess() as compiler:
        c = campaign(database)
        index = max(range(len(c.candidates.kernels)), key=lambda i: len(c.candidates.kernels[i].ops))
        workload = make_workload(c.prepared, c.candidates, index, CPU)
        (proposal, *_) = ScheduleSearch(workload, ranking_model(), 1, []).propose(8)
        with TrialRunner(RemoteTimer(tracker, CPU), compiler) as runner:
            assert runner.rules(workload).status == "ok"
            assert runner.try_schedule(workload, proposal.schedule).status == "ok"
            strict = replace(workload, tolerance=-1.0)  # nothing is near enough: every result is wrong
            assert runner.try_schedule(strict, proposal.schedule).status == "wrong"
    wide = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU()).eval()
    wide = tvmhet.from_torch(wide, (torch.randn(64, 256),))
    database = tmp_path / "b.db"
    report = tvmhet.tune(
        wide, cluster=ALONE, budget_s=300, trials=4, makers=("tvm",), database=database, tracker=tracker
    )
    assert sum(report.trials.values()) == 4 and not report.unreachable
