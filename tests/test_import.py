"""`import tvmhet` is quick: names load at first use, and heavy packages where they are needed."""

import subprocess
import sys

import pytest

import tvmhet


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
