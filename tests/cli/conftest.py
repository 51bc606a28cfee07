"""The command line in this process."""

import sys

import pytest

from tvmhet import cli


@pytest.fixture
def tvmhet(monkeypatch, capsys, tmp_path):
    """`tvmhet("predict", ...)` runs the command line in an empty folder; returns (status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TVMHET_CACHE_DIR", str(tmp_path / "cache"))

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["tvmhet", *map(str, args)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = capsys.readouterr()
        return end.value.code, out, err

    return run
