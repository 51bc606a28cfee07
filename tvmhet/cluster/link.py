"""A way between two memories: a latency and a rate, in one direction."""

from __future__ import annotations

from dataclasses import dataclass

from tvmhet.errors import BadQuantity


@dataclass(frozen=True, slots=True)
class Link:
    """Moving n bytes takes `latency_s + n / byte_per_s`. `name` is the link class it came from, for reports."""

    latency_s: float
    byte_per_s: float
    name: str = ""

    def __post_init__(self) -> None:
        if not self.latency_s >= 0:
            raise BadQuantity(f"link {self.name!r} has latency {self.latency_s} s", "a latency is 0 s or more")
        if not self.byte_per_s > 0:
            raise BadQuantity(f"link {self.name!r} has {self.byte_per_s} B/s", "a bandwidth is more than 0 B/s")

    def transfer_s(self, size_bytes: float) -> float:
        """Return the seconds one transfer of `size_bytes` takes."""
        return self.latency_s + size_bytes / self.byte_per_s

    def then(self, other: Link) -> Link:
        """Return both links in a row: latencies add up, the slower rate holds (the transfer is cut through)."""
        slow = self if self.byte_per_s <= other.byte_per_s else other
        name = "+".join(n for n in dict.fromkeys([*self.name.split("+"), *other.name.split("+")]) if n)
        return Link(self.latency_s + other.latency_s, slow.byte_per_s, name)
