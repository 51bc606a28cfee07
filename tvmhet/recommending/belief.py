"""What is believed of the times of kernels that were not measured, and how a result changes it.

    log(true / predicted)  =  all + kernel + its twins + generation + type + family there + own      (jointly normal)

A result on one type tells about the kernel on others, most of all on types of its generation (one compute capability).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tvmhet.cluster.device import DeviceType
from tvmhet.recommending.uncertainty import KernelBelief

Floats = NDArray[np.float64]
Pair = tuple[str, str]  # device type, kernel key

NOISE = 0.01  # standard deviation of a measured log time


@dataclass(frozen=True, slots=True)
class Parts:
    """How the variance of an error is divided while kernels are measured; they add up to 1.

    "How sure" takes a type's errors to go together more than that (uncertainty.py), which is careful there and would
    here take a few results for all of a type's.
    """

    everything: float
    kernel: float
    twin: float  # the kernel on types of one generation
    generation: float
    device_type: float
    family: float
    own: float


#: Of rooflines (benchmarks/inferring.py): log errors of one published kernel on two GPUs are correlated by 0.46 to 0.96
#: on average, by 0.89 to 1.0 on types of one compute capability; types differ by 1 to 21 % of the variance within
#: one. Less is believed.
ROOFLINE = Parts(everything=0.1, kernel=0.3, twin=0.25, generation=0.05, device_type=0.025, family=0.025, own=0.25)
#: Of learned models, which know what a kernel has on every type: with each type left out of training the same are
#: correlated by -0.16 to 0.37 on average, by -0.05 to 0.39 on types of one compute capability; types differ by 3 to
#: 31 % of the variance within one, by 100 % and more in float32 products and softmax.
LEARNED = Parts(everything=0.05, kernel=0.05, twin=0.15, generation=0.0, device_type=0.1, family=0.1, own=0.55)


@dataclass(frozen=True, slots=True)
class Belief:
    """Joint belief about the log errors of kernels on types: `mean` (n,) and `cov` (n, n), in the order of `pairs`."""

    pairs: tuple[Pair, ...]
    seconds: Mapping[Pair, float]  # as predicted
    mean: Floats
    cov: Floats
    measured: frozenset[Pair] = frozenset()

    @staticmethod
    def of(beliefs: Sequence[KernelBelief], generations: Mapping[str, str] | None = None) -> Belief:
        """Return the belief before anything new is measured; see `covariance` for what errors share.

        `generations`, by type, are alike for types of one generation; a type without one is the only one of its own.
        """
        known = {(b.device_type, b.key): b for b in beliefs}
        pairs = tuple(sorted(known))
        rows = [known[p] for p in pairs]
        measured = frozenset(p for p, b in known.items() if b.measured)
        seconds = {p: b.seconds for p, b in known.items()}
        return Belief(pairs, seconds, np.zeros(len(pairs)), covariance(rows, rows, generations or {}), measured)

    def after(self, pair: Pair, seconds: float) -> Belief:
        """Return the belief once `pair` was measured: the normal distribution conditioned on it."""
        i = self.pairs.index(pair)
        weight = self.cov[:, i] / (float(self.cov[i, i]) + NOISE**2)
        surprise = math.log(seconds / self.seconds[pair]) - float(self.mean[i])
        cov = self.cov - np.outer(weight, self.cov[i])
        return replace(self, mean=self.mean + weight * surprise, cov=cov, measured=self.measured | {pair})

    def expected_s(self, sigmas: float = 0.0) -> dict[Pair, float]:
        """Return the seconds of each pair as believed now, so many standard deviations above the mean of the log."""
        log = self.mean + sigmas * np.sqrt(np.clip(np.diag(self.cov), 0.0, None))
        return {p: self.seconds[p] * math.exp(x) for p, x in zip(self.pairs, log, strict=True)}

    def draw(self, rng: np.random.Generator, num: int) -> dict[Pair, Floats]:
        """Draw log errors, one array of `num` values for each pair."""
        values, vectors = np.linalg.eigh(self.cov)
        root = (vectors * np.sqrt(np.clip(values, 0.0, None))) @ vectors.T  # the same for any basis of equal values
        drawn = self.mean[:, None] + root @ rng.standard_normal((len(self.pairs), num))
        return dict(zip(self.pairs, drawn, strict=True))


def covariance(rows: Sequence[KernelBelief], columns: Sequence[KernelBelief], generations: Mapping[str, str]) -> Floats:
    """Return what the log errors of kernels share with those of others, shape (rows, columns)."""

    def same(key: Callable[[KernelBelief], object]) -> NDArray[np.bool_]:
        index: dict[object, int] = {}
        one, other = (np.array([index.setdefault(key(b), len(index)) for b in part], int) for part in (rows, columns))
        out: NDArray[np.bool_] = one[:, None] == other[None, :]
        return out

    one, other = ([ROOFLINE if b.source == "roofline" else LEARNED for b in part] for part in (rows, columns))

    def common(share: Callable[[Parts], float], where: NDArray[np.bool_] | bool = True) -> Floats:
        return np.asarray(np.sqrt(np.outer([share(p) for p in one], [share(p) for p in other])) * where, np.float64)

    is_kernel, is_type = same(lambda b: b.key), same(lambda b: b.device_type)
    is_generation = same(lambda b: generations.get(b.device_type, f"of {b.device_type}"))
    share = common(lambda p: p.everything) + common(lambda p: p.kernel, is_kernel)
    share = share + common(lambda p: p.twin, is_kernel & is_generation) + common(lambda p: p.generation, is_generation)
    share = share + common(lambda p: p.device_type, is_type)
    share = share + common(lambda p: p.family, same(lambda b: (b.device_type, b.family)))
    free, other_free = (np.array([not b.measured for b in part], bool) for part in (rows, columns))
    share = np.where(is_kernel & is_type, 1.0, np.where(free[:, None] & other_free[None, :], share, 0.0))
    sigmas = (np.array([b.sigma for b in part], float) for part in (rows, columns))
    return np.asarray(share * np.outer(*sigmas), np.float64)


def generations(devices: Iterable[DeviceType]) -> dict[str, str]:
    """Return the compute capability of each type that has one, by its name."""
    return {d.name: c for d in devices if (c := d.compute_capability) is not None}
