"""Tensor split: kernels that several devices of one group run together.

    groups given     a100 x 8, t4 x 4                    splits of a100 by 2 and by 4
    groups planned   a100 x 8, t4 x 4, "a100 / 2" x 4, "a100 / 4" x 2      teams take their devices from a100's 8

A team is a group like any other: its stages have times, links, replicas and a price of their own. Only devices are
counted together, and each device of a team holds its share of the weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tvmhet.errors import BadTime
from tvmhet.solve.problem import DeviceGroup, Problem


@dataclass(frozen=True, slots=True)
class Split:
    """Kernels split over `degree` devices of one group (tensor parallel): seconds per kernel with their collectives.

    Each device holds 1 / degree of every weight and stash that is not whole. inf: the kernel cannot be split so.
    Inference has no backward pass.
    """

    group: int
    degree: int
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...] = ()


def with_splits(problem: Problem, splits: Sequence[Split]) -> Problem:
    """Return the problem with a group of teams for each split, after its own groups. Raises BadTime."""
    for s in splits:
        if s.degree < 2 or not 0 <= s.group < len(problem.groups) or problem.groups[s.group].team_of >= 0:
            raise BadTime(f"a split of degree {s.degree} on group {s.group}", "degrees are >= 2, groups those given")
        if len(s.forward_s) != len(problem.kernels) or any(math.isnan(t) or t < 0 for t in s.forward_s):
            raise BadTime(f"a split of degree {s.degree} has bad times", "one per kernel, >= 0 s, or inf")
    if len({(s.group, s.degree) for s in splits}) < len(splits):
        raise BadTime("two splits of one group have the same degree", "give each once")
    own = len(problem.groups)
    base = [*range(own), *(s.group for s in splits)]  # a team has the links of its devices
    like: dict[int, list[int]] = {-1: [-1]}
    for g, b in enumerate(base):
        like.setdefault(b, []).append(g)
    return replace(
        problem,
        kernels=tuple(
            replace(k, time_s=(*k.time_s, *(s.forward_s[i] for s in splits))) for i, k in enumerate(problem.kernels)
        ),
        groups=(*problem.groups, *(_team(problem.groups[s.group], s) for s in splits)),
        links=tuple(tuple(problem.links[a][b] for b in base) for a in base),
        host_links=tuple(problem.host_links[b] for b in base),
        pins={v: frozenset(t for g in allowed for t in like[g]) for v, allowed in problem.pins.items()},
        wires=tuple(
            replace(w, ways=frozenset((x, y) for a, b in w.ways for x in like[a] for y in like[b]))
            for w in problem.wires
        ),
    )


def _team(group: DeviceGroup, split: Split) -> DeviceGroup:
    return replace(
        group,
        name=f"{group.name} / {split.degree}",
        num_devices=max(0, group.num_devices) // split.degree,
        usd_per_h=group.usd_per_h * split.degree,
        team_of=split.group,
        degree=split.degree,
    )


def with_devices(problem: Problem, counts: Sequence[int]) -> Problem:
    """Return the problem with other numbers of devices: one for each group, those of teams follow from them."""
    rows = [
        replace(g, num_devices=n if g.team_of < 0 else max(0, counts[g.team_of]) // g.degree)
        for g, n in zip(problem.groups, counts, strict=True)
    ]
    return replace(problem, groups=tuple(rows))


def without_teams(problem: Problem) -> Problem:
    """Return the problem without splits; its groups keep their numbers."""
    if all(g.team_of < 0 for g in problem.groups):
        return problem
    kept = [g for g, group in enumerate(problem.groups) if group.team_of < 0]
    return replace(
        problem,
        kernels=tuple(replace(k, time_s=tuple(k.time_s[g] for g in kept)) for k in problem.kernels),
        groups=tuple(problem.groups[g] for g in kept),
        links=tuple(tuple(problem.links[a][b] for b in kept) for a in kept),
        host_links=tuple(problem.host_links[g] for g in kept),
        pins={v: allowed & frozenset(kept) for v, allowed in problem.pins.items()},
        wires=tuple(replace(w, ways=frozenset(x for x in w.ways if max(x) < len(kept))) for w in problem.wires),
    )
