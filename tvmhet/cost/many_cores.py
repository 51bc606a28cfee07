"""What a generated kernel gains of several cores: they take whole steps of its outer loop, of which there may be few.

    3 heads of attention: 3 steps            2 cores: 2 of 3 steps' time
    289 pixels of a convolution: 5 steps of 64 columns, each in as many shares of its rows as are needed:
    96 rows: 2 shares of 5 steps             2 cores: half the time

Estimates for a device of n cores are a core's over n; here is what they are to be multiplied by. Products and
convolutions give cores columns and rows of their result (`emit/cpu/contraction.py`), attention its heads; other kernels
have steps enough.
"""

from __future__ import annotations

import math

from tvmhet.cluster.device import DeviceType
from tvmhet.cost.model import KernelDesc

#: What a parallel region takes beyond its longest share while TVM's threads wait for it: 3 to 20 us.
PARALLEL_START_S = 4e-6

_COLUMNS, _ROWS = 64, 6  # of a tile


def cores_ratio(device: DeviceType, desc: KernelDesc) -> float:
    """Return the factor for a kernel on a device; 1 for library kernels, GPUs and one core.

    A result of one column (a convolution of one pixel) is cut by its rows instead and has steps enough.
    """
    if not device.is_cpu or device.num_sms == 1 or desc.maker != "tvm":
        return 1.0
    root = desc.root
    if root.family == "conv2d" and root.size("groups") == 1:
        batch, rows, columns = root.size("n"), root.size("oc"), root.size("oh") * root.size("ow")
    elif root.family in ("linear", "matmul"):
        batch, rows, columns = root.size("b"), root.size("m"), root.size("n")
    else:
        return 1.0
    if batch * columns == 1:
        return 1.0
    if desc.num_products > 1:
        return _ratio(batch, device.num_sms)
    steps, tiles = batch * math.ceil(columns / _COLUMNS), math.ceil(rows / _ROWS)
    return min(_ratio(steps * d, device.num_sms) for d in range(1, device.num_sms + 1) if tiles % d == 0)


def _ratio(steps: int, num_cores: int) -> float:
    return num_cores * math.ceil(steps / num_cores) / steps
