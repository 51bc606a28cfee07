"""The same cluster with fewer or more devices, or other prices. Machines keep their names, and devices their ids."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping

from tvmhet.cluster.nodes import Network, NodeClass
from tvmhet.cluster.spec import ClusterSpec
from tvmhet.errors import BadInput


def remove(spec: ClusterSpec, devices: Mapping[str, int]) -> ClusterSpec:
    """Return `spec` less `devices`, taken from the last machines first.

    Raises BadInput for more than there are, UnknownDeviceType for an unknown name, EmptyCluster when none is left.
    """
    nodes, network = list(spec.nodes), spec.network
    have = spec.counts()
    for name, count in devices.items():
        slug = _slug(spec, name)
        _check_count(name, count)
        if count > have.get(slug, 0):
            raise BadInput(
                f"{count} x {name!r} cannot be taken away: the cluster has {have.get(slug, 0)}",
                f"its types are {', '.join(f'{n} x {t}' for t, n in have.items())}",
            )
        nodes, network = _take(nodes, network, slug, count)
    return dataclasses.replace(spec, nodes=tuple(nodes), network=network)


def set_counts(spec: ClusterSpec, counts: Mapping[str, int]) -> ClusterSpec:
    """Return `spec` with these totals per type; more of a type go to the last single machine that lists it.

    Raises BadInput where it is not clear which machine should get more.
    """
    have = spec.counts()
    for name, count in counts.items():
        _check_count(name, count)
        slug = _slug(spec, name)
        if count < have.get(slug, 0):
            spec = remove(spec, {slug: have[slug] - count})
        elif count > have.get(slug, 0):
            spec = dataclasses.replace(spec, nodes=_add(spec, slug, count - have.get(slug, 0)))
    return spec


def set_prices(spec: ClusterSpec, usd_per_h: Mapping[str, float]) -> ClusterSpec:
    """Return `spec` with these prices of one device per hour. Raises BadInput for a price that is none."""
    priced = {_slug(spec, name): price for name, price in usd_per_h.items()}
    if unknown := sorted(priced.keys() - spec.counts().keys()):
        raise BadInput(f"the cluster has no device type {unknown[0]!r}", f"it has {', '.join(sorted(spec.counts()))}")
    for name, price in usd_per_h.items():
        if isinstance(price, bool) or not isinstance(price, int | float) or not 0 <= price < math.inf:
            raise BadInput(f"the price of {name!r} is {price!r} USD/h", "give a finite number, 0 or more")

    nodes = tuple(
        dataclasses.replace(
            n,
            devices=tuple(
                (dataclasses.replace(d, usd_per_h=float(priced[d.name])) if d.name in priced else d, count)
                for d, count in n.devices
            ),
        )
        for n in spec.nodes
    )
    return dataclasses.replace(spec, nodes=nodes)


def _slug(spec: ClusterSpec, name: str) -> str:
    return name if name in spec.counts() else spec.catalog().find(name).name


def _check_count(name: str, count: int) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise BadInput(f"the count of {name!r} is {count!r}", "give a whole number, 0 or more")


def _take(
    nodes: list[NodeClass], network: Network | None, slug: str, count: int
) -> tuple[list[NodeClass], Network | None]:
    """Return nodes and network with `count` devices fewer; a class is split where its machines now differ."""
    result: list[NodeClass] = []
    for node in reversed(nodes):
        per_machine = dict((d.name, n) for d, n in node.devices).get(slug, 0)
        taken = min(count, per_machine * node.count)
        count -= taken
        if taken == 0:
            result.append(node)
            continue
        if taken == per_machine * node.count:
            result.append(_with(node, slug, 0))
            continue
        parts = _machines_less(node, slug, taken, per_machine)
        network = None if network is None else _renamed(network, node, parts)
        result.extend(reversed(parts))
    return result[::-1], network


def _machines_less(node: NodeClass, slug: str, taken: int, per_machine: int) -> list[NodeClass]:
    """Return the machines of `node` as classes: those left whole together, the others one by one."""
    if node.count == 1:
        return [_with(node, slug, per_machine - taken)]
    whole = node.count - math.ceil(taken / per_machine)
    parts = []
    if whole >= 2:
        parts.append(dataclasses.replace(node, count=whole))
    elif whole == 1:
        parts.append(dataclasses.replace(node, name=node.machines[0], count=1))
    first = taken - (node.count - whole - 1) * per_machine  # what the first touched machine loses; the others lose all
    for i, machine in enumerate(node.machines[whole:]):
        left = per_machine - first if i == 0 else 0
        parts.append(dataclasses.replace(_with(node, slug, left), name=machine, count=1))
    return parts


def _with(node: NodeClass, slug: str, count: int) -> NodeClass:
    devices = tuple((d, count if d.name == slug else n) for d, n in node.devices)
    return dataclasses.replace(node, devices=devices)


def _renamed(network: Network, node: NodeClass, parts: list[NodeClass]) -> Network:
    """Return `network` whose overrides for the class `node` hold for each of its `parts`."""
    new = [p.name for p in parts]
    pairs = []
    for a, b, link in network.pairs:
        left, right = (new if x == node.name else [x] for x in (a, b))
        named = {tuple(sorted(p)) for p in itertools.product(left, right)}
        pairs += [(x, y, link) for x, y in sorted(named)]
    return dataclasses.replace(network, pairs=tuple(pairs))


def _add(spec: ClusterSpec, slug: str, count: int) -> tuple[NodeClass, ...]:
    single = [i for i, n in enumerate(spec.nodes) if n.count == 1 and slug in {d.name for d, _ in n.devices}]
    if single:
        at, node = single[-1], spec.nodes[single[-1]]
        devices = tuple((d, n + count if d.name == slug else n) for d, n in node.devices)
    elif len(spec.nodes) == 1 and spec.nodes[0].count == 1:
        at, node = 0, spec.nodes[0]
        devices = (*node.devices, (spec.catalog().find(slug), count))
    else:
        raise BadInput(
            f"{count} more x {slug!r}: it is not clear which node gets them",
            "name them in a node of the cluster file; a node of count 1 that lists the type is filled up",
        )
    return (*spec.nodes[:at], dataclasses.replace(node, devices=devices), *spec.nodes[at + 1 :])
