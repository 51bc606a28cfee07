"""Which kernels are measured, and the process that measures them: it may fail, hang or end."""

import json
import os
import sys

import pytest

from tvmhet import calibrating
from tvmhet.calibrating import OpTimer, choose, measure
from tvmhet.cluster import local
from tvmhet.cluster.catalog import device_type
from tvmhet.cost.calibrate import candidates
from tvmhet.cost.operators import parse
from tvmhet.errors import BadInput, MeasurementFailed, NotSupported

CPU = device_type("cpu-x86-64-v2")


@pytest.mark.parametrize("device", ["t4", "b200", "cpu-x86-64-v4"])
def test_what_is_chosen_is_distinct_and_repeatable(device):
    kind = device_type(device)
    chosen = choose(kind, 20)
    assert len(set(chosen)) == 20 and chosen == choose(kind, 20) and set(chosen) <= set(candidates(kind))
    assert len({d.root.family for d in chosen}) >= 5
    assert choose(kind, 5) == chosen[:5] or not kind.is_cpu


def test_a_count_below_one_is_refused():
    with pytest.raises(BadInput, match="0 kernels"):
        choose(CPU, 0)


def test_a_cpu_type_is_measured_here():
    """One of each kind of operator; and a failing one does not end the others."""
    descs = [
        parse({"op": "linear", "m": 64, "n": 64, "k": 64}),
        parse({"op": "elementwise", "name": "sinh", "shape": [64]}),  # has no torch twin in the worker
        parse({"op": "matmul", "b": 4, "m": 16, "n": 16, "k": 16}),
        parse({"op": "conv2d", "n": 1, "c": 4, "h": 9, "w": 9, "oc": 8, "kh": 3, "kw": 3, "stride": 2, "groups": 2}),
        parse({"op": "layer_norm", "rows": 64, "cols": 64}),
        parse({"op": "softmax", "rows": 2048, "cols": 2048}),
    ]
    told = []
    run = measure(CPU, descs, lambda done, total, name: told.append((done, total, name)))
    assert run.measured.descs == tuple(d for i, d in enumerate(descs) if i != 1)
    assert all(1e-7 < s < 5 for s in run.measured.seconds) and run.measured.seconds[-1] > 10 * run.measured.seconds[0]
    (failed,) = run.failed
    assert "sinh" in failed and "KeyError" in failed
    assert told[-1] == (5, 6, "softmax") and run.measured.measured_on


def test_a_device_that_is_not_here_is_said(monkeypatch):
    monkeypatch.setattr(local, "cuda_ordinals", lambda: {"local/t4:0": 0})
    with pytest.raises(NotSupported, match="this machine has no 'l4'"):
        OpTimer.start(device_type("l4"))
    assert json.loads(OpTimer.start(device_type("t4")).command[-1])[1] == "cuda:0"


PROGRAMS = {
    "ends": "import json; print(json.dumps({'ready': ''}), flush=True); input(); raise SystemExit('out of luck')",
    "hangs": "import json, time; print(json.dumps({'ready': ''}), flush=True); time.sleep(60)",
}


@pytest.mark.parametrize("how", PROGRAMS)
def test_a_process_that_ends_or_hangs_is_an_answer(how, monkeypatch):
    monkeypatch.setattr(calibrating, "_KERNEL_LIMIT_S", 0.5)
    with OpTimer((sys.executable, "-c", PROGRAMS[how]), dict(os.environ)) as timer:
        for _ in range(2):  # the second gets a new process
            answer = timer.time({"op": "softmax"})
            assert answer["times_s"] == [] and "ended or hung" in answer["note"]
            assert ("out of luck" in answer["note"]) == (how == "ends")


def test_a_process_that_does_not_start(monkeypatch):
    with (
        OpTimer((sys.executable, "-c", "raise SystemExit('no torch')"), dict(os.environ)) as timer,
        pytest.raises(MeasurementFailed, match="no torch"),
    ):
        timer.time({"op": "softmax"})
