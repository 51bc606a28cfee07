"""Search for better schedules of the generated kernels on which the plan's objective rests most."""

from tvmhet.tuning.report import TuningReport
from tvmhet.tuning.tuner import Tuner

__all__ = ["Tuner", "TuningReport"]
