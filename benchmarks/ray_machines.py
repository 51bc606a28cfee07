"""A Ray cluster of two machines on this one: two nodes, each with a core of its own where there are two."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MACHINES = ("rack-1", "rack-2")
_MEMORY_BYTES = 200 << 20
_START_S = 180.0


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextmanager
def two_machines() -> Iterator[str]:
    """Give the address of the cluster while its nodes run."""
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # sockets' paths are short
    port = _free_port()
    address = f"127.0.0.1:{port}"
    head = ["--head", f"--port={port}", f"--temp-dir={folder}", "--include-dashboard=false"]
    cores = sorted(os.sched_getaffinity(0))
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        for i, machine in enumerate(MACHINES):
            where = [f"--address={address}"] if i else head
            nodes.append(_start(machine, where, cores[i % len(cores)], folder))
            _wait_for(address, i + 1, nodes[-1])
        yield address
    finally:
        for node in nodes:
            node.kill()
            node.wait()
        _kill_all(folder)
        shutil.rmtree(folder, ignore_errors=True)


def _kill_all(folder: Path) -> None:
    """End the daemons of the nodes, which name their folder; their workers go with them."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError):
            if str(folder).encode() in (process / "cmdline").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)


def _start(machine: str, where: list[str], core: int, folder: Path) -> subprocess.Popen[bytes]:
    on_core = f"import os, sys; os.sched_setaffinity(0, {{{core}}}); os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-c", on_core]  # not by preexec_fn: a fork of a process with threads may hang
    command += [str(Path(sys.executable).with_name("ray")), "start", "--block"]
    command += [f"--node-name={machine}", "--num-cpus=1"]
    command += [f"--object-store-memory={_MEMORY_BYTES}", f"--plasma-directory={folder}", "--disable-usage-stats"]
    return subprocess.Popen(
        [*command, *where],
        env={**os.environ, "RAY_memory_monitor_refresh_ms": "0"},  # it would end actors when others fill this machine
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _wait_for(address: str, num_nodes: int, last: subprocess.Popen[bytes]) -> None:
    """Wait until so many nodes answer, in a process of its own: this one connects later, or not at all."""
    code = f"""if True:
        import sys, time, ray
        for _ in range(120):
            try:
                ray.init({address!r}, log_to_driver=False, configure_logging=False)
                if sum(n["Alive"] for n in ray.nodes()) == {num_nodes}:
                    sys.exit(0)
            except (ConnectionError, RuntimeError, ValueError):
                pass
            ray.shutdown()
            time.sleep(0.5)
        sys.exit("the nodes do not answer")
    """
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=_START_S, **quiet)
    assert last.poll() is None
