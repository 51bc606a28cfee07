"""What a generated kernel gains of several cores: they take whole steps of its outer loop, of which there may be few.

    49 pixels of a convolution: 1 step of 64 columns       2 cores: as long as 1
    289 pixels: 5 steps                                    2 cores: 3 of 5 steps' time

Estimates for a device of n cores are a core's over n; here is what they are to be multiplied by. Products and
convolutions give cores columns of their result (`emit/cpu/contraction.py`), attention its heads; other kernels have
steps enough. Measured on two cores of an AMD EPYC: 30 convolutions of 1 to 49 pixels, `python -m benchmarks.branches`.
"""

from __future__ import annotations

import math

from tvmhet.cluster.device import DeviceType
from tvmhet.cost.model import KernelDesc

#: What a parallel region takes beyond its longest share while TVM's threads wait for it: 3 to 20 us.
PARALLEL_START_S = 4e-6

_COLUMNS = 64  # of a step


def cores_ratio(device: DeviceType, desc: KernelDesc) -> float:
    """Return the factor for a kernel on a device; 1 for library kernels, GPUs and one core.

    A result of one column (a convolution of one pixel) is cut by its rows instead and has steps enough.
    """
    if not device.is_cpu or device.num_sms == 1 or desc.maker != "tvm":
        return 1.0
    root = desc.root
    if root.family == "conv2d" and root.size("groups") == 1:
        batch, columns = root.size("n"), root.size("oh") * root.size("ow")
    elif root.family in ("linear", "matmul"):
        batch, columns = root.size("b"), root.size("n")
    else:
        return 1.0
    if batch * columns == 1:
        return 1.0
    steps = batch * (1 if desc.num_products > 1 else math.ceil(columns / _COLUMNS))
    return device.num_sms * math.ceil(steps / device.num_sms) / steps
