"""What a solver returns: stages over kernel indices, the objective, a lower bound, and how sure it is."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Status(str, enum.Enum):
    """How good the answer is known to be."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"


@dataclass(frozen=True, slots=True)
class SolvedStage:
    """One stage: which kernels (indices into `Problem.kernels`) run on how many devices of which group.

    `kernels` are in execution order. `load_s` is the seconds one input occupies the stage, divided by replicas.
    `shares` is the first stage on the same devices, where this one is not the first (a virtual stage); else -1.
    """

    kernels: tuple[int, ...]
    group: int
    num_replicas: int
    load_s: float
    compute_s: float  # kernel times of one input, undivided
    transfer_s: float  # receives and sends of one input, undivided
    memory_bytes: float  # peak on one device
    shares: int = -1


@dataclass(frozen=True, slots=True)
class Solution:
    """Stages in topological order. `objective` and `lower_bound` are seconds (or USD for price objectives)."""

    stages: tuple[SolvedStage, ...]
    objective: float
    lower_bound: float
    status: Status
    steps: int  # work done, in the solver's own steps: repeatable, unlike seconds
    solver: str  # which algorithm found it
    reason: str = ""  # for infeasible: the binding constraint and the smallest mend

    @property
    def gap(self) -> float:
        """Relative distance of the objective above its lower bound; 0 when proved optimal."""
        return 0.0 if self.objective <= 0 else max(0.0, 1.0 - self.lower_bound / self.objective)
