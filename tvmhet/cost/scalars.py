"""What a GPU type reaches of its data sheet: fitted where it was measured, inferred from its likes where it was not.

    fits = {"h100": Scalars, "a100": Scalars, ...}     measured types, one entry each
    infer(device, fits)                                a type that is not among them: a median of its likes

Arithmetic is limited by power besides: a type sustains at most the FLOP per joule that its generation was seen to give.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tvmhet.cluster.device import DeviceType
from tvmhet.cost.columns import MATMUL_GROUPS, Columns, Floats
from tvmhet.cost.compass import minimise
from tvmhet.cost.dram import DramShares
from tvmhet.cost.likes import capability, descriptor, generation, likeness, weighted_quantile
from tvmhet.cost.physics import FITTED, Constants, Scalars, estimate, peaks
from tvmhet.errors import BadModel

#: Generations whose library kernels differ, by number.
_LIBRARIES = ("", "kepler", "pascal", "volta", "ampere", "ada", "hopper", "blackwell")

#: Process node, nm, by architecture: energy per FLOP falls with it. TSMC's 12 nm (Volta, Turing) is its 16 nm process
#: at a denser layout, with the energy of 16 nm (IRDS node names; NVIDIA architecture whitepapers name the process).
_NODE_NM = {
    "Kepler": 28.0, "Maxwell": 28.0, "Pascal": 16.0, "Volta": 16.0, "Turing": 16.0, "Ampere": 7.0, "Ada": 5.0,
    "Hopper": 5.0, "Blackwell": 5.0,
}  # fmt: skip

#: GA10x is not made in A100's process but in Samsung's 8N, of its 10 nm family (GA102 whitepaper). An RTX 3060 laptop
#: (80 to 115 W) gives at most 6.1 TFLOP/s of float32 products: 0.06 to 0.1 TFLOP/J (benchmark_hub @ 8eeb99e).
_SAMSUNG_NM = 10.0

_BOUNDS = (
    np.log([2e-7, 0.05, 0.05, 0.2, 0.2, 2.0, 0.2, 50.0]),
    np.log([3e-4, 1.0, 1.0, 1.1, 8.0, 256.0, 1.0, 50000.0]),
)

#: The share of 128 float32 lanes that a product of matrices keeps busy where half of them share a path with integers,
#: over the share of 64 lanes. Best of 64,000 schedules of one float32 product: RTX 3090 (128 lanes) 24.3 of
#: 35.6 TFLOP/s, RTX 2080 Ti (64 lanes) 12.0 of 13.4 (benchmark_hub @ 8eeb99e, CLBlast Xgemm).
_WIDE_SM_SHARE = (24.3 / 35.6) / (12.0 / 13.4)

#: 16-bit FLOP per SM and clock of matrix units that are not halved: 1,024 from Volta on (architecture whitepapers).
_FULL_MATRIX_RATE = 768.0
#: What halved units reach over what full ones do: RTX 3090 and RTX 4090 gave 0.92 to 1.06 of their rate in products of
#: 256 and more rows (llmservingsim @ 5daddb2), where full ones of their generation give 0.68 to 0.89.
_HALVED_UNITS_SHARE = 1.15

#: What a board takes before it computes, W. With it, P4 (75 W) and T4 (70 W) agree on the FLOP per joule of float32
#: products within 2 % (0.072 and 0.071 TFLOP/J), and both stay under what V100 (250 W) shows to be possible.
_BOARD_W = 20.0
_FLOAT32_FLOP_PER_JOULE = 0.071e12
#: Short kernels run at clocks above what the power limit sustains: float32 products on T4, 0.2 to 0.4 ms against
#: 100 ms, reach 0.58 and 0.42 of the peak; on P4 0.60 and 0.57.
#: Matrix units far above what their power sustains (L4) fall at most with the square root of it: the voltage falls with
#: the clock, so that power goes at least with its square.
_BURST = 1.25
#: Types measured by eager calls, and those measured with attention, are few and unlike, so each tells something of any
#: other: the power of likeness there. So does each of the share of peak that dense products reach.
_FEW_LIKENESS = 0.4
#: What the code of an attention kernel decides, and not the device: it is written per major compute capability.
_KERNEL_SCALARS = frozenset({"compute", "load", "block"})
_OTHER_MAJOR = 0.15
#: Where among the hosts' costs that of a new type is expected: newer GPUs sit in newer hosts.
_HOST_QUANTILE = 0.25
#: Where among its likes' shares of peak a new type's is expected: heat and old kernels pull the low ones down.
_REACH_QUANTILE = 0.7


@dataclass(frozen=True, slots=True)
class Fit:
    """Scalars of a measured type, with the facts that tell how alike another type is."""

    device: DeviceType
    scalars: Scalars


def _dram_per_clock(device: DeviceType) -> float:
    """DRAM bytes per SM and clock."""
    return device.dram_byte_per_s / (device.num_sms * device.clock_hz)


def _same_kernels(device: DeviceType, other: DeviceType, dtype: str) -> float:
    """Return how much the attention kernels of `other` tell of those of `device`."""
    distance = float(np.sum(np.square(descriptor(device, dtype) - descriptor(other, dtype))))
    same = int(capability(device)) == int(capability(other))
    return float(np.exp(-_FEW_LIKENESS * distance / 2.0)) * (1.0 if same else _OTHER_MAJOR)


def infer(
    device: DeviceType,
    fits: Sequence[Fit],
    dtype: str,
    host_bound: bool,
    power_bound: bool = True,
    dram: DramShares | None = None,
) -> Scalars:
    """Return the scalars expected of `device` for kernels in `dtype`: its own fit, else that of its likes.

    The launch cost is a number of seconds where the host set it (`host_bound`: one eager call at a time), else a
    number of GPU clocks. `power_bound` says whether the kernels are dense enough for the power limit to matter: how far
    the likes got in sparser ones says nothing of it. Of DRAM the likes tell what these kernels reach of what each
    type's memory gives to streams (`dram`; none: the same share everywhere). Raises BadModel if `fits` is empty.
    """
    if not fits:
        raise BadModel("a learned model lists no measured device", "retrain it with train.py")
    for fit in fits:
        if fit.device.name == device.name:
            return fit.scalars
    if dtype == "bfloat16" and dtype not in device.peak_flop_per_s:
        dtype = "float16"  # Volta's and Turing's matrix units
    weight = np.array([likeness(device, f.device, dtype) for f in fits])
    logs = np.array([f.scalars.as_log() for f in fits])
    logs[:, 1] -= np.log([_feed(f.device, dtype) for f in fits])
    streams = dram or DramShares()
    logs[:, 3] -= np.log([streams.of(f.device) for f in fits])
    logs[:, 4] += np.log([_dram_per_clock(f.device) for f in fits])  # L2 hits go with the SMs, not with the DRAM
    flat = weight if power_bound and not host_bound else np.power(weight, _FEW_LIKENESS)
    kernel = flat if power_bound else np.array([_same_kernels(device, f.device, dtype) for f in fits])
    by_scalar = [kernel if name in _KERNEL_SCALARS else flat for name in FITTED]
    like = np.array([weighted_quantile(column, w, 0.5) for column, w in zip(logs.T, by_scalar, strict=True)])
    if power_bound:
        reach = np.power(weight, _FEW_LIKENESS) * _headroom(device, fits, dtype)
        like[1] = weighted_quantile(logs[:, 1], reach, _REACH_QUANTILE)
    if host_bound:
        like[0] = np.quantile(logs[:, 0], _HOST_QUANTILE)
    else:
        in_clocks = logs[:, 0] + np.log([f.device.clock_hz for f in fits])
        like[0] = weighted_quantile(in_clocks, weight if power_bound else flat, 0.5) - np.log(device.clock_hz)
    like[1] += np.log(_feed(device, dtype))
    like[3] += np.log(streams.of(device))
    like[4] -= np.log(_dram_per_clock(device))
    limit = float(np.log(_sustained(device, fits, weight, dtype))) if power_bound else 0.0
    burst = limit + np.log(_BURST)
    if dtype != "float32":
        limit = max(limit, 0.5 * (like[1] + limit))
        burst = max(burst, limit)
    like[1] = min(like[1], burst)
    like[2] = min(like[1], limit)
    nearest = _nearest_in_time(device, fits).scalars
    return Scalars.from_log(np.clip(like, *_BOUNDS), nearest.library, nearest.tile)


def _nearest_in_time(device: DeviceType, fits: Sequence[Fit]) -> Fit:
    """The measured type whose compute capability is nearest: a library picks its kernels by it."""
    here = capability(device)
    own = generation(device)
    return min(fits, key=lambda f: (generation(f.device) != own, abs(capability(f.device) - here), f.device.name))


def _sustained(device: DeviceType, fits: Sequence[Fit], weight: Floats, dtype: str) -> float:
    """The share of the arithmetic peak that the power limit of `device` leaves, from the FLOP per joule of its likes.

    A type that its power does not limit shows less than it could give, so the best counts: of all types for float32,
    whose units changed little, of the near ones where matrix units of several generations differ. A type whose power
    is not known (1 W or less: a cluster file that leaves it out) is not limited.
    """
    if device.power_w <= 1.0:
        return 1.0
    near = weight >= (0.0 if dtype == "float32" else 0.2 * weight.max())
    known = _FLOAT32_FLOP_PER_JOULE * _NODE_NM["Pascal"] / _node(device) if dtype == "float32" else 0.0
    seen = max(
        min(f.scalars.sustained, f.scalars.compute)
        * f.device.peak(dtype)
        / _arithmetic_w(f.device)
        * _node(f.device)
        / _node(device)
        for f, n in zip(fits, near, strict=True)
        if n
    )
    return max(seen, known) * _arithmetic_w(device) / device.peak(dtype)


def _headroom(device: DeviceType, fits: Sequence[Fit], dtype: str) -> Floats:
    """How much each type tells of the reach of `device`: little if its power held it back.

    It did if the type has fewer watts per FLOP, or if long kernels reached less on it than short ones.
    """
    throttled = np.array([min(f.scalars.sustained / f.scalars.compute, 1.0) for f in fits]) ** 4
    if device.power_w <= 1.0:
        return throttled
    own = _arithmetic_w(device) / _node(device) / device.peak(dtype)
    theirs = np.array([_arithmetic_w(f.device) / _node(f.device) / f.device.peak(dtype) for f in fits])
    return np.asarray(throttled * np.minimum(theirs / own, 1.0) ** 4, dtype=np.float64)


def _arithmetic_w(device: DeviceType) -> float:
    """The power that is left for arithmetic when memory, leakage and the board have theirs."""
    return max(device.power_w - _BOARD_W, 0.25 * device.power_w)


def _feed(device: DeviceType, dtype: str) -> float:
    """How well an SM feeds its units, over what is usual.

    From Ampere on, 128 float32 lanes share paths with integers. GeForce halves its matrix rate (16-bit products summed
    in float32), so that an SM made for twice as much keeps it busy.
    """
    if dtype == "float32":
        return _WIDE_SM_SHARE if device.lanes_per_sm >= 128 and capability(device) >= 8.0 else 1.0
    halved = device.peak("float16") / (device.num_sms * device.clock_hz) < _FULL_MATRIX_RATE
    return _HALVED_UNITS_SHARE if halved and capability(device) >= 7.0 else 1.0


def _node(device: DeviceType) -> float:
    return _SAMSUNG_NM if device.compute_capability == "8.6" else _NODE_NM.get(device.architecture, 5.0)


def fit_scalars(
    table: Columns,
    seconds: Floats,
    device: DeviceType,
    consts: Constants,
    start: Scalars,
    stiffness: Floats | None = None,
    correction: Floats | None = None,
) -> Scalars:
    """Return the scalars that bring the analytic times of `table` closest to `seconds` (mean absolute log ratio).

    `stiffness` (one entry per scalar) holds each back from `start`, per unit of log; `correction` is the log ratio
    that trees put on top. The tile stays that of `start`. Deterministic: a compass search in log space.
    """
    origin = start.as_log()
    hold = np.full(len(origin), 1e-3) if stiffness is None else stiffness
    target = np.log(seconds) - (0.0 if correction is None else correction)

    def loss(logs: Floats) -> float:
        predicted = estimate(table, device, start.with_log(logs), consts).seconds
        return float(np.mean(np.abs(np.log(predicted) - target)) + hold @ np.abs(logs - origin))

    found = start.with_log(minimise(loss, np.clip(origin, *_BOUNDS), *_BOUNDS))
    return replace(found, sustained=min(found.sustained, found.compute))


def first_guess(table: Columns, seconds: Floats, device: DeviceType, typical: Scalars) -> Scalars:
    """Return `typical` with the launch cost and the share of peak that the fastest rows show."""
    launch = min(float(np.quantile(seconds, 0.01)), typical.launch_s)
    share = float(np.quantile(table.flop / seconds / peaks(table, device), 0.995))
    compute = float(np.clip(share, 0.05, 1.0)) if table.group in MATMUL_GROUPS else typical.compute
    library = _LIBRARIES.index(generation(device)) if generation(device) in _LIBRARIES else 0
    return replace(typical, launch_s=launch, compute=compute, sustained=compute, library=library)


def mean_error(table: Columns, seconds: Floats, device: DeviceType, consts: Constants, scalars: Scalars) -> float:
    """Return the mean absolute log ratio of the analytic times to `seconds`."""
    return float(np.mean(np.abs(np.log(estimate(table, device, scalars, consts).seconds / seconds))))
