"""`python -m tvmhet`: the command line where its script is not on PATH."""

from tvmhet.cli import main

main()
