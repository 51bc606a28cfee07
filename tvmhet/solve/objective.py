"""What a plan is good for."""

from __future__ import annotations

import enum


class Objective(str, enum.Enum):
    """What a plan minimises: seconds, or USD for `COST`, which `cheapest` answers and `solve` does not."""

    THROUGHPUT = "throughput"  # the largest load of any stage: seconds per input in a full pipeline
    LATENCY = "latency"  # the makespan of one input
    COST = "cost"  # the price of one input on devices that are rented while the plan runs, in USD


#: Those that are seconds, which `solve` minimises.
IN_SECONDS = (Objective.THROUGHPUT, Objective.LATENCY)
