"""One team of threads for kernels of both makers.

two teams   generated kernel: TVM's threads work, torch's spin on the same cores, or sleep and have to be woken
            library kernel: torch's work, TVM's spin or sleep
one         either: torch's threads work, and wait for the next kernel, whosever it is
"""

from __future__ import annotations

from tvmhet._passes import passes_func


def share_threads(num_threads: int) -> bool:
    """Give torch's threads to the parallel loops of kernels that this process loads from now on. Imports torch.

    Returns False where torch was built without OpenMP: it has no threads to give, and TVM's stay.
    """
    import torch

    return bool(passes_func("tvmhet.UseOpenMpThreads")(torch._C.__file__, num_threads))
