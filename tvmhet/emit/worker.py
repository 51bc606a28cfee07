"""Compile stages in a process of its own: one JSON task a line on standard input, one JSON answer a line.

Task: {"module": path of a saved module, "target": {...}, "library": path to write, "plain": bool,
"traces": {hash of a function: its tuned schedule}}.
Answer: {"ok": true, "report": text} or {"ok": false, "error": text}. Ends when its input closes.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tvmhet._without_torch import without_torch


def serve() -> None:
    """Answer tasks until the input ends. What TVM prints goes to standard error, never among the answers."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with without_torch():
        import tvm

        from tvmhet.emit.build import compile_to

    for line in sys.stdin:
        task = json.loads(line)
        try:
            mod = tvm.ir.load_json(Path(task["module"]).read_text())
            report = compile_to(mod, task["target"], Path(task["library"]), plain=task["plain"], traces=task["traces"])
            answer: dict[str, object] = {"ok": True, "report": report}
        except Exception as error:  # the parent raises it again, with the stage's name
            answer = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve()
