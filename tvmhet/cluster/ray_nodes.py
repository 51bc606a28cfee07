"""The nodes of a Ray cluster: how to reach them, and which of them stands for which machine of a plan."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

from tvmhet.errors import BadInput, MissingPackage, NotSupported

#: Until April 2026 Ray hid all GPUs from an actor that asks for none, unless told so (ray-project/ray#54928, #62492).
SEES_GPUS = {"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}}
_ANSWER_S = 10.0
_START_ONE = "start one (`ray start --head`, then `ray start --address=HOST:PORT` on the other machines)"


def connect(address: str | None) -> tuple[ModuleType, bool]:
    """Return Ray, connected, and whether this call has connected it: to `address`, or as Ray finds it ("auto").

    Raises MissingPackage without Ray, NotSupported where no cluster answers.
    """
    try:
        import ray
    except ImportError as error:
        raise MissingPackage("running on several machines needs Ray", "pip install tvmhet[ray]") from error
    if ray.is_initialized():
        return ray, False
    where = address or os.environ.get("RAY_ADDRESS", "auto")
    if "://" in where:
        raise NotSupported(f"{where!r} is a Ray client's address", "run in the cluster, at HOST:PORT or auto")
    _check_answers(where)
    try:
        ray.init(address=where, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise NotSupported(f"no Ray cluster answers at {where!r}: {error}", _START_ONE) from error
    return ray, True


def _check_answers(where: str) -> None:
    """Raise NotSupported where nobody listens at an address: Ray itself would try for many minutes."""
    host, colon, port = where.rpartition(":")
    if not colon:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S).close()
    except (OSError, ValueError, OverflowError) as error:
        raise NotSupported(f"no Ray cluster answers at {where!r}: {error}", _START_ONE) from error


def on_node(node: str) -> Any:
    """Return the scheduling strategy that holds an actor or task on the node of this id."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node, soft=False)


def nodes_of(machines: Iterable[str], nodes: Sequence[Mapping[str, Any]], given: Mapping[str, str]) -> dict[str, str]:
    """Return the id of the node that stands for each machine.

    `nodes` are what `ray.nodes()` returns. A machine's node has its name, or the one `given` for it: the node's name,
    host name, address or id. Raises BadInput for a machine that has no node, several, or another one's.
    """
    alive = sorted((node for node in nodes if node["Alive"]), key=lambda node: str(node["NodeName"]))
    shown = ", ".join(f"{node['NodeName']} ({node['NodeManagerAddress']})" for node in alive) or "none"
    found: dict[str, str] = {}
    machines = tuple(machines)
    if unknown := sorted(given.keys() - set(machines)):
        raise BadInput(
            f"a node is given for {unknown[0]!r}, which is no machine of the plan",
            f"its machines: {', '.join(machines)}",
        )
    for machine in machines:
        wanted = given.get(machine, machine)
        suits = [n["NodeID"] for n in alive if wanted in _names(n)]
        if len(suits) != 1:
            raise BadInput(
                f"machine {machine!r} of the plan is {'several' if suits else 'none'} of the Ray cluster's nodes: "
                f"{wanted!r} among {shown}",
                f"start its node with --node-name={machine}, or say which it is: machines={{{machine!r}: 'ADDRESS'}}",
            )
        found[machine] = suits[0]
    if twice := [m for m, node in found.items() if Counter(found.values())[node] > 1]:
        raise BadInput(f"machines {twice[0]!r} and {twice[1]!r} are the same node", "give each its own")
    return found


def _names(node: Mapping[str, Any]) -> tuple[str, ...]:
    return node["NodeName"], node["NodeManagerHostname"], node["NodeManagerAddress"], node["NodeID"]
