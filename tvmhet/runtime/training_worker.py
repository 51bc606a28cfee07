"""A training worker: a CPU device is a process that `main` serves, a GPU a thread of the parent."""

from __future__ import annotations

import gc
import os
import socket
import traceback
from dataclasses import replace

from tvmhet.runtime import vm, worker
from tvmhet.runtime.messages import Failure, Ready, send_object
from tvmhet.runtime.training_loop import TrainingConfig, TrainingLoop


def serve(config: TrainingConfig, control: socket.socket, *, owns_process: bool = True) -> None:
    """Load the functions, report Ready or a Failure through `control`, then run the loop to its end.

    In a process of its own what was loaded is put out of the garbage collector's sight: to look at all of it takes the
    time of a pass (60 ms where a step of a small ResNet takes 40).
    """
    try:
        loop = TrainingLoop(config, control)
    except Exception as error:
        text = traceback.format_exc(limit=-3)
        send_object(control, Failure(None, None, text, needs_memory=vm.is_out_of_memory(error)))
        return
    if owns_process:
        gc.collect()
        gc.freeze()
    send_object(control, Ready())
    loop.run()


def serve_in_thread(config: TrainingConfig, control: socket.socket) -> None:
    """As `serve`, on descriptors of its own: when a long kernel ends, the parent's may be gone, or another file's."""
    given = (config.memory_fd, config.inbound_fd, config.done_fd, *config.outbound.values())
    memory, inbound, done, *outbound = own = [os.dup(fd) for fd in given]
    try:
        renamed = dict(zip(config.outbound, outbound, strict=True))
        serve(
            replace(config, memory_fd=memory, inbound_fd=inbound, done_fd=done, outbound=renamed),
            control,
            owns_process=False,
        )
    finally:
        for fd in own:
            os.close(fd)


def main(control_fd: int) -> None:
    """Run one CPU device in this process."""
    worker.main(control_fd, serve)
