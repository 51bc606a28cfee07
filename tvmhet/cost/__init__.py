"""What a kernel costs on a device type: measured, learned or by roofline."""

from tvmhet.cost.measure import ArgSpec, KernelJob, KernelTimer, Measurement, TimerLimits
from tvmhet.cost.measured import KernelKey, MeasuredKernels
from tvmhet.cost.model import CostModel, KernelDesc, OpDesc, Predictions
from tvmhet.cost.roofline import SPEC_SHEET, Efficiency, Roofline
from tvmhet.cost.table import Entry, TimeTable
from tvmhet.cost.workload import kernel_of

__all__ = [
    "SPEC_SHEET",
    "ArgSpec",
    "CostModel",
    "Efficiency",
    "Entry",
    "KernelDesc",
    "KernelJob",
    "KernelKey",
    "KernelTimer",
    "MeasuredKernels",
    "Measurement",
    "OpDesc",
    "Predictions",
    "Roofline",
    "TimeTable",
    "TimerLimits",
    "kernel_of",
]
