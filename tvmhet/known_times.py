"""The best known time of every candidate kernel of a model: measured, learned or estimated; alone or inside it."""

from __future__ import annotations

from tvmhet.cluster.spec import ClusterSpec
from tvmhet.context import company, kernel_factors
from tvmhet.cost.measured import MeasuredKernels
from tvmhet.cost.table import TimeTable
from tvmhet.ir.prepare import Prepared
from tvmhet.times import Candidates, time_table


def known_times(
    prepared: Prepared,
    candidates: Candidates,
    database: MeasuredKernels,
    cluster: ClusterSpec,
    *,
    in_context: bool,
    together: bool = False,
    tuned: bool = True,
    hopeful: bool = False,
) -> TimeTable:
    """Return the best known time of every candidate; with `in_context` scaled to what kernels take in this model,
    or, where that was not measured, to what they are learned to take in models.

    With `together` it is what they take while all CPU devices of the cluster work, where that was measured: for plans
    of throughput. With `tuned` a generated kernel has its tuned schedule where it has a faster one: for plans that a
    build takes. With `hopeful` kernels that never ran inside the model take the least that can be hoped for.
    """
    devices = cluster.device_types()
    part = company(cluster) if together else ""
    kernels = [[candidates.names[o] for o in k.ops] for k in candidates.kernels]
    factors = {}
    for device in devices if in_context else ():
        ran = [[key] for key in candidates.keys]
        known = kernel_factors(database, prepared.key, device, kernels, part, ran=ran, hopeful=hopeful)
        if known is not None:
            factors[device.name] = known
    return time_table(candidates, devices, database, factors, tuned=tuned, inside=in_context)
