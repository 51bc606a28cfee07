"""The process that times library kernels: which clock it takes, and what it answers where there is no kernel."""

import json

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tvmhet.emit.library_worker import main


@pytest.fixture
def ask(monkeypatch, capsys):
    """What the process says of some operators."""

    def answers(records, *arguments):
        monkeypatch.setattr("sys.stdin", [json.dumps(r) for r in records])
        allowed = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
        threads = torch.get_num_threads()
        try:
            main(*arguments)
        finally:
            torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = allowed
            torch.set_num_threads(threads)
        ready, *lines = map(json.loads, capsys.readouterr().out.splitlines())
        assert "ready" in ready
        return lines

    return answers


SOFTMAX = {"op": "softmax", "rows": 4, "cols": 8, "dtype": "float32"}


def test_a_processor_is_timed_run_by_run(ask):
    (answer,) = ask([SOFTMAX], "cpu")
    assert len(answer["times_s"]) >= 3 and min(answer["times_s"]) > 0 and answer["note"] == ""


def test_a_gpu_is_timed_by_what_is_given_and_what_was_odd_is_said(ask):
    runs = []

    def gpu_times(run, ordinal, with_torch, repeats, budget_s):
        runs.append((run(), ordinal, with_torch))
        return [1e-6] * repeats, "launches are counted"

    (answer,) = ask([SOFTMAX], "cpu", gpu_times)  # the operands on the host, as there may be no GPU
    assert answer == {"times_s": [1e-6] * len(answer["times_s"]), "waited": 0.0, "note": "launches are counted"}
    assert len(answer["times_s"]) > 3 and len(runs) == 1 and runs[0][2]


class Called(TorchDispatchMode):
    """The names of torch's operators that run inside."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


CONV = {"op": "conv2d", "n": 1, "c": 8, "h": 6, "w": 6, "oc": 4, "kh": 1, "kw": 1, "oh": 6, "ow": 6, "groups": 1,
        "stride": [1, 1], "padding": [0, 0]}  # fmt: skip
NORM = {"op": "layer_norm", "rows": 4, "cols": 8}


@pytest.mark.parametrize(
    "record, names",
    [(CONV, ["convolution"]), (NORM, ["native_layer_norm"]), (SOFTMAX, ["softmax"])],
    ids=["conv2d", "layer_norm", "softmax"],
)
def test_a_gpu_is_timed_without_what_the_model_adds(ask, record, names):
    """A result is copied, and a convolution of one pixel a product; both are priced as such."""
    called = Called()

    def gpu_times(run, ordinal, with_torch, repeats, budget_s):
        with called:
            run()
        return [1e-6], ""

    assert not ask([record], "cpu", gpu_times)[0]["note"]
    assert called.names == names
    called.names.clear()
    with called:
        ask([record], "cpu")
    assert {"copy_", "mm"} & set(called.names) or record is SOFTMAX


def test_an_operator_that_the_library_has_not_is_an_answer(ask):
    first, second = ask([SOFTMAX | {"op": "no such"}, SOFTMAX], "cpu")
    assert first["times_s"] == [] and "no such" in first["note"] and second["times_s"]
