"""cost/shipped_cpu: kernels measured elsewhere, for CPU types of the same vendor; damaged files are refused."""

import gzip
from dataclasses import replace

import numpy as np
import pytest

from tvmhet._data import data_path
from tvmhet.cluster.catalog import device_type
from tvmhet.cost import shipped_cpu as shipped
from tvmhet.cost.learned_cpu import MeasuredKernel, learn
from tvmhet.cost.model import OpDesc
from tvmhet.cost.workload import kernel_of
from tvmhet.errors import BadModel

DESCS = [
    kernel_of(OpDesc("linear", (1, m, n, k), "float32"), maker)
    for m in (1, 8, 64) for n in (32, 96, 256) for k in (32, 96, 256, 512) for maker in ("library", "tvm")
]  # fmt: skip
MEASURED = [MeasuredKernel(d, 5e-6 + d.flop / 4e10, inside) for d in DESCS for inside in (0.0, 4e6)]
ABOUT = {"processor": "a core", "device": "cpu-x86-64-v4"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A shipped folder with what a core of Acme's took."""
    shipped._read.cache_clear()
    monkeypatch.setattr(shipped, "data_path", lambda relative: tmp_path / relative)
    shipped.write_measured(tmp_path / "measured" / "cpu_Acme_7_v4.jsonl.gz", ABOUT, MEASURED)
    shipped.train(tmp_path / "measured" / "cpu_Acme_7_v4.jsonl.gz", tmp_path / "trained")
    yield tmp_path
    shipped._read.cache_clear()


def test_the_vendors_kernels_are_learned(folder):
    kind = device_type(ABOUT["device"])
    found, own = shipped.shipped_cpu(kind, "Acme"), learn(kind, MEASURED)
    assert found.measured_on == "a core" and found.num_kernels == len(MEASURED)
    np.testing.assert_array_equal(found.predict_s(DESCS), own.predict_s(DESCS))
    low, high = zip(*(found.interval(d) for d in DESCS), strict=True)
    near, far = zip(*(own.interval(d) for d in DESCS), strict=True)
    assert np.all(np.array(low) < near) and np.all(np.array(high) > far)
    assert all(found.in_range(d) for d in DESCS)


def test_a_core_with_half_the_rates_takes_longer(folder, cpu):
    slower = replace(
        cpu,
        dram_byte_per_s=cpu.dram_byte_per_s / 2,
        peak_flop_per_s={k: v / 2 for k, v in cpu.peak_flop_per_s.items()},
    )
    ratio = shipped.shipped_cpu(slower, "Acme").predict_s(DESCS) / shipped.shipped_cpu(cpu, "Acme").predict_s(DESCS)
    assert 1 < np.median(ratio) < 2.5


def test_other_vendors_and_gpus_have_none(folder, cpu):
    assert shipped.shipped_cpu(cpu, "Other") is None
    assert shipped.shipped_cpu(cpu, "") is None
    assert shipped.shipped_cpu(cpu, "../trained/Acme") is None
    assert shipped.shipped_cpu(device_type("t4"), "Acme") is None


def test_the_processors_own_family_comes_first_then_the_instruction_set(folder):
    about = {"processor": "an older core", "device": "cpu-x86-64-v3"}
    shipped.write_measured(folder / "measured" / "cpu_Acme_6_v3.jsonl.gz", about, MEASURED)
    shipped.train(folder / "measured" / "cpu_Acme_6_v3.jsonl.gz", folder / "trained")
    wanted = {("v3", "6"): "an older core", ("v4", "6"): "an older core", ("v3", "7"): "a core", ("v4", "7"): "a core",
              ("v3", "5"): "an older core", ("v4", "5"): "a core", ("v4", ""): "a core"}  # fmt: skip
    types = {level: device_type(f"cpu-x86-64-{level}") for level in ("v3", "v4")}
    desc = DESCS[0]
    (low, _), (lower, _) = (shipped.shipped_cpu(types["v3"], "Acme", of).interval(desc) for of in ("6", "5"))
    assert 1 > low > lower
    assert {k: shipped.shipped_cpu(types[k[0]], "Acme", k[1]).measured_on for k in wanted} == wanted


def test_of_one_family_the_nearest_instruction_set_is_taken(folder):
    about = {"processor": "the same core", "device": "cpu-x86-64-v3"}
    shipped.write_measured(folder / "measured" / "cpu_Acme_7_v3.jsonl.gz", about, MEASURED)
    shipped.train(folder / "measured" / "cpu_Acme_7_v3.jsonl.gz", folder / "trained")
    wanted = {"v2": "the same core", "v3": "the same core", "v4": "a core"}
    for family in ("7", "8"):
        types = {level: device_type(f"cpu-x86-64-{level}") for level in wanted}
        found = {level: shipped.shipped_cpu(kind, "Acme", family).measured_on for level, kind in types.items()}
        assert found == wanted


def test_of_unknown_models_the_nearest_number_is_taken(folder):
    for model in ("106", "207"):
        path = folder / "measured" / f"cpu_Chips_6-{model}_v4.jsonl.gz"
        shipped.write_measured(path, {"processor": model, "device": "cpu-x86-64-v4"}, MEASURED)
        shipped.train(path, folder / "trained")
    wanted = {"6-85": "106", "6-106": "106", "6-173": "207", "6-207": "207", "6-": "106", "": "106", "15": "106"}
    kind = device_type("cpu-x86-64-v4")
    assert {of: shipped.shipped_cpu(kind, "Chips", of).measured_on for of in wanted} == wanted


def test_the_same_kernels_give_the_same_bytes(folder):
    first = {p.name: p.read_bytes() for p in folder.rglob("cpu_*")}
    shipped.write_measured(folder / "measured" / "cpu_Acme_7_v4.jsonl.gz", ABOUT, MEASURED)
    shipped.train(folder / "measured" / "cpu_Acme_7_v4.jsonl.gz", folder / "trained")
    assert {p.name: p.read_bytes() for p in folder.rglob("cpu_*")} == first


@pytest.mark.parametrize("text", ["", "[]", "schema: 2", "schema: 1\nkinds: [[a, b]]\nnum_kernels: 1"])
def test_damaged_cards_are_refused(folder, cpu, text):
    (folder / "trained" / "cpu_Acme_7_v4.yaml").write_text(text)
    with pytest.raises(BadModel):
        shipped.shipped_cpu(cpu, "Acme")


def test_trees_of_another_card_are_refused(folder, cpu):
    trees = folder / "trained" / "cpu_Acme_7_v4.ubj"
    trees.write_bytes(trees.read_bytes()[:-1] + b"x")
    with pytest.raises(BadModel, match="sha256"):
        shipped.shipped_cpu(cpu, "Acme")


@pytest.mark.slow
def test_what_is_shipped_was_trained_on_what_is_shipped(tmp_path):
    for measured in sorted(data_path("measured").glob("cpu_*.jsonl.gz")):
        assert gzip.decompress(measured.read_bytes()).startswith(b"{")
        shipped.train(measured, tmp_path)
        for made in tmp_path.iterdir():
            assert made.read_bytes() == (data_path("trained") / made.name).read_bytes()
