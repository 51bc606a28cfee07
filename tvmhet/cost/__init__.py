"""What a kernel costs on a device type: measured, learned or by roofline."""

from tvmhet.cost.boosted import LearnedModel
from tvmhet.cost.measure import ArgSpec, KernelJob, KernelTimer, Measurement, TimerLimits
from tvmhet.cost.measured import KernelKey, MeasuredKernels
from tvmhet.cost.model import CostModel, KernelDesc, OpDesc, Predictions
from tvmhet.cost.network import Network
from tvmhet.cost.predict import predict_jsonl
from tvmhet.cost.roofline import SPEC_SHEET, Efficiency, Roofline
from tvmhet.cost.schema import schema_text
from tvmhet.cost.table import Entry, TimeTable
from tvmhet.cost.transfer import Elsewhere, Transfer
from tvmhet.cost.workload import kernel_of

__all__ = [
    "SPEC_SHEET",
    "ArgSpec",
    "CostModel",
    "Efficiency",
    "Elsewhere",
    "Entry",
    "KernelDesc",
    "KernelJob",
    "KernelKey",
    "KernelTimer",
    "LearnedModel",
    "MeasuredKernels",
    "Measurement",
    "Network",
    "OpDesc",
    "Predictions",
    "Roofline",
    "TimeTable",
    "TimerLimits",
    "Transfer",
    "kernel_of",
    "predict_jsonl",
    "schema_text",
]
