"""What is measured of a step beside its kernels: recorded, read again, and priced."""

from __future__ import annotations

from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest

from tests.placed import cpus
from tvmhet.cost.measured import MeasuredKernels
from tvmhet.training_parts import keep_repeated, keep_update, per_parameter_s, repeat_ratio, update_costs

SIZES = [[64] * 40, [4096, 64, 64], [1 << 20], [1 << 16] * 8]


@pytest.fixture
def step():
    """The parts of a step that are read here: 52 parameters."""
    sizes = {f"p{i}": x for i, x in enumerate(x for own in SIZES for x in own)}
    tensors = [SimpleNamespace(name=name, size_bytes=x) for name, x in sizes.items()]
    prepared = SimpleNamespace(key="a step", operator_graph=SimpleNamespace(tensors=tensors))
    return SimpleNamespace(prepared=prepared, gradients=dict.fromkeys(sizes, ""))


@pytest.fixture
def device():
    return cpus(v3=1).device_types()[0]


@pytest.mark.parametrize(
    ("each_s", "byte_s", "beside_s"), [(8e-6, 4e-10, 0), (0, 4e-10, 0), (5e-6, 0, 0), (8e-6, 1e-9, 1e-4)]
)
def test_the_time_of_each_parameter_is_found(each_s, byte_s, beside_s):
    count = sum(map(len, SIZES))
    times = np.array([len(s) * each_s + sum(s) * byte_s for s in SIZES])
    found = per_parameter_s(SIZES, times, float(times.sum()) + beside_s)
    assert found == pytest.approx(each_s + beside_s / count, abs=1e-12)


def test_no_parameter_takes_less_than_nothing_or_more_than_all():
    falling = np.array([1e-6, 5e-5, 1e-3, 1e-3])  # many small ones in no time
    assert per_parameter_s(SIZES, falling, 0.0) == 0.0
    assert 0 < per_parameter_s([[4]], np.array([1e-5]), 1e-5) <= 1e-5


def test_prices_of_all_parameters_add_up_to_the_measured_update(tmp_path, step, device):
    with closing(MeasuredKernels(tmp_path / "m.db")) as database:
        assert update_costs(step, [device], database) == ({}, {})
        keep_update(database, step, device, (2e-3, 2.1e-3, 2.2e-3), 1e-5)
        per_byte_s, extra = update_costs(step, [device], database)
    priced = sum(t.size_bytes + extra[t.name] for t in step.prepared.operator_graph.tensors) * per_byte_s[device.name]
    assert priced == pytest.approx(2.1e-3, rel=1e-4)
    assert extra["p0"] * per_byte_s[device.name] == pytest.approx(1e-5, rel=1e-3)


def test_what_recomputing_adds_is_a_part_of_the_forward_pass(tmp_path, step, device):
    with closing(MeasuredKernels(tmp_path / "m.db")) as database:
        assert repeat_ratio(step, [device], database) == {}
        keep_repeated(database, step, device, 3e-3, 4e-3)
        assert repeat_ratio(step, [device], database) == {device.name: 0.75}
        keep_repeated(database, step, device, -1e-5, 4e-3)  # within the noise of nothing
        assert repeat_ratio(step, [device], database) == {device.name: pytest.approx(0, abs=1e-6)}
    assert repeat_ratio(step, [device], None) == {}
