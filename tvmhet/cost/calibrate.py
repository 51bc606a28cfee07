"""Fit the learned model to one device by a few kernels measured on it.

    pick(model, descs, 20)          the kernels that tell most about all others
    calibrate(model, descs, times)  the same model with those scalars, held back from what was expected before

First the scalars move (launch cost, shares of the peaks): seven figures a group, so a handful of kernels suffices and
what the trees know of shapes stays. What they leave is carried to kernels of similar size (`residual.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tvmhet.cluster.device import DeviceType
from tvmhet.cost.boosted import Calibration, LearnedModel
from tvmhet.cost.columns import Columns, Floats, columns
from tvmhet.cost.inputs import inputs
from tvmhet.cost.model import KernelDesc, OpDesc
from tvmhet.cost.physics import Scalars, estimate
from tvmhet.cost.residual import NOISE, covariance, residual_of
from tvmhet.cost.scalars import fit_scalars
from tvmhet.cost.workload import kernel_of
from tvmhet.errors import BadInput

#: Expected spread of each scalar before any measurement, natural log: how far inferred ones were from fitted ones.
PRIOR_SPREAD = np.array([0.35, 0.25, 0.3, 0.25, 0.5, 0.5, 0.2, 0.5])
#: How far the scalars alone leave a kernel from its time, natural log.
_MISFIT = 0.1
_STEP = 0.05
#: More candidates than this are thinned evenly before picking.
_MOST_CANDIDATES = 1000
_MIN_MEASURED = 2


def pick(model: LearnedModel, descs: Sequence[KernelDesc], count: int) -> tuple[int, ...]:
    """Return the indices of the `count` kernels whose times tell most about the others, in order of picking.

    Groups share the count by how many kernels each has. Fewer come back if `descs` holds fewer that are learned.
    """
    tables = {g: t for g, t in columns(descs).items() if g in model.groups}
    total = sum(len(t) for t in tables.values())
    queues = [[int(t.index[row]) for row in pick_rows(model, t, min(count, len(t)))] for t in tables.values()]
    shares = [len(t) / total for t in tables.values()]
    return _interleave(queues, shares, count)


def candidates(device: DeviceType) -> tuple[KernelDesc, ...]:
    """Return kernels that any machine with torch can run, small to large, in every group that `device` can compute.

    None needs more than an eighth of the device's memory.
    """
    dtypes = [d for d in ("float32", "bfloat16") if d in device.peak_flop_per_s]
    ops = [OpDesc("linear", (1, m, n, k), d) for d in dtypes for m in _SIDES for n in _SIDES for k in _SIDES]
    ops += [OpDesc("matmul", (b, s, s, 64), d) for d in dtypes for b in (16, 256) for s in (64, 256, 1024)]
    ops += [OpDesc("conv2d", (n, c, s, s, c, 3, 3, s, s, 1), "float32") for n in (1, 32) for c, s in _IMAGES]
    ops += [OpDesc("elementwise", (2 * 4**i, 4**i), "float32", "add") for i in range(4, 14)]
    for family in ("softmax", "layer_norm"):
        ops += [OpDesc(family, (4**i, cols), "float32", family) for i in range(2, 9) for cols in (64, 1024)]
    kernels = [kernel_of(op) for op in ops]
    return tuple(k for k in kernels if 8 * (k.read_bytes + k.write_bytes) < device.memory_bytes)


_SIDES = (16, 128, 1024, 8192)
_IMAGES = ((64, 56), (256, 14), (512, 7))


def _interleave(queues: Sequence[Sequence[int]], shares: Sequence[float], count: int) -> tuple[int, ...]:
    """Take from each queue in proportion to its share, the first of each queue first."""
    order = [
        ((place + 0.5) / share, q, item)
        for q, (queue, share) in enumerate(zip(queues, shares, strict=True))
        for place, item in enumerate(queue)
    ]
    return tuple(item for _, _, item in sorted(order)[:count])


def pick_rows(model: LearnedModel, table: Columns, count: int) -> list[int]:
    """Return the rows of one group's table that leave the least uncertainty over all its rows, one after the other.

    Uncertain are the scalars (`PRIOR_SPREAD`, through the analytic model) and each shape's residual: together a
    Gaussian process, of which each pick lowers the summed variance most (A-optimal design, greedy).
    """
    thinned = np.unique(np.linspace(0, len(table) - 1, min(len(table), _MOST_CANDIDATES)).astype(np.int64))
    some = table.take(thinned)
    towards = _sensitivity(model, some) * PRIOR_SPREAD
    left = towards @ towards.T + covariance(some, some)
    chosen: list[int] = []
    for _ in range(min(count, len(some))):
        noisy = np.diag(left) + NOISE**2
        gain = np.square(left).sum(axis=0) / noisy
        gain[chosen] = -1.0
        best = int(np.argmax(gain))
        chosen.append(best)
        left -= np.outer(left[:, best], left[best]) / noisy[best]
    return [int(thinned[i]) for i in chosen]


def _sensitivity(model: LearnedModel, table: Columns) -> Floats:
    """How much the log of each kernel's time moves with the log of each scalar."""
    scalars = model.scalars(table.group)
    logs = scalars.as_log()
    base = np.log(estimate(table, model.device, scalars, model.consts).seconds)
    moved = []
    for i in range(len(logs)):
        step = np.zeros(len(logs))
        step[i] = _STEP
        there = scalars.with_log(logs + step)
        moved.append((np.log(estimate(table, model.device, there, model.consts).seconds) - base) / _STEP)
    return np.column_stack(moved)


