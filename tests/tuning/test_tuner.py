"""The tuning run with invented times: what is tried, kept, resumed and never chosen."""

import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import tvmhet
from tests.placed import plain
from tests.tuning.small import ALONE, CPU, InventedRunner, branches, campaign, fill, model
from tvmhet.cost.measure import Measurement
from tvmhet.cost.tuning_store import TuningStore, tuning_path
from tvmhet.deploy import stage_traces
from tvmhet.graph.merges import find_merges
from tvmhet.graph.schedule import TunedSchedule
from tvmhet.kernel_keys import measured_key
from tvmhet.known_times import known_times
from tvmhet.proposing import variant_of
from tvmhet.tuning import Tuner, search, tuner
from tvmhet.tuning.kernel import Bench, TunedWorkload
from tvmhet.tuning.workload import make_workload


@pytest.fixture
def invented(monkeypatch):
    """Replace what runs schedules, and the search's population by a small one."""

    class Runner(InventedRunner):
        pass

    monkeypatch.setattr(tuner, "TrialRunner", Runner)
    monkeypatch.setattr(tuner.CompilerProcess, "start", lambda self: None)
    monkeypatch.setattr(search, "_POPULATION", 16)
    monkeypatch.setattr(search, "_GENERATIONS", 1)
    return Runner


def table(c):
    """The times that plans are made from."""
    return known_times(c.prepared, c.candidates, c.database, c.cluster, in_context=True)


def test_what_is_found_is_what_plans_use(database, invented):
    c = campaign(database)
    fill(c, 1e-3)
    report = Tuner(c).run(60.0, max_trials=16)
    assert sum(report.trials.values()) == 16 and report.trials["ok"] == 16
    assert report.after < report.before and report.ended == "the trials are spent"
    plan = tvmhet.plan(model(), cluster=ALONE, objective="latency", makers=("tvm",), database=database.path)
    tuned = [(k, p) for s in plan.stages for k, p in zip(s.kernels, s.predictions, strict=True) if p.source == "tuned"]
    assert tuned and plan.objective_value == pytest.approx(report.after)
    assert all(TunedSchedule.from_text(k.spec).function for k, _ in tuned)
    assert "tuned" in str(plan)
    best = min(s for k in report.kernels for s in [k.best_s])
    assert any(p.time_s == pytest.approx(best) for _, p in tuned)


def test_a_build_with_tuned_schedules_gives_the_same_bits(database, invented):
    c = campaign(database)
    x = np.random.default_rng(0).normal(size=(4, 32)).astype("float32")
    with tvmhet.build(model(), cluster=ALONE, makers=("tvm",), database=database.path, inline=True) as plain:
        expected = np.asarray(plain(x))
    fill(c, 1e-3)
    Tuner(c).run(60.0, max_trials=16)
    with tvmhet.build(model(), cluster=ALONE, makers=("tvm",), database=database.path, inline=True) as lib:
        assert any(stage_traces(s.kernels) for s in lib.plan.stages)
        np.testing.assert_array_equal(np.asarray(lib(x)), expected)
        again = tvmhet.Plan.from_json(lib.plan.to_json())
    assert again == lib.plan  # the schedule travels with the plan: another machine needs no tuning files


def test_what_is_tuned_is_the_model_as_the_plan_rewrites_it(database, invented):
    c = campaign(database, of=branches, makers=("tvm",))
    fill(c, 1e-4, product_s=1e-2)
    (level,) = find_merges(c.prepared.graph)
    merged = variant_of(c.prepared, ("tvm",), partial(known_times, database=database, cluster=ALONE, in_context=True),
                        (level,))  # fmt: skip
    fill(replace(c, prepared=merged.prepared, candidates=merged.candidates), 1e-4, product_s=1e-2)
    report = Tuner(c).run(60.0, max_trials=16)
    assert "with products made as one: q + k" in str(report)
    assert report.after < report.before < 2e-2 and any("q_merged" in k.name for k in report.kernels)
    x = np.random.default_rng(0).normal(size=(4, 32)).astype("float32")
    with tvmhet.build(branches(), cluster=ALONE, objective="latency", makers=("tvm",), database=database.path,
                      inline=True) as lib:  # fmt: skip
        assert lib.plan.rewrites == (level,) and lib.plan.objective_value == pytest.approx(report.after)
        assert any(stage_traces(s.kernels) for s in lib.plan.stages)
        np.testing.assert_allclose(np.asarray(lib(x)), plain(branches(), torch.from_numpy(x))[0], rtol=1e-5, atol=1e-6)
    again = Tuner(campaign(database, of=branches, makers=("tvm",))).run(60.0, max_trials=8)
    assert again.earlier == 16 and again.before == pytest.approx(report.after)


def test_a_schedule_that_is_not_faster_is_not_used(database, invented):
    c = campaign(database)
    fill(c, 1e-3)
    invented.rules = lambda self, workload: Measurement("ok", (1e-9,) * 5)  # timed beside, it beats them all
    report = Tuner(c).run(60.0, max_trials=8)
    assert report.trials["ok"] == 8
    assert all(k.best_s == k.rules_s for k in report.kernels)
    assert not table(c).schedules


