"""Calibration and transfer: a device that differs from what is expected of it is learned from a few kernels."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tvmhet.cluster.catalog import device_type
from tvmhet.cost.boosted import Calibration, LearnedModel
from tvmhet.cost.calibrate import calibrate, candidates, pick, pick_rows
from tvmhet.cost.columns import columns
from tvmhet.cost.model import KernelDesc, OpDesc
from tvmhet.cost.residual import residual_of
from tvmhet.cost.transfer import Elsewhere, Transfer
from tvmhet.cost.workload import kernel_of
from tvmhet.errors import BadInput

L4 = device_type("l4")


def kernels(count: int, seed: int) -> list[KernelDesc]:
    rng = np.random.default_rng(seed)
    sizes = np.exp(rng.uniform(np.log(8), np.log(8192), (count, 3))).astype(int).tolist()
    return [kernel_of(OpDesc("linear", (1, *s), "bfloat16")) for s in sizes]


def odd_device() -> LearnedModel:
    """An L4 whose library launches slowly and reaches little of the peak: the truth of these tests."""
    model = LearnedModel.load(L4)
    usual = model.scalars("matmul_tensor")
    odd = dataclasses.replace(
        usual, launch_s=3 * usual.launch_s, compute=0.6 * usual.compute, sustained=0.6 * usual.sustained, dram=0.6
    )
    return model.with_calibration({"matmul_tensor": Calibration(odd, 1.0, 1.0)})


def error(model: LearnedModel, truth: LearnedModel, descs: list[KernelDesc]) -> float:
    return float(np.mean(np.abs(np.log(model.predict(descs).seconds / truth.predict(descs).seconds))))


def test_twenty_kernels_teach_an_odd_device() -> None:
    model, truth, test = LearnedModel.load(L4), odd_device(), kernels(300, 1)
    pool = kernels(400, 2)
    chosen = [pool[i] for i in pick(model, pool, 20)]
    calibrated = calibrate(model, chosen, truth.predict(chosen).seconds.tolist())
    assert error(model, truth, test) > 0.4
    assert error(calibrated, truth, test) < 0.08
    assert set(calibrated.predict(test).source) == {"calibrated"}
    before = kernel_of(OpDesc("softmax", (64, 64), "float32", "softmax"))
    assert calibrated.predict([before]).source == ("learned",)


def test_what_a_shape_gets_wrong_is_carried_to_its_neighbours_only() -> None:
    model = LearnedModel.load(L4)
    near, far = (kernel_of(OpDesc("linear", s, "bfloat16")) for s in ((1, 1000, 4096, 4096), (1, 8, 64, 20000)))
    pool = [kernel_of(OpDesc("linear", (1, m, 4096, 4096), "bfloat16")) for m in (900, 1100, 1200, 1300)]
    pool += kernels(40, 7)
    factor = np.where(np.arange(len(pool)) < 4, 1.3, 1.0)  # a library that is slow in one corner
    found = calibrate(model, pool, (factor * model.predict(pool).seconds).tolist())
    before, after = model.predict([near, far]), found.predict([near, far])
    assert 1.12 < after.seconds[0] / before.seconds[0] < 1.35
    assert 0.9 < after.seconds[1] / before.seconds[1] < 1.1
    width = np.log(after.high / after.low)
    assert width[0] < 0.9 * width[1]  # surer near measured kernels


def test_picks_leave_less_uncertainty_than_chance() -> None:
    """Law of the design: the summed variance over the pool after ten picks is below that after any ten random ones."""
    model = LearnedModel.load(L4)
    (table,) = columns(kernels(200, 11)).values()

    def left(rows: list[int]) -> float:
        some = table.take(np.array(rows))
        return float(np.square(residual_of(some, np.zeros(len(rows))).at(table)[1]).sum())

    chance = [np.random.default_rng(i).permutation(200)[:10].tolist() for i in range(20)]
    assert left(pick_rows(model, table, 10)) < min(left(rows) for rows in chance)


def test_picked_kernels_are_distinct_and_shared_between_groups() -> None:
    model = LearnedModel.load(L4)
    pool = kernels(60, 3) + [kernel_of(OpDesc("softmax", (2**i, 512), "float32", "softmax")) for i in range(1, 15)]
    chosen = pick(model, pool, 20)
    assert len(set(chosen)) == 20 and sum(i >= 60 for i in chosen) in range(3, 6)
    assert pick(model, pool, 20) == chosen and pick(model, pool[:3], 50) != ()
    assert pick(model, [], 5) == ()


@pytest.mark.parametrize("device", ["l4", "p4", "h100-sxm-80gb"])
def test_the_stock_of_kernels_fits_the_device_and_a_minute(device: str) -> None:
    kind = device_type(device)
    model, stock = LearnedModel.load(kind), candidates(kind)
    chosen = pick(model, stock, 50)
    assert len(chosen) == 50 and len(columns([stock[i] for i in chosen])) >= 5
    assert model.predict([stock[i] for i in chosen]).seconds.sum() * 20 < 60  # twenty repeats of each


def test_bad_measurements_are_refused() -> None:
    model, some = LearnedModel.load(L4), kernels(3, 0)
    for times in ([1.0], [1.0, 2.0, 0.0], [1.0, 2.0, float("nan")]):
        with pytest.raises(BadInput):
            calibrate(model, some, times)


def test_transfer_cancels_what_the_model_gets_wrong_of_a_shape() -> None:
    here, there = LearnedModel.load(L4), LearnedModel.load(device_type("l40s"))
    descs = kernels(20, 5)
    elsewhere = Elsewhere(there, dict(zip(descs[:10], 1.5 * there.predict(descs[:10]).seconds, strict=True)))
    found = Transfer(here, (elsewhere,)).predict(descs)
    own = here.predict(descs)
    ratio = found.seconds / own.seconds
    assert (ratio[:10] > 1.3).all() and (ratio[:10] < 1.5).all()
    np.testing.assert_array_equal(ratio[10:], 1.0)
    assert found.source == ("transfer",) * 10 + ("learned",) * 10
    width = np.log(found.high / found.low), np.log(own.high / own.low)
    assert (width[0][:10] < width[1][:10]).all()
    with pytest.raises(BadInput, match="l40s took"):
        Elsewhere(there, {descs[0]: 0.0})
