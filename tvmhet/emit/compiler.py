"""A compiler in a process of its own: `tvmhet.emit.worker` at the other end, which may crash or hang without harm."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class CompileAnswer:
    """`status` is ok, error (TVM raised), crash or timeout; `text` is what made the kernels, or what is wrong."""

    status: str
    text: str


class CompilerProcess:
    """Compiles saved modules one after another; starts at the first use and again after a crash or a timeout."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    @property
    def is_running(self) -> bool:
        """Whether there is a process that has not ended."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the process, which imports TVM for about 2 s, without waiting for it."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tvmhet.emit.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            )

    def compile(
        self,
        module: Path,
        target: Mapping[str, Any],
        library: Path,
        *,
        plain: bool = False,
        traces: Mapping[str, str] | None = None,
        limit_s: float | None = None,
    ) -> CompileAnswer:
        """Compile the module saved at `module` to `library`. Whatever it does to the process, this returns."""
        self.start()
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        task = {"module": str(module), "target": dict(target), "library": str(library), "plain": plain}
        try:
            self._process.stdin.write(json.dumps({**task, "traces": dict(traces or {})}) + "\n")
            self._process.stdin.flush()
            if limit_s is not None and not select.select([self._process.stdout], [], [], limit_s)[0]:
                self.close()
                return CompileAnswer("timeout", f"compiling took longer than {limit_s:g} s")
            line = self._process.stdout.readline()
        except OSError:
            line = ""
        if not line:
            self.close()
            return CompileAnswer("crash", "the compiler process died")
        answer = json.loads(line)
        return CompileAnswer("ok", str(answer["report"])) if answer["ok"] else CompileAnswer("error", answer["error"])

    def close(self) -> None:
        """End the process. A later `compile` starts a new one."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                with suppress(OSError):  # of a process that died, what it was to read cannot be flushed
                    assert stream is not None
                    stream.close()
            self._process = None

    def __enter__(self) -> CompilerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
