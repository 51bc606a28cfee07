"""What kernels gain of several cores: by how many steps of the outer loop there are."""

import pytest

from tvmhet.cluster.catalog import device_type
from tvmhet.cost.many_cores import cores_ratio
from tvmhet.cost.model import KernelDesc, OpDesc

TWO = device_type("cpu-x86-64-v3").with_cores(2)


def product(b, m, n, k):
    return OpDesc("matmul", (b, m, n, k), "float32")


def ratio(*ops):
    return cores_ratio(TWO, KernelDesc(tuple(ops), 1e9, 1e6, 1e6, "float32", "tvm"))


@pytest.mark.parametrize("heads", [1, 2, 3, 12])
def test_attention_gives_cores_heads_and_a_product_columns(heads):
    """Three heads are two steps of two cores: as long as four."""
    scores, values = product(heads, 128, 512, 64), product(heads, 128, 64, 512)
    assert ratio(scores) == 1.0
    assert ratio(scores, values) == {1: 2.0, 2: 1.0, 3: 4 / 3, 12: 1.0}[heads]


@pytest.mark.parametrize(
    ("rows", "columns", "want"), [(128, 49, 1.0), (6, 49, 2.0), (6, 129, 4 / 3), (12, 129, 1.0), (5, 1024, 1.0)]
)
def test_a_product_of_few_columns_gives_cores_its_rows(rows, columns, want):
    """Steps are 64 columns wide; they are cut in shares of six rows and more."""
    assert ratio(product(1, rows, columns, 64)) == want


def test_a_convolution_of_few_pixels_gives_cores_its_channels():
    sizes = {"n": 1, "c": 160, "h": 7, "w": 7, "oc": 960, "kh": 1, "kw": 1, "oh": 7, "ow": 7, "groups": 1}
    assert ratio(OpDesc("conv2d", tuple(sizes.values()), "float32")) == 1.0
    assert ratio(OpDesc("conv2d", tuple((sizes | {"oc": 6}).values()), "float32")) == 2.0
