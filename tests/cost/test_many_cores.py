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