def calibrate(model: LearnedModel, descs: Sequence[KernelDesc], seconds: Sequence[float]) -> LearnedModel:
    """Return `model` fitted to kernels measured on its device, in every group with two or more of them.

    Raises BadInput unless there is one finite positive time per kernel.
    """
    times = np.asarray(seconds, dtype=np.float64)
    if len(times) != len(descs) or not (np.isfinite(times) & (times > 0)).all():
        raise BadInput(f"{len(descs)} kernels and {len(times)} times", "give one finite time above 0 s per kernel")
    found: dict[str, Calibration] = {}
    for group, table in columns(descs).items():
        if group in model.groups and len(table) >= _MIN_MEASURED:
            found[group] = calibrate_group(model, table, times[table.index])
    return model.with_calibration(found)


def calibrate_group(model: LearnedModel, table: Columns, seconds: Floats) -> Calibration:
    """Fit the scalars of one group, the less held back the more kernels there are, and keep what they leave.

    Trees answer to new scalars with new corrections, so the fit is repeated, and of all that were tried (the first
    expectation and points half-way included) the one with which the whole model explains the kernels best is kept.
    """
    before = model.scalars(table.group)
    stiffness = _MISFIT / PRIOR_SPREAD / len(table)
    tried = [before]
    for _ in range(2):
        analytic = estimate(table, model.device, tried[-1], model.consts)
        correction = model.groups[table.group].correction(inputs(table, model.device, analytic))
        fitted = fit_scalars(table, seconds, model.device, model.consts, before, stiffness, correction)
        tried += [before.with_log((before.as_log() + fitted.as_log()) / 2), fitted]

    def log_ratio(scalars: Scalars) -> Floats:
        candidate = model.with_calibration({table.group: Calibration(scalars, 1.0, 1.0)})
        return np.log(seconds / candidate.predict_group(table).seconds)

    def loss(scalars: Scalars) -> float:
        moved = np.abs(scalars.as_log() - before.as_log())
        return float(np.mean(np.abs(log_ratio(scalars))) + stiffness @ moved)

    best = min(tried, key=loss)
    usual = model.groups[table.group].card.measured
    low, high = (min(float(np.mean(usual.low)), 1.0), max(float(np.mean(usual.high)), 1.0))
    return Calibration(best, low, high, residual_of(table, log_ratio(best)))
