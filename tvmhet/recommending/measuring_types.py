"""Which types to keep money for: machines are dear to start, kernels cheap to run once they are.

A type is tried by its longest kernels, which make up half of its time. Once those of a set of types are known, every
other log error is what the joint normal distribution says, and the best option is chosen anew in each draw. The set is
the better of two greedy ones, by value and by value per dollar (Leskovec et al., "Cost-effective Outbreak Detection in
Networks", KDD 2007).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tvmhet.recommending.belief import Belief, Floats, Pair

if TYPE_CHECKING:
    from tvmhet.recommending.measuring import Errors, Prices

_HALF = 0.5  # of a type's time
_DRAWS = 512  # of the errors that are looked at, at most
_LEAST = 1e-4  # gain, as a share of the value, for which a type is added


@dataclass(frozen=True, slots=True)
class Trial:
    """The kernels that a type is tried by, and what starting it and measuring them costs."""

    pairs: tuple[Pair, ...]
    usd: float


def trials(belief: Belief, prices: Prices, started: set[str], sigmas: float = 0.0) -> dict[str, Trial]:
    """Return how each type without a machine would be tried, and the money for it (see `Belief.expected_s`)."""
    out, most = {}, belief.expected_s(sigmas)
    for name in sorted({t for t, _ in belief.pairs} - started):
        longest = sorted((p for p in belief.pairs if p[0] == name and p not in belief.measured),
                         key=lambda p: (-belief.seconds[p], p))  # fmt: skip
        total = math.fsum(belief.seconds[p] for p in longest)
        known, pairs = 0.0, list[tuple[str, str]]()
        for pair in longest:
            if known >= _HALF * total and pairs:
                break
            pairs.append(pair)
            known += belief.seconds[pair]
        if pairs:
            usd = [prices.usd(name, most[p], i > 0) for i, p in enumerate(pairs)]
            out[name] = Trial(tuple(pairs), math.fsum(usd))
    return out


def types_to_start(
    belief: Belief,
    tried: Mapping[str, Trial],
    left_usd: float,
    errors: Errors,
    values: Callable[[Errors], Floats],
    noise: float,
) -> tuple[str, ...]:
    """Return the types that together are worth most to start for up to `left_usd`; empty where none tells anything."""
    known: dict[tuple[str, ...], float] = {}

    def worth(names: Iterable[str]) -> float:
        """How much better choosing anew in each draw is than the best choice for all, as a share."""
        key = tuple(sorted(names))
        if key not in known:
            drawn = values(_once_known(belief, [p for n in key for p in tried[n].pairs], errors, noise))
            now = float(drawn.mean(axis=1).min())
            known[key] = 1.0 - float(drawn.min(axis=0).mean()) / now if now > 0 else 0.0
        return known[key]

    def greedy(per_usd: bool) -> list[str]:
        chosen: list[str] = []
        while True:
            left = left_usd - math.fsum(tried[n].usd for n in chosen)
            payable = [n for n in tried if n not in chosen and tried[n].usd <= left]
            gains = {n: worth([*chosen, n]) - worth(chosen) for n in payable}
            useful = [n for n in payable if gains[n] > _LEAST]
            if not useful:
                return chosen
            chosen.append(max(useful, key=lambda n: gains[n] / tried[n].usd if per_usd else gains[n]))

    return tuple(max((greedy(per_usd=False), greedy(per_usd=True)), key=worth))


def _once_known(belief: Belief, pairs: Sequence[Pair], errors: Errors, noise: float) -> Errors:
    """What the log errors are believed to be in each draw once those of `pairs` are known; for means of their exp."""
    at = [belief.pairs.index(p) for p in pairs]
    cov, num = belief.cov[:, at], min(_DRAWS, len(next(iter(errors.values()))))
    weight = np.linalg.solve(belief.cov[np.ix_(at, at)] + noise**2 * np.eye(len(at)), cov.T).T
    seen = np.array([errors[p][:num] for p in pairs]).reshape(len(at), num) - belief.mean[at][:, None]
    spread = np.diag(belief.cov) - np.einsum("ij,ij->i", weight, cov)
    believed = belief.mean[:, None] + weight @ seen + np.clip(spread, 0.0, None)[:, None] / 2
    return dict(zip(belief.pairs, believed, strict=True))