def test_a_trial_that_ends_badly_is_a_row_and_never_chosen(database, invented):
    c = campaign(database)
    fill(c, 1e-3)
    invented.statuses = ("crash", "timeout", "wrong", "build_error", "crash", "timeout", "wrong", "build_error")
    report = Tuner(c).run(60.0, max_trials=8)
    assert report.trials == {"crash": 2, "timeout": 2, "wrong": 2, "build_error": 2}
    assert len(report.failed) == 8 and "of which 2 build_error, 2 crash" in str(report)
    assert not table(c).schedules
    with TuningStore(tuning_path(database.path, CPU.name)) as store:
        statuses = [row[0] for row in store._runs._db.execute("SELECT status FROM runs ORDER BY id")]
    assert statuses == list(invented.statuses)
    assert Tuner(campaign(database)).run(60.0, max_trials=8).trials["ok"] == 8  # and the next run goes on


def test_the_next_run_goes_on_and_repeats_no_trial(database, invented):
    for _ in range(2):
        c = campaign(database)
        fill(c, 1e-3)
        report = Tuner(c).run(60.0, max_trials=8)
    assert report.earlier == 8 and "continues 8 trials of earlier runs" in str(report)
    with TuningStore(tuning_path(database.path, CPU.name)) as store:
        assert store._db.execute("SELECT COUNT(*), COUNT(DISTINCT kernel || digest) FROM schedules").fetchone() == (
            16,
            16,
        )


def test_records_of_another_tvm_are_skipped_and_counted(database, invented):
    c = campaign(database)
    fill(c, 1e-3)
    Tuner(c).run(60.0, max_trials=8)
    with TuningStore(tuning_path(database.path, CPU.name)) as store:
        store._db.execute("UPDATE schedules SET tvm_version = '0.1'")
    report = Tuner(campaign(database)).run(60.0, max_trials=8)
    assert report.stale == {"another TVM": 8} and "skipped 8 stale records: 8 of another TVM" in str(report)
    assert report.earlier == 0


def test_records_of_another_function_are_skipped_and_counted(database, invented):
    c = campaign(database)
    fill(c, 1e-3)
    Tuner(c).run(60.0, max_trials=8)
    with TuningStore(tuning_path(database.path, CPU.name)) as store:
        (key,) = store.tried(measured_key("0", "tvm", CPU))
        workload = make_workload(c.prepared, c.candidates, c.candidates.keys.index(key), CPU)
        workload = replace(workload, function_hash="0" * 16)  # as if TVM made the kernel differently now
        kernel = TunedWorkload(workload, Bench(store, invented(None, None), search.ranking_model(), database), seed=1)
    assert (kernel.num_stale, kernel.num_earlier) == (8, 0)


def test_a_budget_of_nothing_tunes_nothing_and_says_so(database, invented):
    for budget in ((0.0, None), (60.0, 0)):
        report = Tuner(campaign(database)).run(*budget)
        assert not report.trials and "the budget is 0" in str(report)
    assert invented.tried == 0


def test_a_cluster_that_is_elsewhere_is_named(database, invented):
    c = campaign(database, cluster=tvmhet.ClusterSpec.of({"v100-pcie-16gb": 1}))
    report = Tuner(c).run(60.0)
    assert report.unreachable == ("v100-pcie-16gb",) and "nothing was tuned" in str(report)


def test_a_busy_machine_is_said(database, invented):
    c = campaign(database)
    fill(c, 1e-3)
    plain = invented.try_schedule
    invented.try_schedule = lambda self, w, s: replace(plain(self, w, s), busy=True)
    assert "8 trials were timed on a busy machine" in str(Tuner(c).run(60.0, max_trials=8))


@pytest.mark.slow
def test_kill_9_loses_no_finished_trial(tmp_path):
    """A run that is killed in its sixth trial leaves five, and the next one counts and uses them."""
    code = textwrap.dedent(
        f"""
        import os, signal, sys
        sys.path[:] = {[p or os.getcwd() for p in sys.path]!r}
        from pathlib import Path
        from tests.tuning.small import InventedRunner, campaign, fill
        from tvmhet.cost.measured import MeasuredKernels
        from tvmhet.tuning import Tuner, search, tuner

        class Runner(InventedRunner):
            def try_schedule(self, workload, schedule):
                if Runner.tried == 5:
                    os.kill(os.getpid(), signal.SIGKILL)
                return super().try_schedule(workload, schedule)

        tuner.TrialRunner, search._POPULATION, search._GENERATIONS = Runner, 16, 1
        tuner.CompilerProcess.start = lambda self: None
        with MeasuredKernels(Path({str(tmp_path / "measured.db")!r})) as database:
            c = campaign(database)
            fill(c, 1e-3)
            Tuner(c).run(60.0, max_trials=16)
        """
    )
    root = Path(__file__).parents[2]
    ended = subprocess.run([sys.executable, "-c", code], cwd=root, timeout=120, check=False, capture_output=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    with TuningStore(tuning_path(tmp_path / "measured.db", CPU.name)) as store:
        assert store._db.execute("SELECT COUNT(*) FROM schedules").fetchone() == (5,)
        assert store._runs.num_runs() == 5
