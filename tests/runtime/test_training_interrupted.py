"""Ctrl-C in a training step: it is heeded, and changes nothing."""

import math
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from tests.runtime.test_training import build, kept, regression


def interrupted_step(interrupt):
    """What Ctrl-C does to a step; in a process of its own, for the signal would end the one that runs the tests."""
    trained, good = regression()
    with build(trained) as trainer:
        trainer.train_step(good)
        before = kept(trainer)
        os.kill(trainer._engine._fleet.workers[1].pid, signal.SIGSTOP)  # the step cannot end
        timer = threading.Timer(0.2, interrupt, (signal.SIGINT,))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            trainer.train_step(good)
        timer.join()
        assert all(np.array_equal(v, before[n]) for n, v in kept(trainer).items()) and trainer.steps_done == 1
        assert math.isfinite(trainer.train_step(good))  # with new workers


@pytest.mark.slow
@pytest.mark.parametrize("interrupt", ["lambda number: os.kill(os.getpid(), number)", "signal.raise_signal"])
def test_ctrl_c_in_a_step_changes_nothing(interrupt):
    """Also where the signal wakes another thread only: this one has to look."""
    script = (
        "import faulthandler, os, signal; faulthandler.dump_traceback_later(110, exit=True)\n"  # where it hangs
        f"from tests.runtime.test_training_interrupted import interrupted_step; interrupted_step({interrupt})"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
