"""`python -m tvmhet.cli` is `tvmhet`."""

from tvmhet.cli.entry import main

main()
