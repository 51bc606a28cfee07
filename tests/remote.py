"""A TVM RPC tracker with one server, in a process of their own on this machine."""

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

from tvmhet.cluster.device import DeviceType
from tvmhet.cost.measure import TimerLimits
from tvmhet.cost.measure_rpc import Tracker

#: What python -m tvm.exec.rpc_tracker and rpc_server start, in one process: importing TVM takes seconds.
SERVE = """
import sys, threading
from tvm.rpc.server import PopenRPCServerState
from tvm.rpc.tracker import PopenTrackerServerState
first = int(sys.argv[1])
tracker = PopenTrackerServerState("127.0.0.1", first, first + 50, silent=True)
server = PopenRPCServerState("127.0.0.1", first + 50, first + 99, tracker_addr=("127.0.0.1", tracker.port),
                             key=sys.argv[2], silent=True)
print(tracker.port, flush=True)
threading.Event().wait()
"""


@contextlib.contextmanager
def one_server(device: DeviceType, key: str) -> Iterator[Tracker]:
    """A tracker at which a server for `device` has registered under `key`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        first = min(probe.getsockname()[1], 65000)
    process = subprocess.Popen([sys.executable, "-c", SERVE, str(first), key], stdout=subprocess.PIPE, text=True)
    found = Tracker.parse(f"127.0.0.1:{process.stdout.readline().strip()}", [(device.name, key)])
    try:
        deadline = time.monotonic() + 60
        while not found.timers([device], TimerLimits()) and time.monotonic() < deadline:
            time.sleep(0.1)
        yield found
    finally:
        process.kill()
        process.wait()
