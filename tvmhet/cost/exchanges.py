"""Predict collectives and point-to-point exchanges as kernels are predicted: seconds, an interval, a source.

A device type whose curves were fitted gets the fit's own error as its interval; another type gets the spread of the
fitted types with such a link.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tvmhet.cluster.device import DeviceType
from tvmhet.cost.across import load_across
from tvmhet.cost.model import Predictions
from tvmhet.cost.network import Network, link_class, wire_factor
from tvmhet.cost.operators import ExchangeDesc
from tvmhet.errors import BadInput

#: An error with a mean of e in the log lies within 1.61 e four times in five, if it falls off exponentially (ln 5).
_FOUR_IN_FIVE = math.log(5.0)
_LEAST_ERROR = 0.03


def predict_exchanges(descs: Sequence[ExchangeDesc], device: DeviceType, network: Network) -> Predictions:
    """Return one prediction per exchange. Raises BadInput for a CPU type."""
    if device.is_cpu:
        raise BadInput(f"{descs[0].operation} between {device.name!r} devices", "exchanges are known of GPUs only")
    seconds, low, high = (np.empty(len(descs)) for _ in range(3))
    known, source = np.zeros(len(descs), dtype=np.bool_), np.full(len(descs), "inferred", dtype=object)
    members: dict[tuple[str, int], list[int]] = {}
    for i, desc in enumerate(descs):
        if desc.nodes > 1:
            seconds[i] = _between_nodes(desc, device, network)
            low[i], high[i] = seconds[i] / _reach(load_across().error), seconds[i] * _reach(load_across().error)
        else:
            members.setdefault((desc.operation, desc.num_devices), []).append(i)
    for (operation, count), rows in members.items():
        sizes = [descs[i].size_bytes for i in rows]
        found = network.exchange(operation, device, count, sizes)
        seconds[rows] = found.seconds
        own = network.curves.get((device.name, operation, count))
        if own is not None:
            low[rows], high[rows] = found.seconds / _reach(own.error), found.seconds * _reach(own.error)
            known[rows], source[rows] = True, "learned"
        else:
            wire = np.array(sizes) * wire_factor(operation, count)
            likes = [
                curve.seconds(wire, device.peer_byte_per_s)
                for (name, op, _), curve in network.curves.items()
                if op == operation and network.link_of[name] == link_class(device)
            ] or [found.seconds / 2, found.seconds * 2]
            low[rows] = np.minimum(np.quantile(likes, 0.1, axis=0), found.seconds)
            high[rows] = np.maximum(np.quantile(likes, 0.9, axis=0), found.seconds)
    return Predictions(seconds, low, high, known, tuple(str(s) for s in source))


def _reach(error: float) -> float:
    """The factor up and down that holds four in five, of a mean |log error|."""
    return math.exp(_FOUR_IN_FIVE * max(error, _LEAST_ERROR))


def _between_nodes(desc: ExchangeDesc, device: DeviceType, network: Network) -> float:
    each = desc.num_devices // desc.nodes
    inside = network.curve(desc.operation, device, each)[0] if each > 1 else None
    size = np.array([desc.size_bytes])
    counts = desc.num_devices, desc.nodes
    return float(load_across().seconds(desc.operation, device, inside, counts, size, desc.node_byte_per_s)[0])
