"""How long an all-reduce of gradients takes among the replicas of a stage.

Inside one machine, or where all links are alike: a ring, 2 (r - 1) steps that each move 1 / r of the bytes. Over q
machines with m devices each: the same inside each machine, and between machines a ring of q, in which the m devices of
a machine share its network link (each moves 1 / m of the bytes, so the machine moves all of them once around).

Of replicas that are teams of d devices (tensor split), a machine holds m / d. Inside it each device has a ring with
those that hold the same part as it, over links of its own; between machines all parts share the network link.
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

    def seconds(self, size_bytes: float, replicas: int, degree: int = 1, held_bytes: float | None = None) -> float:
        """Return seconds to add up `size_bytes` over replicas; 0 for one replica, inf where there is no link.

        Each of a replica's `degree` devices has `held_bytes` of them, all where that is None.
        """
        held = size_bytes if held_bytes is None else held_bytes
        most = max(1, self.num_inside // degree)
        machines = math.ceil(replicas / most)
        return ring_s(self.inner, held, min(replicas, most)) + ring_s(self.outer, size_bytes, machines)


def ring_s(link: Link, size_bytes: float, members: int) -> float:
    """Return seconds of a ring all-reduce over `members`, each of which ends with the sum of all."""
    return 0.0 if members < 2 else 2 * (members - 1) * link.transfer_s(size_bytes / members)
