"""What all tests share: golden texts, published data, repeatable examples, one thread per numeric library,
a cache of their own."""

import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TVM_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")  # before torch, numpy or tvm are imported: steady times, no oversubscription
os.environ["TVMHET_CPU_VENDOR"] = ""  # the ratios of no processor: plans are the same wherever the tests run

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as shells start what runs in the background: no Ctrl-C arrives
    signal.signal(signal.SIGINT, signal.default_int_handler)

if "PYTEST_XDIST_WORKER" not in os.environ:  # times measured on this machine before must not change plans; one for all
    os.environ["TVMHET_CACHE_DIR"] = tempfile.mkdtemp(prefix="tvmhet-tests-")

_TESTS = Path(__file__).parent

settings.register_profile("repeatable", derandomize=True)  # the same examples in every run
settings.register_profile("search", derandomize=False)  # HYPOTHESIS_PROFILE=search looks for new ones
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden/ instead of comparing with it")


def pytest_unconfigure():
    if "PYTEST_XDIST_WORKER" not in os.environ:
        shutil.rmtree(os.environ["TVMHET_CACHE_DIR"], ignore_errors=True)


@pytest.fixture
def golden(request):
    """Return `golden(name, text)`: compare `text` with tests/golden/<name>, or rewrite that with --update-golden."""

    def compare(name: str, text: str) -> None:
        path = _TESTS / "golden" / name
        text = text if text.endswith("\n") else text + "\n"
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        assert path.exists(), (
            f"tests/golden/{name} is missing; write it with: pytest --update-golden {request.node.nodeid}"
        )
        assert text == path.read_text(encoding="utf-8"), (
            f"differs from tests/golden/{name}; review: pytest --update-golden"
        )

    return compare


@pytest.fixture
def database(tmp_path):
    """An empty database of measured kernels."""
    from tvmhet.cost.measured import MeasuredKernels

    with MeasuredKernels(tmp_path / "measured.db") as database:
        yield database


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the folder of published data; skip by name where it is not beside the checkout."""
    data = Path(os.environ.get("TVMHET_SHARED", _TESTS.parent.parent / "shared")) / "data"
    if not data.is_dir():
        pytest.skip("the published data (../shared/data, or $TVMHET_SHARED/data) is not on this machine")
    return data
