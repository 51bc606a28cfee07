"""How long an all-reduce of gradients takes among the replicas of a stage.

Inside one machine, or where all links are alike: a ring, 2 (r - 1) steps that each move 1 / r of the bytes. Over q
machines with m devices each: the same inside each machine, and between machines a ring of q, in which the m devices of
a machine share its network link (each moves 1 / m of the bytes, so the machine moves all of them once around).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvmhet.errors import BadInput
from tvmhet.solve.problem import Link


@dataclass(frozen=True, slots=True)
class AllReduce:
    """The network of one device group: up to `num_inside` devices share a machine over `inner`, machines `outer`."""

    inner: Link
    num_inside: int
    outer: Link

    def __post_init__(self) -> None:
        if self.num_inside < 1:
            raise BadInput(f"{self.num_inside} devices per machine", "a machine has at least 1")

    def seconds(self, size_bytes: float, devices: int) -> float:
        """Return seconds to add up `size_bytes` over `devices`; 0 for one device, inf where there is no link."""
        inside = min(devices, self.num_inside)
        machines = math.ceil(devices / self.num_inside)
        return ring_s(self.inner, size_bytes, inside) + ring_s(self.outer, size_bytes, machines)


def ring_s(link: Link, size_bytes: float, members: int) -> float:
    """Return seconds of a ring all-reduce over `members`, each of which ends with the sum of all."""
    return 0.0 if members < 2 else 2 * (members - 1) * link.transfer_s(size_bytes / members)
