"""Devices, how they are joined, and what they cost."""

from tvmhet.cluster.catalog import device_type, device_types
from tvmhet.cluster.device import DeviceType
from tvmhet.cluster.groups import Group, Topology
from tvmhet.cluster.link import Link
from tvmhet.cluster.market import InstanceOffer, Market, Running
from tvmhet.cluster.nodes import Network, NodeClass, Offer
from tvmhet.cluster.spec import ClusterSpec

__all__ = [
    "ClusterSpec",
    "DeviceType",
    "Group",
    "InstanceOffer",
    "Link",
    "Market",
    "Network",
    "NodeClass",
    "Offer",
    "Running",
    "Topology",
    "device_type",
    "device_types",
]
