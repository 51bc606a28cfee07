"""The command line."""

from tvmhet.cli.entry import app, main

__all__ = ["app", "main"]
