"""What every cost model must do, run on each: finite, positive, in its interval, deterministic, alone as in a batch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tvmhet.cluster.catalog import device_type
from tvmhet.cluster.device import DeviceType
from tvmhet.cost.boosted import LearnedModel
from tvmhet.cost.calibrate import calibrate
from tvmhet.cost.model import CostModel, KernelDesc, OpDesc
from tvmhet.cost.roofline import SPEC_SHEET, Efficiency, Roofline
from tvmhet.cost.transfer import Elsewhere, Transfer
from tvmhet.cost.workload import kernel_of

OPERATORS = (
    OpDesc("matmul", (8, 512, 512, 64), "float32"),
    OpDesc("linear", (1, 1, 1, 1), "float32"),
    OpDesc("linear", (1, 65536, 65536, 4096), "float32"),
    OpDesc("linear", (1, 4096, 4096, 4096), "float32", backward=True),
    OpDesc("conv2d", (32, 64, 56, 56, 64, 3, 3, 56, 56, 1), "float32"),
    OpDesc("conv2d", (1, 32, 112, 112, 32, 3, 3, 112, 112, 32), "float32"),
    OpDesc("elementwise", (2 * 4096 * 4096, 4096 * 4096), "float32", "add"),
    OpDesc("elementwise", (1, 1), "float32", "gelu"),
    OpDesc("reduction", (4096, 1024), "float32", "sum"),
    OpDesc("softmax", (8192, 1024), "float32"),
    OpDesc("layer_norm", (8192, 1024), "float32"),
    OpDesc("batch_norm", (64, 100352), "float32"),
    OpDesc("attention_prefill", (1, 32, 8, 2048, 2048, 128, 0), "float32", "causal"),
    OpDesc("attention_decode", (16, 32, 8, 1, 4096, 128, 0), "float32"),
    OpDesc("moe", (64, 2048, 768, 8, 128), "float32"),
    OpDesc("embedding", (2048, 50257, 768), "float32"),
    OpDesc("pooling", (32, 64, 112, 112, 3, 3, 56, 56), "float32", "max_pool2d"),
    OpDesc("movement", (4096 * 4096, 4096 * 4096), "float32", "permute_dims"),
    OpDesc("movement", (0, 1024), "float32", "zeros"),
    OpDesc("generic", (), "float32", "no.such.operator"),
)
KERNELS = tuple(kernel_of(op, maker) for op in OPERATORS for maker in ("library", "tvm"))
FUSED = KernelDesc((OPERATORS[0], OPERATORS[6]), 3e8, 4e6, 8e6, "float32", "tvm")

CALIBRATORS = tuple(kernel_of(OpDesc("linear", (1, s, s, s), "float32")) for s in (2048, 256, 64))

Build = Callable[[DeviceType, DeviceType], CostModel]
MODELS: dict[str, Build] = {
    "roofline": lambda gpu, cpu: Roofline(gpu, Efficiency.load()),
    "roofline-spec-sheet": lambda gpu, cpu: Roofline(gpu, SPEC_SHEET),
    "roofline-cpu": lambda gpu, cpu: Roofline(cpu, Efficiency.load()),
    "learned-unseen": lambda gpu, cpu: LearnedModel.load(gpu),
    "learned-measured": lambda gpu, cpu: LearnedModel.load(device_type("v100-pcie-32gb")),
    "learned-queued": lambda gpu, cpu: LearnedModel.load(gpu, "queued"),
    "learned-cpu": lambda gpu, cpu: LearnedModel.load(cpu),
    "calibrated": lambda gpu, cpu: calibrate(LearnedModel.load(gpu), CALIBRATORS, [2e-3, 3e-5, 2e-5]),
    "transfer": lambda gpu, cpu: Transfer(
        LearnedModel.load(gpu),
        (Elsewhere(LearnedModel.load(device_type("t4")), {KERNELS[0]: 1e-3, KERNELS[4]: 30.0}),),
    ),
}


@pytest.fixture(params=sorted(MODELS))
def model(request: pytest.FixtureRequest, a100: DeviceType, cpu: DeviceType) -> CostModel:
    return MODELS[request.param](a100, cpu)


def test_every_family_has_a_finite_positive_time_in_its_interval(model: CostModel) -> None:
    out = model.predict((*KERNELS, FUSED))
    assert len(out) == len(KERNELS) + 1
    assert np.isfinite(out.seconds).all() and (out.low > 0).all()
    assert (out.low <= out.seconds).all() and (out.seconds <= out.high).all()
    assert (out.seconds < 1e4).all()


def test_same_answer_alone_and_in_a_batch(model: CostModel) -> None:
    batch = model.predict(KERNELS)
    for i, desc in enumerate(KERNELS):
        alone = model.predict((desc,))
        assert alone.seconds[0] == batch.seconds[i]
        assert (alone.low[0], alone.high[0]) == (batch.low[i], batch.high[i])
        assert alone.source[0] == batch.source[i] and alone.in_range[0] == batch.in_range[i]


def test_deterministic_and_independent_of_order(model: CostModel) -> None:
    forward, backward = model.predict(KERNELS), model.predict(KERNELS[::-1])
    np.testing.assert_array_equal(forward.seconds, model.predict(KERNELS).seconds)
    np.testing.assert_array_equal(forward.seconds, backward.seconds[::-1])


def test_nothing_in_nothing_out(model: CostModel) -> None:
    assert len(model.predict(())) == 0


def test_unknown_operators_are_out_of_range(model: CostModel) -> None:
    assert not model.predict((kernel_of(OPERATORS[-1]),)).in_range[0]


def test_sixteen_times_the_work_takes_longer(model: CostModel) -> None:
    small, large = (kernel_of(OpDesc("linear", (1, m, 4096, 4096), "float32")) for m in (1024, 16384))
    out = model.predict((small, large))
    assert 8 < out.seconds[1] / out.seconds[0] < 24
