"""Which fleets a training job is compared on: every number of instances of one offer, of two, of three, ...

Sets of offers are taken by size; where all counts of all sets would be too many, the sets of the most promising offers
are taken.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tvmhet.cluster.market import InstanceOffer, Market
from tvmhet.cluster.nodes import Network, NodeClass
from tvmhet.cluster.spec import ClusterSpec

Fleet = tuple[tuple[InstanceOffer, int], ...]

MOST_FLEETS = 16_000  # compared as whole copies; beyond, of larger sets only those of the most promising offers


def instance_counts(limits: Sequence[int], order: Sequence[int]) -> tuple[NDArray[np.int64], bool]:
    """Return instances of each offer, shape (fleets, offers), at least one in a row; and whether it is all fleets.

    `order` has the offers with a limit above 0, the most promising first. Single offers are always all there.

    >>> instance_counts([1, 2], [0, 1])[0].tolist()
    [[1, 0], [0, 1], [0, 2], [1, 1], [1, 2]]
    """
    rows: list[NDArray[np.int64]] = []
    total, complete = 0, True
    for size in range(1, len(order) + 1):
        first = len(order) if size == 1 else _most_offers(limits, order, size, MOST_FLEETS - total)
        complete = complete and first == len(order)
        for chosen in itertools.combinations(sorted(order[:first]), size):
            counts = np.array(list(itertools.product(*(range(1, limits[o] + 1) for o in chosen))), np.int64)
            made = np.zeros((len(counts), len(limits)), np.int64)
            made[:, list(chosen)] = counts
            rows.append(made)
            total += len(made)
        if not complete and first < size:
            break
    return np.concatenate(rows), complete


def _most_offers(limits: Sequence[int], order: Sequence[int], size: int, most: int) -> int:
    """How many of the first offers have no more than `most` fleets of exactly `size` of them."""
    ways = [1] + [0] * size  # elementary symmetric sums of the limits so far
    for n, offer in enumerate(order):
        for k in range(size, 0, -1):
            ways[k] += ways[k - 1] * limits[offer]
        if ways[size] > most:
            return n
    return len(order)


def fleet_of(market: Market, counts: Sequence[int]) -> Fleet:
    """Return the offers that are rented, with their counts."""
    return tuple((o, int(n)) for o, n in zip(market.offers, counts, strict=True) if n)


def prices_apart(fleet: Fleet) -> Fleet:
    """Return the fleet with offers joined that differ in their price alone (spot, on demand), at their mean price."""
    alike: dict[InstanceOffer, list[tuple[InstanceOffer, int]]] = {}
    for offer, count in fleet:
        bare = dataclasses.replace(offer, usd_per_h=0.0, spot=False, max_instances=0)
        alike.setdefault(bare, []).append((offer, count))
    joined = []
    for same in alike.values():
        count = sum(n for _, n in same)
        mean = sum(offer.usd_per_h * n for offer, n in same) / count
        joined.append((same[0][0] if len(same) == 1 else dataclasses.replace(same[0][0], usd_per_h=mean), count))
    return tuple(joined)


def one_of_each(market: Market) -> ClusterSpec:
    """Return one instance of each offer that can be rented as a cluster."""
    return cluster_of(market, tuple((o, 1) for o in market.offers if o.max_instances))


def cluster_of(market: Market, fleet: Fleet) -> ClusterSpec:
    """Return whole instances of a market as a cluster behind a gateway without devices, which holds the data."""
    nodes = [NodeClass("gateway", ())]
    for offer, count in fleet:
        device = dataclasses.replace(offer.device, usd_per_h=offer.usd_per_h / offer.num_devices)
        nodes.append(NodeClass(offer.key, ((device, offer.num_devices),), count, offer.link))
    return ClusterSpec(tuple(nodes), Network(market.network))
