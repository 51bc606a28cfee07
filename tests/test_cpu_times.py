"""Times of kernels that were never measured, learned from measured kernels of other models."""

import json
import sys
from contextlib import closing

import pytest

import tvmhet
from tests.placed import cpus
from tvmhet import cli, zoo
from tvmhet.candidates import MAKERS, candidate_kernels
from tvmhet.context import keep_context
from tvmhet.cost.measure import Measurement
from tvmhet.cost.measured import MeasuredKernels
from tvmhet.cost.model import to_text
from tvmhet.ir.prepare import prepare
from tvmhet.kernel_keys import inside_key, measured_key
from tvmhet.known_times import known_times
from tvmhet.times import Candidates, time_table

CLUSTER = cpus(v3=1)
(DEVICE,) = CLUSTER.device_types()


def case(**sizes):
    prepared = prepare(tvmhet.from_torch(*zoo.resnet50(image=32, blocks=(1, 1, 1, 1), **sizes)))
    return prepared, Candidates.of(prepared.graph, candidate_kernels(prepared.graph, MAKERS))


@pytest.fixture(scope="module")
def known():
    return case(base_width=8)


@pytest.fixture(scope="module")
def other():
    return case(base_width=12)


@pytest.fixture
def database(known, tmp_path):
    """Kernels of `known` take three times what is estimated without measurements, half as long again inside."""
    _, candidates = known
    table = time_table(candidates, [DEVICE], None)
    with closing(MeasuredKernels(tmp_path / "measured.db")) as database:
        for key, i in {key: i for i, key in enumerate(candidates.keys)}.items():
            name = measured_key(key, candidates.kernels[i].maker, DEVICE)
            seconds = 3 * table.entry(i, DEVICE.name).seconds
            database.describe(key, to_text(candidates.descs[i]))
            database.insert(name, Measurement("ok", (seconds,) * 3))
            database.insert(inside_key(name, candidates.model_bytes), Measurement("ok", (1.5 * seconds,)))
        yield database


def entries(prepared, candidates, database, in_context):
    table = known_times(prepared, candidates, database, CLUSTER, in_context=in_context)
    return [table.entry(i, DEVICE.name) for i in range(len(candidates.kernels))]


def middle(values):
    return sorted(values)[len(values) // 2]


@pytest.mark.parametrize(("in_context", "factor"), [(False, 3.0), (True, 4.5)])
def test_another_model_is_predicted_from_the_measured_one(other, database, in_context, factor):
    _, candidates = other
    first = time_table(candidates, [DEVICE], None)
    found = entries(*other, database, in_context)
    learned = [(i, e) for i, e in enumerate(found) if e.source == "learned"]
    assert len(learned) > len(found) / 2
    ratios = [e.seconds / first.entry(i, DEVICE.name).seconds for i, e in learned]
    assert middle(ratios) == pytest.approx(factor, rel=0.1)
    assert all(e.low <= e.seconds <= e.high for e in found)
    assert "measured kernels of this and other models" in learned[0][1].note


def test_measurements_inside_models_win_where_the_model_itself_was_not_run(known, database):
    alone, inside = (entries(*known, database, in_context) for in_context in (False, True))
    assert {e.source for e in alone} == {e.source for e in inside} == {"measured"}
    for a, b in zip(alone, inside, strict=True):
        assert b.seconds == pytest.approx(1.5 * a.seconds)


def test_the_models_own_factor_wins_over_what_others_teach(known, database):
    prepared, candidates = known
    alone = entries(*known, database, False)
    keep_context(database, prepared.key, DEVICE, (1.2,), 1.0)
    for a, b in zip(alone, entries(prepared, candidates, database, True), strict=True):
        assert b.seconds == pytest.approx(1.2 * a.seconds)


def test_other_types_are_not_touched(other, database):
    _, candidates = other
    (v2,) = cpus(v2=1).device_types()
    with_database, without = (time_table(candidates, [v2], d) for d in (database, None))
    every = range(len(candidates.kernels))
    assert [with_database.entry(i, v2.name) for i in every] == [without.entry(i, v2.name) for i in every]


def test_predict_answers_by_what_was_measured(database, tmp_path, monkeypatch, capsys):
    """A convolution takes what was measured, inside a model if queued."""
    monkeypatch.setenv("TVMHET_CACHE_DIR", str(tmp_path))
    conv = {"op": "conv2d", "n": 1, "c": 12, "h": 8, "w": 8, "oc": 12, "kh": 3, "kw": 3, "stride": 1, "padding": 1}
    ops = tmp_path / "ops.jsonl"
    ops.write_text("".join(json.dumps({**conv, "dtype": "float32", "maker": m}) + "\n" for m in ("library", "tvm")))
    seconds = {}
    for dispatch in ("published", "queued"):
        line = ["tvmhet", "predict", "--device", DEVICE.name, "--ops", str(ops), "--dispatch", dispatch]
        monkeypatch.setattr(sys, "argv", line)
        with pytest.raises(SystemExit, match="0"):
            cli.main()
        answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [a["source"] for a in answers] == ["learned", "learned"]
        seconds[dispatch] = [a["seconds"] for a in answers]
    assert all(q > 1.2 * p for p, q in zip(seconds["published"], seconds["queued"], strict=True))


def test_kernels_of_a_like_processor_come_before_the_data_sheet(known, database, monkeypatch):
    """Without measurements here those that were shipped are learned from; with them, those made here."""
    monkeypatch.setenv("TVMHET_CPU_VENDOR", "AuthenticAMD")
    _, candidates = known
    table = time_table(candidates, [DEVICE], None)
    notes = [table.entry(i, DEVICE.name).note for i in range(len(candidates.kernels))]
    assert sum("kernels measured on AMD" in note for note in notes) > len(notes) / 2
    measured = time_table(candidates, [DEVICE], database)
    assert {measured.entry(i, DEVICE.name).source for i in range(len(candidates.kernels))} == {"measured"}
