"""A run of a stage as a CUDA graph: launched at once, where the VM launches kernel by kernel.

    run once (kernels load, libraries choose) ─► run again, captured ─► graph ─► launch, launch, launch

Small batches are bound by launches: a kernel takes 2 to 10 us, and so does a launch by the VM; one by way of Python and
torch takes 10 to 50. What is captured must read and write the same addresses each time: `storages` of the stage are
held here (`tvmhet.emit.kept_storages`), and what torch allocates comes from a pool of this graph's own.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

from tvmhet.runtime.cuda import runtime_library

_LOG = logging.getLogger("tvmhet.runtime")  # at level INFO: which stages run without a graph, and why
_NON_BLOCKING, _RELAXED = 1, 2  # cudaStreamNonBlocking; cudaStreamCaptureModeRelaxed: others may allocate meanwhile


class CudaGraph:
    """A captured run on one GPU, and what it returned; tensors in it are written anew by each launch."""

    def __init__(self, handle: ctypes.c_void_p, ordinal: int, results: Any, held: Sequence[Any]) -> None:
        self.results = results
        self._handle, self._ordinal, self._held = handle, ordinal, held
        self._destroy = runtime_library().cudaGraphExecDestroy

    @classmethod
    def of(cls, run: Callable[[], Any], ordinal: int, with_torch: bool, times: int = 1) -> CudaGraph:
        """Run once, then capture as many runs as `times` in a row. Raises RuntimeError, or what the run raises."""
        cuda = runtime_library()
        check(cuda.cudaSetDevice(ordinal))
        stream, graph, handle = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        check(cuda.cudaStreamCreateWithFlags(ctypes.byref(stream), _NON_BLOCKING))
        pool: list[Any] = []
        try:
            with _tvm_on(ordinal, stream), _torch_on(ordinal, stream, pool) if with_torch else nullcontext():
                run()
                check(cuda.cudaStreamSynchronize(stream))
                check(cuda.cudaStreamBeginCapture(stream, _RELAXED))
                try:
                    results = [run() for _ in range(times)][-1]
                finally:  # also after an error, or the stream stays as it is
                    status = cuda.cudaStreamEndCapture(stream, ctypes.byref(graph))
                check(status)
            check(cuda.cudaGraphInstantiate(ctypes.byref(handle), graph, ctypes.c_ulonglong(0)))
        finally:
            if graph:
                cuda.cudaGraphDestroy(graph)
            cuda.cudaStreamDestroy(stream)
        return cls(handle, ordinal, results, (run, *pool))

    def launch(self) -> Any:
        """Run it on its GPU's default stream; return the results, which are there once the device is waited for."""
        check(runtime_library().cudaSetDevice(self._ordinal))  # of this thread, which may be another than captured it
        check(runtime_library().cudaGraphLaunch(self._handle, None))
        return self.results

    def __del__(self) -> None:
        self._destroy(self._handle)


def capture(
    functions: tuple[Callable[..., Any], Callable[[], Any]], arguments: Sequence[Any], ordinal: int, with_torch: bool
) -> CudaGraph | None:
    """Capture a stage, given as its `STEADY` and `STORAGES`, on certain arguments. None where it cannot be."""
    steady, storages = functions
    try:
        return CudaGraph.of(partial(steady, *arguments, storages()), ordinal, with_torch)
    except Exception as error:  # TVM's and torch's kernels raise anything
        _LOG.info("not captured as a CUDA graph: %s", error)
        return None


@contextmanager
def _tvm_on(ordinal: int, stream: ctypes.c_void_p) -> Iterator[None]:
    """While inside, TVM's kernels of this thread go to a stream; nothing to do where TVM is not loaded."""
    import tvm_ffi

    choose = tvm_ffi.get_global_func("runtime.Device_SetStream", allow_missing=True)
    if choose is None:
        yield
        return
    device = tvm_ffi.device("cuda", ordinal)
    choose(device, stream.value)
    try:
        yield
    finally:
        choose(device, 0)


@contextmanager
def _torch_on(ordinal: int, stream: ctypes.c_void_p, pool: list[Any]) -> Iterator[None]:
    """While inside, torch's kernels of this thread go to a stream; its memory is of a new pool, added to `pool`."""
    torch = importlib.import_module("torch")
    pool.append(torch.cuda.MemPool())
    contexts: tuple[AbstractContextManager[Any], ...] = (
        torch.cuda.device(ordinal),
        torch.cuda.use_mem_pool(pool[0]),
        torch.cuda.stream(torch.cuda.ExternalStream(stream.value, device=ordinal)),
    )
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def check(status: int) -> None:
    """Raise RuntimeError, with CUDA's words, unless a call of the library ended well."""
    if status:
        text = runtime_library().cudaGetErrorString(status).decode()
        runtime_library().cudaGetLastError()  # or the next call of anybody reports it again
        raise RuntimeError(f"CUDA: {text}")
