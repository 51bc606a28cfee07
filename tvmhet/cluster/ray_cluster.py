"""A Ray cluster as a ClusterSpec: what each node finds on itself, and what a hand-over between two nodes takes.

rack-1: detect() ──► rack-1: {l4: 2, cpu-x86-64-v4-32core: 1} ─┐
rack-2: detect() ──► rack-2: {t4: 4, cpu-x86-64-v3-16core: 1} ─┴─► ClusterSpec, network: 1.9 ms, 1.1 GB/s
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np

from tvmhet.cluster.device import DeviceType
from tvmhet.cluster.link import Link
from tvmhet.cluster.local import detect
from tvmhet.cluster.nodes import Network, NodeClass
from tvmhet.cluster.ray_nodes import SEES_GPUS, connect, on_node
from tvmhet.cluster.spec import ClusterSpec
from tvmhet.errors import NotSupported

#: Two sizes between which a hand-over is taken to be a latency and a rate: of tensors that cross stages.
_SIZES_BYTES = (1 << 20, 16 << 20)
_NUM_TRIES = 7
_COMPARED = ("memory_bytes", "clock_hz", "dram_byte_per_s", "host_byte_per_s", "peer_byte_per_s")
_SAME = 0.1  # figures of one type on two machines may differ by so much: clocks and memory that each reports


def detect_ray(address: str | None = None) -> ClusterSpec:
    """Return the nodes of a Ray cluster with their GPUs and CPUs, the node of this process first.

    `address` is as in `HetModule.on_ray`. The network is what a hand-over over Ray takes, measured between neighbours
    in the list (a few seconds each), the slowest of them. Raises MissingPackage without Ray, NotSupported where no
    cluster answers or a node cannot describe itself.
    """
    ray, has_connected = connect(address)
    try:
        own = ray.get_runtime_context().get_node_id()
        alive = sorted((n for n in ray.nodes() if n["Alive"]), key=lambda n: (n["NodeID"] != own, n["NodeName"]))
        check_names([node["NodeName"] for node in alive])
        found = {node["NodeName"]: _asked(ray, node) for node in alive}
        links = [_measured(ray, a["NodeID"], b["NodeID"]) for a, b in pairwise(alive)]
    finally:
        if has_connected:
            ray.shutdown()
    return merged(found, links)


def check_names(names: Sequence[str]) -> None:
    """Raise NotSupported where two nodes have one name: a plan could not tell them apart."""
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise NotSupported(
            f"two nodes of the Ray cluster are named {twice[0]!r}", "start them with --node-name, each with its own"
        )


def merged(found: Mapping[str, ClusterSpec], links: Sequence[Link]) -> ClusterSpec:
    """Return one cluster of machines that were described one by one, joined by the slowest of `links`.

    A type of one name is one type where its figures differ by a tenth at most, with the memory of the smallest; else
    each machine's is its own.
    """
    types: dict[str, DeviceType] = {}
    counts: dict[str, dict[str, int]] = {}
    notes = []
    for machine, spec in found.items():
        counts[machine] = {_known(device, machine, types): count for device, count in spec.nodes[0].devices}
        notes += [f"{machine}: {note}" for note in spec.notes]
    nodes = [NodeClass(m, tuple((types[name], count) for name, count in own.items())) for m, own in counts.items()]
    network = None
    if links:
        network = Network(Link(max(link.latency_s for link in links), min(link.byte_per_s for link in links)))
        notes.append("the network is what a hand-over over Ray took between neighbours in this list, the slowest")
    return ClusterSpec(tuple(nodes), network, custom_types=tuple(types.values()), notes=tuple(notes))


def _known(device: DeviceType, machine: str, types: dict[str, DeviceType]) -> str:
    """Return the name of the type that this one is taken for, and keep it if it is new."""
    known = types.setdefault(device.name, device)
    if not _is_alike(known, device):
        own = f"{device.name}-{machine}"
        types[own] = dataclasses.replace(device, name=own)
        return own
    if device.memory_bytes < known.memory_bytes:
        types[device.name] = dataclasses.replace(known, memory_bytes=device.memory_bytes)
    return device.name


def _is_alike(a: DeviceType, b: DeviceType) -> bool:
    if (a.target, a.num_sms, a.peak_flop_per_s.keys()) != (b.target, b.num_sms, b.peak_flop_per_s.keys()):
        return False
    pairs = [(getattr(a, name), getattr(b, name)) for name in _COMPARED]
    pairs += [(rate, b.peak_flop_per_s[dtype]) for dtype, rate in a.peak_flop_per_s.items()]
    return all(abs(x - y) <= _SAME * max(x, y) for x, y in pairs)


def _asked(ray: ModuleType, node: Mapping[str, Any]) -> ClusterSpec:
    from ray.exceptions import RayError

    there = {"scheduling_strategy": on_node(node["NodeID"]), "runtime_env": SEES_GPUS}
    try:
        spec: ClusterSpec = ray.get(ray.remote(detect).options(num_cpus=0, **there).remote())
    except RayError as error:
        said = str(error).strip().splitlines()[-1]
        raise NotSupported(
            f"node {node['NodeName']!r} of the Ray cluster cannot describe itself: {said}",
            "see that tvmhet is installed there, or write a cluster file",
        ) from error
    return spec


class _Echo:
    """Makes and takes arrays, as stages do."""

    def make(self, size_bytes: int) -> Any:
        return np.zeros(size_bytes, np.uint8)

    def take(self, array: Any) -> None: ...


def _measured(ray: ModuleType, first: str, second: str) -> Link:
    """Return what handing an array over from one node to another takes beside making it."""
    echo = ray.remote(_Echo)
    maker, taker = (echo.options(num_cpus=0, scheduling_strategy=on_node(n)).remote() for n in (first, second))
    ray.get([maker.make.remote(8), taker.make.remote(8)])
    seconds = []
    for size_bytes in _SIZES_BYTES:
        tries = []
        for _ in range(_NUM_TRIES):
            made = maker.make.remote(size_bytes)
            ray.wait([made], fetch_local=False)
            made_s = time.monotonic()
            ray.get(taker.take.remote(made))
            tries.append(time.monotonic() - made_s)
        seconds.append(statistics.median(tries))
    for actor in (maker, taker):
        ray.kill(actor)
    return link_of(*zip(_SIZES_BYTES, seconds, strict=True))


def link_of(small: tuple[int, float], large: tuple[int, float]) -> Link:
    """Return the link in which so many bytes take so many seconds, for two sizes.

    >>> link_of((1_000_000, 0.003), (16_000_000, 0.018))
    Link(latency_s=0.002, byte_per_s=1000000000.0, name='')
    """
    (few, few_s), (many, many_s) = small, large
    per_byte_s = max(many_s - few_s, 0.0) / (many - few)
    if not per_byte_s:  # noise: the larger one was not slower
        return Link(few_s, many / many_s)
    return Link(max(few_s - few * per_byte_s, 0.0), 1 / per_byte_s)
