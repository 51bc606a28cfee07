"""Every tutorial is a notebook that opens, says how, and runs from top to bottom: its claims are assertions."""

from pathlib import Path

import pytest

jupytext = pytest.importorskip("jupytext")

ROOT = Path(__file__).parent.parent
TUTORIALS = sorted((ROOT / "tutorials").glob("[0-9]*.py"))
_CELL_TIMEOUT_S = 300


def test_there_are_tutorials():
    assert [t.stem for t in TUTORIALS][:2] == ["01_first_plan", "02_your_cluster"]
    assert "04_what_to_rent" in [t.stem for t in TUTORIALS]


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda p: p.stem)
def test_opens_as_a_notebook_and_says_how(path):
    notebook = jupytext.read(path)
    first = notebook.cells[0]
    assert first.cell_type == "markdown" and first.source.startswith("# ")
    assert f"jupytext --to notebook tutorials/{path.name}" in first.source
    assert notebook.metadata["kernelspec"]["name"] == "python3"
    kinds = [cell.cell_type for cell in notebook.cells]
    assert kinds.count("code") >= 5 and kinds.count("markdown") >= 5
    assert sum("assert " in cell.source for cell in notebook.cells if cell.cell_type == "code") >= 5


@pytest.mark.slow
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda p: p.stem)
def test_runs(path, tmp_path, monkeypatch):
    """Run the cells in a kernel of their own, with an empty cache, as a reader would for the first time."""
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("TVMHET_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = jupytext.read(path)
    nbclient.NotebookClient(
        notebook, timeout=_CELL_TIMEOUT_S, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    printed = "".join(out.get("text", "") for cell in notebook.cells for out in cell.get("outputs", ()))
    assert "plan of " in printed and "lower bound" in printed
