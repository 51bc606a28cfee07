"""Ratios of generated to library kernels: by processor where they were measured, by device kind elsewhere."""

import math

import pytest
import yaml

import tvmhet
from tvmhet._data import data_path
from tvmhet.cluster.cpu import family_of, processor_vendor, vendor_of
from tvmhet.cost.generated import maker_ratio
from tvmhet.cost.model import SIZES, KernelDesc, OpDesc
from tvmhet.errors import BadModel

V4, V3 = (tvmhet.device_type(f"cpu-x86-64-{level}") for level in ("v4", "v3"))
FILE = yaml.safe_load(data_path("generated.yaml").read_text())
AMD = FILE["processors"]["AuthenticAMD"]["x86-64-v4"]


def kernel(family, *sizes, maker="tvm"):
    return KernelDesc((OpDesc(family, sizes, "float32"),), 1.0, 1.0, 1.0, "float32", maker)


def conv(channels, window, groups):
    return kernel("conv2d", 1, channels, 8, 8, channels, window, window, 8, 8, groups)


@pytest.mark.parametrize(
    ("desc", "entry"),
    [
        (kernel("matmul", 12, 64, 64, 64), "matmul"),
        (kernel("linear", 1, 1, 64, 64), "linear"),
        (kernel("linear", 4, 4, 64, 64), "linear_few_rows"),
        (kernel("linear", 8, 4, 64, 64), "linear"),
        (conv(8, 3, 1), "conv2d"),
        (conv(8, 3, 2), "conv2d"),
        (conv(8, 1, 1), "conv2d_pointwise"),
        (conv(8, 3, 8), "conv2d_depthwise"),
    ],
)
def test_a_processor_that_was_measured_has_its_own_ratios(desc, entry):
    assert maker_ratio(V4, desc, "AuthenticAMD") == AMD[entry]
    assert maker_ratio(V4, desc, "") == FILE["ratio"]["llvm"][desc.root.family]


def test_a_family_that_was_not_measured_there_has_the_ratio_of_its_kind():
    assert "embedding" not in AMD
    assert maker_ratio(V4, kernel("embedding", 8, 100, 16), "AuthenticAMD") == FILE["ratio"]["llvm"]["embedding"]
    assert maker_ratio(V4, kernel("generic"), "AuthenticAMD") == FILE["ratio"]["llvm"]["default"]


def test_gpus_and_library_kernels_do_not_depend_on_the_processor():
    a100, product = tvmhet.device_type("a100"), kernel("matmul", 1, 64, 64, 64)
    assert maker_ratio(a100, product, "AuthenticAMD") == maker_ratio(a100, product, "") == 1.6
    assert maker_ratio(V4, kernel("matmul", 1, 64, 64, 64, maker="library"), "AuthenticAMD") == 1.0


def test_attention_by_the_library_has_a_ratio_where_it_was_measured():
    ops = [OpDesc("matmul", (12, 64, 64, 64), "float32"), OpDesc("softmax", (768, 64), "float32")]
    attention = KernelDesc((*ops, ops[0]), 1.0, 1.0, 1.0, "float32", "library")
    assert maker_ratio(V4, attention, "AuthenticAMD") == AMD["library_attention"] > 1
    assert maker_ratio(V4, attention, "") == maker_ratio(tvmhet.device_type("a100"), attention, "AuthenticAMD") == 1.0


def test_an_instruction_set_has_ratios_of_its_own():
    desc = kernel("linear", 1, 128, 64, 64)
    assert maker_ratio(V3, desc, "AuthenticAMD") == FILE["processors"]["AuthenticAMD"]["x86-64-v3"]["linear"]


def test_every_ratio_is_of_a_known_family_and_positive():
    special = {"library_attention", "linear_few_rows", "conv2d_pointwise", "conv2d_depthwise"}
    tables = [*FILE["ratio"].values(), *(t for levels in FILE["processors"].values() for t in levels.values())]
    for table in tables:
        assert set(table) <= {*SIZES, *special, "default"}
        assert all(math.isfinite(r) and r > 0 for r in table.values())
    assert all("default" in table for table in FILE["ratio"].values())


def test_an_unknown_kind_is_refused_by_name():
    from dataclasses import replace

    with pytest.raises(BadModel, match="'metal'"):
        maker_ratio(replace(V4, kind="metal"), kernel("generic"), "")


def test_the_vendor_is_read_from_cpuinfo_and_may_be_given(monkeypatch):
    assert vendor_of("processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: AMD EPYC\n") == "AuthenticAMD"
    assert vendor_of("CPU implementer : 0x41\n") == ""
    monkeypatch.setenv("TVMHET_CPU_VENDOR", "GenuineIntel")
    assert processor_vendor() == "GenuineIntel"


def test_intels_models_are_families_and_like_cores_one():
    text = "vendor_id : {}\ncpu family : {}\nmodel : {}\nmodel name : X\n"
    intel = {model: family_of(text.format("GenuineIntel", 6, model)) for model in (85, 106, 108, 143, 173, 207)}
    assert intel == {85: "6-85", 106: "6-106", 108: "6-106", 143: "6-207", 173: "6-173", 207: "6-207"}
    assert family_of(text.format("AuthenticAMD", 25, 143)) == "25"


def test_products_of_few_rows_leave_a_gpu_idle_and_have_a_ratio_of_their_own():
    a100, cuda = tvmhet.device_type("a100"), FILE["ratio"]["cuda"]
    ratios = [maker_ratio(a100, kernel("linear", 1, rows, 768, 768)) for rows in (1, 2, 255, 256)]
    assert ratios == [cuda["linear"], cuda["linear_few_rows"], cuda["linear_few_rows"], cuda["linear"]]
    assert cuda["linear_few_rows"] > cuda["linear"]
