"""What stages of a training step take on teams of devices (tensor split), in both passes.

    forward  = known seconds x (cost model on one device's part / on the whole)       + all-reduces of partial sums
    backward = the same of the gradients' kernels                                      + all-reduces of what flows back

So measured times of the whole count. A backward time that is not given follows a forward time that is, by the ratio of
the whole kernel's passes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from tvmhet.cluster.device import DeviceType
from tvmhet.cluster.spec import ClusterSpec
from tvmhet.cost.table import Entry
from tvmhet.graph.cutting import Part
from tvmhet.ir.training_model import TrainingModel
from tvmhet.ir.training_step import read_step
from tvmhet.planning_training import TrainingGraph, gradients_of
from tvmhet.splitting import Wish, all_reduce_s, given_entry, kernel_names, priced_splits, scaled_to_part, seconds_ratio
from tvmhet.times import Candidates, time_table
from tvmhet.training_teams import forward_part


def with_team_times(
    made: TrainingGraph,
    wishes: Sequence[Wish],
    cluster: ClusterSpec,
    devices: Sequence[DeviceType],
    model: object = None,
) -> TrainingGraph:
    """Return the numbers with those of the wishes that some group of the cluster has devices for. Raises BadInput.

    Of a `model` that is a training step, only what its backward pass can cut, too, is cut.
    """
    if not wishes:
        return made
    pricing = _Pricing(made, devices)
    parts = partial(forward_part, read_step(model), made.graph) if isinstance(model, TrainingModel) else None
    ahead = pricing.forward
    return replace(made, splits=priced_splits(wishes, made.graph, made.candidates, cluster, ahead, pricing, parts))


class _Pricing:
    """Seconds of one device's part, from the known ones of the whole."""

    def __init__(self, made: TrainingGraph, devices: Sequence[DeviceType]) -> None:
        self.made, self.devices = made, devices
        self.forward = scaled_to_part(made.forward, made.candidates, devices)
        self._back = time_table(gradients_of(made.candidates), devices, None)

    def backward(
        self, wish: Wish, part: Part | None, candidates: Candidates | None, device: DeviceType, ahead: Sequence[Entry]
    ) -> tuple[float, ...]:
        """Return seconds per kernel of the backward pass; inf where `ahead`, the forward pass, cannot run."""
        column = [d.name for d in self.devices].index(device.name)
        whole = self.made.backward[:, self.made.forward.column(device.name)]
        whole_ahead = self.made.forward.seconds[:, self.made.forward.column(device.name)]
        ratio = np.full(len(whole), math.inf)
        if candidates is not None:
            ratio = seconds_ratio(time_table(gradients_of(candidates), self.devices, None), self._back)[:, column]
        names = kernel_names(self.made.candidates)
        out = []
        for k, kernel in enumerate(self.made.candidates.kernels):
            given = given_entry(wish.backward_times_s, names[k], wish.degree)
            if not math.isfinite(ahead[k].seconds) or not math.isfinite(whole[k]):
                out.append(math.inf)
            elif given is not None:
                out.append(given.seconds)
            elif ahead[k].source == "given":
                out.append(float(ahead[k].seconds * whole[k] / whole_ahead[k]))
            else:
                assert part is not None, "predicted times are those of a part"
                added = sum(all_reduce_s(device, part.degree, size) for size in part.flowing_back_bytes(kernel.ops))
                out.append(float(whole[k] * ratio[k] + added))
        return tuple(out)
