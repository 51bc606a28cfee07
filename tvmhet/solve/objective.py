"""What a plan is good for."""

from __future__ import annotations

import enum


class Objective(str, enum.Enum):
    """What `solve` minimises; every value is in seconds."""

    THROUGHPUT = "throughput"  # the largest load of any stage: seconds per input in a full pipeline
    LATENCY = "latency"  # the makespan of one input
