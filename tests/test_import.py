"""`import tvmhet` is quick: names load at first use, and heavy packages where they are needed."""

import subprocess
import sys
from pathlib import Path

import pytest

import tvmhet
from tvmhet.emit.compiler import CompilerProcess


def loaded_by(program: str) -> set[str]:
    """Return the top-level packages that a fresh process has loaded after `program`."""
    code = f"{program}\nimport sys; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    return set(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split())


def test_import_alone_loads_nothing_heavy():
    assert not loaded_by("import tvmhet") & {
        "torch",
        "tvm",
        "tvm_ffi",
        "numpy",
        "xgboost",
        "networkx",
        "ortools",
        "rich",
    }


def test_all_names_load_and_leave_what_they_may_not_need():
    seen = loaded_by("import tvmhet\nfor name in tvmhet.__all__: getattr(tvmhet, name)")
    assert {"torch", "tvm"} <= seen
    assert not seen & {"xgboost", "networkx", "onnx", "ray", "typer"}


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nonsense"):
        tvmhet.nonsense  # noqa: B018
    assert set(tvmhet.__all__) <= set(dir(tvmhet))


def test_what_is_imported_without_torch_finds_none_and_what_comes_later_does():
    program = "from tvmhet._without_torch import without_torch\nwith without_torch(): import tvm, tvmhet.emit.build\n"
    assert "tvm" in loaded_by(program)
    assert "torch" not in loaded_by(program)
    assert "torch" in loaded_by(program + "import torch")


def test_torch_that_is_there_stays():
    assert "torch" in loaded_by(
        "import torch\nfrom tvmhet._without_torch import without_torch\nwith without_torch(): import torch as again\n"
        "assert again is torch"
    )


def test_a_compiler_process_does_without_torch(tmp_path):
    with CompilerProcess() as compiler:
        compiler.compile(tmp_path / "missing.json", {}, tmp_path / "never.so")  # an error, after all was imported
        assert b"torch" not in Path(f"/proc/{compiler._process.pid}/maps").read_bytes()
        assert b"libtvm" in Path(f"/proc/{compiler._process.pid}/maps").read_bytes()
