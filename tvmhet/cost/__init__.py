"""What a kernel costs on a device type: measured, learned or by roofline."""

from tvmhet.cost.model import CostModel, KernelDesc, OpDesc, Predictions
from tvmhet.cost.roofline import SPEC_SHEET, Efficiency, Roofline
from tvmhet.cost.workload import kernel_of

__all__ = [
    "SPEC_SHEET",
    "CostModel",
    "Efficiency",
    "KernelDesc",
    "OpDesc",
    "Predictions",
    "Roofline",
    "kernel_of",
]
