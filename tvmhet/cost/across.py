"""Exchanges between nodes: what one node's exchange takes, and the hops and bytes that leave the node.

    latency   = the node's own + hops x hop_s             tree over nodes for all_reduce, ring for gather and scatter
    bandwidth = the slower of the devices' links and the node's network, wire bytes / (share x rate)

As NCCL does: every ring passes each node's network once, so that a node's adapters share the message. `hop_s` is fitted
to all-reduce over two A100 nodes (vidur), `share` is what one adapter of known rate reached (H100, send); both are
taken to hold for every network, which the source "inferred" says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import yaml

from tvmhet._data import data_path
from tvmhet.cluster.device import DeviceType
from tvmhet.cost.compass import minimise
from tvmhet.cost.network import Curve, Floats, wire_factor
from tvmhet.errors import BadInput, BadModel


@dataclass(frozen=True, slots=True)
class Across:
    """What crossing between nodes takes: seconds a hop, share of the rate reached, mean |log error| of the fit."""

    hop_s: float
    share: float
    error: float

    def seconds(
        self,
        operation: str,
        device: DeviceType,
        inside: Curve | None,
        counts: tuple[int, int],
        size_bytes: Floats,
        node_byte_per_s: float,
    ) -> Floats:
        """Return the time of `operation` over `counts` = (devices in all, nodes) for each message size.

        `inside` is the curve of the devices of one node, None if each node has one; `node_byte_per_s` is what leaves a
        node in one direction. Raises BadInput for counts that do not divide or a rate that is not above 0.
        """
        num_devices, nodes = counts
        if nodes < 2 or num_devices % nodes:
            raise BadInput(f"{operation}: gpus is {num_devices}, nodes {nodes}", "give 2 nodes or more, alike")
        if not node_byte_per_s > 0:
            raise BadInput(f"{operation}: the network's rate is {node_byte_per_s} byte/s", "give a rate above 0")
        rate = device.peer_byte_per_s
        beyond = size_bytes * _leaving(operation, num_devices, nodes) * rate / (node_byte_per_s * self.share)
        latency_s = hops(operation, nodes) * self.hop_s
        if inside is None:
            return Curve(latency_s, 1.0, 1.0, 0.0).seconds(beyond, rate)
        within = size_bytes * wire_factor(operation, num_devices) / inside.share
        both = replace(inside, latency_s=inside.latency_s + latency_s, share=1.0)
        return both.seconds(np.maximum(beyond, within), rate)


def hops(operation: str, nodes: int) -> int:
    """Return how many crossings follow one another: up and down a tree, round a ring, or one."""
    if operation == "all_reduce":
        return 2 * math.ceil(math.log2(nodes))
    return nodes - 1 if operation in ("all_gather", "reduce_scatter") else 1


def _leaving(operation: str, num_devices: int, nodes: int) -> float:
    """Bytes that leave a node for one byte of the message, all of its devices together."""
    if operation == "all_to_all":
        return num_devices / nodes * (1 - 1 / nodes)
    return wire_factor(operation, num_devices)


@lru_cache(maxsize=1)
def load_across() -> Across:
    """Read what was fitted from the shipped network file. Raises BadModel if it is malformed."""
    path = data_path("trained/network.yaml")
    try:
        return Across(*(float(v) for v in yaml.safe_load(path.read_text())["across"]))
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise BadModel(f"network file {path.name} cannot be read: {error!r}", "restore it or retrain") from error


def fit_across(
    runs: Mapping[tuple[int, int], tuple[Floats, Floats]], inside: Mapping[int, Curve], device: DeviceType, share: float
) -> Across:
    """Return the hop that brings all-reduce over two nodes closest to `runs`: (devices, nodes) -> (bytes, seconds).

    `inside` holds the curves by devices of one node. A node's rate is not published: each run's own is taken from its
    longest message, so that only latency and the knee are judged.
    """
    rates = {
        counts: float(size[-1] * wire_factor("all_reduce", counts[0]) / seconds[-1] / share)
        for counts, (size, seconds) in runs.items()
    }

    def loss(logs: Floats) -> float:
        across = Across(float(np.exp(logs[0])), share, 0.0)
        errors = [
            np.mean(
                np.abs(
                    np.log(
                        across.seconds(
                            "all_reduce", device, inside.get(counts[0] // counts[1]), counts, size, rates[counts]
                        )
                        / seconds
                    )
                )
            )
            for counts, (size, seconds) in runs.items()
        ]
        return float(np.mean(errors))

    found = minimise(loss, np.log([2e-5]), np.log([1e-6]), np.log([1e-3]))
    return Across(float(np.exp(found[0])), share, loss(found))
